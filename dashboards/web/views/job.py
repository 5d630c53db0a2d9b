"""What the page of a job, or of one of its windows, shows, ready for its template.

Flow: `smon.store.queries` and stored reports → **here**, the modules beside it → templates.
Each section is made by itself: if one cannot be, the others stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dashboards.web.figures.rotation import Mark
from dashboards.web.views.captured import (
    CollectivesView,
    SeriesView,
    collectives_view,
    series_view,
    without_numbers,
)
from dashboards.web.views.common import script_json
from dashboards.web.views.compare import CompareView, compare_view
from dashboards.web.views.groups import GroupsView, groups_view
from dashboards.web.views.part import Part, part
from dashboards.web.views.rotation import RotationView, marks_of, rotation_view
from dashboards.web.views.time import Range, TimeParts, TimeView, time_view
from dashboards.web.views.trust import TrustView, rests_on, trust_view
from dashboards.web.views.verdict import Addresses, FindingView, finding_view, kind_of
from dashboards.web.views.waiting import Waiting, waiting_for
from dashboards.web.views.where import SHOWS, Heat, HeatAsked, Show, heat_of
from dashboards.web.views.why import WhyView, why_view
from smon.api.words import headline_of, job_lines
from smon.errors import MissingError
from smon.render.words import ATTRIBUTION_THRESHOLD, verdict_lines
from smon.report import Finding, JobReport
from smon.store.models import FindingState
from smon.store.queries.agents import AgentRow
from smon.store.queries.findings import FindingRow
from smon.store.queries.jobs import AttemptRow, JobRow, Missing
from smon.store.queries.matrix import Matrix
from smon.store.queries.paging import Page
from smon.store.queries.reports import read_report
from smon.store.queries.spans import StreamTotals, WindowPlace
from smon.store.queries.windows import WindowRow
from smon.topology import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """Every worker in every step, of the window called `window`; None where it is not kept."""

    matrix: Matrix | None
    window: str


@dataclass(frozen=True, slots=True, eq=False)
class JobParts:
    """What the store knows of a job.

    Attributes
    ----------
    document
        The report that the page is about; None before there is one.
    live
        Whether that is the running diagnosis.
    here
        The window of a page of a window.
    asked
        Of the heat map.
    ranged
        Whether steps were chosen; a window's page is about its own steps otherwise.
    server
        Address of this server, for commands.
    capture
        Whether the report was made of files that hold no ops.
    """

    job: JobRow
    document: Mapping[str, Any] | None
    live: bool
    here: WindowPlace | None
    attempts: tuple[AttemptRow, ...]
    missing: Missing
    streams: StreamTotals
    down: tuple[AgentRow, ...]
    time: TimeParts
    windows: Page[WindowRow]
    detail: Detail
    asked: HeatAsked
    ranged: bool
    runbooks: str | None
    server: str
    capture: bool = False


@dataclass(frozen=True, slots=True)
class CostView:
    """What the job loses, in one glance."""

    above_ideal_s: float | None
    slowdown: float
    waste_ratio: float | None
    gpu_hours_per_day: float | None
    cost_per_day: float | None


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The first thing on the page.

    Attributes
    ----------
    severity
        Of the first finding; empty without any.
    calm
        Whether nothing is to be done.
    """

    kind: tuple[str, str, str]
    severity: str
    sentence: str
    lines: tuple[str, ...]
    findings: tuple[FindingView, ...]
    cost: CostView | None
    rests_on: str
    calm: bool
    waiting: Waiting | None


