from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from smon.cli import main
from smon.errors import TraceError
from smon.hangs.report import analyze_hang
from smon.render import print_report
from smon.report import JobReport
from smon.topology import Layout
from smon.trace.load import load
from smon.trace.meta import Job
from tests.hangs.builders import WORLD, Group, dump, entry, report, write

NVRX = "nvrx-flight-recorder"
GLOO = ("healthy", "slow_rank3", "long_last_stage", "gc_pause_rank1")


def of(path: Path) -> JobReport:
    """The report of a public set."""
    trace = load([path])
    return analyze_hang(trace.dumps, trace.job)


def shown(found: JobReport) -> str:
    """As a terminal shows it."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_report(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name, ranks", [("gpu_error_1st", [12, 14]), ("lock_gil_2nd", [10, 15])])
def test_the_faulty_ranks_of_the_public_sets_are_named(
    traces: Path, name: str, ranks: list[int]
) -> None:
    """Those in which the fault was injected, and no other."""
    found = of(traces / NVRX / name)
    assert found.verdict == "hang"
    assert [finding.where.rank for finding in found.findings] == ranks
    assert {(finding.scope, finding.cause) for finding in found.findings} == {("rank", "hang")}


def test_a_gpu_that_failed_is_told_by_what_it_did_not_finish(traces: Path) -> None:
    """Rank 12 never called all-to-all 20,537, rank 14 did; both stopped at 20,530."""
    first, second = of(traces / NVRX / "gpu_error_1st").findings
    assert first.confidence > second.confidence
    assert "has not called all-to-all 20,537 of EXPERT_MODEL_PARALLEL_GROUP" in first.evidence[0]
    assert "4027 × 5120" in first.evidence[0]
    assert first.victims is not None
    assert {13, 14, 15} <= set(first.victims.ranks)
    assert "all-to-all 20,530 to 20,536 are unfinished here" in second.evidence[0]
    assert second.where.dp == 1
    assert (second.where.stage, second.where.tp) == (3, 0)


def test_an_interpreter_that_hangs_is_told_by_its_silence(traces: Path) -> None:
    """Dumps without entries, next to ranks that wait: py-spy is the first thing to do."""
    first, second = of(traces / NVRX / "lock_gil_2nd").findings
    assert "has not called all-to-all 20,947" in first.evidence[0]
    assert "(73: ranks 8, 9, 10, 11)" in first.evidence[0]
    assert "(74: ranks 12, 13, 14, 15)" in second.evidence[0]
    assert any("its dump lists nothing" in line for line in first.evidence)
    assert first.next[0].startswith("py-spy dump --pid <trainer of rank 10>")


@pytest.mark.parametrize("name", GLOO)
def test_no_hang_is_not_healthy(traces: Path, name: str) -> None:
    """The dumps of gloo have no times: slow and healthy jobs look the same."""
    folder = traces / "torch-gloo-2pp2dp" / name
    trace = load(sorted(folder.glob("flight_recorder_rank*.json")))
    found = analyze_hang(trace.dumps, trace.job)
    assert (found.verdict, found.findings) == ("insufficient_data", ())
    assert "does not make the job healthy" in found.quality.notes[-1]
    assert any("do not list their members" in note for note in found.quality.notes)


def test_numbers_that_need_times_are_null_and_the_notes_say_why(traces: Path) -> None:
    """Nothing is invented: no step, no slowdown, no cost."""
    document = json.loads(of(traces / NVRX / "lock_gil_2nd").to_json())
    assert document["step_time"] == {"recorded_s": None, "simulated_s": None, "ideal_s": None}
    assert document["slowdown"]["paper"] is None
    assert document["waste_ratio"] is None
    assert document["cost"]["gpu_hours_per_day"] is None
    assert document["window"]["steps"] == 0
    assert any("no durations and no steps" in note for note in document["quality"]["notes"])


def test_a_rank_that_left_no_dump_is_a_weaker_suspect(tmp_path: Path) -> None:
    """It may have died, or its dump may have been lost."""
    found = report(tmp_path, {rank: dump(entry(WORLD, 8)) for rank in (0, 1, 2)})
    (finding,) = found.findings
    assert finding.where.rank == 3
    assert any("left no dump" in line for line in finding.evidence)
    silent = report(
        tmp_path, {3: dump(), **{rank: dump(entry(WORLD, 8)) for rank in (0, 1, 2)}}
    ).findings[0]
    assert silent.where.rank == 3
    assert silent.confidence > finding.confidence


def test_a_collective_that_all_have_called_blames_nobody(tmp_path: Path) -> None:
    """A weak finding for the group: a running job looks like that too."""
    found = report(tmp_path, {rank: dump(entry(WORLD, 8)) for rank in range(4)})
    (finding,) = found.findings
    assert (finding.scope, finding.where.rank, finding.severity) == ("job", None, "warning")
    assert finding.confidence < 0.5
    assert {one.where.rank for one in finding.candidates} == {0, 1, 2, 3}


def test_a_job_dumped_while_it_runs_has_no_ranks_that_stopped(tmp_path: Path) -> None:
    """If most ranks are behind, the dumps were made one after the other."""
    others = {
        rank: dump(*[entry(WORLD, seq) for seq in range(6 + rank, 10)], status={"0": (9, 5 + rank)})
        for rank in range(4)
    }
    found = report(tmp_path, others)
    assert [finding.scope for finding in found.findings] == ["job"]


def test_ranks_in_a_circle_are_named_together(tmp_path: Path) -> None:
    """With what each of them waits in."""
    left, right = Group("1", (0, 1), 1), Group("3", (0, 1), 3)
    groups = (WORLD, left, right)
    found = report(
        tmp_path,
        {
            0: dump(entry(left, 5), groups=groups, status={"0": (1, 1), "1": (5, 4), "3": (7, 7)}),
            1: dump(entry(right, 8), groups=groups, status={"0": (1, 1), "1": (4, 4), "3": (8, 7)}),
        },
    )
    (finding,) = found.findings
    assert finding.where.ranks == (0, 1)
    assert finding.evidence[0].startswith("rank 0 waits for rank 1 in all-reduce 5")


def test_who_calls_something_else_is_named(tmp_path: Path) -> None:
    """The ranks do not run the same program."""
    documents = {rank: dump(entry(WORLD, 8)) for rank in range(3)}
    found = report(tmp_path, {**documents, 3: dump(entry(WORLD, 8, "nccl:barrier"))})
    (finding,) = found.findings
    assert finding.where.rank == 3
    assert "called barrier as number 8" in finding.evidence[0]


def test_a_wait_for_a_message_is_a_weak_finding(tmp_path: Path) -> None:
    """Messages have no common number."""
    pipe = Group("9", (0, 1, 2, 3), 3, "PIPELINE_MODEL_PARALLEL_GROUP")
    sends = [entry(pipe, 10 + n, "nccl:send 0->1") for n in range(2)]
    groups = (WORLD, pipe)
    found = report(
        tmp_path,
        {
            0: dump(*sends, groups=groups),
            1: dump(entry(pipe, 20, "nccl:recv 1<-0"), groups=groups),
        },
    )
    (finding,) = found.findings
    assert (finding.where.rank, finding.confidence) == (1, 0.5)


def test_many_suspects_are_counted_and_only_the_first_reported(tmp_path: Path) -> None:
    """A report stays short."""
    world = Group("0", tuple(range(40)), 0, "default_pg")
    documents = {rank: dump(groups=(world,)) for rank in range(1, 40)}
    documents[0] = dump(entry(world, 8), groups=(world,))
    found = report(tmp_path, documents)
    assert len(found.findings) == 16
    assert "23 more suspects are left out of the report" in found.quality.notes


def test_no_dump_is_an_error() -> None:
    """Nothing to say anything about."""
    with pytest.raises(TraceError, match="no dump"):
        analyze_hang((), Job("job", Layout(dp=1, pp=1)))


def test_the_terminal_shows_the_verdict_first(traces: Path) -> None:
    """Who, at what, and what to do next; then the evidence and who waits."""
    text = shown(of(traces / NVRX / "lock_gil_2nd"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert lines[1].startswith("Rank 10 (DP rank 1, stage 2): hangs at all-to-all. Next: py-spy")
    assert lines[2] == "Also suspect: Rank 15 (DP rank 1, stage 3)."
    assert "5 ranks wait for it: 6, 8, 9, 11, 14" in text
    assert "steps 0" not in text


def test_the_command_reads_a_folder_of_dumps(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON document, exit code 0."""
    assert main(["analyze", str(traces / NVRX / "gpu_error_1st"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"]) == ("smon.report/1", "hang")


def test_without_a_verdict_the_command_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, one line."""
    write(tmp_path, {rank: dump(entry(WORLD, 1, retired=True)) for rank in range(4)})
    assert main(["analyze", str(tmp_path)]) == 3
    captured = capsys.readouterr()
    assert "no evidence of a hang" in captured.err
    assert "Insufficient data: no evidence of a hang" in captured.out


def test_options_that_need_ops_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A timeline of dumps would be empty."""
    write(tmp_path, {0: dump(entry(WORLD, 1))})
    assert main(["analyze", str(tmp_path), "--timeline", str(tmp_path / "t.json")]) == 2
    assert "need ops" in capsys.readouterr().err
