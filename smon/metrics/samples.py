"""What is published of a running job: the table of families, and one job's samples of them.

Flow: `smon.store.queries.running` → **here** → `smon.metrics.jobs`. Pure functions. Never a label
with a rank, host, step, microbatch or communicator: these are values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from smon.metrics.labels import Labels, bounded
from smon.store.queries.running import RunningFinding, RunningJob

#: Suspects of a job that are published, dearest first.
SLOTS: Final = 10

_NS: Final = 1e9
_SEVERITIES: Final = {"info": 1.0, "warning": 2.0, "critical": 3.0}

#: Verdicts that blame nobody.
_CALM: Final = frozenset({"planned_pause", "warmup", "none"})


class Name(StrEnum):
    """Families of a running job."""

    INFO = "smon_job_info"
    GPUS = "smon_job_gpus"
    STEP = "smon_job_step_seconds"
    IDEAL = "smon_job_ideal_step_seconds"
    SLOWDOWN = "smon_job_slowdown_ratio"
    WASTE = "smon_job_waste_ratio"
    EXCESS = "smon_job_excess_seconds"
    EXCESS_SHARE = "smon_job_excess_ratio"
    COVERAGE = "smon_job_coverage_ratio"
    ALIGNED = "smon_job_clocks_aligned"
    AGENTS = "smon_job_agents"
    ACTIVE = "smon_finding_active"
    SEVERITY = "smon_finding_severity"
    ONSET = "smon_finding_onset_step"
    STAGE = "smon_finding_stage"
    SUSPECT_EXCESS = "smon_suspect_excess_seconds"
    SUSPECT_RANK = "smon_suspect_rank"
    LAG = "smon_analysis_lag_seconds"


#: What each of them is, in a line.
HELP: Final[Mapping[Name, str]] = {
    Name.INFO: "1 for each running job; the labels say what it is and where its page is.",
    Name.GPUS: "GPUs of the job.",
    Name.STEP: "Mean step time of the latest steps, as recorded.",
    Name.IDEAL: "Mean step time of the latest steps without stragglers and imbalance.",
    Name.SLOWDOWN: "Step time over ideal step time (S) of the latest steps.",
    Name.WASTE: "Part of the GPU time of the latest steps that is lost: 1 - 1/S.",
    Name.EXCESS: "Step time that goes away with the dearest finding of a cause.",
    Name.EXCESS_SHARE: "The same as part of the step time as recorded.",
    Name.COVERAGE: "Ops of the latest steps that came, of those expected.",
    Name.ALIGNED: "1 if the clocks of the hosts agree well enough, 0 if they do not.",
    Name.AGENTS: "Streams of the job by state: up, down (no heartbeat), ended.",
    Name.ACTIVE: "1 while a finding is open.",
    Name.SEVERITY: "Gravest finding of a cause: 1 information, 2 warning, 3 critical.",
    Name.ONSET: "Step since which there is the dearest finding of a cause.",
    Name.STAGE: "Pipeline stage that the dearest finding of a cause is about.",
    Name.SUSPECT_EXCESS: "Step time that goes away with a suspect; slot 1 is the dearest.",
    Name.SUSPECT_RANK: "Global rank of the suspect in a slot.",
    Name.LAG: "For how long the running diagnosis has been overdue.",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One series and its value."""

    name: Name
    labels: Labels
    value: float


def samples_of(job: RunningJob, named: Labels, page: str, now_ns: int) -> list[Sample]:
    """Everything that is published of a job; unknown numbers are left out, never NaN.

    Parameters
    ----------
    named
        Labels that name the job.
    page
        Address of its page.
    """
    parts = (_info(job, page), _numbers(job, now_ns), _findings(job.findings), _suspects(job))
    return [
        Sample(name, {**named, **labels}, value)
        for part in parts
        for name, labels, value in part
        if value is not None and math.isfinite(value)
    ]


def importance(job: RunningJob) -> float:
    """GPUs that are lost: the order in which jobs are kept if there is no room for all."""
    shares = [job.waste_ratio or 0.0, *(each.excess_share or 0.0 for each in job.findings)]
    hangs = any(each.verdict == "hang" for each in job.findings)
    return job.layout.world_size * (1.0 if hangs else max(shares))


