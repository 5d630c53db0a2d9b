"""What should be in the trace, what is, and which lanes and steps can be analysed.

Damaged data is normal: agents die, files are cut, rows get lost. The shape that most lanes agree
on says what is missing elsewhere. Single missing ops are filled later (`smon.graph.fill`); here it
is decided what cannot be saved, with a reason for each.

Flow: `smon.trace.grid` → **here** → `smon.graph.structure`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.ops import PER_MICROBATCH, STREAM_COMPUTE, OpType
from smon.topology import Layout
from smon.trace.grid import Grid

#: A worker that lost more of its ops than this in one step is left out of it. Filling 5 % moves S
#: by less than 0.01 on the public traces; above a quarter the order of its ops is guesswork.
MAX_FILLED_RATIO = 0.25

#: A shape is a structure of its own, not damage, if more lanes have it than losses would explain:
#: this share of lanes, plus this many times the measured loss, and never fewer than so many lanes
#: (a window of 4 steps × 2 replicas has 8: one lost row is an eighth of them). Where losses are
#: seen, more: with 1 % lost, 48 lanes and 90 kinds, some kind lacks its last op in 3 lanes more
#: often than not, in 5 lanes once in a hundred windows.
MIN_SHAPE_SHARE = 0.02
SHAPE_SHARE_PER_LOSS = 5.0
MIN_SHAPE_LANES = 3
MIN_SHAPE_LANES_WITH_LOSS = 5

#: A replica absent for so many consecutive steps left the job (elastic training); for fewer, its
#: data got lost, and a step without one of its replicas would read as faster than it was.
ELASTIC_STEPS = 3

_ABSENT = np.iinfo(np.int32).min


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """What is expected and usable of a `Grid` (``P`` kinds, ``L`` lanes).

    Attributes
    ----------
    expected
        (P, L) number of ops that each kind should have in each lane.
    usable
        (L,) lanes to analyse.
    skipped
        (step, reason) of the steps left out.
    coverage_ratio
        Rows present over rows expected, over all steps seen and all workers of the layout.
    missing_ops
        Ops of usable lanes that are missing and will be filled.
    notes
        Sentences for the report.
    """

    expected: NDArray[np.int32]
    usable: NDArray[np.bool_]
    skipped: tuple[tuple[int, str], ...]
    coverage_ratio: float
    missing_ops: int
    notes: tuple[str, ...]


def assess(grid: Grid, layout: Layout) -> Quality:
    """Compare a grid with what its lanes agree on and with the declared layout."""
    present, reach = _counts(grid)
    workers = _stage_sums(grid, layout.pp, present) > 0
    expected = _expected(grid, present, reach, workers)
    missing = expected - present
    faults = _worker_faults(grid, layout, expected, missing, workers)
    states = _States(grid, layout, faults)
    usable, skipped, notes = states.decide()
    total = _expected_rows(expected, workers, layout, len(grid.steps))
    return Quality(
        expected=expected,
        usable=usable,
        skipped=skipped,
        coverage_ratio=float(present.sum() / total) if total else 0.0,
        missing_ops=int(missing[:, usable].sum()),
        notes=notes,
    )


def _counts(grid: Grid) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(P, L) ops present, and highest sequence number plus one, of each kind."""
    kinds = len(grid.kind_stage)
    present = np.empty((kinds, grid.lanes), np.int32)
    reach = np.empty((kinds, grid.lanes), np.int32)
    for kind in range(kinds):
        there = grid.row[grid.kind_offset[kind] : grid.kind_offset[kind + 1]] >= 0
        present[kind] = np.count_nonzero(there, axis=0)
        reach[kind] = len(there) - np.argmax(there[::-1], axis=0)
    reach[present == 0] = 0
    return present, reach


def _stage_sums(grid: Grid, stages: int, values: NDArray[np.int32]) -> NDArray[np.int64]:
    """(stages, L) sums over the kinds of each stage."""
    sums = np.zeros((stages, grid.lanes), np.int64)
    np.add.at(sums, grid.kind_stage, values)
    return sums


