"""One step of one rank of a pipeline: its events in the order of the program, and the ops in them.

Messages between stages cut the program into pieces, and a schedule says which computes a piece
holds. Where a piece holds a forward and a backward (the first and the last stage have no message
between them), autograd tells them apart.

Flow: `smon.trace.events`, `smon.trace.schedules` → **here** → `smon.trace.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.trace.events import MEETINGS, Collective, Kind, Phase, RankEvents
from smon.trace.groups import GroupKind
from smon.trace.schedules import Compute, Program

Rows = NDArray[np.intp]

#: Of the kernels between messages, this share of the time must lie where the schedule computes.
_LEAST_SHARE: Final = 0.9

#: A reduction of at most so many bytes is a loss, a norm or a count, not gradients.
_SCALAR_BYTES: Final = 1024

#: Groups whose collectives belong to the forward or backward that launches them.
_INSIDE: Final = frozenset({GroupKind.TP, GroupKind.CP, GroupKind.EP})

_SENDS: Final = frozenset({OpType.FORWARD_SEND, OpType.BACKWARD_SEND})
_RECVS: Final = frozenset({OpType.FORWARD_RECV, OpType.BACKWARD_RECV})
#: With the stage behind this one, and with the one before it.
_ONWARDS: Final = frozenset({OpType.FORWARD_SEND, OpType.BACKWARD_RECV})
_BACK: Final = frozenset({OpType.FORWARD_RECV, OpType.BACKWARD_SEND})


@dataclass(frozen=True, slots=True)
class Op:
    """An op that was recovered; times in ns on the rank's clock."""

    op: OpType
    start_ns: int
    end_ns: int
    microbatch: int = -1
    chunk: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class StageStep:
    """Events of one step of one rank, in the order in which its host launched them.

    Attributes
    ----------
    stage, stages
        Place in the pipeline, and its length.
    events
        In program order.
    kinds
        What each of the rank's groups is for, if that is known; at the end None, for no group.
    messages
        Rows of the messages between stages.
    opening
        Where each of them begins: the row that sends its size ahead, or its own.
    labels
        Of each message, the ops that it can be, by its direction and peer; None: any.
    """

    stage: int
    stages: int
    events: RankEvents
    kinds: tuple[GroupKind | None, ...]
    messages: Rows
    opening: Rows
    labels: tuple[frozenset[OpType] | None, ...]

    def with_sizes(self) -> StageStep | None:
        """The step as one whose messages are each led by one with its size; None if it is none."""
        if len(self.messages) % 2:
            return None
        return replace(
            self,
            messages=self.messages[1::2],
            opening=self.messages[::2],
            labels=self.labels[1::2],
        )

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which collectives belong to the forward or backward that launches them."""
        of_group = np.array([kind in _INSIDE for kind in self.kinds])
        talks = np.isin(self.events.kind, [Kind.COLLECTIVE, Kind.P2P])
        inside: NDArray[np.bool_] = of_group[self.events.group] & talks
        return inside

    @property
    def phased(self) -> bool:
        """Whether it is known which kernels are backward."""
        compute = self.events.kind == Kind.COMPUTE
        return bool((self.events.phase[compute] == Phase.BACKWARD).any())


def stage_step(
    rank: RankEvents, rows: Rows, *, stage: int, stages: int, kinds: Sequence[GroupKind | None]
) -> StageStep:
    """The step of a rank whose events are `rows`.

    Parameters
    ----------
    kinds
        Of each of the rank's groups, what it is for.
    """
    events = rank.take(rows[np.argsort(_program_order(rank, rows), kind="stable")])
    kinds = (*kinds, None)
    talks = np.isin(events.kind, [Kind.P2P, Kind.COLLECTIVE])
    # RCCL names no kernel; one without arguments may be a batch of messages.
    vague = (events.kind == Kind.P2P) | ((events.collective < 0) & (events.group < 0))
    between = np.array([kind in (None, GroupKind.PP) for kind in kinds])
    messages = np.flatnonzero(talks & vague & between[events.group])
    labels = _labels(events, messages, stage, stages)
    return StageStep(stage, stages, events, kinds, messages, messages, labels)


def _program_order(rank: RankEvents, rows: Rows) -> NDArray[np.int64]:
    """When the host launched each event; where that is not known of all, when they ran."""
    working = rank.kind[rows] != Kind.ANNOTATION
    known = bool((rank.launch_ns[rows][working] >= 0).all())
    return rank.launch_ns[rows] if known else rank.start_ns[rows]


def _labels(
    events: RankEvents, messages: Rows, stage: int, stages: int
) -> tuple[frozenset[OpType] | None, ...]:
    """What each message can be, as far as its own arguments say; None: anything."""
    peers = _peer_stages(events, messages, stage, stages)
    labels: list[frozenset[OpType] | None] = []
    for collective, peer in zip(events.collective[messages].tolist(), peers, strict=True):
        ways = {Collective.SEND: _SENDS, Collective.RECV: _RECVS}.get(collective)
        if ways is not None and peer is not None:
            # From the last stage it goes on to the first: of two stages each is on both sides.
            onwards = _ONWARDS if (peer - stage) % stages == 1 else frozenset()
            back = _BACK if (stage - peer) % stages == 1 else frozenset()
            ways &= onwards | back
        labels.append(ways)
    return tuple(labels)


def _peer_stages(events: RankEvents, messages: Rows, stage: int, stages: int) -> list[int | None]:
    """The neighbouring stage at the other end of each message; None where the trace does not say.

    Some versions give global ranks, others places in the group: of a rank in the middle only one
    reading makes neighbours of all its peers.
    """
    peers = events.peer[messages].tolist()
    members = [
        events.groups[number].ranks if number >= 0 else ()
        for number in events.group[messages].tolist()
    ]
    as_ranks = [
        ranks.index(peer) if peer in ranks else None
        for peer, ranks in zip(peers, members, strict=True)
    ]
    as_places = [peer if 0 <= peer < stages else None for peer in peers]
    said = [at for at, peer in enumerate(peers) if peer >= 0]
    for near in ({-1, 1}, {-1, 1, stages - 1, 1 - stages}):
        for reading in (as_ranks, as_places):
            if all((place := reading[at]) is not None and place - stage in near for at in said):
                return reading
    return [None] * len(peers)


# --- the ops of a step ------------------------------------------------------------------------


def ops_of(step: StageStep, program: Program) -> list[Op] | None:
    """The ops of a step as a program orders them; None if the events are not this program's."""
    carried = _carried(step, program)
    if carried is None:
        return None
    pieces = _pieces(step, program)
    if pieces is None:
        return None
    computes = [_span(step.events, rows, compute) for rows, compute in pieces if len(rows)]
    return [*computes, *_messages(step, carried), *_rest(step, pieces)]


