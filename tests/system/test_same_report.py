"""One trace, one report: whatever way it came in, wherever it was kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smon.trace.load import load
from tests.system.replay import replay
from tests.system.server import ServerProcess, quiet_environ

pytestmark = [pytest.mark.slow]

Expected = Callable[[str], dict[str, Any]]

NAMES = ("AR", "SE", "ST")


def analyze(path: Path) -> dict[str, Any]:
    """What `smon analyze` says of a file."""
    command = [sys.executable, "-m", "smon.cli", "analyze", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, env=quiet_environ())
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def finished_report(server: ServerProcess, name: str, timeout_s: float = 120.0) -> dict[str, Any]:
    """The report of the job's only window, once it is there."""
    end = time.monotonic() + timeout_s
    windows: list[dict[str, Any]] = []
    while time.monotonic() < end:
        jobs = [job for job in server.get(f"jobs?name={name}")["items"] if job["name"] == name]
        if jobs:
            windows = server.get(f"jobs/{jobs[0]['id']}/windows")["items"]
            if windows and all(window["state"] == "done" for window in windows):
                assert len(windows) == 1
                report: dict[str, Any] = server.get(
                    f"jobs/{jobs[0]['id']}/windows/{windows[0]['id']}"
                )
                return report
        time.sleep(0.1)
    raise AssertionError(f"no report of {name}: {windows}; {server.log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def expected(traces: Path) -> Expected:
    """Reports of the recorded traces."""
    known: dict[str, dict[str, Any]] = {}

    def report(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = analyze(traces / "straggler-analysis" / f"trace-{name}.parquet")
        return known[name]

    return report


@pytest.fixture
def server(database_url: str, any_root: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server: SQLite and PostgreSQL, each on local files and on S3."""
    with ServerProcess(tmp_path / "server", database_url=database_url, trace_url=any_root) as one:
        yield one


def send(server: ServerProcess, path: Path) -> None:
    """Ship a recorded trace with the agent's command."""
    command = [sys.executable, "-m", "ingest_agents.cli", "send", str(path), "--server", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet_environ())
    assert done.returncode == 0, done.stderr


def test_a_trace_gives_one_report_whatever_way_it_came(
    server: ServerProcess, traces: Path, expected: Expected
) -> None:
    """Sent by the command, or live by several agents, shuffled, with duplicates: as from a file."""
    for name in NAMES:
        path = traces / "straggler-analysis" / f"trace-{name}.parquet"
        send(server, path)
        trace = load([path])
        job = replace(trace.job, job_id=f"{name}-replayed")
        answers = replay(server, replace(trace, job=job), agents=3, seed=len(name))
        assert answers.duplicates > answers.stored // 5
        sent = finished_report(server, expected(name)["job"]["job_id"])
        replayed = finished_report(server, job.job_id)
        assert sent == expected(name)
        assert replayed["job"].pop("job_id") == job.job_id
        original = json.loads(json.dumps(expected(name)))
        del original["job"]["job_id"]
        assert replayed == original


def test_sending_a_trace_again_changes_nothing(
    server: ServerProcess, traces: Path, expected: Expected
) -> None:
    """The same files are the same stream: a second send is all duplicates."""
    path = traces / "straggler-analysis" / "trace-ST.parquet"
    send(server, path)
    first = finished_report(server, expected("ST")["job"]["job_id"])
    send(server, path)
    assert finished_report(server, expected("ST")["job"]["job_id"]) == first == expected("ST")
    assert len(server.get("jobs")["items"]) == 1
