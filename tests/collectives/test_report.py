from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.cli import EXIT_INSUFFICIENT, EXIT_OK, EXIT_USAGE, main
from smon.collectives.report import analyze_collectives
from smon.report import JobReport, ReportOptions
from smon.trace.load import load
from tests.kineto_files import Ddp, write_ddp

#: `INDEX.md` of the public traces: µs per rank, and who came last.
DLRM = (
    ((2146, 7635, 518, 6132, 4882, 4679, 514, 10), 7),
    ((1032, 1025, 517, 1021, 1108, 1060, 520, 8), 7),
    ((176, 169, 173, 174, 170, 175, 175, 7), 7),
    ((131, 132, 131, 133, 132, 132, 131, 7), 7),
    ((246, 307, 198, 291, 95, 96, 213, 86), 7),
    ((514, 545, 468, 542, 61, 10, 483, 357), 5),
    ((601, 601, 572, 602, 70, 20, 602, 468), 5),
    ((952, 922, 915, 879, 69, 79, 920, 803), 4),
)


def analyzed(*paths: Path, options: ReportOptions | None = None) -> JobReport:
    """The report of what is there."""
    trace = load(paths)
    return analyze_collectives(trace.events, trace.job, options or ReportOptions(notes=trace.notes))


def numbers(value: Any) -> list[float]:  # noqa: ANN401
    """All numbers of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def test_dlrm_has_the_waits_and_last_arrivers_of_the_index(traces: Path) -> None:
    """The last arriver waits least, and its duration is the transfer."""
    report = analyzed(traces / "dlrm-kineto-8rank")
    assert len(report.collectives) == report.collectives_count == len(DLRM)
    for one, (durations, last) in zip(report.collectives, DLRM, strict=True):
        assert one.last_rank == last
        assert one.transfer_s == pytest.approx(min(durations) / 1e6)
        expected = [(duration - min(durations)) / 1e6 for duration in durations]
        assert one.waits_s == pytest.approx(expected, abs=1e-9)
    assert [one.kind for one in report.collectives].count("all-to-all") == 5
    assert all(one.size_bytes for one in report.collectives)


def test_in_dlrm_the_ranks_with_the_shortest_step_are_the_late_ones(traces: Path) -> None:
    """Their own profile looks fastest: 12.5, 13.0 and 13.1 ms against up to 19.9."""
    trace = load([traces / "dlrm-kineto-8rank"])
    length = {rank.rank: rank.steps[0].duration_ns for rank in trace.events}
    report = analyze_collectives(trace.events, trace.job)
    slowdown = {worker.rank: worker.slowdown or 0.0 for worker in report.workers}
    shortest = sorted(length, key=lambda rank: length[rank])[:3]
    slowest = sorted(slowdown, key=lambda rank: -slowdown[rank])[:3]
    assert shortest[0] == slowest[0] == 7
    assert set(shortest) == set(slowest) == {2, 6, 7}
    assert report.verdict == "insufficient_data"


def test_the_late_rank_of_the_14th_exchange_of_nsys(traces: Path) -> None:
    """66 kernels are 33 exchanges; in the 14th rank 0 waits 3.2 of 3.5 ms for rank 1."""
    report = analyzed(traces / "nsys/mfu_2gpu_before.sqlite")
    assert report.collectives_count == 33
    fourteenth = next(one for one in report.collectives if one.index == 13)
    assert fourteenth.last_rank == 1
    assert fourteenth.waits_s == pytest.approx((3.249e-3, 0.0), abs=1e-6)
    assert fourteenth.waits_s[0] + fourteenth.transfer_s == pytest.approx(3.509e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["cpu_only", "nccl_parser_config", "timeline_analysis"])
def test_one_rank_alone_is_insufficient_and_says_so(traces: Path, name: str) -> None:
    """Nobody can tell who waits for whom."""
    report = analyzed(traces / "hta" / name)
    assert report.verdict == "insufficient_data"
    assert any("give the files of all ranks" in note for note in report.quality.notes)
    assert report.workers == ()


def test_a_long_step_of_one_rank_is_still_said(traces: Path) -> None:
    """Step 553 of `cpu_only` is twice as long."""
    notes = analyzed(traces / "hta" / "cpu_only").quality.notes
    assert any("step 553 of rank 34 took 425 ms, 1.9" in note for note in notes)


def test_what_was_left_out_is_in_the_notes(tmp_path: Path) -> None:
    """Assumptions, too: no group, no numbers."""
    paths = write_ddp(tmp_path, Ddp(ranks=3, steps=3, named=False))
    text = paths[0].read_bytes()
    paths[0].write_bytes(text[: len(text) - 9])
    notes = " ".join(analyzed(tmp_path).quality.notes)
    assert "carry no process group" in notes
    assert "carry no sequence number" in notes
    assert "clocks are not compared" in notes


def test_every_number_is_finite_or_null(tmp_path: Path) -> None:
    """And the ledger adds up in the report."""
    report = analyzed(*write_ddp(tmp_path, Ddp(extra_backward=(1, 50.0))))
    document = json.loads(report.to_json())
    assert all(math.isfinite(number) for number in numbers(document))
    lost = document["step_time"]["recorded_s"] - document["step_time"]["ideal_s"]
    assert sum(part["excess_s"] for part in document["ledger"]) == pytest.approx(lost)
    (fix,) = document["fixes"]
    assert fix["fix"] == "replace_workers"
    assert fix["step_time_s"] == pytest.approx(0.152, rel=0.03)


def test_a_price_makes_money(tmp_path: Path) -> None:
    """As for op-level traces."""
    paths = write_ddp(tmp_path, Ddp(extra_backward=(1, 50.0)))
    report = analyzed(*paths, options=ReportOptions(price_per_gpu_hour=2.0))
    assert report.cost.cost_per_day == pytest.approx(2.0 * (report.cost.gpu_hours_per_day or 0.0))
    assert report.fixes[0].cost_per_day


# --- a real run -----------------------------------------------------------------------------------

REAL = Path(__file__).parent / "torch-ddp-gloo"


def test_200_ms_of_backward_in_a_real_run_are_found_where_wall_clocks_see_nothing() -> None:
    """All ranks have steps of one length; gradients are reduced while the backward goes on."""
    trace = load([REAL / "slow-backward"])
    lengths = [np.mean([step.duration_ns for step in rank.steps]) for rank in trace.events]
    assert max(lengths) / min(lengths) < 1.01
    report = analyze_collectives(trace.events, trace.job)
    (finding,) = report.findings
    assert (finding.verdict, finding.cause) == ("straggler", "slow_backward")
    assert finding.where.rank == 1
    assert finding.excess_s == pytest.approx(0.200, rel=0.05)
    assert finding.victims is not None
    assert finding.victims.ranks == (0, 2, 3)


def test_nobody_is_named_in_a_healthy_real_run() -> None:
    """On a busy machine: ranks come at different times, but none is late for long."""
    report = analyzed(REAL / "healthy")
    assert all(finding.where.rank is None for finding in report.findings)
    assert report.slowdown.paper == pytest.approx(1.0, abs=0.1)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_the_verdict_and_who_was_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text first; the same as JSON."""
    write_ddp(tmp_path, Ddp(extra_backward=(1, 200.0)))
    assert main(["analyze", str(tmp_path)]) == EXIT_OK
    text = capsys.readouterr().out
    assert "Rank 1" in text.splitlines()[2]
    assert "slow backward" in text
    assert "Waited for most, of 18 collectives" in text
    assert main(["analyze", "--json", str(tmp_path)]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["verdict"] == "straggler"


def test_a_single_rank_exits_with_insufficient_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, with a report all the same."""
    path = write_ddp(tmp_path, Ddp())[0]
    assert main(["analyze", "--json", str(path)]) == EXIT_INSUFFICIENT
    assert json.loads(capsys.readouterr().out)["verdict"] == "insufficient_data"


def test_steps_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Events of other steps are not looked at."""
    write_ddp(tmp_path, Ddp())
    assert main(["analyze", "--json", "--steps", "11-13", str(tmp_path)]) == EXIT_OK
    window = json.loads(capsys.readouterr().out)["window"]
    assert (window["first_step"], window["last_step"], window["steps_used"]) == (11, 13, 3)
    assert main(["analyze", "--steps", "70-80", str(tmp_path)]) == EXIT_INSUFFICIENT
    assert "the trace has steps 10 to 15" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["analyze", "--timeline", "out.json"]])