def _carried(step: StageStep, program: Program) -> list[tuple[OpType, ...]] | None:
    """What each message carries; of those that no compute separates, the order is free."""
    if len(step.messages) != len(program.messages):
        return None
    carried: list[tuple[OpType, ...]] = []
    for first, last in _runs(program):
        free = list(program.messages[first:last])
        for label in step.labels[first:last]:
            fits = next((each for each in free if _allowed(each, label)), None)
            if fits is None:
                return None
            free.remove(fits)
            carried.append(fits)
    return carried


def _runs(program: Program) -> Iterator[tuple[int, int]]:
    """Messages that follow each other without a compute between: first, and one past the last."""
    inner = range(1, len(program.messages))
    cuts = [0, *(at for at in inner if program.computes[at]), len(program.messages)]
    return pairwise(cuts)


def _allowed(carries: tuple[OpType, ...], label: frozenset[OpType] | None) -> bool:
    return label is None or (len(carries) == 1 and carries[0] in label)


def _pieces(step: StageStep, program: Program) -> list[tuple[Rows, Compute]] | None:
    """Rows of each compute, its inner collectives among them; None if they do not fit."""
    events = step.events
    work = events.kind == Kind.COMPUTE
    inside = step.inside
    begins, ends = [-1, *step.messages.tolist()], [*step.opening.tolist(), len(events)]
    pieces: list[tuple[Rows, Compute]] = []
    for at, (before, after) in enumerate(zip(begins, ends, strict=True)):
        rows = np.arange(before + 1, after)
        rows = rows[(work | inside)[rows]]
        computes = program.computes[at]
        if computes and after == len(events):
            rows = _until_the_end_of_the_last(step, rows)
        cut = _split(step, rows, computes)
        if cut is None or any(not work[part].any() for part, _ in cut):
            return None
        pieces += cut
    return pieces if _covers(step, pieces) else None


