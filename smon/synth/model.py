"""When each op starts and ends: workers walk their programs and meet their peers.

Flow: `smon.synth.timing` → **here** → `smon.synth.scenario`. A lane is one (step, DP rank); every
instruction acts on all lanes at once, in int64 ns since the start of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from smon.errors import CycleError, UnpairedError
from smon.ops import OpType
from smon.synth.plan import Plan, has_peer, last_gradient
from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT, Compute

#: One time per lane, shape ``(steps, dp)``.
Lanes = NDArray[np.int64]

#: The receive before and the send after a compute.
_RECV = {FORWARD: OpType.FORWARD_RECV, BACKWARD: OpType.BACKWARD_RECV}
_SEND = {FORWARD: OpType.FORWARD_SEND, BACKWARD: OpType.BACKWARD_SEND}

#: Forward messages go to the next stage, backward messages to the one before.
_DIRECTION = {FORWARD: 1, BACKWARD: -1}


class Times:
    """Starts and ends of all ops, filled in as the step runs.

    Parameters
    ----------
    work
        Durations of local ops and transfers of groups, ns; shape ``(rows, steps, dp)``.
    delays
        Launch delays of the same shape; None: every op starts as soon as it can.
    """

    __slots__ = ("_delays", "_work", "end", "start", "zero")

    def __init__(self, work: NDArray[np.int64], delays: NDArray[np.int64] | None) -> None:
        self._work = work
        self._delays = delays
        self.start = np.zeros_like(work)
        self.end = np.zeros_like(work)
        self.zero: Lanes = np.zeros(work.shape[1:], np.int64)

    def post(self, row: int, *ready: Lanes) -> Lanes:
        """Start an op once all of `ready` are past; returns its start."""
        at = reduce(np.maximum, ready)
        self.start[row] = at if self._delays is None else at + self._delays[row]
        started: Lanes = self.start[row]
        return started

    def run(self, row: int, *ready: Lanes) -> Lanes:
        """Run a local op; returns its end."""
        np.add(self.post(row, *ready), self._work[row], out=self.end[row])
        ended: Lanes = self.end[row]
        return ended

    def meet(self, rows: Sequence[int], *, over_dp: bool) -> Lanes:
        """End a group that has been posted: the transfer starts with its latest member.

        Parameters
        ----------
        rows
            The member ops of one replica; the first one's work is the transfer.
        over_dp
            The members of all replicas of a step belong to the group.
        """
        latest = reduce(np.maximum, [self.start[row] for row in rows])
        if over_dp:
            latest = latest.max(axis=1, keepdims=True)
        ended: Lanes = latest + self._work[rows[0]]
        for row in rows:
            self.end[row] = ended
        return ended


def run_step(
    plan: Plan, work: NDArray[np.int64], delays: NDArray[np.int64] | None, noop_ns: int
) -> Times:
    """Times of all ops of a step.

    Parameters
    ----------
    work, delays
        As in `Times`.
    noop_ns
        Recorded duration of sends and receives without a peer.

    Raises
    ------
    CycleError
        The programs of the stages wait for each other.
    UnpairedError
        Neighbouring stages send and receive in different orders.
    """
    times = Times(work, delays)
    _gather_params(plan, times)
    _run_pipeline(plan, times)
    _end_step(plan, times)
    _record_noops(plan, times, noop_ns)
    return times


def _gather_params(plan: Plan, times: Times) -> None:
    """All-gathers of all chunks of a stage, one after the other."""
    for stage in range(plan.shape.pp):
        before = times.zero
        for row in plan.rows(stage, OpType.PARAMS_ALL_GATHER):
            times.post(row, before)
            before = times.meet((row,), over_dp=True)


class _Channel:
    """One direction between two neighbours: the k-th send meets the k-th receive.

    Sends of one type are a chain, and so are receives: each waits for the end of the one before,
    which on both sides is the end of the pair before.
    """

    __slots__ = ("_last_end", "_sent", "_times")

    def __init__(self, times: Times) -> None:
        self._times = times
        self._last_end = times.zero
        self._sent: deque[tuple[int, Lanes, tuple[int, int]]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, row: int, ready: Lanes, content: tuple[int, int]) -> None:
        """Leave a send for the receiver; `content` is (chunk it goes to, microbatch)."""
        self._sent.append((row, ready, content))

    def receive(self, row: int, ready: Lanes, content: tuple[int, int]) -> Lanes:
        """Meet the oldest send; returns the end of the pair."""
        send_row, send_ready, sent = self._sent.popleft()
        if sent != content:
            raise UnpairedError(
                f"a stage receives (global chunk, microbatch) {content}, and its neighbour sends "
                f"{sent}: send and receive in one order"
            )
        self._times.post(send_row, send_ready, self._last_end)
        self._times.post(row, ready, self._last_end)
        self._last_end = self._times.meet((send_row, row), over_dp=False)
        return self._last_end


class _Stage:
    """The compute stream of one stage, on all lanes."""

    __slots__ = (
        "_chunks_gathered",
        "_clock",
        "_done",
        "_inbox",
        "_outbox",
        "_place",
        "_plan",
        "_post_first_backward",
        "_posted",
        "_program",
        "_stage",
        "_times",
    )

    def __init__(
        self,
        plan: Plan,
        times: Times,
        stage: int,
        inbox: dict[OpType, _Channel],
        outbox: dict[OpType, _Channel],
    ) -> None:
        self._plan, self._times, self._stage = plan, times, stage
        self._inbox, self._outbox = inbox, outbox
        self._program = plan.programs[stage]
        self._place = 0
        self._clock = times.zero
        self._done = dict.fromkeys((FORWARD, BACKWARD, WEIGHT), 0)
        # When the next receive of each direction can be posted.
        self._posted = {FORWARD: times.zero, BACKWARD: times.zero}
        gathers = plan.rows(stage, OpType.PARAMS_ALL_GATHER)
        self._chunks_gathered = {int(plan.chunk[row]): times.end[row] for row in gathers}
        kinds = [op.kind for op in self._program]
        self._post_first_backward = kinds.index(BACKWARD) - 2

    @property
    def finished(self) -> bool:
        return self._place == len(self._program)

    @property
    def waits_for(self) -> str:
        return f"{self._program[self._place]} of stage {self._stage}"

    def advance(self) -> bool:
        """Run until the end or until a message is missing; returns whether anything ran."""
        before = self._place
        while not self.finished and self._message_there(self._program[self._place]):
            self._run(self._program[self._place])
            self._place += 1
        return self._place > before

    def _message_there(self, op: Compute) -> bool:
        return not self._receives(op) or len(self._inbox[op.kind]) > 0

    def _receives(self, op: Compute) -> bool:
        return op.kind in _RECV and has_peer(self._plan.shape, self._stage, op, _RECV[op.kind])

    def _run(self, op: Compute) -> None:
        index = self._done[op.kind]
        row = self._plan.row(self._stage, op.kind, index)
        ready = [self._clock]
        if op.kind in _RECV:
            ready.append(self._receive(op, index))
        if op.kind is FORWARD and op.chunk in self._chunks_gathered:
            ready.append(self._chunks_gathered.pop(op.chunk))
        self._clock = self._times.run(row, *ready)
        self._done[op.kind] += 1
        if op.kind in _SEND:
            self._posted[op.kind] = self._clock
            self._send(op, index)
        if self._place == self._post_first_backward:
            self._posted[BACKWARD] = self._clock

    def _receive(self, op: Compute, index: int) -> Lanes:
        row = self._plan.row(self._stage, _RECV[op.kind], index)
        posted = self._posted[op.kind]
        if not self._receives(op):
            self._times.start[row] = posted
            return posted
        content = (self._plan.shape.global_chunk(self._stage, op.chunk), op.microbatch)
        return self._inbox[op.kind].receive(row, posted, content)

    def _send(self, op: Compute, index: int) -> None:
        if has_peer(self._plan.shape, self._stage, op, _SEND[op.kind]):
            row = self._plan.row(self._stage, _SEND[op.kind], index)
            chunk = self._plan.shape.global_chunk(self._stage, op.chunk)
            content = (chunk + _DIRECTION[op.kind], op.microbatch)
            self._outbox[op.kind].send(row, self._clock, content)


def _run_pipeline(plan: Plan, times: Times) -> None:
    """Let the stages run in turn until all are through."""
    stages = _connect(plan, times)
    moved = True
    while moved:
        moved = any([stage.advance() for stage in stages])  # noqa: C419  # all take their turn
    waiting = [stage.waits_for for stage in stages if not stage.finished]
    if waiting:
        raise CycleError(f"the stages wait for each other: {', '.join(waiting[:4])}", waiting)


def _connect(plan: Plan, times: Times) -> list[_Stage]:
    """Stages in a ring; the connection from end to start is used by interleaving only."""
    pp = plan.shape.pp
    inboxes = [{kind: _Channel(times) for kind in _DIRECTION} for _ in range(pp)]
    outboxes = [
        {kind: inboxes[(stage + step) % pp][kind] for kind, step in _DIRECTION.items()}
        for stage in range(pp)
    ]
    return [_Stage(plan, times, stage, inboxes[stage], outboxes[stage]) for stage in range(pp)]


def _end_step(plan: Plan, times: Times) -> None:
    """What follows the last compute of each stage, type by type."""
    ended = {stage: _last_compute(plan, times, stage) for stage in range(plan.shape.pp)}
    if plan.shape.overlap:
        reduced = {stage: _reduce_chunks_overlapped(plan, times, stage) for stage in ended}
    else:
        reduced = dict.fromkeys(ended, times.zero)
    for stage, end in ended.items():
        collected = times.run(plan.row(stage, OpType.GC), end)
        layernorm = plan.row(stage, OpType.LAYERNORM_GRADS_ALL_REDUCE)
        ended[stage] = times.run(layernorm, collected, reduced[stage])
    _reduce_embedding(plan, times, ended)
    last_reduction = (
        OpType.SEPARATE_GRADS_ALL_REDUCE if plan.shape.overlap else OpType.GRADS_REDUCE_SCATTER
    )
    for stage in range(plan.shape.pp):
        for row in plan.rows(stage, last_reduction):
            times.post(row, ended[stage])
            ended[stage] = times.meet((row,), over_dp=True)
    _clip_and_optimize(plan, times, ended)


def _last_compute(plan: Plan, times: Times, stage: int) -> Lanes:
    ends = [times.end[plan.rows(stage, kind)[-1:]] for kind in (FORWARD, BACKWARD, WEIGHT)]
    last: Lanes = np.concatenate(ends).max(axis=0)
    return last


def _reduce_chunks_overlapped(plan: Plan, times: Times, stage: int) -> Lanes:
    """Reduce each chunk as soon as its gradients are there, one after the other, after the gathers.

    Returns
    -------
    Lanes
        End of the last reduction.
    """
    gathers = plan.rows(stage, OpType.PARAMS_ALL_GATHER)
    before = times.end[gathers[-1]] if gathers else times.zero
    for row in plan.rows(stage, OpType.GRADS_REDUCE_SCATTER):
        times.post(row, before, times.end[_last_gradient_row(plan, stage, int(plan.chunk[row]))])
        before = times.meet((row,), over_dp=True)
    return before


def _last_gradient_row(plan: Plan, stage: int, chunk: int) -> int:
    ops = plan.programs[stage]
    place = last_gradient(ops, chunk)
    earlier = sum(op.kind is ops[place].kind for op in ops[:place])
    return plan.row(stage, ops[place].kind, earlier)


def _reduce_embedding(plan: Plan, times: Times, ended: dict[int, Lanes]) -> None:
    """First and last stage hold the same embedding: they reduce it together, in each replica."""
    stages = sorted({0, plan.shape.pp - 1})
    rows = [plan.row(stage, OpType.EMBEDDING_GRADS_ALL_REDUCE) for stage in stages]
    for stage, row in zip(stages, rows, strict=True):
        times.post(row, ended[stage])
    end = times.meet(rows, over_dp=False)
    ended.update(dict.fromkeys(stages, end))


def _clip_and_optimize(plan: Plan, times: Times, ended: dict[int, Lanes]) -> None:
    """The norm of all gradients needs every worker of the job; then each optimizes for itself."""
    rows = [plan.row(stage, OpType.OPTIMIZER_CLIP_MAIN_GRAD) for stage in ended]
    for row, end in zip(rows, ended.values(), strict=True):
        times.post(row, end)
    clipped = times.meet(rows, over_dp=True)
    for stage in ended:
        times.run(plan.row(stage, OpType.OPTIMIZER), clipped)


def _record_noops(plan: Plan, times: Times, noop_ns: int) -> None:
    """Give sends and receives without a peer the times that a profiler shows.

    Receives got their start in passing. A send is called once its compute and the last real send
    have ended, which is known only now.
    """
    for stage in range(plan.shape.pp):
        for kind, send in _SEND.items():
            last_end = times.zero
            pairs = zip(plan.rows(stage, kind), plan.rows(stage, send), strict=True)
            for compute_row, row in pairs:
                if plan.real[row]:
                    last_end = times.end[row]
                else:
                    np.maximum(times.end[compute_row], last_end, out=times.start[row])
    noops = np.flatnonzero(~plan.real)
    times.end[noops] = times.start[noops] + noop_ns
