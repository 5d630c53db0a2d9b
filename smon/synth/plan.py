"""The ops of one step by stage, type and number: every op is a row index from here on.

Flow: `smon.synth.schedule` → **here** → `smon.synth.timing` (durations) and `smon.synth.model`
(times). Rows stand in the order of the finished table: stage, op type, sequence number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smon.ops import BACKWARD_P2P, OP_TYPES, P2P, STREAM_COMPUTE, OpType
from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT, Compute, Program, Shape, program

#: Op types that every stage runs once, at the end of the step.
_ONCE: Final = frozenset(
    {
        OpType.OPTIMIZER,
        OpType.GC,
        OpType.LAYERNORM_GRADS_ALL_REDUCE,
        OpType.OPTIMIZER_CLIP_MAIN_GRAD,
    }
)


class _Row(NamedTuple):
    chunk: int = -1
    global_chunk: int = -1
    microbatch: int = -1
    real: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All ops that one replica runs in a step.

    Every compute has a row for each of its two point-to-point ops, also where it has no peer, so
    that the draws of a seed do not depend on whether no-ops are recorded.

    Attributes
    ----------
    shape
        What the plan was made for.
    programs
        Compute stream of each stage.
    spans
        Rows of each (stage, op type) that occurs.
    stage, optype, chunk, global_chunk, microbatch
        Columns, shape ``(rows,)``, as in `smon.trace.schema`.
    real
        False for a send or receive at an end of the model: a no-op. Shape ``(rows,)``.
    """

    shape: Shape
    programs: tuple[Program, ...]
    spans: dict[tuple[int, OpType], range]
    stage: NDArray[np.int32]
    optype: NDArray[np.int8]
    chunk: NDArray[np.int16]
    global_chunk: NDArray[np.int16]
    microbatch: NDArray[np.int32]
    real: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.optype)

    def row(self, stage: int, optype: OpType, index: int = 0) -> int:
        """Row of the `index`-th op of this type on this stage."""
        return self.spans[stage, optype][index]

    def rows(self, stage: int, optype: OpType) -> range:
        """Rows of all ops of this type on this stage; empty if there are none."""
        return self.spans.get((stage, optype), range(0))

    def seq(self, kept: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Sequence numbers of the kept rows, per stage and op type; shape ``(kept rows,)``."""
        key = (self.stage.astype(np.int64) * len(OP_TYPES) + self.optype)[kept]
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        lengths = np.diff(starts, append=len(key))
        return (np.arange(len(key)) - np.repeat(starts, lengths)).astype(np.int32)


def make_plan(shape: Shape) -> Plan:
    """Lay out the rows of a step."""
    programs = tuple(program(shape, stage) for stage in range(shape.pp))
    spans: dict[tuple[int, OpType], range] = {}
    keys: list[tuple[int, OpType]] = []
    rows: list[_Row] = []
    for stage, ops in enumerate(programs):
        for optype in OP_TYPES:
            fresh = _rows(shape, stage, ops, optype)
            if fresh:
                spans[stage, optype] = range(len(rows), len(rows) + len(fresh))
            rows.extend(fresh)
            keys.extend([(stage, optype)] * len(fresh))
    chunk, global_chunk, microbatch, real = zip(*rows, strict=True)
    return Plan(
        shape=shape,
        programs=programs,
        spans=spans,
        stage=np.array([stage for stage, _ in keys], np.int32),
        optype=np.array([optype for _, optype in keys], np.int8),
        chunk=np.array(chunk, np.int16),
        global_chunk=np.array(global_chunk, np.int16),
        microbatch=np.array(microbatch, np.int32),
        real=np.array(real, bool),
    )


def _rows(shape: Shape, stage: int, ops: Program, optype: OpType) -> list[_Row]:
    """Rows of one op type on one stage, in the order in which they start."""
    if optype in STREAM_COMPUTE:
        return [
            _Row(op.chunk, shape.global_chunk(stage, op.chunk), op.microbatch)
            for op in ops
            if op.kind is optype
        ]
    if optype in P2P:
        kind = BACKWARD if optype in BACKWARD_P2P else FORWARD
        return [_Row(real=has_peer(shape, stage, op, optype)) for op in ops if op.kind is kind]
    return list(_once_rows(shape, stage, ops, optype))


def has_peer(shape: Shape, stage: int, op: Compute, optype: OpType) -> bool:
    """Whether the send or receive of this compute has another end: the model has two ends."""
    towards_loss = optype in (OpType.FORWARD_SEND, OpType.BACKWARD_RECV)
    model_end = shape.last_chunk if towards_loss else 0
    return shape.global_chunk(stage, op.chunk) != model_end


def _once_rows(shape: Shape, stage: int, ops: Program, optype: OpType) -> Iterator[_Row]:
    if optype in _ONCE:
        yield _Row()
    elif optype is OpType.EMBEDDING_GRADS_ALL_REDUCE:
        if stage in (0, shape.pp - 1):
            yield _Row()
    elif shape.dp == 1:
        return  # what is left are the collectives over the data-parallel group
    elif optype is OpType.PARAMS_ALL_GATHER:
        yield from (_Row(chunk) for chunk in range(shape.vpp))
    elif optype is OpType.GRADS_REDUCE_SCATTER:
        yield from (_Row(chunk) for chunk in _reduction_order(shape, ops))
    elif shape.overlap:
        yield _Row()


def _reduction_order(shape: Shape, ops: Program) -> list[int]:
    """Chunks in the order in which their gradients are reduced.

    Overlapped reduction takes each chunk as its last gradient is there; without overlap the
    optimizer goes through the chunks in order.
    """
    if not shape.overlap:
        return list(range(shape.vpp))
    return sorted(range(shape.vpp), key=lambda chunk: last_gradient(ops, chunk))


def last_gradient(ops: Program, chunk: int) -> int:
    """Place in the program of the op after which all gradients of a chunk are there."""
    kinds = (BACKWARD, WEIGHT)
    return max(place for place, op in enumerate(ops) if op.chunk == chunk and op.kind in kinds)