def test_what_needs_ops_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """One line, and what to do."""
    write_ddp(tmp_path, Ddp())
    assert main([*command, str(tmp_path)]) in (EXIT_USAGE, EXIT_INSUFFICIENT)
    error = capsys.readouterr().err
    assert "annotate the ops" in error
    assert error.count("\n") == 1


# --- annotated ops ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario, expected",
    [
        ("healthy", None),
        ("slow_rank3", ("straggler", "slow_gpu", 3, "persistent")),
        ("long_last_stage", ("imbalance", "stage_partition", None, "persistent")),
        ("gc_pause_rank1", ("host_stall", "gc", 1, "one_off")),
    ],
)
def test_gloo_traces_have_the_verdict_of_their_ops(
    traces: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scenario: str,
    expected: tuple[object, ...] | None,
) -> None:
    """Annotated ops: the pipeline model is used, and says the same as the Parquet of the run."""
    for path in (traces / "torch-gloo-2pp2dp" / scenario).glob("*.gz"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert main(["analyze", "--json", str(tmp_path)]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    recorded = traces / "torch-gloo-2pp2dp" / scenario / "trace.parquet"
    assert main(["analyze", "--json", str(recorded)]) == EXIT_OK
    same = json.loads(capsys.readouterr().out)
    assert report["verdict"] == same["verdict"]
    assert (report["job"]["layout"]["dp"], report["job"]["layout"]["pp"]) == (2, 2)
    assert report["slowdown"]["paper"] == pytest.approx(same["slowdown"]["paper"], abs=0.005)
    if expected is None:
        assert report["findings"] == []
        return
    for one in (report["findings"][0], same["findings"][0]):
        found = one["verdict"], one["cause"], one["where"]["rank"], one["persistence"]["kind"]
        assert found == expected
