"""Which lanes share one dependency graph, and what decides that graph.

Replicas and steps may differ: another number of microbatches, another order, elastic size. Lanes
are grouped by everything the graph depends on, so it is built once per structure that occurs.

Flow: `smon.trace.quality` → **here** → `smon.graph.build`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.graph.orders import group_by_order, group_by_value
from smon.ops import BACKWARD_P2P, FORWARD_P2P, STREAM_COMPUTE, OpType
from smon.topology import Layout
from smon.trace.grid import Grid
from smon.trace.quality import Quality

#: A send that ended this long before its first compute, or a receive that started this long after
#: its last one, never launched (``docs/method.md`` section 2, rule 7a).
NOOP_TOLERANCE_NS = 50_000.0

_UNKNOWN = -2
_DP_STREAM = (OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER)
_OTHER_REDUCTIONS = (OpType.LAYERNORM_GRADS_ALL_REDUCE, OpType.EMBEDDING_GRADS_ALL_REDUCE)


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All that the dependency graph of a lane depends on; ``N`` slots.

    Attributes
    ----------
    stages
        Pipeline-parallel size.
    stage, optype, seq
        (N,) of each slot.
    slots
        Slots of each (stage, op type) that occurs, by sequence number.
    compute_order, dp_order
        Per stage, the slots of the compute stream and of the all-gather and reduce-scatter
        stream, in observed order.
    noop
        (N,) point-to-point ops at the edges of the step that never launched.
    chunk, global_chunk
        (N,) model chunk of computes and DP collectives, -1 where there is none.
    overlap
        The gradient reduction runs beside the backward computes.
    reduces_first
        It comes after them, and before the other reductions at the end of the step.
    """

    stages: int
    stage: NDArray[np.intp]
    optype: NDArray[np.intp]
    seq: NDArray[np.intp]
    slots: dict[tuple[int, OpType], NDArray[np.intp]]
    compute_order: tuple[NDArray[np.intp], ...]
    dp_order: tuple[NDArray[np.intp], ...]
    noop: NDArray[np.bool_]
    chunk: NDArray[np.intp]
    global_chunk: NDArray[np.intp]
    overlap: bool
    reduces_first: bool

    def __len__(self) -> int:
        return len(self.stage)

    def of(self, stage: int, optype: OpType) -> NDArray[np.intp]:
        """Slots of one kind; empty if there are none."""
        return self.slots.get((stage, optype), _EMPTY)

    def name(self, slot: int) -> str:
        """A slot for people, e.g. ``forward-recv 3 of stage 1``."""
        label = OpType(int(self.optype[slot])).label
        return f"{label} {self.seq[slot]} of stage {self.stage[slot]}"


_EMPTY: NDArray[np.intp] = np.empty(0, np.intp)
_EMPTY.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """Lanes of one structure with their recorded times.

    Attributes
    ----------
    lanes
        (L,) lanes of the grid.
    row, start, end
        (N, L) as in `smon.trace.grid.Grid`; NaN times are missing ops.
    """

    structure: Structure
    lanes: NDArray[np.intp]
    row: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]


def group_lanes(grid: Grid, quality: Quality, layout: Layout) -> list[Replicas]:
    """The usable lanes, grouped by structure; larger groups first."""
    groups = [
        replicas
        for shape in _shapes(grid, quality, layout)
        for replicas in _split_by_structure(shape)
    ]
    return sorted(groups, key=lambda replicas: -len(replicas.lanes))


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """Lanes with the same number of ops of each kind."""

    grid: Grid
    layout: Layout
    lanes: NDArray[np.intp]
    slots: dict[tuple[int, OpType], NDArray[np.intp]]
    row: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    def of(self, stage: int, *optypes: OpType) -> NDArray[np.intp]:
        parts = [self.slots[stage, op] for op in optypes if (stage, op) in self.slots]
        return np.concatenate(parts) if parts else _EMPTY

    def values(self, column: NDArray[np.int16], slots: NDArray[np.intp]) -> NDArray[np.int16]:
        """(slots, L) values of a column of the table, `_UNKNOWN` where the op is missing."""
        row = self.row[slots]
        found: NDArray[np.int16] = column[row]
        found[row < 0] = _UNKNOWN
        return found


def _shapes(grid: Grid, quality: Quality, layout: Layout) -> Iterator[_Shape]:
    usable = np.flatnonzero(quality.usable)
    if len(usable) == 0:
        return
    for lanes in group_by_value(quality.expected[:, usable]):
        members = usable[lanes]
        counts = quality.expected[:, members[0]]
        yield _shape(grid, layout, members, counts)


