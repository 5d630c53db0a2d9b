"""The dependency graph of one structure: rules 1 to 10 of ``docs/method.md``.

Source: the dependency model of Lin et al., "Understanding Stragglers in Large Model Training Using
What-if Analysis" (OSDI 2025), section 3, extended to interleaved stages, recorded no-ops, V-shaped
chunk placement, split backward, and overlap without a separate all-reduce.

Flow: `smon.graph.structure` → **here** → `smon.graph.program`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.errors import UnpairedError
from smon.graph.structure import Structure
from smon.ops import DP_SYNCED, STREAM_COMPUTE, OpType

_Slots = NDArray[np.intp]

#: The first backward send and receive wait for the compute so many places before it (rule 5).
_PLACES_BEFORE = 2

#: So many ops are named in an error; the rest are counted.
_MAX_NAMED = 3

_OTHER_REDUCTIONS = (OpType.LAYERNORM_GRADS_ALL_REDUCE, OpType.EMBEDDING_GRADS_ALL_REDUCE)
_UPDATE = (OpType.OPTIMIZER_CLIP_MAIN_GRAD, OpType.OPTIMIZER)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Dependencies, communication groups and DP synchronisation; ``N`` ops, ``E`` edges.

    Attributes
    ----------
    structure
        What the graph was built from; op i is slot i.
    before, after
        (E,) `after` depends on `before`; sorted by `after`, no repetitions.
    group
        (N,) number of the communication group, -1 for local ops.
    sync
        Key of the ops that are synchronised over all DP ranks, by slot: (op type, stage,
        sequence number), stage -1 where all stages take part.
    """

    structure: Structure
    before: _Slots
    after: _Slots
    group: _Slots
    sync: dict[int, tuple[OpType, int, int]]

    def __len__(self) -> int:
        return len(self.structure)


def build_graph(structure: Structure) -> Graph:
    """Build the graph of one structure.

    Raises
    ------
    UnpairedError
        The sends of one stage and the receives of its neighbour differ in number.
    """
    edges = _Edges()
    groups = _Groups(len(structure))
    partners = {
        (stage, op): _partners(structure, stage, op)
        for stage in range(structure.stages)
        for op in _P2P_OF_COMPUTE
    }
    for stage in range(structure.stages):
        _compute_stream(structure, stage, edges)
        _p2p_streams(structure, stage, partners, edges)
        _dp_stream(structure, stage, edges)
        _end_of_step(structure, stage, edges)
    _match_pairs(structure, partners, groups)
    _collectives(structure, groups)
    before, after = edges.sorted(len(structure))
    return Graph(structure, before, after, groups.group, _sync_keys(structure))


