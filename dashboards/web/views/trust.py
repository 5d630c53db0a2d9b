"""How far the numbers of a page can be trusted, in a few of them.

Flow: a stored report and `smon.store.queries` → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from dashboards.web.text import duration, percent
from smon.report import JobReport
from smon.store.queries.agents import AgentRow
from smon.store.queries.spans import StreamTotals

_MAX_REASONS: Final = 6
_MAX_EXAMPLES: Final = 3
_MAX_NOTES: Final = 8


@dataclass(frozen=True, slots=True)
class Skipped:
    """Steps that were left out for one reason, and the first of them."""

    reason: str
    count: int
    examples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrustView:
    """What the report rests on; numbers of the report are None before there is one."""

    first_step: int | None
    last_step: int | None
    steps: int | None
    steps_used: int | None
    coverage_ratio: float | None
    simulation_error_ratio: float | None
    aligned: bool | None
    residual_s: float | None
    offsets: int
    skipped: tuple[Skipped, ...]
    skipped_count: int
    notes: tuple[str, ...]
    more_notes: int
    streams: StreamTotals
    down: tuple[AgentRow, ...]


def trust_view(
    report: JobReport | None, streams: StreamTotals, down: tuple[AgentRow, ...]
) -> TrustView:
    """What the numbers rest on."""
    if report is None:
        nothing = (None,) * 8
        return TrustView(*nothing, 0, (), 0, (), 0, streams, down)
    window, quality = report.window, report.quality
    return TrustView(
        first_step=window.first_step,
        last_step=window.last_step,
        steps=window.steps,
        steps_used=window.steps_used,
        coverage_ratio=window.coverage_ratio,
        simulation_error_ratio=quality.simulation_error_ratio,
        aligned=quality.clock.aligned,
        residual_s=quality.clock.residual_s,
        offsets=len(quality.clock.offsets),
        skipped=_skipped(report),
        skipped_count=len(window.skipped),
        notes=quality.notes[:_MAX_NOTES],
        more_notes=max(len(quality.notes) - _MAX_NOTES, 0),
        streams=streams,
        down=down,
    )


def _skipped(report: JobReport) -> tuple[Skipped, ...]:
    counted = Counter(each.reason for each in report.window.skipped)
    return tuple(
        Skipped(
            reason,
            count,
            tuple(each.step for each in report.window.skipped if each.reason == reason)[
                :_MAX_EXAMPLES
            ],
        )
        for reason, count in counted.most_common(_MAX_REASONS)
    )


def rests_on(report: JobReport) -> str:
    """What a verdict rests on, in one line."""
    window, quality = report.window, report.quality
    steps = f"{window.steps_used:,} of {window.steps:,} steps"
    parts = [
        f"{steps} ({window.first_step}–{window.last_step})" if window.steps else "no steps",
        f"coverage {percent(window.coverage_ratio)}",
    ]
    if quality.simulation_error_ratio is not None:
        parts.append(f"simulation error {percent(quality.simulation_error_ratio)}")
    if quality.clock.aligned is not None:
        aligned = "aligned" if quality.clock.aligned else "not aligned"
        parts.append(f"clocks {aligned} to {duration(quality.clock.residual_s)}")
    return ", ".join(parts)