def _expected(
    grid: Grid,
    present: NDArray[np.int32],
    reach: NDArray[np.int32],
    workers: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """(P, L) ops that should be there.

    Kinds that repeat per microbatch are compared relative to the microbatches of their lane, so
    that steps of different length speak for each other; a lost last op then stands out.
    """
    optypes = [OpType(code) for code in grid.kind_optype]
    compute = np.array([op in STREAM_COMPUTE for op in optypes], bool)
    computes = reach[compute].max(axis=0, initial=0)
    # With interleaving, the first and the last chunk of the model have one neighbour only.
    chunks = max(int(grid.table.chunk.max(initial=0)) + 1, 1)
    bases = (computes, computes * (chunks - 1) // chunks)
    loss = 1.0 - present.sum() / max(int(reach.sum()), 1)
    expected = np.empty_like(reach)
    for kind, stage in enumerate(grid.kind_stage):
        possible = bases if optypes[kind] in PER_MICROBATCH else (np.zeros_like(computes),)
        base, relative = _most_agreed(reach[kind], possible, workers[stage])
        accepted = _accepted(relative[workers[stage]], loss)
        if optypes[kind] == OpType.OPTIMIZER and accepted[-1] != _ABSENT:
            # A step ends with its optimizer: without one it was cut off, however often that is.
            accepted = accepted[accepted != _ABSENT]
        position = np.searchsorted(accepted, relative)
        target = accepted[np.minimum(position, len(accepted) - 1)]
        agreed = np.where(target == _ABSENT, 0, target + base)
        expected[kind] = np.maximum(agreed, reach[kind])
    return expected


def _most_agreed(
    reach: NDArray[np.int32], bases: Sequence[NDArray[np.int32]], lanes: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The base relative to which most lanes agree, and (L,) the counts relative to it."""
    relatives = [np.where(reach > 0, reach - base, _ABSENT) for base in bases]
    agreement = [np.unique(one[lanes], return_counts=True)[1].max() for one in relatives]
    best = int(np.argmax(agreement))
    return bases[best], relatives[best]


def _accepted(values: NDArray[np.int32], loss: float) -> NDArray[np.int32]:
    """Ascending counts that enough lanes share; the most frequent is always among them."""
    distinct, lanes = np.unique(values, return_counts=True)
    enough = lanes > (MIN_SHAPE_SHARE + SHAPE_SHARE_PER_LOSS * loss) * len(values)
    enough &= lanes >= (MIN_SHAPE_LANES_WITH_LOSS if loss > 0 else MIN_SHAPE_LANES)
    # Of two that are equally frequent the larger: ops get lost, they do not appear.
    enough[len(lanes) - 1 - np.argmax(lanes[::-1])] = True
    return distinct[enough]


def _worker_faults(
    grid: Grid,
    layout: Layout,
    expected: NDArray[np.int32],
    missing: NDArray[np.int32],
    workers: NDArray[np.bool_],
) -> dict[tuple[int, int], str]:
    """Reason per (stage, lane) of the workers that cannot be saved."""
    wanted = _stage_sums(grid, layout.pp, expected)
    ratio = _stage_sums(grid, layout.pp, missing) / np.maximum(wanted, 1)
    cut = _cut_off(grid, expected, missing)
    faults: dict[tuple[int, int], str] = {}
    for lane in np.flatnonzero(cut):
        faults[0, int(lane)] = "the step was cut off before its optimizer"
    for stage, lane in zip(*np.nonzero(~workers), strict=True):
        faults.setdefault((int(stage), int(lane)), "no ops")
    for stage, lane in zip(*np.nonzero(workers & (ratio > MAX_FILLED_RATIO)), strict=True):
        share = f"{ratio[stage, lane]:.0%} of its ops are missing"
        faults.setdefault((int(stage), int(lane)), share)
    return faults


def _cut_off(
    grid: Grid, expected: NDArray[np.int32], missing: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """(L,) lanes in whose step every optimizer op is missing: it did not come to its end."""
    optimizer = grid.kind_optype == OpType.OPTIMIZER
    wanted, lost = expected[optimizer].sum(axis=0), missing[optimizer].sum(axis=0)
    steps = len(grid.steps)
    wanted_by_step = np.bincount(grid.lane_step, wanted, minlength=steps)
    lost_by_step = np.bincount(grid.lane_step, lost, minlength=steps)
    cut = np.logical_and(wanted_by_step > 0, lost_by_step == wanted_by_step)
    of_lane: NDArray[np.bool_] = cut[grid.lane_step]
    return of_lane


def _expected_rows(
    expected: NDArray[np.int32], workers: NDArray[np.bool_], layout: Layout, steps: int
) -> float:
    """Rows of the whole window if every worker of the layout had delivered every step."""
    whole = expected[:, workers.all(axis=0)]
    typical = float(np.median(whole.sum(axis=0))) if whole.size else float(expected.sum())
    absent = steps * layout.dp - expected.shape[1]
    lanes = np.where(workers.all(axis=0), expected.sum(axis=0), typical)
    return float(lanes.sum() + max(absent, 0) * typical)


class _States:
    """Per (step, DP rank): there, damaged beyond repair, or gone; and what to do about it."""

    def __init__(self, grid: Grid, layout: Layout, faults: dict[tuple[int, int], str]) -> None:
        self.grid = grid
        self.faults = faults
        shape = (len(grid.steps), layout.dp)
        self.lane = np.full(shape, -1, np.intp)
        self.lane[grid.lane_step, grid.lane_dp] = np.arange(grid.lanes)
        damaged = np.zeros(grid.lanes, bool)
        damaged[[lane for _, lane in faults]] = True
        self.gone: NDArray[np.bool_] = self.lane < 0
        self.bad: NDArray[np.bool_] = np.logical_or(self.gone, damaged[self.lane])

    def decide(self) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...], tuple[str, ...]]:
        """Usable lanes, skipped steps with reasons, notes."""
        left_out, notes = self._replicas_to_leave_out()
        damaged = np.any(self.bad & ~left_out, axis=1)
        skip = np.asarray(damaged | np.all(left_out, axis=1))
        if skip.all() and not self.bad.all():
            # Every step has some damage: analyse what there is rather than nothing.
            left_out = self.bad
            skip = np.asarray(self.bad.all(axis=1))
            notes.append(
                "every step misses some replica: each step is analysed without the replicas it "
                "misses; waiting for those shows as transfer time of DP collectives"
            )
        unused = skip[:, None] | left_out | self.bad
        usable = np.zeros(self.grid.lanes, bool)
        usable[self.lane[np.nonzero(~unused)]] = True
        skipped = tuple(
            (int(self.grid.steps[step]), self._reason(int(step))) for step in np.flatnonzero(skip)
        )
        return usable, skipped, tuple(notes)

    def _replicas_to_leave_out(self) -> tuple[NDArray[np.bool_], list[str]]:
        """Mask (steps, dp) of replicas absent so long that the steps are kept without them."""
        left_out = np.zeros_like(self.bad)
        notes = []
        steps = len(self.bad)
        for dp in np.flatnonzero(self.bad.any(axis=0)):
            mostly = np.count_nonzero(self.bad[:, dp]) * 2 > steps
            left_out[:, dp] = self.bad[:, dp] if mostly else _long_runs(self.gone[:, dp])
            absent = int(np.count_nonzero(left_out[:, dp]))
            if absent == 0:
                continue
            notes.append(
                f"DP rank {dp} is left out of {absent} of {steps} steps: "
                f"{self._what_lacks(int(dp), left_out[:, dp])}; "
                "if it was slow there, the wait for it shows as transfer time of DP collectives"
            )
        return left_out, notes

    def _what_lacks(self, dp: int, steps: NDArray[np.bool_]) -> str:
        if self.gone[steps, dp].all():
            return "no ops of any stage"
        lanes = set(self.lane[steps, dp].tolist())
        stages = Counter(stage for stage, lane in self.faults if lane in lanes)
        return f"ops of stage {', '.join(map(str, sorted(stages)))} are missing"

    def _reason(self, step: int) -> str:
        for dp in np.flatnonzero(self.bad[step]):
            lane = int(self.lane[step, dp])
            if lane < 0:
                return self._also(step, f"DP rank {dp}: no ops of any stage")
            for (stage, fault_lane), fault in self.faults.items():
                if fault_lane == lane:
                    cut = fault.startswith("the step")
                    return (
                        fault if cut else self._also(step, f"DP rank {dp} stage {stage}: {fault}")
                    )
        return "no replica could be used"

    def _also(self, step: int, reason: str) -> str:
        more = int(np.count_nonzero(self.bad[step])) - 1
        return f"{reason} (and {more} more replicas)" if more > 0 else reason


def _long_runs(gone: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of the runs of True that are at least `ELASTIC_STEPS` long."""
    edges = np.diff(np.concatenate([[0], gone.astype(np.int8), [0]]))
    runs = np.zeros_like(gone)
    for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        runs[first:last] = last - first >= ELASTIC_STEPS
    return runs
