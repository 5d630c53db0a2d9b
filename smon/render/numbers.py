"""Where the time goes, as tables, bars and the heat map of workers.

Colour is an addition: every number is also printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smon.render.words import ATTRIBUTION_THRESHOLD, fix_words, printable, seconds
from smon.report import JobReport, WorkerPart

#: Lower slowdowns are not worth a line of their own.
_NOTICEABLE = 1.005
#: Longer lists are cut to the highest.
_MAX_BARS = 12
_BAR_WIDTH = 16
_CELL_WIDTH: Final = 5
_LABEL_WIDTH = 10
#: From this width on the three breakdowns stand side by side.
_WIDE = 136

#: Heat runs in one hue from paper at 1.00 to dark at the job's worst; in between, these.
_PALE = (254, 230, 206)
_DARK = (166, 54, 3)
_DARK_TEXT_BELOW = 0.55
#: Less of the worst excess than this is left uncoloured.
_VISIBLE_PART = 0.05
_TWO_DIGITS = 100.0

#: Of fixes below the ideal step time.
_MORE_THAN_IS_LOST: Final = (
    "A fix can save more than is lost: in the ideal step all workers have the mean speed, the slow "
    "ones counted in."
)

#: Factors of the ledger that hold more than their name says.
_FACTORS = {"communication": "communication and other"}


def titled(title: str) -> Table:
    """An empty table without lines, under a bold title."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
        show_header=False,
    )


def step_time(report: JobReport) -> Table:
    """Step time and slowdown with its interval."""
    times, slowdown = report.step_time, report.slowdown
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        "Step time",
        f"{seconds(times.recorded_s)} recorded, {seconds(times.simulated_s)} without launch "
        f"delays, {seconds(times.ideal_s)} ideal",
    )
    interval = "" if slowdown.ci95 is None else _interval(slowdown.ci95)
    text = f"{slowdown.paper:.3f}{interval}, launch delays {slowdown.launch:.3f}"
    if slowdown.repaired is not None:
        text += f", against the replaced workers' peers {slowdown.repaired:.3f}"
    if slowdown.history is not None:
        text += f", against earlier windows {slowdown.history:.3f}"
    rows.add_row("Slowdown", text)
    return rows


def _interval(bounds: tuple[float, float]) -> str:
    return f" (95 % interval {bounds[0]:.3f}–{bounds[1]:.3f})"


def breakdown(report: JobReport, width: int) -> RenderableType:
    """Slowdown with only one op type, stage or DP rank as recorded, all else ideal."""
    kinds = sorted(report.by_optype.items(), key=lambda item: -item[1])
    stages = [(f"stage {name}", value) for name, value in report.by_stage.items()]
    ranks = [(f"DP rank {name}", value) for name, value in report.by_dp_rank.items()]
    worst = max(value for _, value in [*kinds, *stages, *ranks])
    columns = [
        _bars("By op type", kinds, worst),
        _bars("By stage", stages, worst),
        _bars("By DP rank", ranks, worst),
    ]
    caption = Text("Slowdown if only this were as recorded, and all else ideal:", style="dim")
    if width < _WIDE:
        return Group(Text(), caption, *columns)
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*columns)
    return Group(Text(), caption, grid)


def _bars(title: str, values: Sequence[tuple[str, float]], worst: float) -> Table:
    shown = _worth_showing(values)
    table = titled(title)
    for name, value in shown:
        part = max(value - 1.0, 0.0) / max(worst - 1.0, ATTRIBUTION_THRESHOLD - 1.0)
        bar = "█" * round(part * _BAR_WIDTH)
        table.add_row(name, f"{value:.3f}", Text(bar, style=_colour(part)))
    rest = sorted((value for _, value in values), reverse=True)[len(shown) :]
    if rest:
        table.add_row(Text(f"{len(rest)} others", style="dim"), Text(f"≤ {rest[0]:.3f}", "dim"), "")
    return table