def _shape(
    grid: Grid, layout: Layout, lanes: NDArray[np.intp], counts: NDArray[np.int32]
) -> _Shape:
    first = np.concatenate([[0], np.cumsum(counts)])
    slots = {
        (int(stage), OpType(int(optype))): np.arange(first[kind], first[kind + 1])
        for kind, (stage, optype) in enumerate(zip(grid.kind_stage, grid.kind_optype, strict=True))
        if counts[kind] > 0
    }
    seen = np.diff(grid.kind_offset)
    if len(lanes) == grid.lanes and np.array_equal(counts, seen):
        return _Shape(grid, layout, lanes, slots, grid.row, grid.start, grid.end)
    source = np.concatenate(
        [offset + np.arange(count) for offset, count in zip(grid.kind_offset, counts, strict=False)]
    ).astype(np.intp)
    # More can be expected of a kind than any lane has: all of its last ops are lost.
    beyond = np.concatenate([np.arange(count) >= n for count, n in zip(counts, seen, strict=True)])
    source[beyond] = 0
    pick = np.ix_(source, lanes)
    row, start, end = grid.row[pick], grid.start[pick], grid.end[pick]
    row[beyond], start[beyond], end[beyond] = -1, np.nan, np.nan
    return _Shape(grid, layout, lanes, slots, row, start, end)


def _split_by_structure(shape: _Shape) -> Iterator[Replicas]:
    lanes = len(shape.lanes)
    features = _Features(lanes)
    compute = [_order(shape, features, s, *STREAM_COMPUTE) for s in range(shape.layout.pp)]
    dp = [_order(shape, features, s, *_DP_STREAM) for s in range(shape.layout.pp)]
    noop = features.add_values(_noops(shape))
    table = shape.grid.table
    chunk = features.add_values(_chunk_values(shape, table.chunk))
    global_chunk = features.add_values(_chunk_values(shape, table.global_chunk))
    overlaps = _overlaps(shape)
    overlap = features.add_values(overlaps)
    first = features.add_values(_reduces_first(shape) * (1 - overlaps))
    for members in features.groups():
        lead = int(members[0])
        structure = _structure(
            shape,
            compute_order=tuple(orders[ids[lead]] for ids, orders in compute),
            dp_order=tuple(orders[ids[lead]] for ids, orders in dp),
            values=_Values(noop[lead], chunk[lead], global_chunk[lead], overlap[lead], first[lead]),
        )
        yield _replicas(shape, structure, members)


class _Features:
    """Collects, per lane, the number of each feature's variant; lanes equal in all are a group."""

    def __init__(self, lanes: int) -> None:
        self.ids = np.zeros(lanes, np.int64)

    def add(self, ids: NDArray[np.intp]) -> None:
        combined = self.ids * (int(ids.max(initial=0)) + 1) + ids
        self.ids = np.unique(combined, return_inverse=True)[1].astype(np.int64)

    def add_values(self, values: NDArray[np.int16]) -> list[NDArray[np.int16]]:
        """Add a feature given as (k, L) values, or (k, 1) if all lanes have the same.

        Returns the agreed values of each lane.
        """
        agreed: list[NDArray[np.int16]] = [values[:, 0]] * len(self.ids)
        if values.shape[1] == 1:
            return agreed
        ids = np.zeros(len(self.ids), np.intp)
        for number, lanes in enumerate(group_by_value(values, unknown=_UNKNOWN)):
            ids[lanes] = number
            known = _agreed(values[:, lanes])
            for lane in lanes:
                agreed[lane] = known
        self.add(ids)
        return agreed

    def groups(self) -> list[NDArray[np.intp]]:
        return [np.flatnonzero(self.ids == number) for number in range(int(self.ids.max()) + 1)]


def _agreed(values: NDArray[np.int16]) -> NDArray[np.int16]:
    """(k,) the value of any lane that has it; lanes of one group differ only by unknowns."""
    known: NDArray[np.int16] = values.max(axis=1)
    return known


def _order(
    shape: _Shape, features: _Features, stage: int, *optypes: OpType
) -> tuple[NDArray[np.intp], list[NDArray[np.intp]]]:
    """Observed order of a stream: number of the order per lane, and the orders as slots."""
    ordered = sorted(optypes, key=lambda op: op.label)
    slots = shape.of(stage, *ordered)
    kinds = np.concatenate(
        [np.full(len(shape.of(stage, op)), number) for number, op in enumerate(ordered)]
    ).astype(np.intp)
    ids, orders = group_by_order(shape.start[slots], kinds)
    features.add(ids)
    return ids, [slots[order] for order in orders]


def _noops(shape: _Shape) -> NDArray[np.int16]:
    """(N, L) 1 where rule 7a says that a point-to-point op never launched."""
    flags = np.zeros(shape.start.shape, np.int16)
    for stage in range(shape.layout.pp):
        for ops, compute_op in (
            (FORWARD_P2P, OpType.FORWARD_COMPUTE),
            (BACKWARD_P2P, OpType.BACKWARD_COMPUTE),
        ):
            compute = shape.of(stage, compute_op)
            for op in sorted(ops):
                slots = shape.of(stage, op)
                if len(slots) and len(compute):
                    flags[slots] = _noop_flags(shape, op, slots, compute)
    return flags


