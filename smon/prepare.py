"""From an op table to a window that can be simulated. No input or output.

``table → grid → quality → structures → graphs → programs → fill → clocks → window → engine``

Flow: `smon.trace`, `smon.graph`, `smon.simulate` → **here** → `smon.analysis`, `smon.timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.errors import CycleError, GraphError, NothingUsableError, TopologyError
from smon.graph.build import Graph, build_graph
from smon.graph.fill import fill_missing
from smon.graph.program import Program, compile_programs
from smon.graph.structure import Replicas, group_lanes
from smon.graph.stuck import Stuck, find_stuck
from smon.ops import STREAM_COMPUTE
from smon.simulate.clock import Alignment, align
from smon.simulate.engine import Engine, Floats
from smon.simulate.ideal import Ideal, measure_ideal
from smon.simulate.warmup import warmup_steps
from smon.simulate.window import Window, make_window
from smon.topology import Layout
from smon.trace.context import Context
from smon.trace.grid import Grid, make_grid
from smon.trace.jumps import Jump, without_jumps
from smon.trace.meta import Job
from smon.trace.quality import Quality, assess
from smon.trace.table import OpTable

#: More clocks than this are counted, not listed.
_MAX_CLOCKS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A window ready for what-if runs.

    Attributes
    ----------
    steps_seen
        Step numbers in the table, used or not.
    skipped
        (step, reason) of those not used.
    gaps_ns
        (steps used,) idle time until the next step, NaN where it is unknown.
    alignment
        What was found out about the clocks; the window's times are aligned.
    context
        Side evidence: hosts, tokens, counters, events.
    warmup
        (step, ns) of the steps at the start that are left out, and how much longer they were.
    stuck
        What the last step waits for, if it hangs.
    """

    job: Job
    table: OpTable
    window: Window
    ideal: Ideal
    engine: Engine
    gaps_ns: Floats
    steps_seen: tuple[int, ...]
    skipped: tuple[tuple[int, str], ...]
    coverage_ratio: float
    alignment: Alignment
    context: Context
    warmup: tuple[tuple[int, float], ...]
    stuck: Stuck | None
    notes: tuple[str, ...]


def prepare(
    table: OpTable,
    job: Job,
    context: Context | None = None,
    *,
    ideal: Ideal | None = None,
    grid: Grid | None = None,
) -> Prepared:
    """Build the graphs of a window and measure its durations.

    Parameters
    ----------
    ideal
        Ideal durations of a larger window that this one is a part of: they hold instead of its
        own, and no step is taken for warm-up.
    grid
        The grid of this table, where it is known already.

    Raises
    ------
    NothingUsableError
        No step can be analysed.
    TopologyError
        The table has workers outside the layout.
    """
    _check_layout(table, job.layout)
    table, jumps = without_jumps(table)
    grid = make_grid(table) if grid is None or jumps else grid
    quality = assess(grid, job.layout)
    groups = group_lanes(grid, quality, job.layout)
    graphs, programs, broken = _graphs(groups)
    skipped = _skipped(grid, quality, groups, broken)
    context = context or Context()
    hosts = _host_numbers(job.layout, context)
    simulated = _engine(grid, _Lanes(job.layout, groups, graphs, programs, hosts), skipped, ideal)
    window, engine, alignment = simulated.window, simulated.engine, simulated.alignment
    return Prepared(
        job=job,
        table=grid.table,
        window=window,
        ideal=engine.reference,
        engine=engine,
        gaps_ns=_gaps(grid, window),
        steps_seen=tuple(grid.steps.tolist()),
        skipped=tuple(sorted(skipped.items())),
        coverage_ratio=quality.coverage_ratio,
        alignment=alignment,
        context=context,
        warmup=simulated.warmup,
        stuck=find_stuck(grid, job.layout, groups, graphs, skipped),
        notes=(
            *_table_notes(table, grid),
            *quality.notes,
            *_window_notes(window),
            *_jump_notes(job.layout, jumps),
            *_clock_notes(job.layout, alignment),
        ),
    )


def _check_layout(table: OpTable, layout: Layout) -> None:
    for name, values, size in (("DP rank", table.dp, layout.dp), ("stage", table.stage, layout.pp)):
        highest = int(values.max(initial=-1))
        if highest >= size:
            raise TopologyError(
                f"the trace has {name} {highest}, but layout {layout} allows 0 to {size - 1}: "
                "correct the layout"
            )


def _gaps(grid: Grid, window: Window) -> Floats:
    """(steps used,) ns from the end of a step to the start of the next; NaN where unknown."""
    gaps = np.full(len(window.steps), np.nan)
    if grid.table.step_relative:
        return gaps
    begin = grid.origin_ns[np.searchsorted(grid.steps, window.steps)]
    follows = np.flatnonzero(np.diff(window.steps) == 1)
    gaps[follows] = np.diff(begin)[follows] - window.recorded()[follows]
    return gaps


