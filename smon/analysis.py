"""From an op table to a report: the whole pipeline of calls, in view. No input or output.

``table → prepare → what-ifs → slowdowns, shares, ledger → diagnosis → fixes → report``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from smon.attribute.groups import MAX_GROUPS, MAX_RANKS, Group, groups_of
from smon.attribute.interval import bootstrap_interval
from smon.attribute.ledger import ledger, ledger_note
from smon.attribute.shares import (
    approximate_workers,
    fixed_share,
    repaired_slowdown,
    slowest_workers,
)
from smon.attribute.slowdown import StepTimes, simulate_all, slowdown
from smon.attribute.standout import standout_notes
from smon.diagnose.evidence import Evidence
from smon.diagnose.history import History
from smon.diagnose.thresholds import ATTRIBUTION_THRESHOLD
from smon.diagnose.verdict import Diagnosis, diagnose
from smon.errors import NothingUsableError, SimulationError
from smon.plan.planner import plan
from smon.prepare import Prepared, prepare
from smon.report import (
    MAX_SIMULATION_ERROR_RATIO,
    MIN_STEPS,
    ClockPart,
    Cost,
    FixPart,
    GroupPart,
    JobPart,
    JobReport,
    LedgerEntry,
    Outline,
    QualityPart,
    SkippedStep,
    Slowdown,
    StepPart,
    StepTime,
    WindowPart,
    WorkerPart,
    WorstPart,
    job_part,
    report_without_numbers,
)
from smon.simulate.cube import Changes
from smon.simulate.whatif import Worker
from smon.topology import Layout
from smon.trace.context import Context
from smon.trace.meta import Job
from smon.trace.table import OpTable

#: Called with (phase, done, total).
Progress = Callable[[str, int, int], None]

#: Planning searches, so its cost grows faster than that of the analysis: of windows above this
#: number of ops, it is done on some steps.
MAX_PLAN_OPS = 4_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """What a report is made with.

    Attributes
    ----------
    notes
        What the reader has to say about the trace.
    price_per_gpu_hour
        In any currency; None leaves money out.
    repair
        (dp, stage) of the workers for the `repaired` reference; by default the suspects.
    history
        The job's earlier windows.
    fixes
        What fixes would buy, where it is known; None: work it out.
    progress
        Called as the analysis goes on.
    max_plan_ops
        Of more ops, what fixes buy is worked out on some steps.
    """

    notes: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None
    repair: tuple[tuple[int, int], ...] = ()
    history: History | None = None
    fixes: tuple[FixPart, ...] | None = None
    progress: Progress | None = None
    max_plan_ops: int = MAX_PLAN_OPS


_DEFAULT = Options()


def analyze(
    table: OpTable, job: Job, options: Options = _DEFAULT, context: Context | None = None
) -> JobReport:
    """Analyse the window of a table.

    Parameters
    ----------
    table, job
        The ops, and what job they belong to.
    context
        Side evidence: hosts, tokens, counters, events.

    Raises
    ------
    NothingUsableError
        No step can be analysed.
    SimulationError
        `repair` names a worker that does not exist or has no peers.
    """
    return analyze_prepared(prepare(table, job, context), options)


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """What is known of a window: step times of the what-ifs, evidence, and what was found."""

    prepared: Prepared
    times: StepTimes
    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def slowdown(self) -> float:
        """S, the mean step time over the mean ideal one."""
        return float(slowdown(self.times.simulated, self.times.ideal))


def study(
    prepared: Prepared, progress: Progress | None = None, history: History | None = None
) -> Study:
    """Run the what-ifs of a window and look for causes.

    Raises
    ------
    NothingUsableError
        The simulated steps take no time.
    """

    def report_progress(done: int, total: int) -> None:
        if progress is not None:
            progress("simulate", done, total)

    times = simulate_all(prepared.window, prepared.ideal, prepared.engine, report_progress)
    if not np.mean(times.simulated) > 0:
        raise NothingUsableError("the simulated steps take no time: the recorded times are garbage")
    evidence = Evidence(
        window=prepared.window,
        engine=prepared.engine,
        times=times,
        layout=prepared.job.layout,
        context=prepared.context,
        gaps_ns=prepared.gaps_ns,
        explained=Changes(),
        aligned=prepared.alignment.aligned,
        warmup=prepared.warmup,
        stuck=prepared.stuck,
        history=history,
        table=prepared.table,
    )
    return Study(prepared, times, evidence, diagnose(evidence))


def fixes_of(
    studied: Study, price: float | None, layers: Sequence[int] | None = None
) -> tuple[FixPart, ...]:
    """What fixes would buy, best first; none for a healthy job, nor from a single step.

    Raises
    ------
    ConfigError
        `layers` does not fit the pipeline.
    """
    healthy = studied.slowdown < ATTRIBUTION_THRESHOLD and not studied.diagnosis.findings
    if healthy or len(studied.prepared.window.steps) < MIN_STEPS:
        return ()
    found = studied.diagnosis.found
    return tuple(
        FixPart(
            fix=str(fix.fix),
            detail=fix.detail,
            step_time_s=fix.step_time_ns / 1e9,
            speedup=fix.speedup,
            gpu_hours_per_day=fix.gpu_hours_per_day,
            cost_per_day=fix.cost_per_day,
            assumptions=fix.assumptions,
            changes_optimisation=fix.changes_optimisation,
        )
        for fix in plan(studied.evidence, found, layers=layers, price=price)
    )


def analyze_prepared(prepared: Prepared, options: Options = _DEFAULT) -> JobReport:
    """As `analyze`, of a window that is already prepared."""
    return report_of(study(prepared, options.progress, options.history), options)


def outline_of(studied: Study) -> Outline:
    """What is known of a studied window without more simulations."""
    prepared, diagnosis = studied.prepared, studied.diagnosis
    few = len(prepared.window.steps) < MIN_STEPS
    return Outline(
        window=_window_part(prepared),
        per_step=_per_step(prepared, studied.times),
        verdict="insufficient_data" if few else diagnosis.verdict,
        findings=diagnosis.findings,
    )


def report_of(studied: Study, options: Options = _DEFAULT) -> JobReport:
    """The report of a window that is already studied."""
    outline = outline_of(studied)
    prepared, times, diagnosis = studied.prepared, studied.times, studied.diagnosis
    window, ideal, engine = prepared.window, prepared.ideal, prepared.engine
    approximate = approximate_workers(times)
    last_stage = [(dp, window.stages - 1) for dp in range(window.dp_ranks)]
    paper = studied.slowdown
    waste = 1.0 - 1.0 / paper
    parts = ledger(window, ideal, engine, times)
    sampled = ledger_note(window, times)
    groups = _groups(studied)
    fixes, planned = planned_fixes(studied, options)
    notes = (
        *options.notes,
        *diagnosis.notes,
        *standout_notes(times, window.steps),
        *([sampled] if sampled else []),
        *planned,
    )
    return JobReport(
        job=_job_part(prepared.job),
        window=outline.window,
        quality=_quality_part(prepared, times, notes),
        step_time=_step_time(times),
        slowdown=Slowdown(
            paper=paper,
            repaired=_repaired(studied, options.repair),
            history=_against_history(studied),
            ci95=bootstrap_interval(times.simulated, times.ideal),
            launch=float(slowdown(times.recorded, times.simulated)),
        ),
        waste_ratio=waste,
        per_step=outline.per_step,
        by_optype=_ratios(times.by_optype, times),
        by_dp_rank=_numbered(slowdown(times.by_dp_rank, times.ideal)),
        by_stage=_numbered(slowdown(times.by_stage, times.ideal)),
        workers=_workers(prepared, times, approximate),
        worker_share=fixed_share(window, ideal, engine, times, slowest_workers(approximate)),
        last_stage_share=fixed_share(window, ideal, engine, times, last_stage),
        groups=tuple(_group_part(group) for group in groups[:MAX_GROUPS]),
        groups_count=len(groups),
        cost=_cost(prepared.job.layout, waste, options.price_per_gpu_hour),
        ledger=tuple(
            LedgerEntry(str(part.factor), part.excess_ns / 1e9, part.share) for part in parts
        ),
        verdict=outline.verdict,
        findings=outline.findings,
        fixes=fixes,
    )


def planned_fixes(studied: Study, options: Options) -> tuple[tuple[FixPart, ...], list[str]]:
    """What fixes would buy, and a note if only some steps were looked at for that."""
    if options.fixes is not None:
        return options.fixes, []
    window = studied.prepared.window
    ops, steps = sum(part.row.size for part in window.parts), window.steps
    if ops <= options.max_plan_ops:
        return fixes_of(studied, options.price_per_gpu_hour), []
    some = evenly(steps.tolist(), max(int(len(steps) * options.max_plan_ops / ops), MIN_STEPS))
    fixes = fixes_of(_of_steps(studied, some), options.price_per_gpu_hour)
    note = f"what fixes buy was worked out on {len(some)} of {len(steps)} steps, evenly spread"
    return fixes, [note] if fixes else []


def _of_steps(studied: Study, steps: Sequence[int]) -> Study:
    """The study of some steps of a window, against the ideal durations of all of it."""
    prepared = studied.prepared
    table = prepared.table.take(np.isin(prepared.table.step, steps))
    part = prepare(table, prepared.job, prepared.context, ideal=prepared.ideal)
    return study(part, None, studied.evidence.history)


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """So many of these steps, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)
    return [int(steps[place]) for place in np.unique(places).tolist()]