_Part = Iterator[tuple[Name, Labels, float | None]]


def _info(job: RunningJob, page: str) -> _Part:
    labels = {
        "job_id": job.job_id,
        "attempt": str(job.attempt),
        "layout": str(job.layout),
        "url": page,
    }
    yield Name.INFO, labels, 1.0
    yield Name.GPUS, {}, float(job.layout.world_size)


def _numbers(job: RunningJob, now_ns: int) -> _Part:
    yield Name.STEP, {}, job.recorded_s
    yield Name.IDEAL, {}, job.ideal_s
    yield Name.SLOWDOWN, {}, job.slowdown
    yield Name.WASTE, {}, job.waste_ratio
    yield Name.COVERAGE, {}, job.coverage_ratio
    yield Name.ALIGNED, {}, None if job.aligned is None else float(job.aligned)
    for state in ("up", "down", "ended"):
        yield Name.AGENTS, {"state": state}, float(getattr(job.agents, state))
    yield Name.LAG, {}, lag_s(job, now_ns)


def lag_s(job: RunningJob, now_ns: int) -> float:
    """For how long the running diagnosis of a job has been overdue.

    It is due a step time after the last one, if ops have come since; a job that sends nothing, or
    files alone, is owed nothing.
    """
    last = job.analysed_ns or job.created_ns
    ready = -1 if job.ready_step is None else job.ready_step
    seen = -1 if job.live_step is None else job.live_step
    if ready <= seen and (job.last_ops_ns is None or job.last_ops_ns <= last):
        return 0.0
    return max((now_ns - last) / _NS - (job.recorded_s or 0.0), 0.0)


def _findings(findings: Sequence[RunningFinding]) -> _Part:
    for cause, group in _grouped(findings, lambda each: bounded(each.cause)).items():
        dearest = max(group, key=lambda each: each.excess_s or 0.0)
        labels = {"cause": cause}
        yield Name.EXCESS, labels, dearest.excess_s
        yield Name.EXCESS_SHARE, labels, dearest.excess_share
        yield Name.SEVERITY, labels, max(_SEVERITIES.get(each.severity, 1.0) for each in group)
        yield Name.ONSET, labels, float(dearest.since_step)
        yield Name.STAGE, labels, None if dearest.stage is None else float(dearest.stage)
    for labels in _kinds(findings):
        yield Name.ACTIVE, labels, 1.0


def _grouped(
    findings: Sequence[RunningFinding], key: Callable[[RunningFinding], str]
) -> dict[str, list[RunningFinding]]:
    groups: dict[str, list[RunningFinding]] = {}
    for each in findings:
        groups.setdefault(key(each), []).append(each)
    return groups


def _kinds(findings: Sequence[RunningFinding]) -> list[Labels]:
    """Labels of findings, each set once: several ranks may have the same."""
    kinds = dict.fromkeys((each.cause, each.scope, each.persistence) for each in findings)
    return [
        {"cause": bounded(cause), "scope": bounded(scope), "persistence": bounded(kind)}
        for cause, scope, kind in kinds
    ]


def _suspects(job: RunningJob) -> _Part:
    for slot, each in enumerate(suspects(job.findings), start=1):
        labels = {"slot": str(slot), "cause": bounded(each.cause)}
        yield Name.SUSPECT_EXCESS, labels, each.excess_s
        yield Name.SUSPECT_RANK, labels, float(each.rank or 0)


def suspects(findings: Sequence[RunningFinding]) -> list[RunningFinding]:
    """Findings that name a rank, each rank once, dearest first; at most `SLOTS`."""
    ordered = sorted(findings, key=lambda each: -(each.excess_s or 0.0))
    by_rank: dict[int, RunningFinding] = {}
    for each in ordered:
        if each.rank is not None and each.verdict not in _CALM:
            by_rank.setdefault(each.rank, each)
    return list(by_rank.values())[:SLOTS]
