"""A real `smon serve` in a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

START_S = 180.0
_POLL_S = 0.02

#: Ports that `free_port` gives: so many from here on to each process that runs tests side by side.
#: The kernel gives none of them to a connection, nor to who asks for any port: those lie above.
_FIRST_PORT = 12_000
_PORTS = 2_000
_SIDE_BY_SIDE = 10

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SIDE_BY_SIDE

#: Not from the first one on: another run of the tests may be under way.
_TURNS = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """A port that nobody listens on, and that is given to nobody else for a long while."""
    for turn in itertools.islice(_TURNS, _PORTS):
        port = _FIRST_PORT + _WORKER * _PORTS + turn % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"expected a free port of {_PORTS}, found none")


def quiet_environ() -> dict[str, str]:
    """The environment without any SMON_ variable."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SMON_")}


class ServerProcess:
    """`smon serve`, started, killed and started again on the same ports.

    Parameters
    ----------
    folder
        Holds its data and its log.
    settings
        SMON_ variables, without the prefix, in lower case.
    module
        What is run instead of ``smon.cli``: a server with a bug planted in it.
    """

    def __init__(
        self, folder: Path, *, role: str = "all", module: str = "smon.cli", **settings: object
    ) -> None:
        self.folder = folder
        self.role = role
        self.port, self.ops_port = free_port(), free_port()
        self.module = module
        self.settings = {"data_dir": folder / "data", **settings}
        self.log = folder / f"server-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> Mapping[str, str]:
        """What the process gets."""
        given = {f"SMON_{name.upper()}": str(value) for name, value in self.settings.items()}
        return {**quiet_environ(), **given}

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Its command line."""
        ports = ["--port", str(self.port), "--ops-port", str(self.ops_port)]
        return [sys.executable, "-m", self.module, "serve", "--role", self.role, *ports]

    def start(self, *, wait: bool = True) -> ServerProcess:
        """Start it, and wait until it is ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environ, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until /readyz says so."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.log.read_text()[-3000:]}")
            if self.ready():
                return
            time.sleep(_POLL_S)
        raise AssertionError(f"the server is not ready: {self.log.read_text()[-3000:]}")

    def ready(self) -> bool:
        """Whether it can take batches now."""
        try:
            return request(self.ops_port, "GET", "/readyz")[0] == 200
        except (OSError, HTTPException):
            return False

    def kill(self) -> None:
        """SIGKILL, to it and to its worker."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; its exit code."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill_rest()

    def kill_rest(self) -> None:
        """Leave nothing behind."""
        self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def get(self, path: str) -> Any:  # noqa: ANN401  # JSON
        """The JSON of a route below /api/v1."""
        status, body = request(self.port, "GET", f"/api/v1/{path}")
        assert status == 200, (status, body[:500])
        return json.loads(body)

    def post(self, path: str, document: object) -> Any:  # noqa: ANN401  # JSON
        """The JSON answer to a JSON document."""
        status, body = request(
            self.port,
            "POST",
            f"/api/v1/{path}",
            json.dumps(document).encode(),
            {"Content-Type": "application/json"},
        )
        assert status < 300, (status, body[:500])
        return json.loads(body)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name with labels."""
        _, body = request(self.ops_port, "GET", "/metrics")
        lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def request(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body of one request to this machine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
