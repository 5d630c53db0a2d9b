"""What tests of the analysis share: hand-written steps, damage, and a reference simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smon.graph.build import Graph, build_graph
from smon.graph.structure import Replicas, Structure, group_lanes
from smon.ops import OpType
from smon.report import JobReport
from smon.synth.scenario import Scenario, generate
from smon.synth.timing import Noise, SlowCompute
from smon.topology import Layout
from smon.trace.grid import make_grid
from smon.trace.load import load
from smon.trace.meta import Job
from smon.trace.quality import assess
from smon.trace.table import OpTable, make_table

Floats = NDArray[np.float64]

_EMPTY = np.empty(0, np.intp)

#: Short names of op types, as hand-written steps and expected edges give them.
SHORT = {
    "F": OpType.FORWARD_COMPUTE,
    "B": OpType.BACKWARD_COMPUTE,
    "W": OpType.WEIGHT_GRAD_COMPUTE,
    "FS": OpType.FORWARD_SEND,
    "FR": OpType.FORWARD_RECV,
    "BS": OpType.BACKWARD_SEND,
    "BR": OpType.BACKWARD_RECV,
    "AG": OpType.PARAMS_ALL_GATHER,
    "RS": OpType.GRADS_REDUCE_SCATTER,
    "SEP": OpType.SEPARATE_GRADS_ALL_REDUCE,
    "LN": OpType.LAYERNORM_GRADS_ALL_REDUCE,
    "EMB": OpType.EMBEDDING_GRADS_ALL_REDUCE,
    "GC": OpType.GC,
    "CLIP": OpType.OPTIMIZER_CLIP_MAIN_GRAD,
    "OPT": OpType.OPTIMIZER,
}
_NAMES = {int(op): name for name, op in SHORT.items()}


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a hand-written step; times in ms."""

    name: str
    stage: int
    start: float
    end: float
    chunk: int = -1
    global_chunk: int = -1
    dp: int = 0
    step: int = 0
    rank: int = -1


def table_of(ops: Iterable[Op]) -> OpTable:
    """A table of these ops, numbered by start time within type, worker and step."""
    ordered = sorted(ops, key=lambda op: op.start)
    seq: dict[tuple[str, int, int, int, int], int] = {}
    numbers = []
    for op in ordered:
        key = (op.name, op.stage, op.dp, op.step, op.rank)
        seq[key] = seq.get(key, -1) + 1
        numbers.append(seq[key])
    columns = {
        "step": [op.step for op in ordered],
        "dp": [op.dp for op in ordered],
        "stage": [op.stage for op in ordered],
        "rank": [op.rank for op in ordered],
        "optype": [int(SHORT[op.name]) for op in ordered],
        "start_ns": [round(op.start * 1e6) for op in ordered],
        "duration_ns": [round((op.end - op.start) * 1e6) for op in ordered],
        "seq": numbers,
        "chunk": [op.chunk for op in ordered],
        "global_chunk": [op.global_chunk for op in ordered],
    }
    arrays = {name: np.array(values) for name, values in columns.items()}
    return make_table(arrays, step_relative=True)


def replicas_of(table: OpTable, layout: Layout) -> list[Replicas]:
    """The lanes of a table by structure."""
    grid = make_grid(table)
    return group_lanes(grid, assess(grid, layout), layout)


def graph_of(ops: Iterable[Op], *, pp: int, dp: int = 1) -> Graph:
    """The graph of a hand-written step; its lanes must be of one structure."""
    (replicas,) = replicas_of(table_of(ops), Layout(dp=dp, pp=pp))
    return build_graph(replicas.structure)


def name_of(graph: Graph, op: int) -> str:
    """Short name of an op, e.g. ``FR1@0``: forward-recv 1 of stage 0."""
    structure = graph.structure
    return f"{_NAMES[int(structure.optype[op])]}{structure.seq[op]}@{structure.stage[op]}"


def edges_of(graph: Graph) -> set[str]:
    """Edges as ``F0@0 B0@0``: the second depends on the first."""
    pairs = zip(graph.before.tolist(), graph.after.tolist(), strict=True)
    return {f"{name_of(graph, before)} {name_of(graph, after)}" for before, after in pairs}


def groups_of(graph: Graph) -> set[frozenset[str]]:
    """Communication groups as sets of short names."""
    numbers = np.unique(graph.group[graph.group >= 0])
    return {
        frozenset(name_of(graph, op) for op in np.flatnonzero(graph.group == number).tolist())
        for number in numbers
    }


def groups(*texts: str) -> set[frozenset[str]]:
    """Expected groups, each given as names with spaces between."""
    return {frozenset(text.split()) for text in texts}


