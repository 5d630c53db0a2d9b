"""Pipeline schedules: the order of computes on each stage.

Flow: `smon.synth.scenario` → **here** → `smon.synth.plan`. Pure order: no times, no messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Final

from smon.ops import OpType

FORWARD: Final = OpType.FORWARD_COMPUTE
BACKWARD: Final = OpType.BACKWARD_COMPUTE
WEIGHT: Final = OpType.WEIGHT_GRAD_COMPUTE


class Schedule(StrEnum):
    """Pipeline schedules that a synthetic job can run."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


@dataclass(frozen=True, slots=True)
class Compute:
    """One op of a stage's compute stream.

    Attributes
    ----------
    kind
        Forward, backward or weight-gradient compute.
    chunk
        Model chunk within the stage.
    microbatch
        Microbatch it works on.
    """

    kind: OpType
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        letter = {FORWARD: "F", BACKWARD: "B", WEIGHT: "W"}[self.kind]
        return f"{letter}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


#: The compute stream of one stage, in order.
Program = tuple[Compute, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the structure of a step: steps of one shape have the same ops in one order.

    Attributes
    ----------
    dp, pp, vpp
        Data-parallel size, stages, model chunks per stage.
    microbatches
        Microbatches per data-parallel rank and step.
    overlap
        Gradients are reduced while the backward still runs.
    """

    schedule: Schedule
    dp: int
    pp: int
    vpp: int
    microbatches: int
    overlap: bool

    def global_chunk(self, stage: int, chunk: int) -> int:
        """Model chunk counted through the whole model: chunk 0 of every stage, then chunk 1 …."""
        return chunk * self.pp + stage

    @property
    def last_chunk(self) -> int:
        """Global chunk at the end of the model, the one with the loss."""
        return self.pp * self.vpp - 1


def program(shape: Shape, stage: int) -> Program:
    """The compute stream of one stage."""
    return _PROGRAMS[shape.schedule](shape, stage)


def _gpipe(shape: Shape, stage: int) -> Program:  # noqa: ARG001  # all stages run one order
    """All forwards, then all backwards, microbatches in order (Huang et al. 2019; torch)."""
    return tuple(
        Compute(kind, 0, microbatch)
        for kind in (FORWARD, BACKWARD)
        for microbatch in range(shape.microbatches)
    )


def _one_f_one_b(shape: Shape, stage: int) -> Program:
    """One forward, one backward, after enough forwards to fill the stages behind this one."""
    forwards, backwards = _gpipe_halves(shape, stage)
    return _alternate(forwards, backwards, warmup=shape.pp - stage - 1)


def _gpipe_halves(shape: Shape, stage: int) -> tuple[Program, Program]:
    both = _gpipe(shape, stage)
    return both[: shape.microbatches], both[shape.microbatches :]


def _interleaved(shape: Shape, stage: int) -> Program:
    """Megatron-LM's interleaved 1F1B: microbatches in groups of PP, each through all chunks.

    Source: ``forward_backward_pipelining_with_interleaving``; the number of warm-up forwards is
    ``(PP - stage - 1) * 2 + (VPP - 1) * PP``.
    """
    group = shape.pp * shape.vpp
    places = [divmod(k, group) for k in range(shape.microbatches * shape.vpp)]
    order = [(r // shape.pp, g * shape.pp + r % shape.pp) for g, r in places]
    forwards = tuple(Compute(FORWARD, chunk, microbatch) for chunk, microbatch in order)
    backwards = tuple(
        Compute(BACKWARD, shape.vpp - 1 - chunk, microbatch) for chunk, microbatch in order
    )
    warmup = (shape.pp - stage - 1) * 2 + (shape.vpp - 1) * shape.pp
    return _alternate(forwards, backwards, warmup)


def _alternate(forwards: Program, backwards: Program, warmup: int) -> Program:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    turns = zip_longest(forwards[warmup:], backwards)
    return forwards[:warmup] + tuple(op for turn in turns for op in turn if op is not None)


def _zero_bubble(shape: Shape, stage: int) -> Program:
    """ZB-H1: as 1F1B, with each backward's weight-gradient half put off by `stage` backwards.

    The later the stage, the more it puts off, so that the gradients of activations reach the
    first stage early; the weight gradients then fill the wait at the end of the step.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 (handcrafted H1).
    """
    ops: list[Compute] = []
    for op in _one_f_one_b(shape, stage):
        ops.append(op)
        if op.kind is BACKWARD and op.microbatch >= stage:
            ops.append(Compute(WEIGHT, 0, op.microbatch - stage))
    left = range(max(shape.microbatches - stage, 0), shape.microbatches)
    return (*ops, *(Compute(WEIGHT, 0, microbatch) for microbatch in left))


_PROGRAMS: Final[dict[Schedule, Callable[[Shape, int], Program]]] = {
    Schedule.GPIPE: _gpipe,
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.INTERLEAVED: _interleaved,
    Schedule.ZERO_BUBBLE: _zero_bubble,
}