def _graphs(
    groups: list[Replicas],
) -> tuple[list[Graph | None], list[Program], dict[int, str]]:
    """Graph of each group, None where its ops form none; their programs; and why, by group."""
    graphs: list[Graph | None] = []
    broken: dict[int, str] = {}
    for number, replicas in enumerate(groups):
        try:
            graphs.append(build_graph(replicas.structure))
        except GraphError as error:
            graphs.append(None)
            broken[number] = str(error)
    try:
        programs = compile_programs([graph for graph in graphs if graph is not None])
    except CycleError:
        programs = _leave_out_cycles(graphs, broken)
    return graphs, programs, broken


def _leave_out_cycles(graphs: list[Graph | None], broken: dict[int, str]) -> list[Program]:
    """Leave out the graphs with cycles, then those that contradict a more frequent one.

    Returns
    -------
    list of Program
        Of the graphs that are left.
    """
    programs: list[Program] = []
    for together in (False, True):
        sound: list[Graph] = []
        for number, graph in enumerate(graphs):
            if graph is None:
                continue
            try:
                programs = compile_programs([*sound, graph] if together else [graph])
                sound.append(graph)
            except CycleError as error:
                graphs[number] = None
                broken[number] = str(error)
    return programs


def _skipped(
    grid: Grid, quality: Quality, groups: list[Replicas], broken: dict[int, str]
) -> dict[int, str]:
    """Steps left out with reasons; a step goes if the graph of one of its replicas is broken."""
    skipped = dict(quality.skipped)
    for number, reason in broken.items():
        for lane in groups[number].lanes:
            skipped.setdefault(int(grid.steps[grid.lane_step[lane]]), reason)
    return skipped


def _nothing_usable(grid: Grid, skipped: dict[int, str]) -> NothingUsableError:
    reasons = sorted(skipped.items())
    first = f"; step {reasons[0][0]}: {reasons[0][1]}" if reasons else ""
    return NothingUsableError(f"none of {len(grid.steps)} steps can be analysed{first}", reasons)


@dataclass(frozen=True, slots=True, eq=False)
class _Lanes:
    """Lanes by structure with their graphs (None: broken), and (dp, stage) host numbers.

    `programs` are those of all sound graphs together.
    """

    layout: Layout
    groups: list[Replicas]
    graphs: list[Graph | None]
    programs: list[Program]
    hosts: NDArray[np.intp] | None


def _host_numbers(layout: Layout, context: Context) -> NDArray[np.intp] | None:
    """(dp_ranks, stages) number of the host of each worker; None unless all are known."""
    names = [
        context.hosts.get(layout.rank(dp, stage))
        for dp in range(layout.dp)
        for stage in range(layout.pp)
    ]
    if any(name is None for name in names):
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names]).reshape(layout.dp, layout.pp)


@dataclass(frozen=True, slots=True, eq=False)
class _Simulated:
    """What `_engine` makes."""

    window: Window
    engine: Engine
    alignment: Alignment
    warmup: tuple[tuple[int, float], ...]


def _engine(
    grid: Grid, lanes: _Lanes, skipped: dict[int, str], ideal_given: Ideal | None
) -> _Simulated:
    """The window without warm-up and without steps whose ops take no time.

    Those are added to `skipped`.
    """
    warmup: tuple[tuple[int, float], ...] | None = None if ideal_given is None else ()
    while len(skipped) < len(grid.steps):
        window, alignment = _window(grid, lanes, skipped)
        engine = Engine(window, _ideal(window, ideal_given))
        recorded = window.recorded()
        idle = (recorded <= 0.0) | (engine.ideal_step_ns <= 0.0)
        skipped.update((step, "its ops take no time") for step in window.steps[idle].tolist())
        if idle.any():
            continue
        if warmup is None:
            warmup = _warmup(window, recorded, engine.ideal_step_ns)
            skipped.update((step, "warm-up of the job") for step, _ in warmup)
            if warmup:
                continue
        return _Simulated(window, engine, alignment, warmup)
    raise _nothing_usable(grid, skipped)


def _ideal(window: Window, given: Ideal | None) -> Ideal:
    """Ideal durations as given, or measured where none are."""
    measured = measure_ideal(window.parts)
    if given is None:
        return measured
    return Ideal(np.where(np.isnan(given.by_optype), measured.by_optype, given.by_optype))


def _warmup(window: Window, recorded: Floats, ideal: Floats) -> tuple[tuple[int, float], ...]:
    count = warmup_steps(recorded, ideal, _pace(window))
    extra = recorded - ideal * np.median(recorded / ideal)
    return tuple(zip(window.steps[:count].tolist(), extra[:count].tolist(), strict=True))


def _pace(window: Window) -> Floats:
    """(steps,) typical time of a compute op in each step, over that in the typical step."""
    compute = [int(op) for op in STREAM_COMPUTE]
    steps, means = [], []
    for part in window.parts:
        chosen = part.work[np.isin(part.graph.structure.optype, compute)]
        if len(chosen):
            steps.append(part.step)
            means.append(chosen.mean(axis=0))
    if not steps:
        return np.ones(len(window.steps))
    step, mean = np.concatenate(steps), np.concatenate(means)
    numbers = range(len(window.steps))
    pace = np.array([np.median(mean[step == n]) if (step == n).any() else 0.0 for n in numbers])
    typical = float(np.median(pace))
    return pace / typical if typical > 0 else np.ones(len(pace))


