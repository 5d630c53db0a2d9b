"""Where the time goes: the waterfall from ideal to recorded, and what fixes would buy.

Flow: a stored report → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dashboards.web.text import duration
from dashboards.web.views.verdict import FACTORS
from smon.render.words import fix_words
from smon.report import FixPart, JobReport

#: The axis of the waterfall begins at zero if the parts take more of the step than this.
_FROM_ZERO: Final = 0.25
#: So much of the width lies before the ideal step time if it does not.
_BEFORE: Final = 0.15
_LEAST_WIDTH: Final = 0.8
_WIDTH: Final = 100.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the waterfall, in % of the width; `end` is where the next one begins.

    Attributes
    ----------
    kind
        ``total``, ``most`` of the part that adds most, ``adds`` or ``saves``.
    share
        Of the loss; None of the totals.
    """

    name: str
    kind: str
    value_s: float
    share: float | None
    begin: float
    width: float
    end: float


@dataclass(frozen=True, slots=True)
class FixLine:
    """One fix in words.

    Attributes
    ----------
    gain_s
        Step time that it saves, against the step time without launch delays.
    gain
        How much more often steps end.
    """

    words: str
    step_time_s: float
    gain_s: float | None
    gain: float
    gpu_hours_per_day: float
    cost_per_day: float | None
    assumptions: tuple[str, ...]
    changes_optimisation: bool


@dataclass(frozen=True, slots=True)
class WhyView:
    """The ledger and the fixes of a report; both empty without usable steps.

    Attributes
    ----------
    axis
        Where the axis begins, if not at zero.
    """

    words: str
    bars: tuple[Bar, ...]
    axis: str
    fixes: tuple[FixLine, ...]


def why_view(report: JobReport) -> WhyView:
    """The ledger and the fixes of a report."""
    bars, begin_s = _bars(report)
    return WhyView(
        words=_words(report),
        bars=bars,
        axis=f"The bars begin at {duration(begin_s)}, not at zero." if begin_s > 0 else "",
        fixes=tuple(_fix(report, fix) for fix in report.fixes),
    )


def _words(report: JobReport) -> str:
    times, parts = report.step_time, report.ledger
    if not parts or times.recorded_s is None or times.ideal_s is None:
        return ""
    largest = max(parts, key=lambda part: part.excess_s)
    if largest.excess_s <= 0:
        return f"The ideal step takes {duration(times.ideal_s)}; nothing makes it longer."
    return (
        f"From the ideal {duration(times.ideal_s)} to the recorded {duration(times.recorded_s)} a "
        f"step; most of it by {FACTORS.get(largest.factor, largest.factor.replace('_', ' '))}."
    )


def _bars(report: JobReport) -> tuple[tuple[Bar, ...], float]:
    """Bars from the ideal step time to the recorded one, and seconds at which the axis begins."""
    ideal, recorded = report.step_time.ideal_s, report.step_time.recorded_s
    if not report.ledger or ideal is None or recorded is None:
        return (), 0.0
    levels = [ideal]
    for part in report.ledger:
        levels.append(levels[-1] + part.excess_s)
    low, high = min(*levels, recorded), max(*levels, recorded)
    span = high - low
    begin_s = 0.0 if span > _FROM_ZERO * high else max(low - _BEFORE * (span or high), 0.0)
    scale = _WIDTH / ((high - begin_s) or 1.0)

    def bar(name: str, kind: str, ends: tuple[float, float], share: float | None) -> Bar:
        left, right = sorted((each - begin_s) * scale for each in ends)
        width = max(right - left, _LEAST_WIDTH)
        left = min(left, _WIDTH - width)
        value = ends[1] if kind == "total" else ends[1] - ends[0]
        end = min((ends[1] - begin_s) * scale, _WIDTH)
        return Bar(name, kind, value, share, round(left, 3), round(width, 3), round(end, 3))

    parts = [
        bar(
            FACTORS.get(part.factor, part.factor.replace("_", " ")),
            _kind(part.excess_s, max(each.excess_s for each in report.ledger)),
            (levels[number], levels[number + 1]),
            part.share,
        )
        for number, part in enumerate(report.ledger)
    ]
    first = bar("ideal", "total", (begin_s, ideal), None)
    return (first, *parts, bar("recorded", "total", (begin_s, recorded), None)), begin_s


def _kind(excess_s: float, most_s: float) -> str:
    if excess_s < 0:
        return "saves"
    return "most" if excess_s == most_s > 0 else "adds"


def _fix(report: JobReport, fix: FixPart) -> FixLine:
    today = report.step_time.simulated_s
    return FixLine(
        words=fix_words(fix),
        step_time_s=fix.step_time_s,
        gain_s=None if today is None else today - fix.step_time_s,
        gain=fix.speedup - 1.0,
        gpu_hours_per_day=fix.gpu_hours_per_day,
        cost_per_day=fix.cost_per_day,
        assumptions=fix.assumptions,
        changes_optimisation=fix.changes_optimisation,
    )
