"""Profiles and dumps of two hosts, shipped by their agents: one verdict on the job."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kineto_files import Ddp, write_ddp
from tests.system.server import ServerProcess, quiet_environ

pytestmark = [pytest.mark.slow]

PATIENCE_S = 180.0

#: The rank that is late, and by how much in its backward, ms.
LATE, EXTRA_MS = 2, 60.0


@contextmanager
def agent(root: Path, host: str, server: ServerProcess) -> Iterator[None]:
    """The agent of a host that has nothing but folders of profiles and dumps."""
    environ = {
        **quiet_environ(),
        "SMON_SERVER": server.url,
        "SMON_SPOOL_DIR": str(root / "spool"),
        "SMON_KINETO_DIR": str(root / "kineto"),
        "SMON_FLIGHT_RECORDER_DIR": str(root / "dumps"),
        "SMON_FILE_STILL_S": "0.2",
        "SMON_HOSTNAME": host,
        "SMON_JOB_ID": "profiled",
    }
    command = [sys.executable, "-m", "ingest_agents.cli", "run"]
    with subprocess.Popen(command, env=environ) as process:
        try:
            yield
        finally:
            process.kill()


def finished(server: ServerProcess) -> dict[str, Any]:
    """The report on the only window of the job, once all ranks are in it."""
    end, seen = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < end:
        for job in server.get("jobs?name=profiled")["items"]:
            windows = server.get(f"jobs/{job['id']}/windows")["items"]
            seen = str(windows)
            if windows and all(window["state"] == "done" for window in windows):
                (window,) = windows
                report: dict[str, Any] = server.get(f"jobs/{job['id']}/windows/{window['id']}")
                if report["window"]["coverage_ratio"] == 1.0:
                    return report
        time.sleep(0.2)
    raise AssertionError(f"no report: {seen}; {server.log.read_text()[-3000:]}")


def report_on(
    hosts: Sequence[Sequence[Path]], folder: str, root: Path, *, timeout_s: float = 60.0
) -> dict[str, Any]:
    """What a server says of files that appear in a folder of each host."""
    server = ServerProcess(root / "server", window_timeout_s=timeout_s)
    with server, ExitStack() as stack:
        for number, paths in enumerate(hosts):
            host = root / f"host-{number}"
            for name in ("kineto", "dumps"):
                (host / name).mkdir(parents=True)
            stack.enter_context(agent(host, f"host-{number}", server))
            for path in paths:
                aside = host / folder / f".{path.name}"
                shutil.copyfile(path, aside)
                aside.rename(host / folder / path.name)
        return finished(server)


def test_profiles_of_two_hosts_are_one_capture_with_one_verdict(tmp_path: Path) -> None:
    """Each agent sees two of four ranks; who is late only shows among all of them."""
    job = Ddp(ranks=4, steps=24, extra_backward=(LATE, EXTRA_MS))
    made = write_ddp(tmp_path / "made", job)
    finding = report_on((made[:2], made[2:]), "kineto", tmp_path)["findings"][0]
    assert finding["verdict"] == "straggler"
    assert finding["where"]["rank"] == LATE
    assert finding["cause"] == "slow_backward"
    assert finding["excess_s"] == pytest.approx(EXTRA_MS / 1e3, rel=0.1)


def test_dumps_of_two_hosts_say_who_has_not_arrived(traces: Path, tmp_path: Path) -> None:
    """Nobody has told the agents the layout: it is in the dumps of all ranks together."""
    folder = traces / "nvrx-flight-recorder" / "lock_gil_2nd"
    dumps = [folder / f"_dump_{rank}" for rank in range(16)]
    # Old dumps do not say how many ranks there are: some time after the last file, that is all.
    report = report_on((dumps[:8], dumps[8:]), "dumps", tmp_path, timeout_s=25.0)
    assert report["verdict"] == "hang"
    assert {finding["where"]["rank"] for finding in report["findings"]} == {10, 15}
    layout = report["job"]["layout"]
    assert (layout["tp"], layout["dp"], layout["pp"]) == (2, 2, 4)
