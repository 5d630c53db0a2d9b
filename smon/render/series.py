"""Step times of a whole job, for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group
from rich.table import Table

from smon.render.numbers import titled
from smon.render.words import printable, seconds
from smon.report import SeriesPart, StretchPart

_MAX_SECTIONS: Final = 20


def series(part: SeriesPart) -> Group:
    """Their distribution, levels and bursts; and the parts of the step, if the log has them."""
    table = titled(f"Step times, {part.points - part.warmup_points:,} values")
    table.add_row("median", seconds(part.median_s))
    table.add_row("5 % to 95 %", f"{seconds(part.p05_s)} to {seconds(part.p95_s)}")
    table.add_row("99 %", seconds(part.p99_s))
    table.add_row("longest", f"{seconds(part.max_s)} at step {part.max_step}")
    table.add_row(f"above {part.slow_ratio} × the median", f"{part.slow_points:,}")
    if part.warmup_points:
        table.add_row("left out as warm-up", f"the first {part.warmup_points:,}")
    for burst in part.bursts:
        table.add_row("burst", _stretch(burst))
    if len(part.levels) > 1:
        for level in part.levels:
            table.add_row("level", _stretch(level))
    return Group(table, *([_sections(part)] if part.sections else []))


def _stretch(part: StretchPart) -> str:
    return f"steps {part.first_step}–{part.last_step}, median {seconds(part.median_s)}"


def _sections(part: SeriesPart) -> Table:
    table = titled("Parts of the step, as the log has them (medians)")
    for section in part.sections[:_MAX_SECTIONS]:
        same = section.low_s == section.high_s
        low = "" if same else f"{seconds(section.low_s)} to "
        table.add_row(printable(section.name), f"{low}{seconds(section.high_s)}")
    return table
