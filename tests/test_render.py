from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from smon.analysis import analyze
from smon.render import print_report
from smon.render.words import headline, place, printable, seconds, verdict_lines
from smon.report import Candidate, JobReport, PersistencePart
from smon.synth.presets import scenario
from smon.synth.scenario import generate


@pytest.fixture(scope="module")
def report() -> JobReport:
    """The report of the demo job, with fewer steps."""
    made = generate(scenario("slow-worker", steps=3))
    return analyze(made.table, made.job)


def text(report: JobReport, *, width: int = 100, color: bool = False) -> str:
    """What is printed on a terminal (or, without colour, into a pipe)."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, color_system="truecolor" if color else None
    )
    print_report(report, console)
    return out.getvalue()


@pytest.mark.parametrize("ideal_s, times", [(3.7, 1), (3.6, 0), (None, 0)])
def test_a_fix_that_saves_more_than_is_lost_is_explained(
    report: JobReport, ideal_s: float | None, times: int
) -> None:
    """Only where a fix goes below the ideal step time: else there is no riddle."""
    best_s = min(fix.step_time_s for fix in report.fixes)
    assert best_s == pytest.approx(3.66, abs=0.01)
    changed = replace(report, step_time=replace(report.step_time, ideal_s=ideal_s))
    assert text(changed, width=200).count("A fix can save more than is lost") == times


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200])
def test_the_heat_map_fits_the_terminal(report: JobReport, width: int) -> None:
    """No line of the heat map is wider than the terminal; DP ranks are grouped instead."""
    lines = text(report, width=width).splitlines()
    rows = [line for line in lines if line.startswith(("stage ", "DP rank  "))]
    rows = rows[-5:]
    assert len(rows) == 5
    assert all(len(line) <= width for line in rows)


def test_commands_can_be_copied_from_a_narrow_terminal(report: JobReport) -> None:
    """Commands are printed whole, however narrow: the terminal wraps them, and gives them back."""
    lines = text(report, width=40).splitlines()
    command = report.findings[0].next[0]
    assert sum(line.endswith(f"Next: {command}") for line in lines) == 1
    assert [line for line in lines if line.startswith("    → ")] == [
        f"    → {each}" for each in report.findings[0].next
    ]


def test_evidence_stays_indented(report: JobReport) -> None:
    """What is too long for one line goes on below its own beginning."""
    lines = text(report, width=40).splitlines()
    first = lines.index("WARNING  " + headline(report, report.findings[0])) + 1
    evidence = lines[first : next(at for at, line in enumerate(lines) if "→" in line)]
    assert len(evidence) > len(report.findings[0].evidence)
    assert all(line.startswith("    ") and len(line) <= 40 for line in evidence)


def test_the_hottest_cell_is_the_slow_worker(report: JobReport) -> None:
    """Row and column of the highest number are the worker that was slowed."""
    rows = [line for line in text(report).splitlines() if line.startswith("stage ")][-4:]
    values = [[float(cell) for cell in row.split()[2:]] for row in rows]
    flat = {(stage, dp): value for stage, row in enumerate(values) for dp, value in enumerate(row)}
    assert max(flat, key=lambda place: flat[place]) == (2, 5)


def test_a_grouped_cell_is_the_worst_of_its_ranks(report: JobReport) -> None:
    """Grouping must not hide the straggler."""
    rows = [line for line in text(report, width=40).splitlines() if line.startswith("stage 2")]
    assert max(float(cell) for cell in rows[0].split()[2:]) == pytest.approx(1.35, abs=0.01)
    assert "each cell is the worst of 2" in " ".join(text(report, width=40).split())


def test_without_colour_nothing_is_lost(report: JobReport) -> None:
    """Colour is an addition: the characters are the same with and without it."""
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", text(report, color=True))
    assert coloured == text(report)


def test_a_pipe_gets_no_escape_sequences(report: JobReport) -> None:
    """Plain text in, plain text out."""
    assert "\x1b" not in text(report)


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "bell\x07", "two\nlines", "right\u202eleft", "[bold]markup[/bold]"]
)
def test_hostile_job_names_are_shown_and_not_obeyed(report: JobReport, name: str) -> None:
    """A job name is text: no escape sequence, no markup, no second line."""
    shown = text(replace(report, job=replace(report.job, job_id=name)))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert shown.splitlines()[0].startswith(printable(name))


@pytest.mark.parametrize(
    "value, shown",
    [(12.3456, "12.3 s"), (1.0, "1.00 s"), (0.98765, "988 ms"), (0.0123456, "12.3 ms"),
     (0.0000123, "0.012 ms"), (123.4, "123 s"), (0.0, "0 ms"), (None, "unknown")],
)  # fmt: skip
def test_seconds_have_three_digits_and_a_unit(value: float | None, shown: str) -> None:
    """Three significant digits; ms under one second."""
    assert seconds(value) == shown


def test_the_verdict_says_who_why_how_much_and_what_to_do(report: JobReport) -> None:
    """The first line alone is enough to act on."""
    first, following, *_ = verdict_lines(report)
    assert first.startswith("TP group of rank 168 (DP rank 5, stage 2): slow GPU, +1.3")
    assert "per step (26." in first
    assert ". Next: scontrol update" in first
    assert "of its GPU time is lost" in following


def test_without_a_finding_nobody_is_named(report: JobReport) -> None:
    """A slow job whose cause is unknown says so, and points at the ledger."""
    lines = verdict_lines(replace(report, findings=()))
    assert "No cause was found" in lines[1]
    assert "rank" not in " ".join(lines)


@pytest.mark.parametrize(
    "scope, words",
    [
        ("rank", "Rank 168"),
        ("stage", "Stage 2, on every DP rank"),
        ("dp_group", "DP group of stage 2"),
        ("ep_group", "EP group of stage 2"),
        ("pp_group", "Pipeline of DP rank 5"),
        ("node", "Node of rank 168"),
        ("job", "Whole job"),
    ],
)
def test_places_are_named_in_the_terms_of_the_job(
    report: JobReport, scope: str, words: str
) -> None:
    """Each scope has its own words."""
    assert place(report, replace(report.findings[0], scope=scope)).startswith(words)


@pytest.mark.parametrize(
    "lasting, words",
    [
        (PersistencePart("periodic", 0.125, None, 8), "every 8 steps"),
        (PersistencePart("onset", 0.5, 20, None), "since step 20"),
        (PersistencePart("ramp", 0.8, 12, None), "since step 12, growing"),
        (PersistencePart("one_off", 0.1, 4, None), "once, at step 4"),
        (PersistencePart("rotating", 1.0, None, None), "somewhere else each time"),
        (PersistencePart("intermittent", 0.15, None, None), "in 15% of the steps"),
    ],
)
def test_the_headline_says_when(report: JobReport, lasting: PersistencePart, words: str) -> None:
    """Persistence in words."""
    finding = replace(report.findings[0], persistence=lasting)
    assert words in headline(report, finding)


def test_candidates_are_listed_with_what_tells_them_apart(report: JobReport) -> None:
    """What cannot be told apart is a set of candidates."""
    places = [replace(report.findings[0].where, rank=rank) for rank in range(12)]
    many = tuple(Candidate("slow_link", where, "nccl-tests") for where in places)
    finding = replace(report.findings[0], candidates=many)
    shown = text(replace(report, findings=(finding,)), width=200)
    assert "one of the ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in shown
    assert "to tell them apart: nccl-tests" in shown
