"""From events to ops, where annotations name them: then the pipeline model can be used.

An annotation names an op if it is the label of an op type, with or without ``smon::`` before it and
``|mb=3|chunk=0`` behind it. Everything else (kernels, spans of gloo) lies inside such an op and is
not needed.

Flow: `smon.trace.events` → **here** → `smon.trace.table`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import BY_LABEL, P2P, OpType
from smon.topology import Layout
from smon.trace.events import Kind, RankEvents
from smon.trace.table import OpTable, concat, make_table, number_by_start

_OP: Final = re.compile(r"^(?:smon::)?([a-z]+(?:-[a-z]+)+|optimizer|gc)((?:\|[a-z]+=-?\d+)*)$")
_MAX_NUMBER: Final = 2**15 - 1


def names_ops(ranks: Sequence[RankEvents], layout: Layout) -> bool:
    """Whether the annotations name all ops that the model of a pipeline rests on.

    These are the forward and backward computes of every rank and, with more than one stage, sends
    or receives between stages.
    """
    for rank in ranks:
        found = {op for op, _ in _ops(rank).values()}
        if not {OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE} <= found:
            return False
        if layout.pp > 1 and not found & P2P:
            return False
    return bool(ranks)


def op_table(ranks: Sequence[RankEvents], layout: Layout) -> OpTable:
    """The ops that annotations name."""
    return concat(_table(rank, layout) for rank in ranks)


def _ops(rank: RankEvents) -> dict[int, tuple[OpType, dict[str, int]]]:
    """Of each name that names an op: its type, and the numbers behind it."""
    found: dict[int, tuple[OpType, dict[str, int]]] = {}
    for number, name in enumerate(rank.names):
        match = _OP.match(name)
        op = BY_LABEL.get(match[1]) if match else None
        if match is not None and op is not None:
            pairs = (part.split("=") for part in match[2].split("|")[1:])
            found[number] = op, {key: int(value[:9]) for key, value in pairs}
    return found


def _table(rank: RankEvents, layout: Layout) -> OpTable:
    ops = _ops(rank)
    events = rank.of_kind(Kind.ANNOTATION)
    events = events.take(np.isin(events.name, list(ops)) & (events.step >= 0))
    optype = np.array([ops[name][0] for name in events.name.tolist()], np.int8)
    place = layout.place(rank.rank)
    workers = np.full(len(events), rank.rank, np.int32)
    return make_table(
        {
            "step": events.step,
            "dp": np.full(len(events), place.dp, np.int32),
            "stage": np.full(len(events), place.stage, np.int32),
            "rank": workers,
            "optype": optype,
            "start_ns": events.start_ns,
            "duration_ns": events.duration_ns,
            "seq": number_by_start(events.step, workers, optype, events.start_ns),
            "chunk": _numbers(events, ops, "chunk"),
            "microbatch": _numbers(events, ops, "mb"),
        },
        dropped=dict(rank.dropped),
    )


def _numbers(
    events: RankEvents, ops: dict[int, tuple[OpType, dict[str, int]]], key: str
) -> NDArray[np.int32]:
    """A number behind the name of computes; -1 where there is none."""
    compute = {OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE, OpType.WEIGHT_GRAD_COMPUTE}
    values = np.full(len(events), -1, np.int32)
    for row, name in enumerate(events.name.tolist()):
        op, numbers = ops[name]
        if op in compute:
            values[row] = min(numbers.get(key, -1), _MAX_NUMBER)
    return values