def _against_history(studied: Study) -> float | None:
    history = studied.evidence.history
    if history is None or history.simulated_s <= 0:
        return None
    return float(np.mean(studied.times.simulated)) / 1e9 / history.simulated_s


def _repaired(studied: Study, chosen: Sequence[Worker]) -> float | None:
    """Slowdown against the chosen workers' peers, or the suspects' where these have any."""
    window, engine, times = studied.prepared.window, studied.prepared.engine, studied.times
    if chosen:
        return repaired_slowdown(window, engine, times, chosen)
    suspects = studied.diagnosis.suspects()
    try:
        return repaired_slowdown(window, engine, times, suspects) if suspects else None
    except SimulationError:
        return None


def empty_report(job: Job, error: NothingUsableError, options: Options = _DEFAULT) -> JobReport:
    """The report of a window in which nothing can be analysed: no numbers, but all reasons."""
    steps = [step for step, _ in error.skipped] or [0]
    return report_without_numbers(
        _job_part(job),
        WindowPart(
            first_step=min(steps),
            last_step=max(steps),
            steps=len(error.skipped),
            steps_used=0,
            skipped=tuple(SkippedStep(step, reason) for step, reason in error.skipped),
            coverage_ratio=0.0,
        ),
        (*options.notes, str(error)),
        options.price_per_gpu_hour,
    )


