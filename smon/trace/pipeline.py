"""From kernels to ops, where nothing names them: the pipeline model of an ordinary profile.

A profile of a pipeline has NCCL's messages between stages, and kernels between them. Process groups
say who is which stage; the number of messages, which schedule and how many microbatches; its place
between the messages, what a kernel works on. Where that does not come out on every rank, nothing
is guessed: the trace is analysed by its collectives, and a note says what was expected and found.

Flow: `smon.trace.events` → `smon.trace.stage` → **here** → `smon.trace.table`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from smon.ops import STREAM_COMPUTE, OpType
from smon.topology import Layout
from smon.trace.events import RankEvents
from smon.trace.groups import kind_by_members, kind_of
from smon.trace.schedules import Plan, Schedule, microbatches_of, program_of
from smon.trace.stage import Op, StageStep, ops_of, stage_step
from smon.trace.table import OpTable, make_table

#: Fewer steps that show a whole pipeline than this share of all are a coincidence.
_LEAST_STEPS: Final = 0.5

#: Model chunks per stage that are tried.
_MAX_CHUNKS: Final = 12

_MAX_NAMED: Final = 8

#: By rank and step.
_Found = dict[tuple[int, int], list[Op]]
_Steps = Mapping[tuple[int, int], StageStep]


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Ops that no annotation names.

    Attributes
    ----------
    chunks
        Model chunks of each stage.
    notes
        How they were told, and which steps were left out.
    """

    table: OpTable
    chunks: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unclear:
    """Why the ops of a pipeline cannot be told."""

    reason: str


def recover(ranks: Sequence[RankEvents], layout: Layout) -> Recovered | Unclear:
    """The ops of a job of two or more stages, from its kernels and messages."""
    missing = _missing(ranks, layout)
    if missing:
        return Unclear(missing)
    steps = _steps(ranks, layout)
    numbers = {number for _, number in steps}
    best, found, left_out = Plan(Schedule.ONE_F_ONE_B), _Found(), sorted(numbers)
    for plan in _plans(layout):
        ops, unfit = _try(plan, steps, len(ranks))
        if len(unfit) < len(left_out):
            best, found, left_out = plan, ops, unfit
    if len(numbers) - len(left_out) < _LEAST_STEPS * len(numbers) or not found:
        return Unclear(_unfit(steps))
    table = _table(ranks, layout, _with_gathers(found))
    return Recovered(table, best.chunks, tuple(_notes(best, found, left_out, steps)))


def _plans(layout: Layout) -> Iterator[Plan]:
    """Schedules to try; interleaved ones of any number of chunks, unless the layout says it."""
    several = range(2, _MAX_CHUNKS + 1) if layout.vpp == 1 else [layout.vpp]
    for sizes in (False, True):
        for schedule in Schedule:
            if schedule.interleaves:
                yield from (Plan(schedule, count, sizes) for count in several)
            elif layout.vpp == 1:
                yield Plan(schedule, sizes=sizes)


# --- which events -----------------------------------------------------------------------------


def _missing(ranks: Sequence[RankEvents], layout: Layout) -> str:
    """What a pipeline needs and this trace lacks; empty if nothing."""
    places = [layout.place(rank.rank) for rank in ranks]
    workers = {(place.dp, place.stage) for place in places}
    lacking = layout.dp * layout.pp - len(workers)
    if lacking:
        return f"{lacking} of {layout.dp * layout.pp} workers of {layout} have no file"
    if not all(rank.timed and rank.on_gpu for rank in ranks):
        return (
            "forward and backward between messages are told by kernels, which some ranks have not "
            "(with gloo, none has): annotate the ops"
        )
    return ""


def _steps(ranks: Sequence[RankEvents], layout: Layout) -> _Steps:
    """The steps of all ranks in program order."""
    found = {}
    for rank in ranks:
        stage = layout.place(rank.rank).stage
        kinds = [kind_of(group) or kind_by_members(group, layout) for group in rank.groups]
        order = np.argsort(rank.step, kind="stable")
        numbers, first = np.unique(rank.step[order], return_index=True)
        for number, rows in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
            if number >= 0:
                found[rank.rank, number] = stage_step(
                    rank, rows, stage=stage, stages=layout.pp, kinds=kinds
                )
    return found


# --- which schedule ---------------------------------------------------------------------------


def _try(plan: Plan, steps: _Steps, ranks: int) -> tuple[_Found, list[int]]:
    """The ops of the steps that follow a schedule on every rank, and the other steps.

    A schedule has one number of microbatches on all ranks of a step.
    """
    of_step: dict[int, dict[int, StageStep]] = defaultdict(dict)
    for (rank, number), step in steps.items():
        of_step[number][rank] = step
    found: _Found = {}
    unfit = []
    for number, members in sorted(of_step.items()):
        ops = _of_step(plan, members) if len(members) == ranks else None
        if ops is None:
            unfit.append(number)
        else:
            found.update({(rank, number): mine for rank, mine in ops.items()})
    return found, unfit