def _noop_flags(
    shape: _Shape, op: OpType, slots: NDArray[np.intp], compute: NDArray[np.intp]
) -> NDArray[np.int16]:
    if op in (OpType.FORWARD_RECV, OpType.BACKWARD_RECV):
        time = shape.start[slots]
        flags = time > shape.start[compute[-1]] + NOOP_TOLERANCE_NS
        unknown = np.isnan(time) | np.isnan(shape.start[compute[-1]])
    else:
        time = shape.end[slots]
        flags = time < shape.end[compute[0]] - NOOP_TOLERANCE_NS
        unknown = np.isnan(time) | np.isnan(shape.end[compute[0]])
    return np.where(unknown, _UNKNOWN, flags).astype(np.int16)


def _chunk_values(shape: _Shape, column: NDArray[np.int16]) -> NDArray[np.int16]:
    """(N, L) chunk of computes and DP collectives; (N, 1) of -1 where there is only one chunk."""
    interleaved = shape.grid.table.chunk.max(initial=-1) > 0
    values = np.full(shape.start.shape if interleaved else (len(shape.start), 1), -1, np.int16)
    for (_, op), slots in shape.slots.items() if interleaved else ():
        if op in STREAM_COMPUTE or op in _DP_STREAM:
            values[slots] = shape.values(column, slots)
    return values


def _overlaps(shape: _Shape) -> NDArray[np.int16]:
    """(1, L) 1 where a gradient reduction starts before the last compute of its stage ended."""
    flags = np.zeros((1, len(shape.lanes)), np.int16)
    for stage in range(shape.layout.pp):
        reduce = shape.of(stage, OpType.GRADS_REDUCE_SCATTER)
        compute = shape.of(stage, *STREAM_COMPUTE)
        if shape.of(stage, OpType.SEPARATE_GRADS_ALL_REDUCE).size:
            flags[:] = 1
        elif len(reduce) and len(compute):
            # fmax and fmin leave NaN out: a lost op says nothing.
            last = np.fmax.reduce(shape.end[compute], axis=0)
            flags[0] |= np.fmin.reduce(shape.start[reduce], axis=0) < last
    return flags


def _reduces_first(shape: _Shape) -> NDArray[np.int16]:
    """(1, L) 1 where a gradient reduction starts before another reduction of its stage."""
    flags = np.zeros((1, len(shape.lanes)), np.int16)
    for stage in range(shape.layout.pp):
        reduce = shape.of(stage, OpType.GRADS_REDUCE_SCATTER)
        others = shape.of(stage, *_OTHER_REDUCTIONS)
        if len(reduce) and len(others):
            first = np.fmin.reduce(shape.start[reduce], axis=0)
            flags[0] |= first < np.fmin.reduce(shape.start[others], axis=0)
    return flags


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Agreed values of one group of lanes: (N,) each, `overlap` and `reduces_first` (1,)."""

    noop: NDArray[np.int16]
    chunk: NDArray[np.int16]
    global_chunk: NDArray[np.int16]
    overlap: NDArray[np.int16]
    reduces_first: NDArray[np.int16]


def _structure(
    shape: _Shape,
    *,
    compute_order: tuple[NDArray[np.intp], ...],
    dp_order: tuple[NDArray[np.intp], ...],
    values: _Values,
) -> Structure:
    count = len(shape.start)
    stage, optype, seq = (np.empty(count, np.intp) for _ in range(3))
    for (slot_stage, op), slots in shape.slots.items():
        stage[slots], optype[slots], seq[slots] = slot_stage, op, np.arange(len(slots))
    compute = np.isin(optype, [int(op) for op in STREAM_COMPUTE])
    chunk = np.where(compute & (values.chunk < 0), 0, values.chunk)
    # Interleaving deals chunks round robin: chunk c of stage s is chunk c * PP + s of the model.
    by_formula = np.where(chunk >= 0, chunk * shape.layout.pp + stage, -1)
    known = compute & (values.global_chunk >= 0)
    return Structure(
        stages=shape.layout.pp,
        stage=stage,
        optype=optype,
        seq=seq,
        slots=shape.slots,
        compute_order=compute_order,
        dp_order=dp_order,
        noop=values.noop == 1,
        chunk=np.where(chunk < 0, -1, chunk).astype(np.intp),
        global_chunk=np.where(known, values.global_chunk, by_formula).astype(np.intp),
        overlap=bool(values.overlap[0] == 1),
        reduces_first=bool(values.reduces_first[0] == 1),
    )


def _replicas(shape: _Shape, structure: Structure, members: NDArray[np.intp]) -> Replicas:
    if len(members) == len(shape.lanes):
        return Replicas(structure, shape.lanes, shape.row, shape.start, shape.end)
    return Replicas(
        structure,
        shape.lanes[members],
        shape.row[:, members],
        shape.start[:, members],
        shape.end[:, members],
    )