def _job_part(job: Job) -> JobPart:
    return job_part(job.job_id, job.attempt, job.layout)


def _window_part(prepared: Prepared) -> WindowPart:
    return WindowPart(
        first_step=prepared.steps_seen[0],
        last_step=prepared.steps_seen[-1],
        steps=len(prepared.steps_seen),
        steps_used=len(prepared.window.steps),
        skipped=tuple(SkippedStep(step, reason) for step, reason in prepared.skipped),
        coverage_ratio=prepared.coverage_ratio,
    )


def _quality_part(prepared: Prepared, times: StepTimes, notes: Collection[str]) -> QualityPart:
    error = float(np.mean(np.abs(times.replayed - times.recorded) / times.recorded))
    more = []
    if error > MAX_SIMULATION_ERROR_RATIO:
        more.append(
            f"the simulation misses the recorded step times by {error:.1%}: the dependency model "
            "does not fit this job, do not rely on the numbers"
        )
    if len(prepared.window.steps) < MIN_STEPS:
        more.append("one usable step cannot tell a slow worker from one slow moment")
    return QualityPart(error, _clock_part(prepared), (*notes, *prepared.notes, *more))


def _clock_part(prepared: Prepared) -> ClockPart:
    alignment, layout = prepared.alignment, prepared.job.layout
    if alignment.residual_ns is None:
        return ClockPart(None, None)
    offsets = []
    for dp, stage in np.argwhere(alignment.correction_ns != 0).tolist():
        rank = layout.rank(dp, stage)
        offset: dict[str, float | int | str] = {"rank": rank}
        if rank in prepared.context.hosts:
            offset["host"] = prepared.context.hosts[rank]
        offset["offset_s"] = float(alignment.correction_ns[dp, stage]) / 1e9
        offsets.append(offset)
    return ClockPart(alignment.aligned, alignment.residual_ns / 1e9, tuple(offsets))


