"""Trainers in processes of their own, under torch's interpreter, with agents that ship their ops.

A trainer is a module of this folder that is run once per rank; what it shall do it reads from the
JSON document in ``SMON_TEST_PLAN``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults.processes import AgentProcess
from tests.system.server import ServerProcess, free_port, quiet_environ
from tests.torch.plans import PLAN, RESULT

#: Python with torch; `.ci/torch` makes it.
PYTHON = "SMON_TORCH_PYTHON"

TRAIN_S = 600.0
REPORT_S = 300.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a trainer.

    Attributes
    ----------
    name
        Of the job, as the server shows it.
    trainer
        Name of the module in this folder.
    layout
        As ``SMON_LAYOUT``; empty: every rank is a DP rank.
    plan
        What the trainer shall do.
    steps
        Recorded steps: all are one window.
    hosts
        Ranks are dealt to so many hosts, each with a spool and an agent of its own.
    environ
        Further variables of the trainers.
    """

    name: str
    trainer: str
    plan: Mapping[str, Any]
    steps: int
    ranks: int = 4
    layout: str = ""
    hosts: int = 2
    environ: Mapping[str, str] = field(default_factory=dict)

    def host(self, rank: int) -> int:
        """Number of the host of a rank: neighbours share one."""
        return rank * self.hosts // self.ranks


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that has ended.

    Attributes
    ----------
    report
        Of its window, as REST shows it.
    results
        What each trainer has measured itself, by rank.
    """

    report: dict[str, Any]
    results: tuple[dict[str, Any], ...]


def interpreter() -> str:
    """Python with torch.

    A test that finds none has failed: nobody runs these tests without meaning it.
    """
    found = os.environ.get(PYTHON, "")
    assert Path(found).is_file(), f"expected {PYTHON} to name a Python that has torch: make torch"
    return found


def run(job: Job, server: ServerProcess, folder: Path) -> Ran:
    """Train, ship, and wait for the report of the job's window."""
    with shipped(job, server, folder) as spools:
        results = train(job, spools, folder)
        report = finished_report(server, job.name)
    (folder / f"{job.name}-report.json").write_text(json.dumps(report, indent=1))
    return Ran(report, results)


@contextmanager
def shipped(job: Job, server: ServerProcess, folder: Path) -> Iterator[list[Path]]:
    """Spools with a running agent each."""
    spools = [folder / f"{job.name}-host-{number}" for number in range(job.hosts)]
    with ExitStack() as stack:
        for spool in spools:
            spool.mkdir(parents=True)
            agent = AgentProcess(server.url, spool, spool.name, log_folder=folder)
            stack.enter_context(agent)
        yield spools


def train(job: Job, spools: Sequence[Path], folder: Path) -> tuple[dict[str, Any], ...]:
    """Run all ranks to their end; what each has left as its result."""
    port, python = free_port(), interpreter()
    outputs = [folder / f"{job.name}-rank-{rank}.json" for rank in range(job.ranks)]
    logs = [output.with_suffix(".log") for output in outputs]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            environ = {**_environ(job, rank, port), RESULT: str(outputs[rank])}
            environ["SMON_SPOOL_DIR"] = str(spools[job.host(rank)])
            process = subprocess.Popen(
                [python, "-m", f"tests.torch.{job.trainer}"],
                env=environ,
                cwd=ROOT,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            processes.append(process)
            stack.callback(_kill, process)
        _wait(processes, logs)
    return tuple(json.loads(output.read_text()) if output.exists() else {} for output in outputs)


def _environ(job: Job, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set, and what the recorder needs."""
    per_host = job.ranks // job.hosts
    variables = {
        "RANK": rank,
        "WORLD_SIZE": job.ranks,
        "LOCAL_RANK": rank % per_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": ROOT,
        "SMON_JOB_ID": job.name,
        "SMON_LAYOUT": job.layout,
        "SMON_HOSTNAME": f"{job.name}-host-{job.host(rank)}",
        "SMON_WINDOW_STEPS": job.steps,
        PLAN: json.dumps(job.plan),
        **job.environ,
    }
    return {**quiet_environ(), **{name: str(value) for name, value in variables.items()}}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Wait for all; the first that fails fails the test, with what it has said."""
    end = time.monotonic() + TRAIN_S
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        failed = [rank for rank, code in enumerate(codes) if code]
        assert not failed, _said(failed, logs)
        assert time.monotonic() < end, _said(range(len(logs)), logs)
        time.sleep(_POLL_S)


def _said(ranks: Iterable[int], logs: Sequence[Path]) -> str:
    return "\n".join(f"rank {rank}: {logs[rank].read_text()[-2000:]}" for rank in ranks)


def finished_report(server: ServerProcess, name: str) -> dict[str, Any]:
    """The report of a job's only window, once it is there."""
    end = time.monotonic() + REPORT_S
    windows: list[dict[str, Any]] = []
    while time.monotonic() < end:
        jobs = [job for job in server.get(f"jobs?name={name}")["items"] if job["name"] == name]
        if jobs:
            windows = server.get(f"jobs/{jobs[0]['id']}/windows")["items"]
            if windows and all(window["state"] == "done" for window in windows):
                assert len(windows) == 1, windows
                path = f"jobs/{jobs[0]['id']}/windows/{windows[0]['id']}"
                report: dict[str, Any] = server.get(path)
                return report
        time.sleep(_POLL_S)
    raise AssertionError(f"no report of {name}: {windows}; {server.log.read_text()[-3000:]}")