class _Edges:
    """Collects edges as pairs of arrays."""

    def __init__(self) -> None:
        self._before: list[_Slots] = []
        self._after: list[_Slots] = []

    def add(self, before: _Slots, after: _Slots) -> None:
        self._before.append(before)
        self._after.append(after)

    def chain(self, slots: _Slots) -> None:
        """Each op after the one before it."""
        self.add(slots[:-1], slots[1:])

    def all_to_one(self, before: _Slots, after: int) -> None:
        self.add(before, np.full(len(before), after))

    def sorted(self, count: int) -> tuple[_Slots, _Slots]:
        before = np.concatenate([*self._before, np.empty(0, np.intp)])
        after = np.concatenate([*self._after, np.empty(0, np.intp)])
        keys = np.unique(after * count + before)
        return (keys % max(count, 1)).astype(np.intp), (keys // max(count, 1)).astype(np.intp)


class _Groups:
    """Collects communication groups."""

    def __init__(self, count: int) -> None:
        self.group = np.full(count, -1, np.intp)
        self._next = 0

    def pairs(self, one: _Slots, other: _Slots) -> None:
        """The k-th of one with the k-th of the other."""
        numbers = self._next + np.arange(len(one))
        self.group[one] = numbers
        self.group[other] = numbers
        self._next += len(one)

    def together(self, slots: _Slots) -> None:
        if len(slots):
            self.group[slots] = self._next
            self._next += 1

    def alone(self, slots: _Slots) -> None:
        self.group[slots] = self._next + np.arange(len(slots))
        self._next += len(slots)


@dataclass(frozen=True, slots=True, eq=False)
class _P2P:
    """Point-to-point ops of one kind with the computes they belong to.

    Attributes
    ----------
    ops, computes
        The i-th op serves the i-th compute.
    peer
        Stage at the other end; -1: no other end, the op never launches (rule 7b).
    """

    ops: _Slots
    computes: _Slots
    peer: _Slots


#: Of each point-to-point type: its compute type, and which global chunk is at the other end.
_P2P_OF_COMPUTE = {
    OpType.FORWARD_SEND: (OpType.FORWARD_COMPUTE, +1),
    OpType.FORWARD_RECV: (OpType.FORWARD_COMPUTE, -1),
    OpType.BACKWARD_SEND: (OpType.BACKWARD_COMPUTE, -1),
    OpType.BACKWARD_RECV: (OpType.BACKWARD_COMPUTE, +1),
}


def _partners(structure: Structure, stage: int, op: OpType) -> _P2P:
    """Which compute each point-to-point op of a kind serves, no-ops of rule 7a left out.

    A profiler records all of them or only those that launch; the first receive of the first stage
    may be missing either way (rule 7).
    """
    compute_op, direction = _P2P_OF_COMPUTE[op]
    computes = structure.of(stage, compute_op)
    recorded = structure.of(stage, op)
    recorded = recorded[~structure.noop[recorded]]
    peer = _peer_stages(structure, stage, computes, direction)
    if len(recorded) == len(computes):
        return _P2P(recorded, computes, peer)
    real = peer >= 0
    if len(recorded) == np.count_nonzero(real):
        return _P2P(recorded, computes[real], peer[real])
    # The very first receive of the step has nothing to receive, and often is not recorded.
    receives = op in (OpType.FORWARD_RECV, OpType.BACKWARD_RECV)
    if receives and len(recorded) == len(computes) - 1 and not real[0]:
        return _P2P(recorded, computes[1:], peer[1:])
    if structure.stages == 1:
        return _P2P(recorded[:0], computes[:0], peer[:0])
    message = (
        f"stage {stage} has {len(recorded)} {op.label} ops for {len(computes)} {compute_op.label} "
        f"ops, of which {np.count_nonzero(real)} have a neighbour to talk to"
    )
    raise UnpairedError(message, [structure.name(slot) for slot in recorded])


def _peer_stages(structure: Structure, stage: int, computes: _Slots, direction: int) -> _Slots:
    """(computes,) stage that holds the next (previous) chunk of the model, -1 if there is none.

    Usually the neighbour, with wrap-around when interleaved; in V-shaped placements it can be the
    stage itself, which then copies locally: -1 too.
    """
    owner = _chunk_owner(structure)
    other = structure.global_chunk[computes] + direction
    known = (other >= 0) & (other < len(owner))
    peer = np.where(known, owner[np.clip(other, 0, len(owner) - 1)], -1)
    return np.where(peer == stage, -1, peer)


def _chunk_owner(structure: Structure) -> _Slots:
    """(model chunks,) stage that computes each chunk."""
    compute = structure.global_chunk >= 0
    compute &= np.isin(structure.optype, [int(op) for op in STREAM_COMPUTE])
    owner = np.full(int(structure.global_chunk.max(initial=-1)) + 1, -1, np.intp)
    owner[structure.global_chunk[compute]] = structure.stage[compute]
    return owner if len(owner) else np.full(1, -1, np.intp)


def _compute_stream(structure: Structure, stage: int, edges: _Edges) -> None:
    """Rule 1."""
    edges.chain(structure.compute_order[stage])


def _p2p_streams(
    structure: Structure,
    stage: int,
    partners: dict[tuple[int, OpType], _P2P],
    edges: _Edges,
) -> None:
    """Rules 2 to 5."""
    for op in _P2P_OF_COMPUTE:
        edges.chain(structure.of(stage, op))
        part = partners[stage, op]
        if op in (OpType.FORWARD_SEND, OpType.BACKWARD_SEND):
            edges.add(part.computes, part.ops)
        else:
            edges.add(part.ops, part.computes)
            # A receive is posted when the compute before its own has ended.
            all_computes = structure.of(stage, _P2P_OF_COMPUTE[op][0])
            position = np.searchsorted(all_computes, part.computes)
            later = position > 0
            edges.add(all_computes[position[later] - 1], part.ops[later])
    _first_backward(structure, stage, edges)


def _first_backward(structure: Structure, stage: int, edges: _Edges) -> None:
    """Rule 5: the first backward P2P waits for the forward two places before the first backward."""
    order = structure.compute_order[stage]
    backward = np.flatnonzero(structure.optype[order] == OpType.BACKWARD_COMPUTE)
    if len(backward) == 0 or backward[0] < _PLACES_BEFORE:
        return
    forward = order[[backward[0] - _PLACES_BEFORE]]
    for op in (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV):
        slots = structure.of(stage, op)
        first = slots[~structure.noop[slots]][:1]
        edges.add(forward[: len(first)], first)


def _match_pairs(
    structure: Structure, partners: dict[tuple[int, OpType], _P2P], groups: _Groups
) -> None:
    """Rules 6 and 7: the k-th real send with the k-th real receive; no-ops are alone."""
    ends = (
        (OpType.FORWARD_SEND, OpType.FORWARD_RECV),
        (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV),
    )
    for send_op, recv_op in ends:
        for stage in range(structure.stages):
            send = partners[stage, send_op]
            for peer in np.unique(send.peer[send.peer >= 0]):
                recv = partners[int(peer), recv_op]
                sends = send.ops[send.peer == peer]
                recvs = recv.ops[recv.peer == stage]
                _check_pairs(structure, sends, recvs, (send_op, stage), (recv_op, int(peer)))
                groups.pairs(sends, recvs)
    p2p = np.isin(structure.optype, [int(op) for op in _P2P_OF_COMPUTE])
    groups.alone(np.flatnonzero(p2p & (groups.group < 0)))


def _check_pairs(
    structure: Structure,
    sends: _Slots,
    recvs: _Slots,
    send_kind: tuple[OpType, int],
    recv_kind: tuple[OpType, int],
) -> None:
    if len(sends) == len(recvs):
        return
    spare = sends[len(recvs) :] if len(sends) > len(recvs) else recvs[len(sends) :]
    message = (
        f"{len(sends)} {send_kind[0].label} of stage {send_kind[1]} face {len(recvs)} "
        f"{recv_kind[0].label} of stage {recv_kind[1]}; without a partner: "
        f"{_some(structure, spare)}"
    )
    raise UnpairedError(message, [structure.name(slot) for slot in spare])


def _some(structure: Structure, slots: _Slots) -> str:
    names = ", ".join(structure.name(slot) for slot in slots[:_MAX_NAMED])
    more = len(slots) - _MAX_NAMED
    return f"{names} and {more} more" if more > 0 else names


def _dp_stream(structure: Structure, stage: int, edges: _Edges) -> None:
    """Rule 8: the chain of DP collectives, and what waits for them."""
    order = structure.dp_order[stage]
    edges.chain(order)
    gathers = order[structure.optype[order] == OpType.PARAMS_ALL_GATHER]
    forwards = structure.of(stage, OpType.FORWARD_COMPUTE)
    for chunk in np.unique(structure.chunk[forwards]):
        first = forwards[structure.chunk[forwards] == chunk][0]
        mine = gathers[np.isin(structure.chunk[gathers], (chunk, -1))]
        edges.all_to_one(mine[-1:], int(first))
    if structure.overlap:
        _overlapped_reduction(structure, stage, edges)


def _overlapped_reduction(structure: Structure, stage: int, edges: _Edges) -> None:
    """A chunk's gradients are reduced once its last backward has ended."""
    computes = structure.compute_order[stage]
    computes = computes[structure.optype[computes] != OpType.FORWARD_COMPUTE]
    for reduce in structure.of(stage, OpType.GRADS_REDUCE_SCATTER):
        chunk = structure.chunk[reduce]
        mine = computes if chunk < 0 else computes[structure.chunk[computes] == chunk]
        edges.all_to_one(mine[-1:], int(reduce))


def _end_of_step(structure: Structure, stage: int, edges: _Edges) -> None:
    """Rule 9: the chain after the last compute."""
    reduces = structure.of(stage, OpType.GRADS_REDUCE_SCATTER)
    in_chain = structure.of(stage, OpType.SEPARATE_GRADS_ALL_REDUCE)
    if not structure.overlap:
        in_chain = reduces
    pause = structure.of(stage, OpType.GC)
    others = [structure.of(stage, op) for op in _OTHER_REDUCTIONS]
    reductions = [in_chain, *others] if structure.reduces_first else [*others, in_chain]
    rest = [*reductions, *(structure.of(stage, op) for op in _UPDATE)]
    edges.chain(np.concatenate([structure.compute_order[stage][-1:], pause, *rest]))
    if structure.overlap and len(reduces):
        # Whatever comes first after the backward needs the gradients.
        waiting = np.concatenate(rest)
        edges.add(reduces[-1:][: len(waiting)], waiting[:1])


def _collectives(structure: Structure, groups: _Groups) -> None:
    """Rule 10: groups of the ops that are not point-to-point."""
    for op in (OpType.EMBEDDING_GRADS_ALL_REDUCE, OpType.OPTIMIZER_CLIP_MAIN_GRAD):
        slots = np.flatnonzero(structure.optype == op)
        for seq in np.unique(structure.seq[slots]):
            groups.together(slots[structure.seq[slots] == seq])
    for op in DP_SYNCED - {OpType.OPTIMIZER_CLIP_MAIN_GRAD}:
        groups.alone(np.flatnonzero(structure.optype == op))


def _sync_keys(structure: Structure) -> dict[int, tuple[OpType, int, int]]:
    keys = {}
    for op in sorted(DP_SYNCED):
        for slot in np.flatnonzero(structure.optype == op):
            over_stages = op == OpType.OPTIMIZER_CLIP_MAIN_GRAD
            stage = -1 if over_stages else int(structure.stage[slot])
            keys[int(slot)] = (op, stage, int(structure.seq[slot]))
    return keys
