"""What each page shows, ready for its template.

Flow: `smon.store.queries` and stored reports → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from dashboards.web.figures import MAX_COLUMNS, heat_figure, step_time_figure
from dashboards.web.text import duration, times
from smon.api.words import cause_words, headline_of, job_lines, job_words
from smon.render.words import fix_words, headline, verdict_lines
from smon.report import Finding, JobReport
from smon.store.queries.agents import AgentRow
from smon.store.queries.findings import FindingRow
from smon.store.queries.fleet import FleetSummary
from smon.store.queries.history import History
from smon.store.queries.jobs import AttemptRow, JobRow, Missing
from smon.store.queries.paging import Page
from smon.store.queries.reports import read_report

#: Icon and word of each state: neither stands without the other.
STATES: Final = {
    "healthy": ("✓", "healthy"),
    "slow": ("▲", "slow"),
    "critical": ("◆", "critical"),
    "incomplete": ("◔", "incomplete"),
    "not_aligned": ("≠", "clocks not aligned"),
    "waiting": ("…", "waiting"),
    "ended": ("■", "ended"),
}

_MAX_EVIDENCE: Final = 4
_MAX_WORKERS: Final = 8
_MAX_STEPS: Final = 20
_MAX_SKIPPED: Final = 8

#: Factors of the ledger that hold more than their name says.
_FACTORS: Final = {
    "communication": "communication and other",
    "launch_delay": "launch delays",
    "stage": "stages of uneven length",
    "worker": "slow workers",
    "step": "whole steps",
    "microbatch": "uneven microbatches",
}


@dataclass(frozen=True, slots=True)
class FleetLine:
    """One job of the fleet table."""

    job: JobRow
    words: str


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet page; `dearest` is the cause that wastes most."""

    lines: tuple[FleetLine, ...]
    next: str | None
    query: str
    summary: FleetSummary
    dearest: str | None
    server: str


def fleet_view(page: Page[JobRow], query: str, summary: FleetSummary, server: str) -> FleetView:
    """The fleet page.

    Parameters
    ----------
    query
        Part of the name that jobs were filtered by.
    server
        Address of this server, for the command that an empty page shows.
    """
    return FleetView(
        lines=tuple(FleetLine(row, job_words(row)) for row in page.items),
        next=page.next,
        query=query,
        summary=summary,
        dearest=cause_words(summary.causes[0].cause) if summary.causes else None,
        server=server,
    )