def _worth_showing(values: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The highest, at most `_MAX_BARS`; what changes nothing is left to "others"."""
    ranked = sorted(values, key=lambda item: -item[1])
    return [item for item in ranked if item[1] >= _NOTICEABLE][:_MAX_BARS]


def _colour(part: float) -> str:
    part = min(max(part, 0.0), 1.0)
    mixed = [round(pale + (dark - pale) * part) for pale, dark in zip(_PALE, _DARK, strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"


def heat_map(report: JobReport, width: int) -> Group:
    """Exact S_w of every worker, stages × DP ranks; DP ranks grouped until they fit."""
    columns = max(1, (width - _LABEL_WIDTH) // _CELL_WIDTH)
    dp, pp = report.job.layout.dp, report.job.layout.pp
    group = -(-dp // columns)
    cells = _cells(report.workers, group)
    worst = max(cells.values(), default=1.0)
    title = Text("Workers", style="bold")
    title.append("  exact slowdown if only this worker were as recorded", style="dim")
    if group > 1:
        title.append(f"; each cell is the worst of {group} DP ranks", style="dim")
    firsts = range(0, dp, group)
    header = "".join(f"{first:>{_CELL_WIDTH}}" for first in firsts)
    lines = [title, Text(f"{'DP rank':<{_LABEL_WIDTH}}{header}", style="dim")]
    for stage in range(pp):
        line = Text(f"stage {stage}".ljust(_LABEL_WIDTH))
        for column in range(len(firsts)):
            line.append_text(_cell(cells.get((stage, column)), worst))
        lines.append(line)
    return Group(*lines)


def _cells(workers: Iterable[WorkerPart], group: int) -> dict[tuple[int, int], float]:
    """Worst slowdown by (stage, column)."""
    cells: dict[tuple[int, int], float] = {}
    for worker in workers:
        if worker.slowdown is not None:
            place = (worker.stage, worker.dp // group)
            cells[place] = max(cells.get(place, 0.0), worker.slowdown)
    return cells


def _cell(value: float | None, worst: float) -> Text:
    if value is None:
        return Text("   – ", style="dim")
    text = f" {value:.2f}" if value < _TWO_DIGITS else f" {value:4.0f}"
    part = (value - 1.0) / max(worst - 1.0, 1e-9)
    if worst < ATTRIBUTION_THRESHOLD or part < _VISIBLE_PART:
        return Text(text, style="dim")
    ink = "black" if part < _DARK_TEXT_BELOW else "white"
    return Text(text, style=f"{ink} on {_colour(part)}")


def quality(report: JobReport) -> Group:
    """Coverage, simulation error, what was left out and why."""
    window, quality_part = report.window, report.quality
    title = Text("Data quality", style="bold")
    known = [f"coverage {window.coverage_ratio:.2%}"]
    if quality_part.simulation_error_ratio is not None:
        known.append(f"simulation error {quality_part.simulation_error_ratio:.2%}")
    title.append(f"  {', '.join(known)}", style="dim")
    lines = [title]
    lines.extend(
        Text(f"  step {skipped.step} left out: {printable(skipped.reason)}")
        for skipped in window.skipped[:_MAX_BARS]
    )
    if len(window.skipped) > _MAX_BARS:
        lines.append(Text(f"  {len(window.skipped) - _MAX_BARS} more steps left out"))
    lines.extend(Text(f"  {printable(note)}") for note in quality_part.notes)
    return Group(*lines)


def ledger(report: JobReport) -> RenderableType:
    """From ideal to recorded step time, factor by factor."""
    table = titled("From ideal to recorded step time")
    largest = max((abs(entry.excess_s) for entry in report.ledger), default=0.0) or 1.0
    for entry in report.ledger:
        bar = "█" * round(max(entry.excess_s, 0.0) / largest * _BAR_WIDTH)
        sign = "+" if entry.excess_s >= 0 else "−"
        table.add_row(
            _FACTORS.get(entry.factor, entry.factor.replace("_", " ")),
            f"{sign}{seconds(abs(entry.excess_s))}",
            f"{entry.share:.1%}".replace("-", "−"),
            Text(bar, style=_colour(1.0)),
        )
    return table


def fixes(report: JobReport) -> RenderableType:
    """What each fix would buy, best first; and how one can buy more than is lost, if it does."""
    table = titled("What a fix would buy")
    for fix in report.fixes[:_MAX_BARS]:
        money = "" if fix.cost_per_day is None else f"${fix.cost_per_day:,.0f} per day"
        table.add_row(
            Text(fix_words(fix)),
            seconds(fix.step_time_s),
            f"{fix.speedup - 1:+.1%}",
            f"{fix.gpu_hours_per_day:,.0f} GPU-hours per day",
            money,
        )
    ideal_s = report.step_time.ideal_s
    if ideal_s is None or all(fix.step_time_s >= ideal_s for fix in report.fixes[:_MAX_BARS]):
        return table
    return Group(table, Text(_MORE_THAN_IS_LOST, style="dim"))
