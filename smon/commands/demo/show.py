"""The demo from beginning to end: start server and agents, run the job, say what SMon says.

Flow: `smon.commands.demo` → **here** → ``smon serve``, ``smon-agent run`` as processes, and
`smon.commands.demo.trainer`. The answer comes over REST, as anybody would ask for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import Any, Final

from smon.commands.demo.trainer import (
    HOSTS,
    JOB,
    ONSET_STEP,
    SLOW_DP,
    SLOW_FACTOR,
    SLOW_STAGE,
    Trainer,
)
from smon.errors import ConfigError, StoreError

_LOOPBACK: Final = "127.0.0.1"
_PRICE: Final = "2"

#: A server that is not ready by then will not be; nor will the answer come.
_START_S: Final = 60.0
_ANSWER_S: Final = 180.0
_POLL_S: Final = 0.25
_LAST_WORDS: Final = 2_000


@dataclass(frozen=True, slots=True)
class _Ports:
    """Of the server; the second is for health."""

    api: int
    ops: int

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.api}"


def show(folder: Path, *, port: int, once: bool) -> int:
    """Run the demo in a folder.

    Returns
    -------
    int
        Exit code.

    Raises
    ------
    ConfigError
        There is no free port.
    StoreError
        The server does not start, or gives no answer.
    """
    ports = _free_ports(port)
    stop = threading.Event()
    with _signals(stop), _processes(folder, ports):
        layout = f"{HOSTS} hosts"
        print(f"SMon runs at {ports.url}", flush=True)
        print(
            f"A synthetic training job starts: 256 GPUs (8 DP × 4 PP × 8 TP) on {layout}, whose "
            "agents ship every step.",
            flush=True,
        )
        return _watch(folder, ports, once=once, stop=stop)


def _watch(folder: Path, ports: _Ports, *, once: bool, stop: threading.Event) -> int:
    onset = threading.Event()

    def said(step: int) -> None:
        if step == ONSET_STEP:
            onset.set()
            print(
                f"Step {step}: from now on, one worker computes {SLOW_FACTOR} × as long. SMon sees "
                "the trace only.",
                flush=True,
            )

    trainer = Trainer([folder / f"spool-{number}" for number in range(HOSTS)], said)
    trainer.start()
    try:
        answer = _answer(ports, trainer, onset, stop)
        if answer is not None:
            _print_answer(answer, ports)
            if not once:
                print("\nThe job goes on. Ctrl-C ends everything.", flush=True)
                _wait(trainer, stop)
    finally:
        trainer.stop()
    return 0


def _wait(trainer: Trainer, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        if trainer.error is not None:
            raise StoreError(f"the job of the demo failed: {trainer.error}") from trainer.error


@dataclass(frozen=True, slots=True)
class _Answer:
    """What SMon says of the job, and how long after the onset."""

    job: Mapping[str, Any]
    seconds: float


def _answer(
    ports: _Ports, trainer: Trainer, onset: threading.Event, stop: threading.Event
) -> _Answer | None:
    """The answer that names the slow worker; None if the demo is stopped before."""
    end = time.monotonic() + _ANSWER_S
    begun = 0.0
    while not stop.wait(_POLL_S):
        if trainer.error is not None:
            raise StoreError(f"the job of the demo failed: {trainer.error}") from trainer.error
        if onset.is_set() and not begun:
            begun = time.monotonic()
        job = _named(ports) if begun else None
        if job is not None:
            return _Answer(job, time.monotonic() - begun)
        if time.monotonic() > end:
            raise StoreError(f"no answer within {_ANSWER_S:.0f} s: look at {ports.url}")
    return None


def _named(ports: _Ports) -> Mapping[str, Any] | None:
    """The job with its findings, as soon as one names the slow worker."""
    try:
        jobs = _get(ports.api, f"/api/v1/jobs?name={JOB}")["items"]
        if not jobs:
            return None
        job: Mapping[str, Any] = _get(ports.api, f"/api/v1/jobs/{jobs[0]['id']}")
    except (OSError, HTTPException, ValueError, KeyError):
        return None
    right = [
        finding
        for finding in job["findings"]
        if (finding["cause"], finding["dp"], finding["stage"]) == ("slow_gpu", SLOW_DP, SLOW_STAGE)
    ]
    return job if right else None


def _print_answer(answer: _Answer, ports: _Ports) -> None:
    print(f"\n{answer.seconds:.1f} s later, SMon says:\n", flush=True)
    for line in answer.job["lines"]:
        print(f"  {line}")
    print(f"\n  page   {ports.url}/jobs/{answer.job['id']}")
    print(f"  REST   {ports.url}/api/v1/jobs/{answer.job['id']}")
    print(f"  API    {ports.url}/api/v1/openapi.json", flush=True)


# --- processes ------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes(folder: Path, ports: _Ports) -> Iterator[None]:
    """The server, ready, and an agent per host."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.append(_server(folder, ports))
        _wait_ready(children[0], folder, ports)
        children += [_agent(folder, ports, number) for number in range(HOSTS)]
        yield
    finally:
        # Agents first, so that they send what they have.
        for child in reversed(children):
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _server(folder: Path, ports: _Ports) -> subprocess.Popen[bytes]:
    options = ["--port", str(ports.api), "--ops-port", str(ports.ops)]
    environ = {
        **_environ(),
        "SMON_DATA_DIR": str(folder / "data"),
        "SMON_PRICE_PER_GPU_HOUR": _PRICE,
    }
    return _start(["-m", "smon.cli", "serve", *options], environ, folder / "server.log")


def _agent(folder: Path, ports: _Ports, number: int) -> subprocess.Popen[bytes]:
    environ = {
        **_environ(),
        "SMON_SERVER": ports.url,
        "SMON_SPOOL_DIR": str(folder / f"spool-{number}"),
        "SMON_HOSTNAME": f"gpu-node-{number}",
    }
    (folder / f"spool-{number}").mkdir(exist_ok=True)
    command = ["-m", "ingest_agents.cli", "run"]
    return _start(command, environ, folder / f"agent-{number}.log")


def _environ() -> dict[str, str]:
    """Without settings of another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SMON_")}


def _start(arguments: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        # In a session of its own: Ctrl-C is for the demo, which ends its children in order.
        return subprocess.Popen(  # noqa: S603  # our own commands
            [sys.executable, *arguments],
            env=environ,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _wait_ready(server: subprocess.Popen[bytes], folder: Path, ports: _Ports) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError, HTTPException):
            if _request(ports.ops, "/readyz")[0] == 200:  # noqa: PLR2004  # OK
                return
        time.sleep(0.05)
    log = folder / "server.log"
    words = log.read_text(errors="replace")[-_LAST_WORDS:] if log.exists() else ""
    raise StoreError(f"the server did not start: {words}")


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the demo in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def noted(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_ports(wanted: int) -> _Ports:
    """The wanted port and the next one, or any two that are free."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError, OverflowError), socket.socket() as api:
            api.bind((_LOOPBACK, port))
            first = int(api.getsockname()[1])
            with socket.socket() as ops:
                ops.bind((_LOOPBACK, first + 1 if port else 0))
                return _Ports(first, int(ops.getsockname()[1]))
    raise ConfigError("there is no free port: end another program that listens")


def _get(port: int, path: str) -> Any:  # noqa: ANN401  # JSON
    status, body = _request(port, path)
    if status != 200:  # noqa: PLR2004  # OK
        raise ValueError(f"status {status}")
    return json.loads(body)


def _request(port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection(_LOOPBACK, port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
