"""The report of a job's step times: bursts, levels, and that no rank can be named.

Flow: `smon.trace.load` → **here** (`smon.series.shape`) → `smon.report`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from smon.diagnose.thresholds import CRITICAL_SHARE, MIN_EXCESS_SHARE, WARNING_SHARE
from smon.report import (
    Finding,
    JobReport,
    PersistencePart,
    ReportOptions,
    SectionPart,
    SeriesPart,
    StepTime,
    StretchPart,
    Where,
    WindowPart,
    job_part,
    report_without_numbers,
)
from smon.series.shape import (
    LEAST_CHANGE,
    SLOW,
    Bools,
    Floats,
    Span,
    bursts_of,
    levels_of,
    warm_up,
)
from smon.trace.meta import Job
from smon.trace.series import StepSeries

#: Fewer values show no burst and no level.
LEAST_POINTS: Final = 20

_NO_RANK: Final = (
    "the file has only job-level times: no rank can be named, and whether one worker is slow "
    "cannot be told"
)
_NO_IDEAL: Final = (
    "job-level times have no ideal to compare with: slowdown, waste and cost are unknown; a job "
    "that is always slow looks even"
)


_DEFAULT: Final = ReportOptions()


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """A series without its warm-up, and what was found in it."""

    steps: np.ndarray
    seconds: Floats
    slow: Bools
    median: float
    bursts: list[Span]
    levels: list[Span]

    def part(self, span: Span) -> StretchPart:
        """A stretch for the report."""
        return StretchPart(
            first_step=int(self.steps[span.first]),
            last_step=int(self.steps[span.end - 1]),
            points=len(span),
            slow_points=int(self.slow[span.first : span.end].sum()),
            median_s=float(np.median(self.seconds[span.first : span.end])),
        )


def analyze_series(series: StepSeries, job: Job, options: ReportOptions = _DEFAULT) -> JobReport:
    """Say what the step times of a job show."""
    warm = warm_up(series.seconds) if len(series) else 0
    used = len(series) - warm
    shape = _shape(series, warm) if used else None
    findings = () if shape is None else _findings(shape)
    notes = [*options.notes, *series.notes, *_dropped(series), *series.statements, _NO_RANK]
    if used < LEAST_POINTS:
        notes.append(f"{used} step times after warm-up: fewer than {LEAST_POINTS} show no burst")
        verdict, findings = "insufficient_data", ()
    else:
        verdict = findings[0].verdict if findings else "none"
        notes.append(_NO_IDEAL)
    first, last = (int(series.steps[0]), int(series.steps[-1])) if len(series) else (0, 0)
    blank = report_without_numbers(
        job_part(job.job_id, job.attempt, job.layout),
        WindowPart(first, last, len(series), used, (), _coverage(series)),
        tuple(notes),
        options.price_per_gpu_hour,
    )
    return replace(
        blank,
        step_time=StepTime(float(series.seconds[warm:].mean()) if used else None, None, None),
        series=None if shape is None else _part(series, shape),
        verdict=verdict,
        findings=findings,
    )


def _shape(series: StepSeries, warm: int) -> _Shape:
    steps, seconds = series.steps[warm:], series.seconds[warm:]
    median = float(np.median(seconds))
    slow = seconds > SLOW * median
    bursts = bursts_of(slow)
    outside = np.ones(len(seconds), bool)
    for span in bursts:
        outside[span.first : span.end] = False
    places = np.flatnonzero(outside)
    levels = [
        Span(int(places[level.first]), int(places[level.end - 1]) + 1)
        for level in levels_of(seconds[outside])
        if len(level)
    ]
    return _Shape(steps, seconds, slow, median, bursts, levels)


def _part(series: StepSeries, shape: _Shape) -> SeriesPart:
    low, high, highest = np.quantile(shape.seconds, (0.05, 0.95, 0.99)).tolist()
    most = int(np.argmax(shape.seconds))
    return SeriesPart(
        points=len(series),
        warmup_points=len(series) - len(shape.seconds),
        median_s=shape.median,
        p05_s=low,
        p95_s=high,
        p99_s=highest,
        max_s=float(shape.seconds[most]),
        max_step=int(shape.steps[most]),
        slow_ratio=SLOW,
        slow_points=int(shape.slow.sum()),
        bursts=tuple(shape.part(span) for span in shape.bursts),
        levels=tuple(shape.part(span) for span in shape.levels),
        sections=tuple(
            SectionPart(
                section.name, float(np.median(section.low_s)), float(np.median(section.high_s))
            )
            for section in series.sections
        ),
    )


def _dropped(series: StepSeries) -> list[str]:
    return [f"{count:,} left out: {reason}" for reason, count in series.dropped]


def _coverage(series: StepSeries) -> float:
    """Usable values over all values of the file."""
    lost = sum(count for _, count in series.dropped)
    return len(series) / max(len(series) + lost, 1)


# --- findings -----------------------------------------------------------------------------------


def _findings(shape: _Shape) -> tuple[Finding, ...]:
    """Changes to a slower level, and bursts, dearest first."""
    levels = [_of_level(shape, at) for at in range(1, len(shape.levels)) if _slower(shape, at)]
    found = [finding for finding in levels if finding.excess_share >= MIN_EXCESS_SHARE]
    found += [_of_burst(shape, span) for span in shape.bursts]
    return tuple(sorted(found, key=lambda finding: -finding.excess_s))


def _slower(shape: _Shape, at: int) -> bool:
    before, after = (shape.part(shape.levels[place]).median_s for place in (at - 1, at))
    return after >= LEAST_CHANGE * before


def _of_level(shape: _Shape, at: int) -> Finding:
    """From here on the whole job is slower, until the end or the next level."""
    span = shape.levels[at]
    part, before = shape.part(span), shape.part(shape.levels[at - 1])
    return _finding(
        shape,
        span,
        base=before.median_s,
        kind="onset",
        evidence=(
            f"median {part.median_s:.4g} s in steps {part.first_step}–{part.last_step}, "
            f"{before.median_s:.4g} s in steps {before.first_step}–{before.last_step}: "
            f"{part.median_s / before.median_s:.2f} ×",
        ),
    )


def _of_burst(shape: _Shape, span: Span) -> Finding:
    """A stretch in which slow values are dense."""
    part = shape.part(span)
    scattered = int(shape.slow.sum()) - sum(shape.part(one).slow_points for one in shape.bursts)
    outside = len(shape.seconds) - sum(len(one) for one in shape.bursts)
    return _finding(
        shape,
        span,
        base=shape.median,
        kind="one_off",
        evidence=(
            f"{part.slow_points:,} of {part.points:,} values in steps "
            f"{part.first_step}–{part.last_step} are above {SLOW} × the median of "
            f"{shape.median:.4g} s; elsewhere {scattered:,} of {outside:,}",
            f"median in it {part.median_s:.4g} s, {part.median_s / shape.median:.2f} × the usual",
        ),
    )


def _finding(
    shape: _Shape, span: Span, *, base: float, kind: str, evidence: tuple[str, ...]
) -> Finding:
    """Of the whole job; it costs what its values have above `base`, spread over all values."""
    excess = float((shape.seconds[span.first : span.end] - base).sum()) / len(shape.seconds)
    share = excess / float(shape.seconds.mean())
    part = shape.part(span)
    return Finding(
        severity=_severity(share),
        verdict="job_wide",
        cause="job_wide",
        scope="job",
        where=Where(),
        phase="whole step",
        optypes=(),
        excess_s=excess,
        excess_share=share,
        persistence=PersistencePart(kind, len(span) / len(shape.seconds), part.first_step, None),
        confidence=0.6,
        evidence=evidence,
        victims=None,
        candidates=(),
        next=(
            f"what else happened at steps {part.first_step}–{part.last_step}: storage, network, "
            "other jobs on these nodes",
            "traces of all ranks (docs/sources.md) for the next one: they name the rank",
        ),
    )


def _severity(share: float) -> str:
    if share >= CRITICAL_SHARE:
        return "critical"
    return "warning" if share >= WARNING_SHARE else "info"