@dataclass(frozen=True, slots=True)
class FindingView:
    """A finding as the job page shows it, in words."""

    severity: str
    headline: str
    evidence: tuple[str, ...]
    confidence: float
    next: tuple[str, ...]
    victims: str | None


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One factor, and where its bar begins and ends, in % of the longest."""

    name: str
    excess_s: float
    share: float
    begin: float
    width: float
    saves: bool


@dataclass(frozen=True, slots=True)
class FixLine:
    """One fix in words."""

    words: str
    step_time_s: float
    speedup: float
    gpu_hours_per_day: float
    cost_per_day: float | None
    assumptions: tuple[str, ...]
    changes_optimisation: bool


@dataclass(frozen=True, slots=True)
class ReportView:
    """What the page takes from the newest report."""

    lines: tuple[str, ...]
    findings: tuple[FindingView, ...]
    ledger: tuple[LedgerLine, ...]
    fixes: tuple[FixLine, ...]
    workers: tuple[dict[str, Any], ...]
    grouped: int
    heat: str
    heat_words: str
    quality: dict[str, Any]
    window: dict[str, Any]
    step_time: dict[str, Any]
    slowdown: dict[str, Any]
    waste_ratio: float | None
    cost: dict[str, Any]
    live: bool


@dataclass(frozen=True, slots=True)
class JobView:
    """The page of one job; `report` is None until something has been analysed."""

    job: JobRow
    sentence: str
    lines: tuple[str, ...]
    report: ReportView | None
    attempts: tuple[AttemptRow, ...]
    missing: Missing
    agents: tuple[AgentRow, ...]
    down: int
    findings: tuple[tuple[FindingRow, str], ...]
    history: History
    recent: tuple[Any, ...]
    steps: str
    steps_words: str


@dataclass(frozen=True, slots=True)
class JobParts:
    """What the store knows of a job."""

    job: JobRow
    document: Mapping[str, Any] | None
    live: bool
    attempts: tuple[AttemptRow, ...]
    missing: Missing
    agents: tuple[AgentRow, ...]
    findings: tuple[FindingRow, ...]
    history: History


def job_view(parts: JobParts) -> JobView:
    """The page of one job."""
    row = parts.job
    points = parts.history.points
    report = None if parts.document is None else _report_view(parts.document, live=parts.live)
    lines = report.lines if report is not None else tuple(job_lines(row))
    return JobView(
        job=row,
        sentence=lines[0],
        lines=lines[1:],
        report=report,
        attempts=parts.attempts,
        missing=parts.missing,
        agents=parts.agents,
        down=sum(agent.down for agent in parts.agents),
        findings=tuple((each, headline_of(each.document, row.layout)) for each in parts.findings),
        history=parts.history,
        recent=tuple(reversed(points[-_MAX_STEPS:])),
        steps=script_json(step_time_figure(points, parts.findings)) if points else "",
        steps_words=_steps_words(parts.history),
    )


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: it cannot end it, nor begin a comment."""
    text = orjson.dumps(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _steps_words(history: History) -> str:
    known = [point for point in history.points if point.recorded_s is not None]
    if not known:
        return "No step has been analysed yet."
    longest = max(known, key=lambda point: point.recorded_s or 0.0)
    last = known[-1]
    return (
        f"Step times of attempt {history.attempt}, steps {known[0].step} to {last.step}: the last "
        f"took {duration(last.recorded_s)} (ideal {duration(last.ideal_s)}), the longest, step "
        f"{longest.step}, {duration(longest.recorded_s)}."
    )


def _report_view(document: Mapping[str, Any], *, live: bool) -> ReportView:
    # The parts that are large are shown from the document as it is.
    report = read_report({**document, "per_step": [], "workers": []})
    ranked = sorted(
        (worker for worker in document["workers"] if worker["slowdown"] is not None),
        key=lambda worker: -worker["slowdown"],
    )
    return ReportView(
        lines=_lines(report),
        findings=tuple(_finding_view(report, each) for each in report.findings),
        ledger=_ledger(report),
        fixes=tuple(
            FixLine(
                fix_words(fix),
                fix.step_time_s,
                fix.speedup,
                fix.gpu_hours_per_day,
                fix.cost_per_day,
                fix.assumptions,
                fix.changes_optimisation,
            )
            for fix in report.fixes
        ),
        workers=tuple(ranked[:_MAX_WORKERS]),
        grouped=-(-report.job.layout.dp // MAX_COLUMNS),
        heat=script_json(heat_figure(document)) if ranked else "",
        heat_words=_heat_words(ranked),
        quality={
            **document["quality"],
            "coverage_ratio": report.window.coverage_ratio,
            "skipped": report.window.skipped[:_MAX_SKIPPED],
            "skipped_count": len(report.window.skipped),
        },
        window=document["window"],
        step_time=document["step_time"],
        slowdown=document["slowdown"],
        waste_ratio=report.waste_ratio,
        cost=document["cost"],
        live=live,
    )


def _lines(report: JobReport) -> tuple[str, ...]:
    """The verdict and what it costs; what to do has lines of its own on the page."""
    lines = verdict_lines(report)
    first = headline(report, report.findings[0]) + "." if report.findings else lines[0]
    return (first, *lines[1:])


def _finding_view(report: JobReport, finding: Finding) -> FindingView:
    victims = finding.victims
    words = None
    if victims is not None and victims.wait_s is not None:
        words = f"{victims.count:,} other workers wait, typically {duration(victims.wait_s)} a step"
    return FindingView(
        severity=finding.severity,
        headline=headline(report, finding),
        evidence=finding.evidence[:_MAX_EVIDENCE],
        confidence=finding.confidence,
        next=finding.next,
        victims=words,
    )


def _ledger(report: JobReport) -> tuple[LedgerLine, ...]:
    """A waterfall from the ideal to the recorded step time."""
    parts = report.ledger
    ends = [0.0]
    for part in parts:
        ends.append(ends[-1] + part.excess_s)
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0
    lines = []
    for number, part in enumerate(parts):
        left, right = sorted((ends[number], ends[number + 1]))
        lines.append(
            LedgerLine(
                name=_FACTORS.get(part.factor, part.factor.replace("_", " ")),
                excess_s=part.excess_s,
                share=part.share,
                begin=round((left - low) / span * 100, 3),
                width=round(max((right - left) / span * 100, 0.4), 3),
                saves=part.excess_s < 0,
            )
        )
    return tuple(lines)


def _heat_words(ranked: Sequence[Mapping[str, Any]]) -> str:
    if not ranked:
        return "No worker was there in any step that could be analysed."
    worst = ranked[0]
    return (
        f"If only rank {worst['rank']} (DP rank {worst['dp']}, stage {worst['stage']}) were as "
        f"recorded, the job would run at {times(worst['slowdown'])} its ideal step time: that is "
        f"the most of all {len(ranked):,} workers."
    )
