"""The steps of a job over time: their figure, what lies below it, and the words for both.

Flow: `smon.store.queries` → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.web.figures.steps import Chart, Lane, LaneKind, step_time_figure
from dashboards.web.text import difference, duration, times
from dashboards.web.views.common import script_json
from dashboards.web.views.verdict import CALM
from smon.api.words import cause_words
from smon.store.queries.findings import FindingRow
from smon.store.queries.history import History, StepPoint
from smon.store.queries.spans import AttemptSpan, IncompleteSpan

_MAX_STEPS: Final = 20
_MAX_LANES: Final = 8


@dataclass(frozen=True, slots=True)
class Range:
    """Steps that the page is about; None: from the first, to the last."""

    first: int | None = None
    last: int | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing was chosen."""
        return self.first is None and self.last is None

    def holds(self, first: int, last: int) -> bool:
        """Whether any of the steps from `first` to `last` is in it."""
        after = self.first is None or last >= self.first
        return after and (self.last is None or first <= self.last)


@dataclass(frozen=True, slots=True)
class TimeParts:
    """What the store knows of a job's steps.

    Attributes
    ----------
    earlier
        Histories of the attempts before the one that is shown.
    """

    history: History
    earlier: tuple[History, ...]
    spans: tuple[AttemptSpan, ...]
    incomplete: tuple[IncompleteSpan, ...]
    findings: tuple[FindingRow, ...]
    chosen: Range


@dataclass(frozen=True, slots=True)
class TimeView:
    """The section of step times.

    Attributes
    ----------
    figure
        JSON for plotly; empty without any step.
    first, last
        Steps that are shown.
    legend
        Class of a mark, and its meaning.
    findings
        In the chosen range, with their words.
    """

    figure: str
    words: str
    worst: str
    attempt: int | None
    steps: int
    shown: int
    first: int | None
    last: int | None
    chosen: Range
    legend: tuple[tuple[str, str], ...]
    recent: tuple[StepPoint, ...]
    findings: tuple[FindingRow, ...]
    hidden: int


def time_view(parts: TimeParts) -> TimeView:
    """The section of step times."""
    points = parts.history.points
    mine = tuple(each for each in parts.findings if parts.chosen.holds(*_steps_of(each)))
    chart = _chart(parts, mine)
    return TimeView(
        figure=script_json(step_time_figure(chart)) if points else "",
        words=_words(parts.history, parts.chosen),
        worst=_worst(points),
        attempt=parts.history.attempt,
        steps=parts.history.steps,
        shown=len(points),
        first=points[0].step if points else None,
        last=points[-1].step if points else None,
        chosen=parts.chosen,
        legend=tuple(_legend(chart)),
        recent=tuple(reversed(points[-_MAX_STEPS:])),
        findings=mine,
        hidden=len(parts.findings) - len(mine),
    )


def _chart(parts: TimeParts, findings: Sequence[FindingRow]) -> Chart:
    points = parts.history.points
    attempt = parts.history.attempt
    starts = [(span.number, span.first_step) for span in parts.spans if span.number > 0]
    chosen = parts.chosen
    span = None
    if points and not chosen.whole:
        first = points[0].step if chosen.first is None else chosen.first
        last = points[-1].step if chosen.last is None else chosen.last
        span = (first, max(first, last))
    return Chart(
        points=points,
        earlier=[each.points for each in parts.earlier if each.points],
        starts=[(number, step) for number, step in starts if chosen.holds(step, step)],
        lanes=list(_lanes(parts, [each for each in findings if each.attempt == attempt])),
        span=span,
    )


def _lanes(parts: TimeParts, findings: Sequence[FindingRow]) -> Iterator[Lane]:
    points = parts.history.points
    if not points:
        return
    for finding in findings[:_MAX_LANES]:
        first, last = _clipped(_steps_of(finding), points)
        yield Lane(_kind(finding), first, last, _lane_words(finding))
    incomplete = [span for span in parts.incomplete if parts.chosen.holds(*_ends(span))]
    for span in incomplete[-2:]:
        first, last = _clipped(_ends(span), points)
        yield Lane(LaneKind.MISSING, first, last, f"{span.missing_count:,} ranks missing")


def _ends(span: IncompleteSpan) -> tuple[int, int]:
    return span.first_step, span.last_step


def _steps_of(finding: FindingRow) -> tuple[int, int]:
    """From its onset, as far as that is known, to the step that it was last seen in."""
    first = finding.opened_step if finding.onset_step is None else finding.onset_step
    last = finding.last_step if finding.cleared_step is None else finding.cleared_step
    return first, max(first, last)


def _clipped(ends: tuple[int, int], points: Sequence[StepPoint]) -> tuple[int, int]:
    low, high = points[0].step, points[-1].step
    return min(max(ends[0], low), high), max(min(ends[1], high), low)


def _kind(finding: FindingRow) -> LaneKind:
    if finding.verdict in CALM:
        return LaneKind.PLANNED
    known = {each.value: each for each in LaneKind}
    return known.get(finding.severity, LaneKind.INFO)


def _lane_words(finding: FindingRow) -> str:
    """Short: a bar has room for some forty letters on a phone."""
    period = finding.document.get("persistence", {}).get("period")
    if finding.verdict in CALM:
        often = f", every {period} steps" if period else ""
        return f"planned: {cause_words(finding.cause)}{often}"
    where = ""
    if finding.rank is not None:
        where = f", rank {finding.rank}"
    elif finding.stage is not None:
        where = f", stage {finding.stage}"
    cleared = "" if finding.cleared_step is None else ", cleared"
    return f"{finding.severity}: {cause_words(finding.cause)}{where}{cleared}"


def _legend(chart: Chart) -> Iterator[tuple[str, str]]:
    yield "line-recorded", "recorded"
    yield "line-ideal", "ideal"
    yield "area-gap", "lost between them"
    if any(part for part in chart.earlier):
        yield "line-earlier", "earlier attempts"
    kinds = {lane.kind for lane in chart.lanes}
    meanings = {
        LaneKind.CRITICAL: "critical finding",
        LaneKind.WARNING: "warning",
        LaneKind.INFO: "info",
        LaneKind.PLANNED: "planned pause",
        LaneKind.MISSING: "ranks missing",
    }
    yield from ((f"bar-{kind}", words) for kind, words in meanings.items() if kind in kinds)
    if any(point.skipped for point in chart.points):
        yield "cross", "step left out"
    if chart.starts:
        yield "line-start", "restart"


def _words(history: History, chosen: Range) -> str:
    known = [point for point in history.points if point.recorded_s is not None]
    if not known:
        some = "" if chosen.whole else " in this range"
        return f"No step{some} has been analysed yet."
    longest = max(known, key=lambda point: point.recorded_s or 0.0)
    last = known[-1]
    return (
        f"Steps {known[0].step} to {last.step} of attempt {history.attempt}: the last took "
        f"{duration(last.recorded_s)} (ideal {duration(last.ideal_s)}), the longest, step "
        f"{longest.step}, {duration(longest.recorded_s)}."
    )


def _worst(points: Sequence[StepPoint]) -> str:
    """The step that was slowed down most."""
    known = [point for point in points if point.slowdown is not None]
    if not known:
        return ""
    worst = max(known, key=lambda point: point.slowdown or 0.0)
    lost = None
    if worst.recorded_s is not None and worst.ideal_s is not None:
        lost = worst.recorded_s - worst.ideal_s
    return (
        f"Slowed down most: step {worst.step}, {times(worst.slowdown)} its ideal, "
        f"{difference(lost)}."
    )