def bare_structure(optype: NDArray[np.intp]) -> Structure:
    """A structure of one stage that knows its op types and nothing else."""
    count = len(optype)
    none = np.full(count, -1)
    zero = np.zeros(count, np.intp)
    return Structure(
        1, zero, optype.astype(np.intp), np.arange(count), {}, (_EMPTY,), (_EMPTY,),
        np.zeros(count, bool), none, none, overlap=False, reduces_first=False,
    )  # fmt: skip


# --- jobs and damage --------------------------------------------------------------------------

#: Noise and launch delays as in a real job.
REAL_NOISE = Noise(compute_ratio=0.03, communication_ratio=0.05, launch_delay_s=0.001)


def synthetic_job(**fields: Any) -> tuple[OpTable, Job]:  # noqa: ANN401  # of Scenario
    """A noisy job of 4 × 4 workers with one slow worker, unless told otherwise."""
    given = {
        "dp": 4,
        "pp": 4,
        "steps": 12,
        "noise": REAL_NOISE,
        "faults": (SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5),),
    }
    made = generate(Scenario(**{**given, **fields}))
    return made.table, made.job


def public_job(traces: Path, name: str) -> tuple[OpTable, Job]:
    """One of the public traces: AR, SE or ST."""
    trace = load([traces / "straggler-analysis" / f"trace-{name}.parquet"])
    return trace.table, trace.job


def changed(table: OpTable, **columns: NDArray[Any]) -> OpTable:
    """The table made anew with other columns: unusable rows are dropped and counted."""
    return make_table({**table.columns, **columns}, step_relative=table.step_relative)


def without(table: OpTable, rows: NDArray[np.bool_]) -> OpTable:
    """The table without these rows."""
    return table.take(~rows)


def rows_where(table: OpTable, *optypes: OpType, **where: int) -> NDArray[np.bool_]:
    """Mask of the rows of these types (any, if none is given) with these values."""
    mask = np.isin(table.optype, optypes) if optypes else np.ones(len(table), bool)
    for name, value in where.items():
        mask &= table.columns[name] == value
    return np.asarray(mask, bool)


def cut_last_step(table: OpTable, share: float) -> OpTable:
    """Only what had ended after this share of the last step."""
    mine = table.step == table.step.max()
    begin, end = table.start_ns, table.start_ns + table.duration_ns
    limit = begin[mine].min() + share * (end[mine].max() - begin[mine].min())
    return table.take(~mine | (end <= limit))


def known(value: float | None) -> float:
    """A number of a report that must be there."""
    assert value is not None
    return value


def said(report: JobReport) -> str:
    """All that a report says about what was missing."""
    reasons = [f"step {one.step}: {one.reason}" for one in report.window.skipped]
    return "\n".join([*report.quality.notes, *reasons])


# --- reference simulator ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One replica in one step: its graph, and per op the work and launch delay."""

    graph: Graph
    step: int
    work: Sequence[float]
    delay: Sequence[float]


def reference_steps(lanes: Sequence[Lane], steps: int) -> list[float]:
    """Step times by ``docs/method.md`` section 4, one op at a time, in plain Python.

    Knows nothing of units, phases, what is ideal, or arrays: ops that end together are one node,
    nodes run in topological order.
    """
    members: dict[object, list[tuple[int, int]]] = {}
    node_of: dict[tuple[int, int], object] = {}
    before: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, lane in enumerate(lanes):
        for op in range(len(lane.graph.group)):
            node = _node(lane, number, op)
            node_of[number, op] = node
            members.setdefault(node, []).append((number, op))
            before[number, op] = []
        for first, second in zip(lane.graph.before, lane.graph.after, strict=True):
            before[number, int(second)].append((number, int(first)))
    sorter: TopologicalSorter[object] = TopologicalSorter()
    for node, ops in members.items():
        sorter.add(node, *(node_of[dep] for op in ops for dep in before[op]))
    end: dict[tuple[int, int], float] = {}
    for node in sorter.static_order():
        latest = max(
            max((end[dep] for dep in before[number, op]), default=0.0) + lanes[number].delay[op]
            for number, op in members[node]
        )
        for number, op in members[node]:
            end[number, op] = latest + lanes[number].work[op]
    times = [0.0] * steps
    for (number, op), at in end.items():
        optypes = lanes[number].graph.structure.optype
        last = optypes[op] == OpType.OPTIMIZER or not (optypes == OpType.OPTIMIZER).any()
        if last:
            times[lanes[number].step] = max(times[lanes[number].step], at)
    return times


def _node(lane: Lane, number: int, op: int) -> object:
    if op in lane.graph.sync:
        return (lane.step, lane.graph.sync[op])
    group = int(lane.graph.group[op])
    return (number, "group", group) if group >= 0 else (number, "op", op)


#: Work of one op of one structure, (ops, lanes), per structure.
Works = Sequence[Floats]
Simulate = Callable[[Works], list[float]]