def _window(grid: Grid, lanes: _Lanes, skipped: dict[int, str]) -> tuple[Window, Alignment]:
    used = np.array([step not in skipped for step in grid.steps.tolist()])
    number = np.cumsum(used) - 1
    kept, sound = [], []
    for replicas, graph in zip(lanes.groups, lanes.graphs, strict=True):
        mine = used[grid.lane_step[replicas.lanes]]
        if graph is not None and mine.any():
            kept.append(replicas if mine.all() else _only_lanes(replicas, mine))
            sound.append(graph)
    # Of fewer graphs, programs can have other phases.
    same = [program.graph for program in lanes.programs] == sound
    programs = lanes.programs if same else compile_programs(sound)
    filled = [
        fill_missing(
            replicas,
            program,
            number[grid.lane_step[replicas.lanes]],
            grid.lane_dp[replicas.lanes],
        )
        for replicas, program in zip(kept, programs, strict=True)
    ]
    stages, dp_ranks = lanes.layout.pp, lanes.layout.dp
    alignment = align(
        filled,
        stages,
        dp_ranks,
        grid.steps[used],
        hosts=lanes.hosts,
        step_start_ns=None if grid.table.step_relative else grid.origin_ns[used],
    )
    return make_window(grid.steps[used], stages, dp_ranks, alignment.lanes), alignment


def _only_lanes(replicas: Replicas, lanes: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Replicas:
    return Replicas(
        replicas.structure,
        replicas.lanes[lanes],
        replicas.row[:, lanes],
        replicas.start[:, lanes],
        replicas.end[:, lanes],
    )


def _table_notes(table: OpTable, grid: Grid) -> list[str]:
    """What was left out row by row."""
    counts = dict(table.dropped)
    counts["duplicate of another row"] = grid.duplicates
    counts["same op as another row, with other times"] = grid.conflicts
    counts["sequence number far above the number of ops"] = grid.out_of_range
    return [
        f"{count:,} {'row' if count == 1 else 'rows'} left out: {reason}"
        for reason, count in counts.items()
        if count
    ]


def _window_notes(window: Window) -> list[str]:
    notes = []
    ops = sum(part.row.size for part in window.parts)
    filled = sum(int(np.count_nonzero(part.row < 0)) for part in window.parts)
    if filled:
        notes.append(
            f"{filled:,} of {ops:,} ops ({filled / ops:.2%}) are missing and were filled in from "
            "their peers"
        )
    if len(window.parts) > 1:
        notes.append(
            f"the replicas and steps of this window have {len(window.parts)} different structures"
        )
    for count, what in (
        (window.impossible_delays, "launch delays"),
        (window.impossible_transfers, "transfer times"),
    ):
        if count:
            notes.append(
                f"{count:,} {what} of −10 ms or less were taken as 0: clocks of different hosts "
                "disagree, or the recorded times do"
            )
    return notes


def _misalignment(alignment: Alignment) -> str:
    if alignment.residual_ns is None:
        return "no communication between the workers is in the trace"
    if not alignment.linked.all():
        return (
            f"{int(np.count_nonzero(~alignment.linked))} workers cannot be compared with the rest"
        )
    typical = alignment.residual_ns / 1e6
    return f"ends of the same communication differ, typically by {typical:.1f} ms, on some far more"


def _jump_notes(layout: Layout, jumps: Sequence[Jump]) -> list[str]:
    """Which clocks were set, and when."""
    notes = [
        f"the clock of rank {layout.rank(jump.dp, jump.stage)} (DP rank {jump.dp}, stage "
        f"{jump.stage}) was set {jump.ahead_ns / 1e9:+.3f} s before step {jump.step}; its times "
        "were corrected"
        for jump in jumps[:_MAX_CLOCKS]
    ]
    more = len(jumps) - _MAX_CLOCKS
    return [*notes, f"so were clocks {more} more times"] if more > 0 else notes


def _clock_notes(layout: Layout, alignment: Alignment) -> list[str]:
    """Which clocks were put right, and whether all can be compared now."""
    notes = []
    for dp, stage in np.argwhere(alignment.correction_ns != 0)[:_MAX_CLOCKS].tolist():
        offset = alignment.correction_ns[dp, stage] / 1e6
        notes.append(
            f"the clock of rank {layout.rank(dp, stage)} (DP rank {dp}, stage {stage}) is "
            f"{offset:+.2f} ms off; its times were corrected"
        )
    more = int(np.count_nonzero(alignment.correction_ns)) - _MAX_CLOCKS
    if more > 0:
        notes.append(f"so are the clocks of {more} more workers")
    if not alignment.aligned:
        notes.append(
            f"clocks are not aligned: {_misalignment(alignment)}; causes that rest on times of "
            "different workers (links, data loader) are withheld"
        )
    return notes
