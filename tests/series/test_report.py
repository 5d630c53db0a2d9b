from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from smon.cli import main
from smon.errors import NothingUsableError, TraceError
from smon.render import print_report
from smon.report import JobReport
from smon.series.report import analyze_series
from smon.topology import Layout
from smon.trace.load import load
from smon.trace.meta import Job
from smon.trace.series import StepSeries

DEEPSEEK = "deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release__golden_values_dev_dgx_h100.json.gz"
JOB = Job("job", Layout(dp=4, pp=2))


def of(path: Path) -> JobReport:
    """The report of a file."""
    trace = load([path])
    assert trace.series is not None
    return analyze_series(trace.series, trace.job)


def report(seconds: np.ndarray) -> JobReport:
    """The report of these values, every fifth step."""
    steps = 5 * np.arange(1, len(seconds) + 1, dtype=np.int64)
    return analyze_series(StepSeries(steps, seconds), JOB)


def test_the_burst_of_the_public_series_is_found(traces: Path) -> None:
    """625 of 9,529 values above 1.3 × the median, the first of them warm-up; and where."""
    found = of(traces / "megatron-step-times" / DEEPSEEK)
    assert found.series is not None
    assert (found.series.points, found.series.warmup_points) == (9_529, 1)
    assert found.series.slow_points == 624
    (burst,) = found.series.bursts
    # The published range, 30,025 to 32,525, is the block of 500 values with most slow ones.
    assert burst.first_step <= 30_025 < burst.last_step <= 32_525
    assert burst.slow_points >= 0.95 * burst.points
    assert found.verdict == "job_wide"
    assert found.findings[0].persistence.onset_step == burst.first_step


@pytest.mark.parametrize(
    "name",
    [
        "megatron-step-times/gpt3_7b_tp1_pp4_memory_speed__golden_values_dev_dgx_h100.json.gz",
        "megatron-step-times/"
        "mixtral_8x7b_alltoall_tp2pp4ep4_release__golden_values_lts_dgx_a100.json.gz",
        f"megatron-step-times/{DEEPSEEK}",
        "megatron-logs/meg_gpt2_base_n16_dp1_tp4_pp16-1809577.out.gz",
        "megatron-logs/meg_gpt2_perf_n16-1999618.out.gz",
        "megatron-logs/straggler_detector_readme.log",
    ],
)
def test_no_rank_is_ever_named(traces: Path, name: str) -> None:
    """The file has none, and the report says so."""
    found = of(traces / name)
    assert all(finding.scope == "job" for finding in found.findings)
    assert all(finding.where.rank is None for finding in found.findings)
    assert not found.workers
    assert any("no rank can be named" in note for note in found.quality.notes)


def test_the_first_step_is_warm_up(traces: Path) -> None:
    """6.9 times the others; and every second value is `"nan"`."""
    folder = traces / "megatron-step-times"
    found = of(folder / "gpt3_7b_tp1_pp4_memory_speed__golden_values_dev_dgx_h100.json.gz")
    assert found.series is not None
    assert found.series.warmup_points == 1
    assert found.series.max_s < 1.2
    assert any(
        note.startswith("13 left out: step whose time is nan") for note in found.quality.notes
    )


def test_a_slower_level_is_a_finding_with_its_onset() -> None:
    """What it costs is what its values have above the level before."""
    found = report(np.r_[np.full(100, 2.0), np.full(100, 2.5)])
    (finding,) = found.findings
    assert (finding.verdict, finding.scope) == ("job_wide", "job")
    assert (finding.persistence.kind, finding.persistence.onset_step) == ("onset", 505)
    assert finding.excess_s == pytest.approx(0.25)
    assert finding.excess_share == pytest.approx(0.25 / 2.25)


def test_a_faster_level_is_no_finding() -> None:
    """But it is in the report."""
    found = report(np.r_[np.full(100, 2.5), np.full(200, 2.0)])
    assert found.verdict == "none"
    assert found.series is not None
    assert len(found.series.levels) == 2


def test_an_even_series_says_what_it_cannot_tell() -> None:
    """None is not healthy: there is nothing to compare with."""
    found = report(np.full(100, 2.0))
    assert found.verdict == "none"
    assert (found.slowdown.paper, found.waste_ratio, found.step_time.ideal_s) == (None, None, None)
    assert found.step_time.recorded_s == 2.0
    assert any("a job that is always slow looks even" in note for note in found.quality.notes)


def test_few_values_are_too_few() -> None:
    """Their distribution is given all the same."""
    found = report(np.full(12, 2.0))
    assert found.verdict == "insufficient_data"
    assert found.series is not None
    assert found.series.median_s == 2.0


def test_quotes_of_a_tool_stand_in_the_notes(traces: Path) -> None:
    """Milliwatts that are labelled W are put right, and shown as they were written."""
    found = of(traces / "megatron-logs" / "straggler_detector_readme.log")
    assert found.verdict == "insufficient_data"
    (quote,) = (note for note in found.quality.notes if "StragglerDetector" in note)
    assert "602 W, written as 601796 W (rank 8)" in quote
    assert "3,453.08 ms (rank 8) to 3,468.2 ms (rank 0)" in quote
    assert "cannot check it" in quote


def test_the_log_gives_the_layout_and_the_parts_of_the_step(traces: Path) -> None:
    """World, TP and PP are in its first lines; timers in those after each report."""
    found = of(traces / "megatron-logs" / "meg_gpt2_base_n16_dp1_tp4_pp16-1809577.out.gz")
    assert found.job.world_size == 64
    assert (found.job.layout.tp, found.job.layout.pp) == (4, 16)
    assert found.series is not None
    assert found.series.median_s == pytest.approx(2.74005)
    assert {"forward-compute", "backward-compute"} <= {part.name for part in found.series.sections}


def test_the_terminal_shows_the_distribution(traces: Path) -> None:
    """Verdict first, no empty tables."""
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_report(of(traces / "megatron-step-times" / DEEPSEEK), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Whole job: the whole job got slower" in text
    assert "longest                 99.8 s at step 31625" in text


def test_the_command_prints_one_document(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And keeps the steps that are asked for."""
    path = str(traces / "megatron-step-times" / DEEPSEEK)
    assert main(["analyze", path, "--json", "--steps", "35000-47680"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "none"
    assert document["window"]["first_step"] == 35_000
    assert document["series"]["bursts"] == []


def test_an_empty_file_is_one_clear_line(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one of the golden values is."""
    assert (
        main(["analyze", str(traces / "megatron-step-times/EMPTY_0byte_golden_values.json")]) == 2
    )
    assert "the file is empty" in capsys.readouterr().err


def test_several_series_are_one_too_many(traces: Path) -> None:
    """Which of them is meant, nobody knows."""
    with pytest.raises(TraceError, match="in one file, found 3 files"):
        load([traces / "megatron-step-times"])


def test_a_series_has_no_ops(traces: Path) -> None:
    """Planning and sending say so."""
    with pytest.raises(NothingUsableError, match="step times of the whole job only"):
        load([traces / "megatron-step-times" / DEEPSEEK]).ops()
