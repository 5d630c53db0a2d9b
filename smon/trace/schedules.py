"""Schedules of a pipeline as one stage's messages show them.

A profile of kernels does not say which microbatch a kernel works on. The schedule does: between the
messages of a stage the order of its computes is fixed by the number of stages, its place among
them, and the number of microbatches, and the number of messages tells the number of microbatches.

Flow: `smon.ops` → **here** → `smon.trace.stage`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from smon.ops import OpType

#: More messages of one stage in one step than jobs send: a thousand microbatches.
MAX_MESSAGES: Final = 1 << 12


class Schedule(Enum):
    """Schedules that SMon can tell, and how their messages are launched.

    Of 1F1B each send and the receive that follows it are one kernel (Megatron-LM's batched
    messages, ``torch.distributed.pipelining``) or one each (Megatron-LM without batching).
    Interleaved 1F1B is Megatron-LM's, with messages batched, or overlapping with computes.
    """

    ONE_F_ONE_B = "1F1B"
    ONE_F_ONE_B_APART = "1F1B with a kernel for each message"
    GPIPE = "GPipe"
    INTERLEAVED = "interleaved 1F1B"
    INTERLEAVED_OVERLAP = "interleaved 1F1B with overlapping messages"

    @property
    def interleaves(self) -> bool:
        """Whether stages have several model chunks."""
        return self in (Schedule.INTERLEAVED, Schedule.INTERLEAVED_OVERLAP)


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, as a job may run it.

    Attributes
    ----------
    chunks
        Model chunks of each stage.
    sizes
        Each message is led by one with its size, as where sequences vary in length.
    """

    schedule: Schedule
    chunks: int = 1
    sizes: bool = False

    def __str__(self) -> str:
        chunks = f" of {self.chunks} model chunks per stage" if self.chunks > 1 else ""
        sizes = ", sizes of messages sent ahead" if self.sizes else ""
        return f"{self.schedule.value}{chunks}{sizes}"


@dataclass(frozen=True, slots=True)
class Compute:
    """One forward or backward of a stage."""

    op: OpType
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """What one stage does in a step, in order.

    Attributes
    ----------
    messages
        Of each message kernel, the sends and receives that it carries.
    computes
        What is launched before the first kernel, between each two, and after the last: one more
        than there are kernels.
    """

    messages: tuple[tuple[OpType, ...], ...]
    computes: tuple[tuple[Compute, ...], ...]


#: A compute, or the sends and receives of one call.
_Item = Compute | tuple[OpType, ...]


#: Calls whose sends and receives are kernels of their own.
_APART: Final = frozenset({Schedule.ONE_F_ONE_B_APART, Schedule.INTERLEAVED_OVERLAP})


@lru_cache(maxsize=4096)
def program_of(plan: Plan, stages: int, stage: int, microbatches: int) -> Program:
    """The program of one stage."""
    messages: list[tuple[OpType, ...]] = []
    computes: list[list[Compute]] = [[]]
    for item in _items(plan, stages, stage, microbatches):
        if isinstance(item, Compute):
            computes[-1].append(item)
            continue
        for call in [(op,) for op in item] if plan.schedule in _APART else [item]:
            if call:
                messages.append(call)
                computes.append([])
    return Program(tuple(messages), tuple(map(tuple, computes)))


def _items(plan: Plan, stages: int, stage: int, microbatches: int) -> Iterator[_Item]:
    """Computes and calls in order, without messages that have no other end."""
    if plan.schedule.interleaves:
        yield from _Interleaved(plan, stages, stage, microbatches).items()
        return
    make = _gpipe if plan.schedule is Schedule.GPIPE else _one_f_one_b
    ends = _absent(stages, stage)
    for item in make(stages - stage - 1, microbatches):
        yield item if isinstance(item, Compute) else tuple(op for op in item if op not in ends)


@lru_cache(maxsize=4096)
def microbatches_of(plan: Plan, stages: int, stage: int, messages: int) -> int | None:
    """How many microbatches a stage has that launches so many messages; None if none fits."""
    if not 0 < messages <= MAX_MESSAGES:
        return None
    # Interleaving deals microbatches to chunks in groups of one for each stage. A forward and its
    # backward take at least one kernel together, except some at the ends of the model.
    unit = stages if plan.schedule.interleaves else 1
    most = 2 * messages // (unit * plan.chunks) + 2

    def count(units: int) -> int:
        return len(program_of(plan, stages, stage, units * unit).messages)

    units = 1 + bisect_left(range(1, most), messages, key=count)
    return units * unit if units < most and count(units) == messages else None


def _absent(stages: int, stage: int) -> set[OpType]:
    """Messages that have no other end: the model has two ends."""
    absent = set()
    if stage == 0:
        absent |= {OpType.FORWARD_RECV, OpType.BACKWARD_SEND}
    if stage == stages - 1:
        absent |= {OpType.FORWARD_SEND, OpType.BACKWARD_RECV}
    return absent