def _split(
    step: StageStep, rows: Rows, computes: Sequence[Compute]
) -> list[tuple[Rows, Compute]] | None:
    """Rows of each of the computes that follow each other without a message between."""
    backward = step.events.phase[rows] == Phase.BACKWARD
    if len(computes) <= 1:
        parts = [(rows, compute) for compute in computes]
        return parts if not step.phased or all(_fits(step, *part) for part in parts) else None
    if len(computes) != 2:  # noqa: PLR2004  # a forward and a backward
        return _alternating(rows, backward, computes)
    if not backward.any():
        return None
    if computes[0].op is OpType.FORWARD_COMPUTE:
        cut = int(np.argmax(backward))
    else:
        cut = len(rows) - int(np.argmax(backward[::-1]))
    return [(rows[:cut], computes[0]), (rows[cut:], computes[1])]


def _alternating(
    rows: Rows, backward: NDArray[np.bool_], computes: Sequence[Compute]
) -> list[tuple[Rows, Compute]] | None:
    """Forwards and backwards in turn; None if the rows do not change between them so often."""
    parts = np.split(rows, np.flatnonzero(np.diff(backward)) + 1)
    expected = [compute.op is OpType.BACKWARD_COMPUTE for compute in computes]
    turns = all(one != other for one, other in pairwise(expected))
    if len(parts) != len(computes) or not turns or bool(backward[0]) != expected[0]:
        return None
    return list(zip(parts, computes, strict=True))


def _fits(step: StageStep, rows: Rows, compute: Compute) -> bool:
    """Whether most of the time of a compute is of its phase."""
    duration = step.events.duration_ns[rows]
    backward = step.events.phase[rows] == Phase.BACKWARD
    mostly = bool(2 * duration[backward].sum() > duration.sum())
    return mostly == (compute.op is OpType.BACKWARD_COMPUTE)


def _until_the_end_of_the_last(step: StageStep, rows: Rows) -> Rows:
    """Of the rows after the last message those of the last backward: what follows ends the step."""
    if step.phased:
        backward = np.flatnonzero(step.events.phase[rows] == Phase.BACKWARD)
        return rows[: int(backward[-1]) + 1] if len(backward) else rows[:0]
    outer = np.array([kind is not None and kind not in _INSIDE for kind in step.kinds])
    after = np.flatnonzero(outer[step.events.group])
    after = after[after > int(step.messages[-1])]
    return rows[rows < int(after[0])] if len(after) else rows


def _covers(step: StageStep, pieces: Sequence[tuple[Rows, Compute]]) -> bool:
    """Whether nearly all kernels between the first and the last message are in a piece."""
    events = step.events
    between = np.zeros(len(events), bool)
    between[step.messages[0] : step.messages[-1]] = True
    between &= events.kind == Kind.COMPUTE
    used = np.zeros(len(events), bool)
    for rows, _ in pieces:
        used[rows] = True
    total = int(events.duration_ns[between].sum())
    return total == 0 or int(events.duration_ns[between & used].sum()) >= _LEAST_SHARE * total


