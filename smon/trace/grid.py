"""Rows of the op table arranged as slots × lanes.

A *lane* is one DP replica in one step; a *slot* is one op of it: (stage, op type, sequence
number). Everything after this works on whole slots, arrays over all lanes at once.

Flow: `smon.trace.table` → **here** → `smon.trace.quality` → `smon.graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smon.ops import OP_TYPES
from smon.trace.table import OpTable

#: A sequence number counts ops of one worker in one step, so it stays below the number of rows of
#: its kind in the fullest lane; twice that leaves room for lost rows. Others are garbage, and one
#: of them (2**31 − 1) would cost the memory of all slots below it.
_MAX_SEQ_PER_ROW = 2
_SEQ_ROOM = 16


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Ops as slots × lanes; ``S`` slots, ``L`` lanes, ``P`` kinds.

    A *kind* is a (stage, op type) that occurs; its slots are consecutive, by sequence number.

    Attributes
    ----------
    steps
        (steps,) step numbers, ascending.
    origin_ns
        (steps,) earliest start in each step; 0 where times restart at 0 anyway.
    lane_step, lane_dp
        (L,) index into `steps`, and DP rank; lanes are sorted by both.
    kind_stage, kind_optype
        (P,) stage and op type code.
    kind_offset
        (P + 1,) first slot of each kind.
    row
        (S, L) row of the op table, -1 where there is none.
    start, end
        (S, L) float64 ns since the start of the step, NaN where there is no row. Whole
        nanoseconds below 2**53 are exact in float64, and simulations stay in it.
    duplicates, conflicts, out_of_range
        Rows left out: exact repetitions, same op with other times (the first is kept), and
        absurd sequence numbers.
    """

    table: OpTable
    steps: NDArray[np.int64]
    origin_ns: NDArray[np.int64]
    lane_step: NDArray[np.intp]
    lane_dp: NDArray[np.int32]
    kind_stage: NDArray[np.intp]
    kind_optype: NDArray[np.intp]
    kind_offset: NDArray[np.intp]
    row: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    duplicates: int
    conflicts: int
    out_of_range: int

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.lane_step)


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """Values of a column as indices into the sorted distinct ones."""

    values: NDArray[np.int64]
    inverse: NDArray[np.intp]


def joined(grids: Sequence[Grid], table: OpTable) -> Grid | None:
    """The grid of the tables of several grids, put together, as `make_grid` would make it.

    Parameters
    ----------
    grids
        Of one step each, ascending.
    table
        Their tables, one after the other.

    Returns
    -------
    Grid or None
        None if their slots differ, or rows were left out: then only `make_grid` knows.
    """
    first = grids[0]
    if not all(_alike(first, grid) for grid in grids):
        return None
    rows = np.cumsum([0, *(len(grid.table) for grid in grids)]).tolist()
    return Grid(
        table=table,
        steps=np.concatenate([grid.steps for grid in grids]),
        origin_ns=np.concatenate([grid.origin_ns for grid in grids]),
        lane_step=np.concatenate(
            [np.full(grid.lanes, number, np.intp) for number, grid in enumerate(grids)]
        ),
        lane_dp=np.concatenate([grid.lane_dp for grid in grids]),
        kind_stage=first.kind_stage,
        kind_optype=first.kind_optype,
        kind_offset=first.kind_offset,
        row=np.concatenate(
            [
                np.where(grid.row < 0, np.int32(-1), grid.row + np.int32(begin))
                for grid, begin in zip(grids, rows, strict=False)
            ],
            axis=1,
        ),
        start=np.concatenate([grid.start for grid in grids], axis=1),
        end=np.concatenate([grid.end for grid in grids], axis=1),
        duplicates=sum(grid.duplicates for grid in grids),
        conflicts=sum(grid.conflicts for grid in grids),
        out_of_range=0,
    )


def _alike(one: Grid, other: Grid) -> bool:
    """Whether two grids of whole steps have the same slots."""
    return (
        one.out_of_range == other.out_of_range == 0
        and one.table.step_relative == other.table.step_relative
        and np.array_equal(one.kind_stage, other.kind_stage)
        and np.array_equal(one.kind_optype, other.kind_optype)
        and np.array_equal(one.kind_offset, other.kind_offset)
    )


