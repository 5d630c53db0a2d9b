"""What fixes would buy, and the step time at other sizes, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smon.render.numbers import titled
from smon.render.words import fix_words, printable, seconds
from smon.report import FixPart

_BAR_WIDTH = 30

#: (DP ranks, expected step time, lower and upper bound), times in seconds.
Series = tuple[Sequence[int], Sequence[float], Sequence[float], Sequence[float]]


def print_plan(
    fixes: Sequence[FixPart], series: Series, assumptions: Sequence[str], console: Console
) -> None:
    """Print the fixes with their assumptions, then the forecast."""
    if not fixes:
        console.print(Text("No fix: this job loses too little.", style="bold"))
    for fix in fixes:
        console.print(_fix(fix))
    console.print()
    console.print(_forecast(series))
    for line in assumptions:
        console.print(Text(f"  {printable(line)}", style="dim"))


def _fix(fix: FixPart) -> Text:
    saved = f"{fix.gpu_hours_per_day:,.0f} GPU-hours"
    money = "" if fix.cost_per_day is None else f", ${fix.cost_per_day:,.0f}"
    text = Text(f"{fix.speedup - 1:+.1%}  ", style="bold")
    text.append(fix_words(fix), style="bold")
    text.append(f"\n        {seconds(fix.step_time_s)} per step; saves {saved}{money} per day")
    if fix.changes_optimisation:
        text.append("; changes how the model is trained", style="yellow")
    for line in fix.assumptions:
        text.append(f"\n        assumes: {printable(line)}", style="dim")
    return text


def _forecast(series: Series) -> Table:
    """Expected step time by number of DP ranks, as a bar chart."""
    table = titled("Step time to expect with other numbers of DP ranks")
    largest = max(series[3], default=0.0) or 1.0
    for ranks, expected, low, high in zip(*series, strict=True):
        bar = "█" * round(expected / largest * _BAR_WIDTH)
        table.add_row(f"DP {ranks}", seconds(expected), f"{seconds(low)} – {seconds(high)}", bar)
    return table