@dataclass(frozen=True, slots=True)
class WhereView:
    """The heat map with its switches.

    Attributes
    ----------
    steps
        Steps that the slider has.
    note
        What stands instead of what was asked for, and why.
    """

    heat: Heat
    figure: str
    steps: tuple[int, ...]
    position: int
    shows: tuple[tuple[str, str], ...]
    window: str
    note: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The page of one job, or of one of its windows.

    Attributes
    ----------
    capture
        Whether the report was made of files that hold no ops: there is no timeline of it.
    layout
        Of the job, as the report has it.
    without
        Why nothing can be said of single workers; empty if something can.
    """

    job: JobRow
    path: str
    here: WindowPlace | None
    ranged: bool
    report: bool
    live: bool
    verdict: VerdictView
    time: Part[TimeView]
    findings: tuple[tuple[FindingRow, str], ...]
    where: Part[WhereView]
    rotation: Part[RotationView]
    why: Part[WhyView]
    groups: Part[GroupsView]
    compare: Part[CompareView]
    quality: TrustView
    windows: Page[WindowRow]
    attempts: tuple[AttemptRow, ...]
    missing: Missing
    window: str
    capture: bool
    without: str
    collectives: Part[CollectivesView]
    series: Part[SeriesView]
    layout: Layout | None


def job_view(parts: JobParts) -> JobView:
    """The page of one job, or of one of its windows."""
    document = parts.document
    report = None if document is None else part(lambda: small_report(document))
    whole = None if report is None else report.value
    time = part(lambda: time_view(parts.time))
    shown = time.value.findings if time.value else parts.time.findings
    return JobView(
        job=parts.job,
        path=_path(parts),
        here=parts.here,
        ranged=parts.ranged,
        report=document is not None,
        live=parts.live,
        verdict=_verdict(parts, whole, report.problem if report else ""),
        time=time,
        findings=tuple((each, headline_of(each.document, parts.job.layout)) for each in shown),
        where=part(lambda: _where(parts)),
        rotation=part(lambda: _rotation(parts)),
        why=part(lambda: None if whole is None else why_view(whole)),
        groups=part(lambda: None if document is None else groups_view(document)),
        compare=part(lambda: None if document is None else compare_view(document)),
        quality=trust_view(whole, parts.streams, parts.down),
        windows=parts.windows,
        attempts=parts.attempts,
        missing=parts.missing,
        window=parts.detail.window,
        capture=parts.capture,
        without=part(lambda: _without(parts)).value or "",
        collectives=part(lambda: None if document is None else collectives_view(document)),
        series=part(lambda: None if document is None else series_view(document)),
        layout=part(lambda: _layout(parts)).value,
    )


def _layout(parts: JobParts) -> Layout | None:
    """Of the attempt; of a capture, that of the files, who know better than their agents."""
    if parts.document is None or not parts.capture:
        return parts.job.layout
    return Layout(**parts.document["job"]["layout"])


def _without(parts: JobParts) -> str | None:
    if parts.document is None or not parts.capture:
        return None
    return without_numbers(parts.document)


def _path(parts: JobParts) -> str:
    """Address of the page."""
    job = f"/jobs/{parts.job.id}"
    return job if parts.here is None else f"{job}/windows/{parts.here.id}"


def small_report(document: Mapping[str, Any]) -> JobReport:
    """The report without what is large: that is shown from the document as it is."""
    large = ("per_step", "workers", "groups", "collectives")
    return read_report({**document, **{name: [] for name in large}})


# --- the verdict ------------------------------------------------------------------------------


def _since(parts: JobParts, finding: Finding) -> int | None:
    """First step of a finding over its life, which may have begun before the steps of a report.

    None of a report that is of no step.
    """
    if parts.document is not None and not parts.document["window"]["steps"]:
        return None
    if parts.here is not None:
        return finding.persistence.onset_step
    where = finding.where
    key = (finding.cause, where.rank, where.dp, where.stage)
    for row in parts.time.findings:
        if (row.cause, row.rank, row.dp, row.stage) == key and row.state == FindingState.OPEN:
            return row.opened_step if row.onset_step is None else row.onset_step
    return finding.persistence.onset_step


def _verdict(parts: JobParts, report: JobReport | None, problem: str) -> VerdictView:
    if report is None:
        lines = [f"The report cannot be shown: {problem}."] if problem else job_lines(parts.job)
        waiting = None
        if not problem and parts.job.slowdown is None:
            waiting = waiting_for(
                parts.job, parts.attempts, parts.windows.items, parts.streams, parts.server
            )
        kind = ("…", "Waiting", "nothing to say yet") if waiting else ("?", "Unknown", problem)
        return VerdictView(
            kind, "", lines[0], tuple(lines[1:]), (), None, "", calm=True, waiting=waiting
        )
    addresses = Addresses(f"/jobs/{parts.job.id}", parts.runbooks)
    findings = tuple(
        replace(finding_view(report, each, addresses), since=_since(parts, each))
        for each in report.findings
    )
    lines = verdict_lines(report)
    slow = (report.slowdown.paper or 1.0) >= ATTRIBUTION_THRESHOLD
    return VerdictView(
        kind=kind_of(report, slow=slow),
        severity=findings[0].severity if findings else "",
        sentence=findings[0].headline if findings else lines[0],
        lines=tuple(lines[1:]) if not findings else (),
        findings=findings,
        cost=_cost(report),
        rests_on=rests_on(report),
        calm=all(each.calm for each in findings) and (bool(findings) or not slow),
        waiting=None,
    )


def _cost(report: JobReport) -> CostView | None:
    if report.slowdown.paper is None:
        return None
    recorded, ideal = report.step_time.recorded_s, report.step_time.ideal_s
    return CostView(
        above_ideal_s=None if recorded is None or ideal is None else recorded - ideal,
        slowdown=report.slowdown.paper,
        waste_ratio=report.waste_ratio,
        gpu_hours_per_day=report.cost.gpu_hours_per_day,
        cost_per_day=report.cost.cost_per_day,
    )


# --- where ------------------------------------------------------------------------------------


def steps_of(document: Mapping[str, Any], matrix: Matrix | None, chosen: Range) -> tuple[int, ...]:
    """Steps of which single workers are known, in the chosen range.

    Raises
    ------
    StoreError
        The file of the workers cannot be read.
    """
    if matrix is not None:
        known: Sequence[int] = matrix.steps()
    else:
        known = [each["step"] for each in document["per_step"]]
    return tuple(step for step in known if chosen.holds(step, step))


def _where(parts: JobParts) -> WhereView | None:
    document, matrix = parts.document, parts.detail.matrix
    if document is None:
        return None
    heat, note = _heat_or_another(document, matrix, parts.asked)
    steps = () if matrix is None else steps_of(document, matrix, parts.time.chosen)
    step = heat.asked.step
    return WhereView(
        heat=heat,
        figure=script_json(heat.figure) if heat.lines else "",
        steps=steps,
        position=steps.index(step) + 1 if step in steps else 0,
        shows=tuple((show.value, words) for show, words in SHOWS.items() if _can(show, matrix)),
        window=parts.detail.window,
        note=note,
    )


def _heat_or_another(
    document: Mapping[str, Any], matrix: Matrix | None, asked: HeatAsked
) -> tuple[Heat, str]:
    """What is asked for or, if that is not known, all steps; and why."""
    try:
        return heat_of(document, matrix, asked), ""
    except MissingError as error:
        show = asked.show if _can(asked.show, matrix) else Show.EXACT
        known = f"Step {asked.step} is not one of the analysed steps of this report."
        note = f"{error}." if asked.step is None or matrix is None else known
        return heat_of(document, matrix, HeatAsked(show, group=asked.group)), note


def _can(show: Show, matrix: Matrix | None) -> bool:
    return matrix is not None or show in (Show.EXACT, Show.PAPER)


def rotation_marks(document: Mapping[str, Any], matrix: Matrix | None) -> list[Mark]:
    """The slowest worker of each step: as the report says, or else as the file has it."""
    told = marks_of(document)
    if told is not None or matrix is None:
        return told or []
    ranks = {(worker["dp"], worker["stage"]): worker["rank"] for worker in document["workers"]}
    return [
        Mark(each.step, ranks[each.dp, each.stage], each.dp, each.stage, each.slowdown)
        for each in matrix.worst()
        if (each.dp, each.stage) in ranks
    ]


def _rotation(parts: JobParts) -> RotationView | None:
    if parts.document is None:
        return None
    marks = rotation_marks(parts.document, parts.detail.matrix)
    return rotation_view(marks, parts.time.chosen)
