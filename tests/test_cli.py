from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smon.cli import EXIT_INSUFFICIENT, EXIT_OK, EXIT_USAGE, main
from smon.synth.presets import scenario
from smon.synth.scenario import Scenario, generate
from smon.synth.write import write_trace

Write = Callable[[Scenario], Path]

CONTRACT = [
    "schema", "job", "window", "quality", "step_time", "slowdown", "waste_ratio", "per_step",
    "by_optype", "by_dp_rank", "by_stage", "workers", "worker_share", "last_stage_share",
    "ledger", "verdict", "findings", "fixes", "cost",
]  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the trace of a scenario, returns its folder."""

    def into_folder(chosen: Scenario) -> Path:
        made = generate(chosen)
        folder = tmp_path / chosen.name
        folder.mkdir()
        write_trace(made.table, made.job, folder)
        return folder

    return into_folder


def job(**changes: object) -> Scenario:
    """A small healthy job."""
    return scenario("slow-worker", dp=4, pp=4, microbatches=4, steps=4, faults=(), **changes)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr says, if it is one line and stdout is empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def test_json_is_one_document_with_the_keys_of_the_contract(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json`` prints exactly one JSON document and nothing else."""
    assert main(["analyze", "--json", str(write(job()))]) == EXIT_OK
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert list(report)[: len(CONTRACT)] == CONTRACT
    assert set(report) - set(CONTRACT) == {
        "groups", "groups_count", "collectives", "collectives_count", "series",
    }  # fmt: skip
    assert report["schema"] == "smon.report/1"
    assert set(report["slowdown"]) == {"paper", "repaired", "history", "ci95", "launch"}
    assert set(report["workers"][0]) == {
        "dp", "stage", "rank", "host", "slowdown", "approx_slowdown",
    }  # fmt: skip


