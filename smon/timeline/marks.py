"""One step of some workers for a page: every op as a mark, who was longest, who waited for whom.

Flow: `smon.prepare` → **here** → `smon.worker.timelines` → a file that the API reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import NothingUsableError
from smon.ops import LABELS, OpType
from smon.prepare import Prepared
from smon.simulate.engine import Floats
from smon.timeline.kinds import Kind
from smon.timeline.spans import Sheet, ideal_waits, sheets, waits, whole
from smon.timeline.waits import Wait, longest_waits

#: Version of the document; part of the name of a task, so that an older one is never read.
SCHEMA: Final = "smon.marks/1"

#: The table of waits shows so many.
_MAX_WAITS: Final = 12

#: What a replica comes to last: where it is late, all others wait.
_LAST_MEETINGS: Final = (OpType.GRADS_REDUCE_SCATTER, OpType.OPTIMIZER_CLIP_MAIN_GRAD)


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """(dp_ranks, stages, steps) ns that workers compute and wait; NaN where one is absent."""

    compute: Floats
    wait: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Ops:
    """Ops of one run of one worker, ns since the start of the step; all arrays are (ops,)."""

    op: NDArray[np.intp]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    wait: Floats
    microbatch: NDArray[np.int64]
    filled: NDArray[np.bool_]


def marks(
    prepared: Prepared, step: int, workers: Sequence[tuple[int, int]], totals: Totals
) -> dict[str, Any]:
    """All ops of some workers in one step, actual and ideal.

    Parameters
    ----------
    prepared
        A window with this step.
    step
        Its number.
    workers
        (dp, stage) of each row, from top to bottom; one that is absent from the step has no ops.
    totals
        Of all workers.

    Returns
    -------
    dict
        A document of schema `SCHEMA` (plain lists and numbers).

    Raises
    ------
    NothingUsableError
        The window was prepared without this step.
    """
    if step not in prepared.window.steps:
        reason = dict(prepared.skipped).get(step, "the window does not have it")
        raise NothingUsableError(f"step {step} cannot be drawn: {reason}", prepared.skipped)
    at = int(np.searchsorted(prepared.window.steps, step))
    drawn = sheets(prepared)
    microbatch = prepared.table.microbatch
    found = [
        (row, kind, ops)
        for row, worker in enumerate(workers)
        for kind, ops in _of_worker(drawn, at, worker, microbatch)
    ]
    return {
        "schema": SCHEMA,
        "step": step,
        "recorded_s": float(prepared.window.recorded()[at]) / 1e9,
        "ideal_s": float(prepared.engine.ideal_step_ns[at]) / 1e9,
        "rows": [_row(prepared, worker, totals, at) for worker in workers],
        "longest": _longest(prepared, totals.compute[:, :, at], at),
        "waits": [_wait(prepared, one) for one in longest_waits(drawn, at, microbatch, _MAX_WAITS)],
        "types": list(LABELS),
        "marks": _columns(found),
    }


def _of_worker(
    drawn: Sequence[Sheet], at: int, worker: tuple[int, int], microbatch: NDArray[np.integer]
) -> list[tuple[Kind, _Ops]]:
    dp, stage = worker
    for sheet in drawn:
        part = sheet.part
        for lane in np.flatnonzero((part.step == at) & (part.dp == dp)).tolist():
            own = sheet.ideal_lane(lane)
            actual = whole(part.start[:, lane], part.end[:, lane], 0)
            ideal = whole(sheet.ideal_start[:, own], sheet.ideal_end[:, own], 0)
            mine = part.graph.structure.stage == stage
            row = part.row[:, lane]
            number = np.where(row >= 0, microbatch[row], -1).astype(np.int64)
            return [
                (kind, _chosen(sheet, mine, times, wait, (number, row < 0)))
                for kind, times, wait in (
                    (Kind.ACTUAL, actual, waits(sheet, lane)),
                    (Kind.IDEAL, ideal, ideal_waits(sheet, lane)),
                )
            ]
    return []


def _chosen(
    sheet: Sheet,
    mine: NDArray[np.bool_],
    times: tuple[NDArray[np.int64], NDArray[np.int64]],
    wait: Floats,
    known: tuple[NDArray[np.int64], NDArray[np.bool_]],
) -> _Ops:
    """The ops of one worker, by start; those that only stand for something are left out."""
    start, end = times
    op = np.flatnonzero(mine & (~sheet.placeholder | (end > start)))
    op = op[np.argsort(start[op], kind="stable")]
    length = (end - start)[op]
    return _Ops(
        op=sheet.part.graph.structure.optype[op],
        start=start[op],
        end=end[op],
        wait=np.minimum(wait[op], length),
        microbatch=known[0][op],
        filled=known[1][op],
    )


def _columns(found: Sequence[tuple[int, Kind, _Ops]]) -> dict[str, list[int]]:
    columns: dict[str, list[int]] = {
        name: []
        for name in ("row", "kind", "type", "start_ns", "end_ns", "wait_ns", "microbatch", "filled")
    }
    for row, kind, ops in found:
        count = len(ops.op)
        columns["row"] += [row] * count
        columns["kind"] += [int(kind)] * count
        columns["type"] += ops.op.tolist()
        columns["start_ns"] += ops.start.tolist()
        columns["end_ns"] += ops.end.tolist()
        columns["wait_ns"] += np.rint(ops.wait).astype(np.int64).tolist()
        columns["microbatch"] += ops.microbatch.tolist()
        columns["filled"] += ops.filled.astype(np.int64).tolist()
    return columns


def _row(prepared: Prepared, worker: tuple[int, int], totals: Totals, at: int) -> dict[str, Any]:
    dp, stage = worker
    return {
        **_place(prepared, dp, stage),
        "compute_s": _seconds(totals.compute[dp, stage, at]),
        "wait_s": _seconds(totals.wait[dp, stage, at]),
    }


def _place(prepared: Prepared, dp: int, stage: int) -> dict[str, Any]:
    return {"dp": dp, "stage": stage, "rank": prepared.job.layout.rank(dp, stage)}


def _wait(prepared: Prepared, one: Wait) -> dict[str, Any]:
    return {
        "op": one.op.label,
        **_place(prepared, one.dp, one.stage),
        "for": _place(prepared, one.for_dp, one.for_stage),
        "microbatch": one.microbatch if one.microbatch >= 0 else None,
        "start_s": one.start_ns / 1e9,
        "wait_s": one.wait_ns / 1e9,
        "ideal_s": one.ideal_ns / 1e9,
        "workers": one.workers,
    }


def _longest(prepared: Prepared, compute: Floats, at: int) -> dict[str, Any] | None:
    """The worker that computes longest, against the median of its stage's others."""
    peers = np.full_like(compute, np.nan)
    for dp in range(len(compute)):
        others = np.delete(compute, dp, axis=0)
        known = ~np.isnan(others).all(axis=0) if len(others) else np.zeros(len(compute[dp]), bool)
        peers[dp, known] = np.nanmedian(others[:, known], axis=0)
    more = compute - peers
    if np.isnan(more).all():
        return None
    dp, stage = (int(one) for one in np.unravel_index(np.nanargmax(more), more.shape))
    meeting, late = _late(prepared, at, dp, stage)
    return {
        **_place(prepared, dp, stage),
        "compute_s": _seconds(compute[dp, stage]),
        "peers_s": _seconds(peers[dp, stage]),
        "late_s": _seconds(late),
        "meeting": meeting,
    }


def _late(prepared: Prepared, at: int, dp: int, stage: int) -> tuple[str | None, float]:
    """Where a replica meets the others last, and how long after their median it comes there."""
    for op in _LAST_MEETINGS:
        start = {}
        for part in prepared.window.parts:
            structure = part.graph.structure
            slots = structure.of(stage, op)
            if len(slots):
                for lane in np.flatnonzero(part.step == at).tolist():
                    start[int(part.dp[lane])] = float(part.start[slots[-1], lane])
        others = [value for one, value in start.items() if one != dp]
        if dp in start and others:
            return op.label, start[dp] - float(np.median(others))
    return None, float("nan")


def _seconds(value: float) -> float | None:
    return float(value) / 1e9 if np.isfinite(value) else None