def make_grid(table: OpTable) -> Grid:
    """Arrange a table; several ranks of one worker (TP, CP) become one op that spans them all.

    The spanning op starts with the earliest and ends with the latest of its ranks.
    """
    steps = _index(table.step)
    dp_ranks = int(table.dp.max(initial=0)) + 1
    lanes = _index(steps.inverse * dp_ranks + table.dp)
    kinds = _index(table.stage.astype(np.int64) * len(OP_TYPES) + table.optype)
    highest = np.full(len(kinds.values), -1, np.intp)
    np.maximum.at(highest, kinds.inverse, table.seq)
    usable = _plausible_seq(table.seq, highest, kinds, lanes)
    if usable is not None:
        fewer = make_grid(table.take(usable))
        return _with_out_of_range(fewer, int(np.count_nonzero(~usable)))
    offset = np.concatenate([[0], np.cumsum(highest + 1)])
    place = (offset[kinds.inverse] + table.seq) * len(lanes.values) + lanes.inverse
    row = np.full((int(offset[-1]), len(lanes.values)), -1, np.int32)
    # Backwards, so that the first of several rows for one place stays.
    row.reshape(-1)[place[::-1]] = np.arange(len(table) - 1, -1, -1, dtype=np.int32)
    origin_ns = _origins(table, steps)
    since_ns = table.start_ns - origin_ns[steps.inverse]
    start, end = _times(since_ns, table.duration_ns, row)
    duplicates, conflicts = 0, 0
    if np.count_nonzero(row >= 0) < len(table):
        duplicates, conflicts = _merge(table, row, place, since_ns, (start, end))
    return Grid(
        table=table,
        steps=steps.values,
        origin_ns=origin_ns,
        lane_step=(lanes.values // dp_ranks).astype(np.intp),
        lane_dp=(lanes.values % dp_ranks).astype(np.int32),
        kind_stage=(kinds.values // len(OP_TYPES)).astype(np.intp),
        kind_optype=(kinds.values % len(OP_TYPES)).astype(np.intp),
        kind_offset=offset.astype(np.intp),
        row=row,
        start=start,
        end=end,
        duplicates=duplicates,
        conflicts=conflicts,
        out_of_range=0,
    )


def _index(values: NDArray[np.integer]) -> _Index:
    """Distinct values and each element's place among them; sorts only if they are sparse."""
    if len(values) == 0:
        return _Index(np.empty(0, np.int64), np.empty(0, np.intp))
    low, span = int(values.min()), int(values.max()) - int(values.min()) + 1
    if span > 4 * len(values) + (1 << 16):
        distinct, inverse = np.unique(values, return_inverse=True)
        return _Index(distinct.astype(np.int64), inverse)
    shifted = values - low
    seen = np.zeros(span, bool)
    seen[shifted] = True
    distinct = np.flatnonzero(seen)
    position = np.cumsum(seen, dtype=np.intp) - 1
    return _Index(distinct.astype(np.int64) + low, position[shifted])


def _plausible_seq(
    seq: NDArray[np.int32], highest: NDArray[np.intp], kinds: _Index, lanes: _Index
) -> NDArray[np.bool_] | None:
    """Mask of rows whose sequence number can be one, None if all can."""
    count = len(lanes.values)
    rows = np.bincount(kinds.inverse, minlength=len(highest))
    # No lane is fuller than the fullest: where the mean one allows it, there is nothing to count.
    if bool((highest * count < rows * _MAX_SEQ_PER_ROW + _SEQ_ROOM * count).all()):
        return None
    by_lane = np.bincount(kinds.inverse * count + lanes.inverse, minlength=len(highest) * count)
    fullest = by_lane.reshape(len(highest), count).max(axis=1)
    usable: NDArray[np.bool_] = seq < (fullest * _MAX_SEQ_PER_ROW + _SEQ_ROOM)[kinds.inverse]
    return None if bool(usable.all()) else usable


def _with_out_of_range(grid: Grid, rows: int) -> Grid:
    return replace(grid, out_of_range=grid.out_of_range + rows)


def _origins(table: OpTable, steps: _Index) -> NDArray[np.int64]:
    """(steps,) where the times of each step begin: its earliest op, unless they restart at 0."""
    if table.step_relative:
        return np.zeros(len(steps.values), np.int64)
    origin = np.full(len(steps.values), np.iinfo(np.int64).max)
    np.minimum.at(origin, steps.inverse, table.start_ns)
    return origin


def _times(
    since_ns: NDArray[np.int64], duration_ns: NDArray[np.int64], row: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(S, L) starts and ends; NaN where there is no row."""
    start = since_ns[row].astype(np.float64) if len(since_ns) else np.empty(row.shape)
    end = duration_ns[row].astype(np.float64) if len(since_ns) else np.empty(row.shape)
    end += start
    absent = row < 0
    if absent.any():
        start[absent] = np.nan
        end[absent] = np.nan
    return start, end


def _merge(
    table: OpTable,
    row: NDArray[np.int32],
    place: NDArray[np.intp],
    since_ns: NDArray[np.int64],
    times: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[int, int]:
    """Widen ops to all their ranks, in place; count exact repetitions and conflicting ones."""
    index = np.arange(len(table))
    later = np.flatnonzero(row.reshape(-1)[place] != index)
    kept = row.reshape(-1)[place[later]]
    peers = table.rank[later] != table.rank[kept]
    again = later[~peers]
    same = (table.start_ns[again] == table.start_ns[kept[~peers]]) & (
        table.duration_ns[again] == table.duration_ns[kept[~peers]]
    )
    later = later[peers]
    start, end = times
    begun = since_ns[later].astype(np.float64)
    np.minimum.at(start.reshape(-1), place[later], begun)
    np.maximum.at(end.reshape(-1), place[later], begun + table.duration_ns[later])
    return int(np.count_nonzero(same)), int(np.count_nonzero(~same))