def _step_time(times: StepTimes) -> StepTime:
    means = (float(part.mean()) / 1e9 for part in (times.recorded, times.simulated, times.ideal))
    return StepTime(*means)


def _per_step(prepared: Prepared, times: StepTimes) -> tuple[StepPart, ...]:
    window, layout = prepared.window, prepared.job.layout
    optypes = {name: part / times.ideal for name, part in times.by_optype.items()}
    dp_ranks, stages = times.by_dp_rank / times.ideal, times.by_stage / times.ideal
    workers = times.by_worker / times.ideal
    return tuple(
        StepPart(
            step=int(step),
            recorded_s=float(times.recorded[index]) / 1e9,
            simulated_s=float(times.simulated[index]) / 1e9,
            ideal_s=float(times.ideal[index]) / 1e9,
            slowdown=float(times.simulated[index] / times.ideal[index]),
            by_optype={name: float(part[index]) for name, part in optypes.items()},
            by_dp_rank=_numbered(dp_ranks[:, index]),
            by_stage=_numbered(stages[:, index]),
            worst=_worst(workers[:, :, index], layout),
        )
        for index, step in enumerate(window.steps)
    )


def _worst(workers: np.ndarray, layout: Layout) -> WorstPart | None:
    """Of (dp_ranks, stages) slowdowns the highest."""
    if np.isnan(workers).all():
        return None
    dp, stage = (int(index) for index in np.unravel_index(np.nanargmax(workers), workers.shape))
    return WorstPart(dp, stage, layout.rank(dp, stage), float(workers[dp, stage]))


def _groups(studied: Study) -> list[Group]:
    """Without aligned clocks transfer times mean nothing, and no group is shown."""
    if not studied.prepared.alignment.aligned:
        return []
    prepared, evidence = studied.prepared, studied.evidence
    return groups_of(prepared.window, prepared.job.layout, evidence.recorded_work)


def _group_part(group: Group) -> GroupPart:
    return GroupPart(
        kind=group.kind,
        dp=group.dp,
        stage=group.stage,
        members=len(group.ranks),
        ranks=group.ranks[:MAX_RANKS],
        transfer_p50_s=group.p50 / 1e9,
        transfer_p99_s=group.p99 / 1e9,
        peers_p50_s=None if group.peers_p50 is None else group.peers_p50 / 1e9,
        last_rank=group.last,
        last_share=group.last_share,
    )


def _ratios(times: dict[str, np.ndarray], all_times: StepTimes) -> dict[str, float]:
    return {name: float(slowdown(part, all_times.ideal)) for name, part in times.items()}


def _numbered(values: np.ndarray) -> dict[str, float]:
    """Values by index; absent ones left out."""
    return {
        str(index): value for index, value in enumerate(values.tolist()) if not math.isnan(value)
    }


def _workers(
    prepared: Prepared, times: StepTimes, approximate: np.ndarray
) -> tuple[WorkerPart, ...]:
    layout, hosts = prepared.job.layout, prepared.context.hosts
    exact = slowdown(times.by_worker, times.ideal)
    return tuple(
        WorkerPart(
            dp=dp,
            stage=stage,
            rank=layout.rank(dp, stage),
            host=hosts.get(layout.rank(dp, stage)),
            slowdown=_known(exact[dp, stage]),
            approx_slowdown=_known(approximate[dp, stage]),
        )
        for stage in range(layout.pp)
        for dp in range(layout.dp)
    )


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _cost(layout: Layout, waste: float, price: float | None) -> Cost:
    hours = max(waste, 0.0) * layout.world_size * 24
    return Cost(hours, None if price is None else hours * price, price)