def _one_f_one_b(behind: int, microbatches: int) -> Iterator[_Item]:
    """One forward, one backward in turn, after a forward for each stage `behind` this one.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2.
    """
    warmup = min(behind, microbatches)
    for microbatch in range(warmup):
        yield (OpType.FORWARD_RECV,)
        yield Compute(OpType.FORWARD_COMPUTE, microbatch)
        yield (OpType.FORWARD_SEND,)
    if warmup < microbatches:
        yield (OpType.FORWARD_RECV,)
    for microbatch in range(warmup, microbatches):
        yield Compute(OpType.FORWARD_COMPUTE, microbatch)
        yield (OpType.FORWARD_SEND, OpType.BACKWARD_RECV)
        yield Compute(OpType.BACKWARD_COMPUTE, microbatch - warmup)
        last = microbatch == microbatches - 1
        yield (OpType.BACKWARD_SEND,) if last else (OpType.BACKWARD_SEND, OpType.FORWARD_RECV)
    for microbatch in range(microbatches - warmup, microbatches):
        yield (OpType.BACKWARD_RECV,)
        yield Compute(OpType.BACKWARD_COMPUTE, microbatch)
        yield (OpType.BACKWARD_SEND,)


def _gpipe(_behind: int, microbatches: int) -> Iterator[_Item]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    for microbatch in range(microbatches):
        yield (OpType.FORWARD_RECV,)
        yield Compute(OpType.FORWARD_COMPUTE, microbatch)
        yield (OpType.FORWARD_SEND,)
    for microbatch in range(microbatches):
        yield (OpType.BACKWARD_RECV,)
        yield Compute(OpType.BACKWARD_COMPUTE, microbatch)
        yield (OpType.BACKWARD_SEND,)


class _Interleaved:
    """1F1B with several model chunks on each stage; messages go round from the last to the first.

    Microbatches go in groups of one for each stage through chunk after chunk. A call sends what was
    just computed and receives what is computed next; the first stage receives what the last one
    sends at that time, so many turns later than the others. Source: Narayanan et al. 2021 (as
    above), section 2.2, and Megatron-LM core 0.16.
    """

    def __init__(self, plan: Plan, stages: int, stage: int, microbatches: int) -> None:
        self.stages, self.stage, self.chunks = stages, stage, plan.chunks
        self.overlap = plan.schedule is Schedule.INTERLEAVED_OVERLAP
        self.total = microbatches * plan.chunks
        self.warmup = min((stages - stage - 1) * 2 + (plan.chunks - 1) * stages, self.total)

    def items(self) -> Iterator[_Item]:
        first, last = self.stage == 0, self.stage == self.stages - 1
        yield () if first else (OpType.FORWARD_RECV,)
        for turn in range(self.warmup):
            yield self._forward(turn)
            steady_next = turn == self.warmup - 1 and self.warmup < self.total
            grads = (OpType.BACKWARD_RECV,) if steady_next and not last else ()
            yield self._after_forward(turn) + grads
        for turn in range(self.total - self.warmup):
            forward = turn + self.warmup
            yield self._forward(forward)
            if self.overlap:
                yield self._after_forward(forward)
            yield self._backward(turn)
            yield (() if self.overlap else self._after_forward(forward)) + self._after_backward(
                turn
            )
        if self.warmup == self.total and not last:
            yield (OpType.BACKWARD_RECV,)
        for turn in range(self.total - self.warmup, self.total):
            yield self._backward(turn)
            yield self._after_backward(turn)

    def _chunk(self, turn: int) -> int:
        return turn % (self.stages * self.chunks) // self.stages

    def _compute(self, op: OpType, turn: int, chunk: int) -> Compute:
        group, place = divmod(turn, self.stages * self.chunks)
        return Compute(op, group * self.stages + place % self.stages, chunk)

    def _forward(self, turn: int) -> Compute:
        return self._compute(OpType.FORWARD_COMPUTE, turn, self._chunk(turn))

    def _backward(self, turn: int) -> Compute:
        chunk = self.chunks - 1 - self._chunk(turn)
        return self._compute(OpType.BACKWARD_COMPUTE, turn, chunk)

    def _after_forward(self, turn: int) -> tuple[OpType, ...]:
        at_end = self.stage == self.stages - 1 and self._chunk(turn) == self.chunks - 1
        send = () if at_end else (OpType.FORWARD_SEND,)
        return send + self._receive(OpType.FORWARD_RECV, turn, from_end=self.stage == 0)

    def _after_backward(self, turn: int) -> tuple[OpType, ...]:
        at_end = self.stage == 0 and self._chunk(turn) == self.chunks - 1
        send = () if at_end else (OpType.BACKWARD_SEND,)
        from_end = self.stage == self.stages - 1
        return send + self._receive(OpType.BACKWARD_RECV, turn, from_end=from_end)

    def _receive(self, op: OpType, turn: int, *, from_end: bool) -> tuple[OpType, ...]:
        """What is received meanwhile: for the next turn, or what comes round from the other end."""
        if turn == self.total - 1:
            return ()
        sent = turn - (self.stages - 1)
        nothing = from_end and (sent < 0 or self._chunk(sent) == self.chunks - 1)
        return () if nothing else (op,)
