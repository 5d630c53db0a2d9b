"""Clocks of the workers, from the trace itself: how far each is off, and the times put right.

Members of a collective, and both ends of a point-to-point transfer, end together. Where their
recorded ends differ, in the same way all the time, it is the clocks that differ; a healthy host
whose clock is 200 ms ahead looks like a straggler otherwise.

Flow: `smon.graph.fill` → `clock_axis` → `clock_evidence` → `clock_fit` → `clock_estimate` →
**here** → `smon.simulate.window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smon.graph.fill import Filled, fill_missing
from smon.graph.structure import Replicas
from smon.ops import OpType
from smon.simulate.clock_axis import Clocks, Floats, Indices, TimeAxis, time_axis
from smon.simulate.clock_estimate import (
    DRIFT_RESIDUALS,
    MIN_OFFSET_NS,
    RESIDUALS,
    SPREADS,
    STANDARD_ERRORS,
    Estimate,
    estimate_clocks,
)
from smon.simulate.clock_evidence import all_ends, compared, components

__all__ = [
    "DRIFT_RESIDUALS",
    "MAX_RESIDUAL_NS",
    "MIN_OFFSET_NS",
    "RESIDUALS",
    "SPREADS",
    "STANDARD_ERRORS",
    "Alignment",
    "align",
]

#: Clocks count as aligned up to this residual: half of what a launch delay may be negative by.
MAX_RESIDUAL_NS = 5_000_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Clocks of a window; ``W`` = (dp_ranks, stages).

    Attributes
    ----------
    lanes
        The lanes with their times put right; the very same objects if nothing was corrected.
    offset_ns
        W, by how much each clock was ahead at the middle of the window, as estimated (not all of
        it is worth correcting). Relative to the median clock of its component, so that one bad
        clock does not make all others look bad; NaN where nothing is known.
    drift_ppm
        W, how fast each clock gained on the median one; None if no clock drifted.
    correction_ns
        W, the part of `offset_ns` that was taken off: 0 or all of it.
    residual_ns
        What is left, as a standard deviation (1.4826 MAD) of ends that should coincide; the error
        bar of every transfer time. None if there was nothing to compare.
    residual_p99_ns
        99th percentile of the same.
    component
        W, which workers could be compared with each other, directly or through others: numbered
        from 0, the largest first; -1 for a worker without any op.
    linked
        W, whether a worker is in component 0. Of a job whose workers cannot be compared at all,
        none is.
    left_out
        Op types whose ends are not evidence, because the host records them.
    corrected
        Whether any time was changed.
    aligned
        Whether times of different workers can now be compared: all are linked, and no clock's own
        residual is above `MAX_RESIDUAL_NS`.
    """

    lanes: list[Filled]
    offset_ns: Floats
    drift_ppm: Floats | None
    correction_ns: Floats
    residual_ns: float | None
    residual_p99_ns: float | None
    component: Indices
    linked: NDArray[np.bool_]
    left_out: tuple[OpType, ...]
    corrected: bool
    aligned: bool


def align(  # noqa: PLR0913  # three of them are optional
    lanes: Sequence[Filled],
    stages: int,
    dp_ranks: int,
    steps: NDArray[np.int64],
    *,
    hosts: NDArray[np.intp] | None = None,
    step_start_ns: NDArray[np.int64] | None = None,
    rebase: bool = True,
) -> Alignment:
    """Estimate the offset (and the drift) of each clock, and take off what is beyond doubt.

    Parameters
    ----------
    lanes
        Lanes of each structure; ops that were filled in are no evidence.
    steps
        (steps,) step numbers.
    hosts
        (dp_ranks, stages) host of each worker: those of one host share its clock. None: each
        worker has its own.
    step_start_ns
        (steps,) absolute start of each step. None: steps are taken to follow each other at their
        usual recorded length, from their numbers.
    rebase
        Times count from the earliest start of each step, so where that one is corrected the whole
        step moves. False leaves the origin where it is.
    """
    axis = time_axis(lanes, steps, step_start_ns)
    clocks = Clocks.of(lanes, (dp_ranks, stages), hosts)
    ends = compared(all_ends(lanes, clocks, axis))
    component = components(ends, clocks)
    estimate = estimate_clocks(ends, clocks, component, stages, len(steps))
    corrected = estimate.corrects
    return Alignment(
        lanes=_put_right(lanes, clocks, estimate, axis, rebase=rebase) if corrected else [*lanes],
        offset_ns=clocks.spread(estimate.offset),
        drift_ppm=_ppm(clocks, estimate, axis),
        # Of a worker that is not there nothing is taken off.
        correction_ns=np.nan_to_num(clocks.spread(estimate.applied_offset)),
        residual_ns=estimate.residual_ns,
        residual_p99_ns=estimate.residual_p99_ns,
        component=clocks.numbers(component),
        linked=clocks.numbers(component) == 0 if any_linked(component) else clocks.nothing(),
        left_out=estimate.left_out,
        corrected=corrected,
        aligned=_is_aligned(component, estimate.worst_ns),
    )


def _ppm(clocks: Clocks, estimate: Estimate, axis: TimeAxis) -> Floats | None:
    if not estimate.applied_drift.any():
        return None
    return clocks.spread(estimate.drift / axis.half_ns * 1e6)


def any_linked(component: Indices) -> bool:
    """Whether any two clocks can be compared, or there is only one."""
    size = np.bincount(component[component >= 0], minlength=1)
    return bool(size[0] > 1 or len(size) == 1)


def _is_aligned(component: Indices, worst_ns: float | None) -> bool:
    everything = any_linked(component) and bool((component <= 0).all())
    return everything and (worst_ns is None or worst_ns <= MAX_RESIDUAL_NS)


# --- putting right --------------------------------------------------------------------------


def _put_right(
    lanes: Sequence[Filled],
    clocks: Clocks,
    estimate: Estimate,
    axis: TimeAxis,
    *,
    rebase: bool,
) -> list[Filled]:
    """The lanes on the median clock; ops that were filled in are filled in again."""
    moved = [_moved(filled, clocks, estimate, axis) for filled in lanes]
    if rebase:
        origin = np.full(len(axis.begin), np.inf)
        for filled in moved:
            earliest = np.where(filled.row >= 0, filled.start, np.inf).min(axis=0)
            np.minimum.at(origin, filled.step, earliest)
        for filled in moved:
            filled.start[...] -= origin[filled.step]
            filled.end[...] -= origin[filled.step]
    return [_filled_again(filled) for filled in moved]


def _moved(filled: Filled, clocks: Clocks, estimate: Estimate, axis: TimeAxis) -> Filled:
    stage = filled.program.graph.structure.stage[:, None]
    clock = clocks.of_worker[filled.dp, stage]
    offset = estimate.applied_offset[clock]
    if not estimate.applied_drift.any():
        return replace(filled, start=filled.start - offset, end=filled.end - offset)
    drift = estimate.applied_drift[clock]
    start, end = (
        time - offset - drift * axis.of(time, filled.step) for time in (filled.start, filled.end)
    )
    return replace(filled, start=start, end=end)


def _filled_again(filled: Filled) -> Filled:
    """What was filled in had been guessed from times of other clocks."""
    holes = filled.row < 0
    if not holes.any():
        return filled
    filled.start[holes] = np.nan
    filled.end[holes] = np.nan
    structure = filled.program.graph.structure
    lane = np.arange(len(filled.step))
    replicas = Replicas(structure, lane, filled.row, filled.start, filled.end)
    return fill_missing(replicas, filled.program, filled.step, filled.dp)