def test_text_names_the_slow_worker_and_no_other(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict comes first and names the rank that was slowed."""
    assert main(["analyze", str(write(scenario("slow-worker", steps=4)))]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("TP group of rank 168 (DP rank 5, stage 2): slow GPU")
    assert "Next: scontrol update" in " ".join(lines[2:4])
    named = [line for line in lines if re.search(r"\brank \d+ \(", line)]
    assert len(named) == 3
    assert all("rank 168 (" in line for line in named)


def test_a_healthy_job_gets_one_calm_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is named in a healthy job."""
    assert main(["analyze", str(write(scenario("healthy", steps=4)))]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("No straggler. This job runs at 1.0")
    assert lines[3] == ""


def test_a_long_stage_is_a_stage_and_not_its_ranks(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that is long on every replica names no rank."""
    assert main(["analyze", str(write(scenario("long-stage", steps=4)))]) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[2].startswith("Stage 3, on every DP rank")


def test_with_one_replica_a_stage_cannot_be_told_from_a_worker(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """With DP = 1 a slow device and a long stage look the same, and both are candidates."""
    folder = write(scenario("long-stage", steps=4, dp=1))
    assert main(["analyze", str(folder)]) == EXIT_OK
    assert "could be slow_gpu or stage_partition" in capsys.readouterr().out


def test_steps_select_a_part_of_the_window(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--steps A-B`` keeps both ends."""
    folder = write(job())
    assert main(["analyze", "--json", "--steps", "1-2", str(folder)]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in report["per_step"]] == [1, 2]


@pytest.mark.parametrize(
    "text, steps",
    [("2", [2]), ("2-", [2, 3]), ("-1", [0, 1]), ("0-9", [0, 1, 2, 3])],
)
def test_steps_may_be_open(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, steps: list[int]
) -> None:
    """Either end of ``--steps`` may be left out."""
    main(["analyze", "--json", f"--steps={text}", str(write(job()))])
    report = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in report["per_step"]] == steps


def test_price_adds_money(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Cost is waste × GPUs × 24 hours × price."""
    folder = write(scenario("slow-worker", steps=3))
    assert main(["analyze", "--json", "--price", "2.5", str(folder)]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    hours = report["waste_ratio"] * report["job"]["world_size"] * 24
    assert report["cost"]["gpu_hours_per_day"] == pytest.approx(hours)
    assert report["cost"]["cost_per_day"] == pytest.approx(2.5 * hours)


def test_repair_gives_the_slowdown_against_the_peers(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the slow worker replaced by its peers the job is as fast as a healthy one."""
    folder = write(scenario("slow-worker", steps=4))
    assert main(["analyze", "--json", "--repair", "5,2", str(folder)]) == EXIT_OK
    slow = json.loads(capsys.readouterr().out)
    assert main(["analyze", "--json", str(write(scenario("healthy", steps=4)))]) == EXIT_OK
    healthy = json.loads(capsys.readouterr().out)
    truth = slow["step_time"]["simulated_s"] / healthy["step_time"]["simulated_s"]
    assert slow["slowdown"]["repaired"] == pytest.approx(truth, rel=2e-3)
    assert healthy["slowdown"]["repaired"] is None


def test_timeline_is_written_beside_the_report(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--timeline`` writes a JSON document with events."""
    out = tmp_path / "timeline.json"
    assert main(["analyze", "--json", "--timeline", str(out), str(write(job()))]) == EXIT_OK
    json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text())["traceEvents"]


def test_one_step_is_insufficient_but_reported(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """One usable step: the report is printed, the exit code is 3, and stderr says why."""
    folder = write(job())
    assert main(["analyze", "--json", "--steps", "1", str(folder)]) == EXIT_INSUFFICIENT
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"] == "insufficient_data"
    assert captured.err == "smon analyze: insufficient data: 1 of 1 steps usable\n"


def test_nothing_usable_is_exit_3_with_reasons(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace without half of its workers: every step is skipped, each with its reason."""
    folder = write(job())
    (folder / "meta.yaml").write_text("dp_size: 4\npp_size: 5\ntp_size: 8\n")
    assert main(["analyze", "--json", str(folder)]) == EXIT_INSUFFICIENT
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["verdict"] == "insufficient_data"
    assert len(report["window"]["skipped"]) == 4
    assert report["slowdown"]["paper"] is None
    assert "stage 4: no ops" in captured.err
    assert main(["analyze", str(folder)]) == EXIT_INSUFFICIENT
    assert "Insufficient data: 0 usable steps." in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["analyze"], "required"),
        (["analyze", "x", "--layout", "tp4-zz2"], "expected parts such as"),
        (["analyze", "x", "--layout", "tp4-tp4"], "given twice"),
        (["analyze", "x", "--layout", "dp0-pp1"], "from 1 to"),
        (["analyze", "x", "--steps", "b-a"], "expected A-B"),
        (["analyze", "x", "--steps", "9-3"], "lies before"),
        (["analyze", "x", "--price", "cheap"], "expected a price"),
        (["analyze", "x", "--price", "nan"], "expected a price"),
        (["analyze", "x", "--repair", "3"], "expected DP,STAGE"),
        (["analyse", "x"], "invalid choice"),
        (["analyze", "does-not-exist"], "does-not-exist"),
        (["synth", "no-such", "--out", "x"], "no-such"),
        (["synth", "1f1b"], "--out"),
        (["synth", "1f1b", "--out", "x", "--dp", "0"], "dp"),
        (["synth", "interleaved", "--out", "x", "--vpp", "1"], "vpp"),
        ([], "COMMAND"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors say what was expected and found, without a traceback."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]  # argparse exits with a number
    assert code == EXIT_USAGE
    assert part in one_line(capsys)


def test_a_repair_of_nobody_is_an_error(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker that does not exist, or all replicas of a stage, cannot be replaced."""
    folder = str(write(job()))
    assert main(["analyze", folder, "--repair", "9,0"]) == EXIT_USAGE
    assert "no worker at DP rank 9" in one_line(capsys)
    everyone = [part for dp in range(4) for part in ("--repair", f"{dp},1")]
    assert main(["analyze", folder, *everyone]) == EXIT_USAGE
    assert "no peer is left" in one_line(capsys)


def test_synth_writes_what_analyze_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each scenario gets a folder; options replace its sizes."""
    sizes = ["--dp", "2", "--pp", "2", "--microbatches", "4", "--steps", "2"]
    names = ["gpipe", "interleaved", "zero-bubble"]
    assert main(["synth", *names, *sizes, "--overlap", "--out", str(tmp_path)]) == EXIT_OK
    assert len(capsys.readouterr().out.splitlines()) == 3
    for name in names:
        assert main(["analyze", "--json", str(tmp_path / name)]) == EXIT_OK
        report = json.loads(capsys.readouterr().out)
        assert report["job"]["layout"]["dp"] == 2
        assert report["quality"]["simulation_error_ratio"] == 0.0


def test_synth_says_where_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file where the folder should be is one clear line."""
    (tmp_path / "file").write_text("")
    arguments = ["synth", "1f1b", "--steps", "1", "--out", str(tmp_path / "file")]
    assert main(arguments) == EXIT_USAGE
    assert "cannot write" in one_line(capsys)


@pytest.mark.slow
def test_demo_names_the_slow_worker(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The demo ends with the answer that it set out to find, and names the host."""
    assert main(["demo", "--once", "--port", "0", "--data-dir", str(tmp_path)]) == EXIT_OK
    out = capsys.readouterr().out
    assert "rank 168 (DP rank 5, stage 2, gpu-node-2): slow GPU" in out


def test_help_loads_nothing_heavy() -> None:
    """``smon --help`` imports neither numpy nor pyarrow nor rich."""
    code = (
        "import sys\n"
        "from smon.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pyarrow', 'rich', 'yaml', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_closed_pipe_is_no_error(write: Write) -> None:
    """``smon analyze … | head -1`` ends quietly."""
    command = f"{sys.executable} -m smon.cli analyze {write(job())} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert done.stdout == b"{"
    assert done.stderr == b""
