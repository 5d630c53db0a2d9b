"""A report for a terminal: the verdict first, then findings, ledger, workers, fixes, quality.

Knows the report and nothing behind it.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from smon.render.collectives import collectives
from smon.render.numbers import breakdown, fixes, heat_map, ledger, quality, step_time
from smon.render.series import series
from smon.render.words import headline, printable, seconds, verdict_lines
from smon.report import Finding, JobReport

__all__ = ["print_report"]

_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold"}
_MAX_CANDIDATES = 8
_INDENT = 4


def print_report(report: JobReport, console: Console) -> None:
    """Print everything the report says that helps a person."""
    console.print(_title(report))
    console.print()
    for line in verdict_lines(report):
        # Never broken by us: the first one ends with a command, to be copied as it stands.
        console.print(Text(line, style="bold"), soft_wrap=True)
    for finding in report.findings:
        console.print()
        _print_finding(report, finding, console)
    if report.slowdown.paper is not None:
        console.print()
        console.print(step_time(report))
        if report.ledger:
            console.print()
            console.print(ledger(report))
        console.print(breakdown(report, console.width))
        console.print()
        console.print(heat_map(report, console.width))
        if report.fixes:
            console.print()
            console.print(fixes(report))
    if report.series is not None:
        console.print()
        console.print(series(report.series))
    if report.collectives:
        console.print()
        console.print(collectives(report))
    console.print()
    console.print(quality(report))


def _title(report: JobReport) -> Text:
    job, window = report.job, report.window
    layout = job.layout
    sizes = [("DP", layout.dp), ("PP", layout.pp), ("TP", layout.tp), ("CP", layout.cp)]
    parts = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("DP", "PP")]
    steps = f"steps {window.first_step}–{window.last_step}"
    used = f", {window.steps_used} of {window.steps} used"
    seen = f" · {steps}{used}" if window.steps else ""
    title = Text(printable(job.job_id), style="bold")
    title.append(f"  {' · '.join(parts)} · {job.world_size:,} GPUs{seen}", style="dim")
    return title


def _print_finding(report: JobReport, finding: Finding, console: Console) -> None:
    """A finding with its evidence, its candidates and what to do."""
    head = Text(f"{finding.severity.upper()}  ", style=_STYLES.get(finding.severity, "bold"))
    head.append(headline(report, finding), style="bold")
    console.print(head, soft_wrap=True)
    for line in _grounds(finding):
        console.print(Padding(Text(line), (0, 0, 0, _INDENT), expand=False))
    for line in finding.next:
        console.print(Text(f"{' ' * _INDENT}→ {printable(line)}"), soft_wrap=True)


def _grounds(finding: Finding) -> list[str]:
    """What a finding rests on, who else it could be, and who waits for it."""
    lines = [printable(line) for line in finding.evidence]
    if finding.candidates:
        lines.append(_candidates(finding))
    victims = finding.victims
    if victims is not None and victims.wait_s is None:
        lines.append(f"{victims.count} ranks wait for it: {', '.join(map(str, victims.ranks))}")
    elif victims is not None:
        wait = seconds(victims.wait_s)
        lines.append(f"{victims.count} other workers wait, typically {wait} a step")
    return [*lines, f"confidence {finding.confidence:.0%}"]


def _candidates(finding: Finding) -> str:
    shown = finding.candidates[:_MAX_CANDIDATES]
    ranks = [str(one.where.rank) for one in shown if one.where.rank is not None]
    causes = sorted({one.cause for one in shown})
    apart = sorted({one.tell_apart for one in shown if one.tell_apart})
    if len(causes) > 1:
        could = f"could be {' or '.join(causes)}"
    else:
        more = len(finding.candidates) - len(shown)
        could = f"one of the ranks {', '.join(ranks)}" + (f" and {more} more" if more > 0 else "")
    return f"{could}; to tell them apart: {', '.join(apart)}" if apart else could