def _span(events: RankEvents, rows: Rows, compute: Compute) -> Op:
    """From the first kernel of a compute to the end of its last, waits inside included."""
    start, end = events.start_ns[rows].min(), events.end_ns[rows].max()
    return Op(compute.op, int(start), int(end), compute.microbatch, compute.chunk)


def _messages(step: StageStep, carried: Sequence[tuple[OpType, ...]]) -> Iterator[Op]:
    start, end = step.events.start_ns[step.opening], step.events.end_ns[step.messages]
    for at, ops in enumerate(carried):
        for op in ops:
            yield Op(op, int(start[at]), int(end[at]))


# --- what begins and ends a step --------------------------------------------------------------


def _rest(step: StageStep, pieces: Sequence[tuple[Rows, Compute]]) -> Iterator[Op]:
    """Collectives between replicas and stages, and the optimizer."""
    last_backward = pieces[-1][0]
    optimizer = _optimizer(step, int(last_backward[-1]))
    begun = int(step.events.start_ns[pieces[0][0]].min())
    until = int(optimizer[0]) if len(optimizer) else len(step.events)
    collectives = np.flatnonzero(np.isin(step.events.collective, [int(each) for each in MEETINGS]))
    for row in collectives[step.events.kind[collectives] == Kind.COLLECTIVE].tolist():
        op = _type_of(step, row, last_backward, until)
        start, end = int(step.events.start_ns[row]), int(step.events.end_ns[row])
        # Gathered beside the forwards, or for the step that follows: no forward waits for it.
        if op is OpType.PARAMS_ALL_GATHER and int(last_backward[-1]) > row and start >= begun:
            continue
        if op is not None:
            yield Op(op, start, end)
    if len(optimizer):
        start, end = step.events.start_ns[optimizer].min(), step.events.end_ns[optimizer].max()
        yield Op(OpType.OPTIMIZER, int(start), int(end))


def _optimizer(step: StageStep, last_backward: int) -> Rows:
    """Kernels of the optimizer: by annotation, else those after the last reduction."""
    events = step.events
    compute = events.kind == Kind.COMPUTE
    compute[: last_backward + 1] = False
    marked = np.flatnonzero(compute & (events.phase == Phase.OPTIMIZER))
    if len(marked):
        return marked
    reduces = np.isin(events.collective, [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
    after = np.flatnonzero(reduces)
    after = after[after > last_backward]
    rest = np.flatnonzero(compute)
    return rest[rest > int(after[-1])] if len(after) else rest[:0]


def _type_of(step: StageStep, row: int, last_backward: Rows, until: int) -> OpType | None:
    """What a collective is, by its group and its place; None: part of a compute, or none of these.

    Until the last backward begins, reductions are those of losses and norms, or of every
    microbatch: the computes have them inside.
    """
    kind = step.kinds[int(step.events.group[row])]
    collective = int(step.events.collective[row])
    if kind is GroupKind.DP and collective == Collective.ALL_GATHER:
        return OpType.PARAMS_ALL_GATHER
    if kind is GroupKind.DP:
        large = not 0 <= int(step.events.size_bytes[row]) <= _SCALAR_BYTES
        reduces = collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        return OpType.GRADS_REDUCE_SCATTER if large and reduces and row > last_backward[0] else None
    if collective != Collective.ALL_REDUCE or not last_backward[-1] < row < until:
        return None
    return _AT_THE_END.get(kind) if kind is not None else None


_AT_THE_END: Final = {
    GroupKind.TP: OpType.LAYERNORM_GRADS_ALL_REDUCE,
    GroupKind.EMBEDDING: OpType.EMBEDDING_GRADS_ALL_REDUCE,
    GroupKind.PP: OpType.EMBEDDING_GRADS_ALL_REDUCE,
    GroupKind.MODEL: OpType.OPTIMIZER_CLIP_MAIN_GRAD,
    GroupKind.WORLD: OpType.OPTIMIZER_CLIP_MAIN_GRAD,
}
