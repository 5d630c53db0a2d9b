"""The report of a trace that only has collectives.

``events → match → structures → simulate → ledger, findings → JobReport``. What such a trace cannot
tell is in the notes; numbers that would need it are None.

Flow: `smon.trace.load` → **here** → `smon.report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from smon.attribute.interval import bootstrap_interval
from smon.collectives.activity import Activity, Part, activity_of
from smon.collectives.attribute import Study, ledger_of, repaired, slowest_share, study_of
from smon.collectives.findings import Evidence, findings_of
from smon.collectives.matching import LEAST_MEMBERS, Matched, match
from smon.collectives.parts import (
    MAX_GROUPS,
    Meeting,
    collective_parts,
    group_parts,
    meetings_of,
)
from smon.collectives.segments import Floats, structures_of
from smon.diagnose.thresholds import CRITICAL_STEPS
from smon.errors import TraceError
from smon.plan.fix import MIN_GAIN, FixName
from smon.report import (
    MAX_SIMULATION_ERROR_RATIO,
    MIN_STEPS,
    ClockPart,
    Cost,
    Finding,
    FixPart,
    JobReport,
    LedgerEntry,
    QualityPart,
    ReportOptions,
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
from smon.trace.events import RankEvents
from smon.trace.meta import Job

#: A step of one rank this much above its typical one is worth a line where nothing else is known.
_LONG_STEP: Final = 1.3
_MAX_LINES: Final = 8

_DEFAULT: Final = ReportOptions()


def analyze_collectives(
    ranks: Sequence[RankEvents], job: Job, options: ReportOptions = _DEFAULT
) -> JobReport:
    """Analyse what the ranks of a job did between their collectives.

    Parameters
    ----------
    ranks
        One entry per rank that has a file.
    job
        Name, and a layout with as many DP ranks as the job has ranks.

    Raises
    ------
    TraceError
        No rank has a collective.
    """
    if not any((rank.collective >= 0).any() for rank in ranks):
        raise TraceError(
            f"none of {len(ranks)} ranks has a collective in a step: nothing says who waits for "
            "whom"
        )
    matched = match(ranks)
    meetings = meetings_of(matched)
    groups = group_parts(meetings)
    timed = all(rank.timed for rank in ranks)
    structures = structures_of(matched) if timed and len(ranks) >= LEAST_MEMBERS else []
    notes = (*options.notes, *_notes(matched))
    if not structures:
        return _without_times(job, matched, meetings, options, notes)
    study = study_of(structures)
    evidence = Evidence(
        study=study,
        activity=_activity(matched, study),
        ranks=tuple(rank.rank for rank in matched.ranks),
        hosts=tuple(rank.host for rank in matched.ranks),
    )
    found = findings_of(evidence)
    waste = 1.0 - float(study.ideal.mean() / study.simulated.mean())
    return JobReport(
        job=job_part(job.job_id, job.attempt, job.layout),
        window=_window_part(matched, study),
        quality=_quality_part(study, notes),
        step_time=StepTime(*(_seconds(times) for times in _step_times(study))),
        slowdown=_slowdown(study, _suspects(evidence, found)),
        waste_ratio=waste,
        per_step=_per_step(study, evidence.ranks),
        by_optype={name: _ratio(times, study.ideal) for name, times in study.by_type.items()},
        by_dp_rank={
            str(rank): ratio
            for rank, times in zip(evidence.ranks, study.by_rank, strict=True)
            if not np.isnan(ratio := _ratio(times, study.ideal))
        },
        by_stage={},
        workers=_workers(job, study, evidence),
        worker_share=slowest_share(study),
        last_stage_share=None,
        cost=_cost(job, waste, options.price_per_gpu_hour),
        groups=tuple(groups[:MAX_GROUPS]),
        groups_count=len(groups),
        collectives=collective_parts(meetings),
        collectives_count=len(meetings),
        verdict=_verdict(study, found),
        ledger=_ledger(study),
        findings=found,
        fixes=_fixes(study, evidence, found, job=job, price=options.price_per_gpu_hour),
    )


def _activity(matched: Matched, study: Study) -> Activity:
    """What ranks did, over all structures, by step."""
    each = [activity_of(matched.ranks, structure) for structure in study.structures]
    order = np.argsort(np.concatenate([one.steps for one in study.structures]), kind="stable")
    parts = {
        part: np.concatenate([activity.parts[part] for activity in each])[order] for part in Part
    }
    return Activity(parts, each[0].kernels, each[0].phases)


def _verdict(study: Study, found: Sequence[Finding]) -> str:
    if len(study.steps) < MIN_STEPS:
        return "insufficient_data"
    return found[0].verdict if found else "none"


# --- what the trace cannot tell -----------------------------------------------------------------


def _notes(matched: Matched) -> list[str]:
    notes = [
        "the trace has collectives but no pipeline model: each rank counts as a DP rank, and the "
        "time between its collectives as its work; stages and microbatches are not told apart",
        "who came last is told by waiting, inside each rank: clocks are not compared",
    ]
    if matched.assumed:
        notes.append(
            "collectives carry no process group: they are taken as collectives of all ranks"
        )
    if matched.by_order:
        notes.append(
            "collectives carry no sequence number: they are matched by their order within the step"
        )
    notes += [
        f"{count:,} of {matched.total:,} communication events not used: {reason}"
        for reason, count in matched.unmatched
    ]
    dropped: Counter[str] = Counter()
    for rank in matched.ranks:
        dropped.update(dict(rank.dropped))
    notes += [f"{count:,} left out: {reason}" for reason, count in sorted(dropped.items())]
    return notes


def _without_times(
    job: Job,
    matched: Matched,
    meetings: list[Meeting],
    options: ReportOptions,
    notes: tuple[str, ...],
) -> JobReport:
    """What can be said without segments: waits in collectives, and step times of one rank."""
    if len(matched.ranks) < LEAST_MEMBERS:
        why = "one rank's trace cannot tell who waits for whom: give the files of all ranks"
    elif not all(rank.timed for rank in matched.ranks):
        why = "the trace has durations but no start times: what lies between collectives is unknown"
    else:
        why = "no collective could be matched over the ranks"
    markers = {step.number for rank in matched.ranks for step in rank.steps}
    steps = sorted(markers | set(matched.steps)) or [0]
    groups = group_parts(meetings)
    blank = report_without_numbers(
        job_part(job.job_id, job.attempt, job.layout),
        WindowPart(
            first_step=steps[0],
            last_step=steps[-1],
            steps=len(steps),
            steps_used=0,
            skipped=tuple(SkippedStep(step, why) for step in steps),
            coverage_ratio=0.0,
        ),
        (*notes, why, *_long_steps(matched.ranks)),
        options.price_per_gpu_hour,
    )
    return replace(
        blank,
        groups=tuple(groups[:MAX_GROUPS]),
        groups_count=len(groups),
        collectives=collective_parts(meetings),
        collectives_count=len(meetings),
    )


def _long_steps(ranks: Sequence[RankEvents]) -> list[str]:
    """Steps of a rank that are long beside its typical one."""
    lines = []
    for rank in ranks:
        if len(rank.steps) <= MIN_STEPS:
            continue
        typical = float(np.median([step.duration_ns for step in rank.steps]))
        lines += [
            f"step {step.number} of rank {rank.rank} took {step.duration_ns / 1e6:.0f} ms, "
            f"{step.duration_ns / typical:.2f} × its typical step"
            for step in rank.steps
            if typical > 0 and step.duration_ns > _LONG_STEP * typical
        ]
    return lines[:_MAX_LINES]


# --- parts of the report ------------------------------------------------------------------------


def _window_part(matched: Matched, study: Study) -> WindowPart:
    markers = {step.number for rank in matched.ranks for step in rank.steps}
    seen = sorted(markers | set(matched.steps))
    used = set(study.steps.tolist())
    return WindowPart(
        first_step=seen[0],
        last_step=seen[-1],
        steps=len(seen),
        steps_used=len(used),
        skipped=tuple(
            SkippedStep(step, "none of its collectives could be matched over the ranks")
            for step in seen
            if step not in used
        ),
        coverage_ratio=matched.matched / max(matched.total, 1),
    )


def _quality_part(study: Study, notes: Sequence[str]) -> QualityPart:
    error = float(np.mean(np.abs(study.simulated - study.recorded) / study.recorded))
    steps, more = len(study.steps), []
    if error > MAX_SIMULATION_ERROR_RATIO:
        more.append(
            f"the simulation misses the recorded step times by {error:.1%}: much of the step is "
            "not in the collectives that were matched, do not rely on the numbers"
        )
    if steps < MIN_STEPS:
        more.append("one usable step cannot tell a slow worker from one slow moment")
    elif steps < CRITICAL_STEPS:
        more.append(
            f"{steps} steps: a finding is at most a warning, and what comes in fewer than one of "
            f"{steps} steps cannot be seen"
        )
    return QualityPart(error, ClockPart(None, None), (*notes, *more))


def _step_times(study: Study) -> tuple[Floats, Floats, Floats]:
    return study.recorded, study.simulated, study.ideal


def _seconds(times: Floats) -> float:
    return float(times.mean()) / 1e9


def _ratio(times: Floats, ideal: Floats) -> float:
    return float(times.mean() / ideal.mean())


def _slowdown(study: Study, suspects: list[int]) -> Slowdown:
    return Slowdown(
        paper=_ratio(study.simulated, study.ideal),
        repaired=_ratio(study.simulated, repaired(study, suspects)) if suspects else None,
        history=None,
        ci95=bootstrap_interval(study.simulated, study.ideal),
        launch=_ratio(study.recorded, study.simulated),
    )


def _suspects(evidence: Evidence, found: Sequence[Finding]) -> list[int]:
    """Positions of the ranks that are named."""
    named = [one.where.rank for one in found if one.scope == "rank"]
    return [evidence.ranks.index(rank) for rank in named if rank in evidence.ranks]


def _per_step(study: Study, ranks: tuple[int, ...]) -> tuple[StepPart, ...]:
    parts = []
    for at, step in enumerate(study.steps.tolist()):
        ideal = float(study.ideal[at])
        by_rank = study.by_rank[:, at] / ideal
        parts.append(
            StepPart(
                step=step,
                recorded_s=float(study.recorded[at]) / 1e9,
                simulated_s=float(study.simulated[at]) / 1e9,
                ideal_s=ideal / 1e9,
                slowdown=float(study.simulated[at]) / ideal,
                by_optype={name: float(times[at]) / ideal for name, times in study.by_type.items()},
                by_dp_rank={
                    str(rank): float(ratio)
                    for rank, ratio in zip(ranks, by_rank, strict=True)
                    if not np.isnan(ratio)
                },
                by_stage={},
                worst=_worst(by_rank, ranks),
            )
        )
    return tuple(parts)


def _worst(by_rank: Floats, ranks: tuple[int, ...]) -> WorstPart | None:
    if np.isnan(by_rank).all():
        return None
    at = int(np.nanargmax(by_rank))
    return WorstPart(ranks[at], 0, ranks[at], float(by_rank[at]))


def _workers(job: Job, study: Study, evidence: Evidence) -> tuple[WorkerPart, ...]:
    place = {rank: at for at, rank in enumerate(evidence.ranks)}
    workers = []
    for rank in range(job.layout.world_size):
        at = place.get(rank)
        ratio = float("nan") if at is None else _ratio(study.by_rank[at], study.ideal)
        known = None if np.isnan(ratio) else ratio
        host = None if at is None else evidence.hosts[at]
        workers.append(WorkerPart(rank, 0, rank, host, known, known))
    return tuple(workers)


def _cost(job: Job, waste: float, price: float | None) -> Cost:
    hours = max(waste, 0.0) * job.layout.world_size * 24
    return Cost(hours, None if price is None else hours * price, price)


def _ledger(study: Study) -> tuple[LedgerEntry, ...]:
    parts = ledger_of(study)
    total = float((study.recorded - study.ideal).mean())
    return tuple(
        LedgerEntry(str(factor), value / 1e9, value / total if total else 0.0)
        for factor, value in parts.items()
    )


def _fixes(
    study: Study,
    evidence: Evidence,
    found: Sequence[Finding],
    *,
    job: Job,
    price: float | None,
) -> tuple[FixPart, ...]:
    """What it buys if the named ranks become like their peers."""
    suspects = _suspects(evidence, found)
    if not suspects:
        return ()
    then = repaired(study, suspects)
    speedup = _ratio(study.simulated, then)
    if speedup < 1.0 + MIN_GAIN:
        return ()
    hours = (1.0 - 1.0 / speedup) * job.layout.world_size * 24
    stalls = all(one.verdict == "host_stall" for one in found if one.scope == "rank")
    named = ", ".join(str(evidence.ranks[at]) for at in suspects)
    return (
        FixPart(
            fix=str(FixName.REMOVE_STALLS if stalls else FixName.REPLACE_WORKERS),
            detail=f"rank {named} between collectives like the others",
            step_time_s=_seconds(then),
            speedup=speedup,
            gpu_hours_per_day=hours,
            cost_per_day=None if price is None else hours * price,
            assumptions=(
                "an upper bound where gradients are reduced while the backward still runs: what "
                "the others compute behind a wait is not in the trace of collectives",
            ),
        ),
    )
