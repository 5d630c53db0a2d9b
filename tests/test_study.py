from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smon.analysis import analyze
from smon.cli import main
from smon.commands.fleet_analyze import paths_of
from smon.errors import ConfigError, TaskLostError
from smon.render.study import COLUMNS, study_text
from smon.study import UNKNOWN, Asked, FirstFinding, Row, analysed, document, failed, row_of
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.write import write_synthetic

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy job, a job with a long stage, one step of a job, and a file that is none."""
    folder = tmp_path_factory.mktemp("jobs")
    for name, sizes in (
        ("N-small", {"steps": 4}),
        ("long-stage", {"dp": 2, "steps": 4}),
        ("N-1-step", {"dp": 2, "pp": 2}),
    ):
        made = generate(scenario(name, **sizes))
        (folder / name).mkdir()
        write_synthetic(made, folder / name)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "trace.parquet").write_bytes(b"PAR1 and no more")
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``smon fleet analyze`` in this process."""
    code = main(["fleet", "analyze", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


# --- one trace --------------------------------------------------------------------------------


def test_a_row_has_the_numbers_of_the_report() -> None:
    """And GPU-hours as the fleet report counts them."""
    made = generate(scenario("long-stage", dp=2, steps=4))
    report = analyze(made.table, made.job)
    row = row_of(Asked("a", price=2.0), report)
    assert (row.job, row.gpus, row.steps_used) == ("long-stage", 8, 4)
    assert (row.slowdown, row.verdict) == (report.slowdown.paper, report.verdict)
    assert row.finding is not None
    assert row.finding.cause == report.findings[0].cause == "stage_partition"
    assert row.finding.place == "Stage 3, on every DP rank"
    assert report.step_time.recorded_s is not None
    assert report.waste_ratio is not None
    assert row.gpu_hours == pytest.approx(report.step_time.recorded_s * 4 * 8 / 3600)
    assert row.gpu_hours is not None
    assert row.lost_gpu_hours == pytest.approx(row.gpu_hours * report.waste_ratio)
    assert row.lost_gpu_hours is not None
    assert row.lost_cost == pytest.approx(2.0 * row.lost_gpu_hours)


def test_a_trace_that_cannot_be_read_is_a_row_with_the_reason(jobs: Path) -> None:
    """It does not end the study."""
    row = analysed(Asked(str(jobs / "damaged")))
    assert row.error is not None
    assert "trace.parquet" in row.error
    assert row == Row(row.path, error=row.error)


def test_an_error_that_nobody_expected_says_its_class() -> None:
    """That of a lost process says what it is."""
    assert failed(Asked("a"), KeyError("x")).error == "unexpected KeyError: 'x'"
    assert failed(Asked("a"), TaskLostError("the node is gone")).error == "the node is gone"


# --- all together -----------------------------------------------------------------------------


def row(path: str, **given: Any) -> Row:  # noqa: ANN401  # of Row
    """A trace of 10 GPU-hours, of which one was lost."""
    known = {"job": path, "gpus": 4, "steps_used": 4, "verdict": "none", "gpu_hours": 10.0}
    return Row(path, **{**known, "lost_gpu_hours": 1.0, **given})


def finding(cause: str, node: str | None = None) -> FirstFinding:
    """A finding of that cause."""
    return FirstFinding("warning", cause, "rank", "Rank 1", 1, 1, 0, node, 0.1, 0.05)


def test_what_is_lost_adds_up_by_cause() -> None:
    """By the first finding of each trace; the dearest cause first."""
    told = document(
        [
            row("a", lost_gpu_hours=2.0, finding=finding("slow_gpu")),
            row("b", lost_gpu_hours=3.0, finding=finding("slow_gpu")),
            row("c", lost_gpu_hours=4.0),
            row("d", error="unreadable", gpu_hours=None, lost_gpu_hours=None),
            row("e", verdict="insufficient_data", lost_gpu_hours=9.0),
        ]
    )
    assert [(one["cause"], one["jobs"]) for one in told["causes"]] == [
        ("slow_gpu", 2),
        (UNKNOWN, 1),
    ]
    assert sum(one["lost_gpu_hours"] for one in told["causes"]) == told["lost_gpu_hours"] == 9.0
    assert (told["gpu_hours"], told["lost_share"]) == (30.0, 0.3)
    assert (told["traces"], told["failed"], told["insufficient"]) == (5, 1, 1)
    assert told["lost_cost"] is None


def test_windows_of_one_job_count_as_one_job() -> None:
    """It is slowed if all of them together are; its cause is that of its dearest window."""
    told = document(
        [
            row("a", job="x", lost_gpu_hours=0.0),
            row("b", job="x", lost_gpu_hours=2.0, finding=finding("gc")),
            row("c", job="y", lost_gpu_hours=0.2),
        ]
    )
    assert (told["jobs"], told["slowed"]) == (2, 1)
    assert [(one["name"], one["cause"]) for one in told["worst"]] == [("x", "gc"), ("y", UNKNOWN)]


def test_hosts_in_most_jobs_come_first() -> None:
    """A host of one job may have the job's own reasons."""
    told = document(
        [
            row("a", job="x", finding=finding("gc", "n2")),
            row("b", job="x", finding=finding("gc", "n2")),
            row("c", job="x", finding=finding("slow_gpu", "n1")),
            row("d", job="y", finding=finding("thermal", "n1")),
        ]
    )
    assert [(one["host"], one["jobs"], one["findings"]) for one in told["hosts"]] == [
        ("n1", 2, 2),
        ("n2", 1, 2),
    ]
    assert told["hosts"][0]["causes"] == ["slow_gpu", "thermal"]


def test_the_order_of_traces_does_not_matter() -> None:
    """They end in any order."""
    rows = [row("a", lost_gpu_hours=0.1), row("b", lost_gpu_hours=0.2), row("c", job="a")]
    assert document(rows) == document(reversed(rows))


def test_a_study_without_numbers_says_so() -> None:
    """No division by nothing."""
    told = document([row("/x/a", gpu_hours=None, lost_gpu_hours=None, verdict="hang")])
    assert (told["jobs"], told["lost_share"]) == (0, None)
    assert "hang" in study_text(told)


def test_names_of_others_cannot_write_to_the_terminal() -> None:
    """Control characters are shown, not sent."""
    bad = "\x1b[31m"
    named = replace(finding("gc"), place="Rank 1")
    told = document([row(f"/x/{bad}", job=bad, finding=named), row("/y", error=bad)])
    assert "\x1b" not in study_text(told)


# --- the command ------------------------------------------------------------------------------


def test_the_command_says_what_all_lose(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The worst job, its finding, and what could not be analysed."""
    code, out, err = run(capsys, f"{jobs}/*", "--parallel", "1", "--price", "2")
    assert (code, err) == (0, "")
    assert out.startswith("4 traces, 2 jobs with step times; slowed by 10 % or more: 1.\n")
    assert "Stage 3, on every DP rank: more work than the other stages" in out
    assert "1 trace with too little data" in out
    assert f"{jobs}/damaged: " in out
    assert "$" in out


def test_the_result_does_not_depend_on_executor_and_order(
    jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte."""
    paths = [str(path) for path in jobs.iterdir()]
    here = run(capsys, *sorted(paths), "--json", "--parallel", "1")
    pool = run(capsys, *sorted(paths, reverse=True), paths[0], "--json", "--parallel", "2")
    assert here == pool
    told = json.loads(here[1])
    assert told["schema"] == "smon.study/1"
    assert [Path(one["path"]).name for one in told["rows"]] == sorted(
        path.name for path in jobs.iterdir()
    )


def test_csv_has_a_row_for_each_trace(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the finding in columns of its own."""
    _, out, _ = run(capsys, f"{jobs}/*", "--csv", "--parallel", "1")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert tuple(rows[0]) == COLUMNS
    (long,) = [one for one in rows if one["job"] == "long-stage"]
    assert (long["cause"], long["stage"], long["error"]) == ("stage_partition", "3", "")


def test_nothing_that_can_be_analysed_is_an_error(
    jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the first reason."""
    code, out, err = run(capsys, str(jobs / "damaged"), "--parallel", "1")
    assert (code, out) == (2, "")
    assert err.startswith("smon fleet: error: none of 1 traces could be analysed; the first: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--parallel", "0"], ["--parallel", "many"], ["--price", "-1"], ["--executor", "dask"]],
)
def test_options_that_cannot_be_are_refused(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read."""
    with pytest.raises(SystemExit) as stop:
        run(capsys, "x", *arguments)
    assert stop.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_an_address_without_ray_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be forgotten silently."""
    code, _, err = run(capsys, "x", "--ray-address", "10.0.0.1:6379")
    assert code == 2
    assert "--ray-address goes with --executor ray" in err


def test_paths_are_absolute_and_come_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another working folder; a name with a bracket is a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", "c[1]"):
        (tmp_path / name).mkdir()
    whole = str(tmp_path)
    assert paths_of(["b", "?", f"{whole}/a", "c[1]"]) == [f"{whole}/{name}" for name in "ab"] + [
        f"{whole}/c[1]"
    ]
    with pytest.raises(ConfigError, match="nothing that fits"):
        paths_of(["z*"])


def test_sqlite_is_refused_on_a_cluster(tmp_path: Path) -> None:
    """Nodes would look for a file of this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "smon.cli", "worker", "--executor", "ray", "--ray-address", "a:1"],
        cwd=ROOT,
        env={**os.environ, "SMON_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "expected PostgreSQL" in done.stderr
