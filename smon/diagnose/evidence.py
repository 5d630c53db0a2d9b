"""What the causes look at: durations as cubes, and each worker compared with its peers.

Flow: `smon.simulate` → **here** → `smon.diagnose.causes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from smon.attribute.occupied import compute_and_wait
from smon.attribute.slowdown import StepTimes
from smon.diagnose.history import History
from smon.graph.stuck import Stuck
from smon.ops import OpType
from smon.simulate.cube import Changed, Changes, cube_of
from smon.simulate.engine import Engine
from smon.simulate.window import Window
from smon.topology import Layout
from smon.trace.context import Context
from smon.trace.table import OpTable

Floats = NDArray[np.float64]

F, B = OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE
COMPUTE = (F, B)


@dataclass(frozen=True, eq=False)
class Evidence:
    """One window, as the causes see it. Cubes are (steps, dp_ranks, stages, positions), in ns.

    Attributes
    ----------
    window, engine, times
        The window, its simulator, and the step times of the what-ifs.
    layout
        Of the job.
    context
        Optional side evidence: hosts, tokens, counters, events.
    gaps_ns
        (steps,) idle time between the end of a step and the start of the next one, NaN where it is
        unknown (the last step; sampled steps; times that restart at 0).
    aligned
        Whether the clocks of all workers can be compared: without, transfer times mean nothing.
    warmup, stuck
        As in `smon.prepare.Prepared`.
    history
        The job's earlier windows.
    table
        The rows of the trace, for what is told by each TP rank alone.
    explained
        Changes that undo what was already found, so that one cause does not hide another.
    """

    window: Window
    engine: Engine
    times: StepTimes
    layout: Layout
    context: Context
    gaps_ns: Floats
    explained: Changes
    aligned: bool = True
    warmup: tuple[tuple[int, float], ...] = ()
    stuck: Stuck | None = None
    history: History | None = None
    table: OpTable | None = None

    def explaining(self, changes: Changes) -> Evidence:
        """The same window, with more explained."""
        later = replace(self, explained=self.explained | changes)
        later.known.update(self.known)  # of durations as recorded, which stay
        return later

    @property
    def steps(self) -> NDArray[np.int64]:
        """(steps,) step numbers."""
        return self.window.steps

    def work(self, optype: OpType) -> Floats:
        """Durations (transfer times of communication), with what is explained undone."""
        if optype in self.explained.work:
            return self.explained.work[optype]
        return self.recorded_work(optype)

    def delay(self, optype: OpType) -> Floats:
        """Launch delays, with the stalls that are explained taken off."""
        recorded = self._cached(
            ("delay", optype, ()), lambda: cube_of(self.window, optype, lambda part: part.delay)
        )
        stall = self.explained.stall.get(optype)
        return recorded if stall is None else recorded - stall

    def recorded_work(self, optype: OpType) -> Floats:
        """Durations as recorded."""
        return self._cached(
            ("work", optype, ()), lambda: cube_of(self.window, optype, lambda part: part.work)
        )

    def typical(self, optype: OpType, axes: tuple[int, ...]) -> Floats:
        """Median of `work` over some of its axes; not to be written to."""
        if optype in self.explained.work:
            return nanmedian(self.work(optype), axes)
        return self._cached(
            ("typical", optype, axes), lambda: nanmedian(self.recorded_work(optype), axes)
        )

    @cached_property
    def known(self) -> dict[tuple[str, OpType, tuple[int, ...]], Floats]:
        """What has been worked out of durations as recorded."""
        return {}

    def _cached(
        self, key: tuple[str, OpType, tuple[int, ...]], make: Callable[[], Floats]
    ) -> Floats:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @cached_property
    def compute_and_wait_ns(self) -> tuple[Floats, Floats]:
        """(dp_ranks, stages, steps) what each worker computes, and only waits for its peers."""
        return compute_and_wait(self.window)

    @cached_property
    def wait_ns(self) -> Floats:
        """(dp_ranks, stages) mean time per step in which a worker only waits for its peers."""
        wait = self.compute_and_wait_ns[1]
        known = ~np.isnan(wait)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(known, wait, 0.0).sum(axis=2) / known.sum(axis=2))

    def cost_ns(self, changes: Changes) -> Floats:
        """(steps,) what a cause costs: without it, steps would be so much shorter.

        Launch delays are not simulated beside slow work: many of them are waits for something that
        the graph does not have, and would shrink with the work. Stalls that are a cause of their
        own are added to a run without any.
        """
        cost: Floats = np.zeros(len(self.steps))
        if changes.work:
            run = self.engine.run(Changed(self.window, Changes(work=changes.work)))
            cost += self.times.simulated - run.step_ns[0]
        if changes.stall:
            only = Changed(self.window, Changes(stall=changes.stall))
            cost += self.engine.run(only, delays=only).step_ns[0] - self.times.simulated
        return cost


def nanmedian(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """Median, NaN left out; NaN where nothing is left, without a warning."""
    axes = (axis,) if isinstance(axis, int) else axis
    if values.size and not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axes))
    # All places at once; see `nanquantile`.
    kept = [place for place in range(values.ndim) if place not in axes]
    shape = tuple(values.shape[place] for place in kept)
    count = math.prod(values.shape[place] for place in axes)
    flat = values.transpose(*kept, *axes).reshape(*shape, count)
    if count == 0:
        return np.full(shape, np.nan)
    ordered = np.sort(flat, axis=-1)  # NaN last
    known = np.count_nonzero(~np.isnan(flat), axis=-1, keepdims=True)
    upper = known // 2
    lower = np.maximum(upper - (known % 2 == 0), 0)
    below, above = (np.take_along_axis(ordered, at, -1)[..., 0] for at in (lower, upper))
    return np.asarray(np.where(known[..., 0] > 0, (below + above) / 2.0, np.nan))


def nanquantile(values: Floats, quantile: float, axis: int) -> Floats:
    """Quantile, NaN left out; NaN where nothing is left, without a warning.

    All places at once: numpy's own calls itself once for each place as soon as one value is NaN,
    which took half of a diagnosis of 1,024 workers.
    """
    if values.shape[axis] == 0:
        return np.full(np.delete(values.shape, axis), np.nan)
    ordered = np.sort(values, axis=axis)  # NaN last
    known = np.count_nonzero(~np.isnan(values), axis=axis, keepdims=True)
    place = np.maximum(quantile * (known - 1), 0.0)
    low = np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(known - 1, 0))
    below, above = (np.take_along_axis(ordered, at, axis) for at in (low, high))
    found = below + (above - below) * (place - low)
    return np.asarray(np.where(known > 0, found, np.nan).squeeze(axis))


def spread(values: Floats) -> float:
    """Robust standard deviation: 1.4826 × median absolute deviation, NaN left out."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return float("nan")
    return float(1.4826 * np.median(np.abs(known - np.median(known))))
