"""From an op table to a report: the whole pipeline of calls, in view. No input or output.

``table → prepare → what-ifs → slowdowns, shares, ledger → diagnosis → fixes → report``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

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
    MIN_STEPS,
    ClockPart,
    Cost,
    FixPart,
    JobPart,
    JobReport,
    LayoutPart,
    LedgerEntry,
    QualityPart,
    SkippedStep,
    Slowdown,
    StepPart,
    StepTime,
    WindowPart,
    WorkerPart,
)
from smon.simulate.cube import Changes
from smon.simulate.whatif import Worker
from smon.simulate.window import Window
from smon.topology import Layout
from smon.trace.context import Context
from smon.trace.meta import Job
from smon.trace.table import OpTable

#: Called with (phase, done, total).
Progress = Callable[[str, int, int], None]

#: Above this the replay does not reproduce the trace, and nothing that follows can be trusted; the
#: paper drops such jobs (section 4).
MAX_SIMULATION_ERROR_RATIO = 0.05

#: Planning searches, so its cost grows faster than that of the analysis: for windows above this
#: number of ops it is left to ``smon plan``.
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
    progress
        Called as the analysis goes on.
    """

    notes: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None
    repair: tuple[tuple[int, int], ...] = ()
    history: History | None = None
    progress: Progress | None = None


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


def report_of(studied: Study, options: Options = _DEFAULT) -> JobReport:
    """The report of a window that is already studied."""
    prepared, times, diagnosis = studied.prepared, studied.times, studied.diagnosis
    window, ideal, engine = prepared.window, prepared.ideal, prepared.engine
    approximate = approximate_workers(times)
    last_stage = [(dp, window.stages - 1) for dp in range(window.dp_ranks)]
    paper = studied.slowdown
    waste = 1.0 - 1.0 / paper
    parts = ledger(window, ideal, engine, times)
    sampled = ledger_note(window, times)
    ops = sum(part.row.size for part in window.parts)
    plans = ops <= MAX_PLAN_OPS
    notes = (
        *options.notes,
        *diagnosis.notes,
        *standout_notes(times, window.steps),
        *([sampled] if sampled else []),
        *([] if plans else ["fixes are left out of the report of so large a window: smon plan"]),
    )
    return JobReport(
        job=_job_part(prepared.job),
        window=_window_part(prepared),
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
        per_step=_per_step(window, times),
        by_optype=_ratios(times.by_optype, times),
        by_dp_rank=_numbered(slowdown(times.by_dp_rank, times.ideal)),
        by_stage=_numbered(slowdown(times.by_stage, times.ideal)),
        workers=_workers(prepared, times, approximate),
        worker_share=fixed_share(window, ideal, engine, times, slowest_workers(approximate)),
        last_stage_share=fixed_share(window, ideal, engine, times, last_stage),
        cost=_cost(prepared.job.layout, waste, options.price_per_gpu_hour),
        ledger=tuple(
            LedgerEntry(str(part.factor), part.excess_ns / 1e9, part.share) for part in parts
        ),
        verdict="insufficient_data" if len(window.steps) < MIN_STEPS else diagnosis.verdict,
        findings=diagnosis.findings,
        fixes=fixes_of(studied, options.price_per_gpu_hour) if plans else (),
    )


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
    return JobReport(
        job=_job_part(job),
        window=WindowPart(
            first_step=min(steps),
            last_step=max(steps),
            steps=len(error.skipped),
            steps_used=0,
            skipped=tuple(SkippedStep(step, reason) for step, reason in error.skipped),
            coverage_ratio=0.0,
        ),
        quality=QualityPart(None, ClockPart(None, None), (*options.notes, str(error))),
        step_time=StepTime(None, None, None),
        slowdown=Slowdown(None, None, None, None, None),
        waste_ratio=None,
        per_step=(),
        by_optype={},
        by_dp_rank={},
        by_stage={},
        workers=(),
        worker_share=None,
        last_stage_share=None,
        cost=Cost(None, None, options.price_per_gpu_hour),
        verdict="insufficient_data",
    )


def _job_part(job: Job) -> JobPart:
    layout = job.layout
    sizes = LayoutPart(layout.dp, layout.pp, layout.tp, layout.cp, layout.ep, layout.vpp)
    return JobPart(job.job_id, job.attempt, sizes, layout.world_size)


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


def _per_step(window: Window, times: StepTimes) -> tuple[StepPart, ...]:
    optypes = {name: part / times.ideal for name, part in times.by_optype.items()}
    dp_ranks, stages = times.by_dp_rank / times.ideal, times.by_stage / times.ideal
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
        )
        for index, step in enumerate(window.steps)
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