def _of_step(plan: Plan, members: Mapping[int, StageStep]) -> dict[int, list[Op]] | None:
    """The ops of each rank in one step; None if one of them does not follow the plan."""
    steps = {rank: step.with_sizes() if plan.sizes else step for rank, step in members.items()}
    counts = set()
    for step in steps.values():
        counts.add(None if step is None else _microbatches(plan, step))
        if len(counts) > 1 or None in counts:
            return None
    found = {}
    for rank, step in steps.items():
        ops = None if step is None else _ops(plan, step)
        if ops is None:
            return None
        found[rank] = ops
    return found


def _microbatches(plan: Plan, step: StageStep) -> int | None:
    return microbatches_of(plan, step.stages, step.stage, len(step.messages))


def _ops(plan: Plan, step: StageStep) -> list[Op] | None:
    count = _microbatches(plan, step)
    if count is None:
        return None
    return ops_of(step, program_of(plan, step.stages, step.stage, count))


def _unfit(steps: _Steps) -> str:
    """What was expected and found, of the step that most ranks have."""
    usual = Counter(number for _, number in steps).most_common(1)
    if not usual:
        return "no step has a kernel"
    number = usual[0][0]
    counts: dict[int, set[int]] = defaultdict(set)
    for (_, at), step in steps.items():
        if at == number:
            counts[step.stage].add(len(step.messages))
    listed = ", ".join(
        f"{stage}: {'/'.join(map(str, sorted(found)))}"
        for stage, found in sorted(counts.items())[:_MAX_NAMED]
    )
    expected = (
        "1F1B with m microbatches (and m ≥ stages) has m + stages − 1 on the first stage, m + 1 on "
        "the last, or, as GPipe, 2 m on both where each message is a kernel; interleaved 1F1B is "
        "known as Megatron-LM runs it"
    )
    unphased = not all(step.phased for step in steps.values())
    more = "; autograd, which tells backward kernels, is not in all traces" if unphased else ""
    return (
        f"step {number} has these numbers of message kernels by stage: {listed}; {expected}; "
        f"and between messages each compute has kernels of its phase{more}"
    )


# --- the table --------------------------------------------------------------------------------


def _with_gathers(found: _Found) -> _Found:
    """Parameters that are gathered once a step has computed belong to the step that follows."""
    moved: _Found = {key: [] for key in found}
    for (rank, number), ops in found.items():
        begun = min(op.start_ns for op in ops if op.op in STREAM_COMPUTE)
        for op in ops:
            late = op.op is OpType.PARAMS_ALL_GATHER and op.start_ns >= begun
            key = rank, number + 1 if late else number
            if key in moved:
                moved[key].append(op)
    return moved


def _table(ranks: Sequence[RankEvents], layout: Layout, found: _Found) -> OpTable:
    rows = []
    for (rank, number), ops in sorted(found.items()):
        place, seen = layout.place(rank), Counter[OpType]()
        for op in sorted(ops, key=lambda op: (op.start_ns, op.microbatch)):
            times = op.start_ns, op.end_ns - op.start_ns
            rows.append((number, place.dp, place.stage, rank, int(op.op), *times, seen[op.op],
                         op.chunk, op.microbatch))  # fmt: skip
            seen[op.op] += 1
    values = np.array(rows, np.int64).reshape(-1, len(_COLUMNS))
    dropped: Counter[str] = Counter()
    for one in ranks:
        dropped.update(dict(one.dropped))
    columns = {name: values[:, at] for at, name in enumerate(_COLUMNS)}
    return make_table(columns, dropped=dropped)


_COLUMNS: Final = (
    "step", "dp", "stage", "rank", "optype", "start_ns", "duration_ns", "seq", "chunk",
    "microbatch",
)  # fmt: skip


def _notes(plan: Plan, found: _Found, left_out: Sequence[int], steps: _Steps) -> list[str]:
    counts = sorted({1 + max(op.microbatch for op in ops) for ops in found.values()})
    told = any(label is not None for step in steps.values() for label in step.labels)
    numbers = " or ".join(map(str, counts[:_MAX_NAMED]))
    how = "direction and peer of the messages" if told else "the number of messages"
    notes = [
        f"no annotation names the ops: forward and backward of {numbers} microbatches follow from "
        f"the schedule {plan}, and that from {how} on each stage"
    ]
    if left_out:
        shown = ", ".join(map(str, left_out[:_MAX_NAMED]))
        notes.append(
            f"{len(left_out)} {'step does' if len(left_out) == 1 else 'steps do'} not show the "
            f"whole schedule on every rank, and are left out: {shown}"
        )
    return notes
