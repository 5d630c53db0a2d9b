"""Real processes that are killed: a server, its power cut, agents."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.faults import planted_server, synced
from tests.faults.forge import ROOT, Forked, forge
from tests.faults.synced import Cut, cut_power
from tests.system.server import ServerProcess, quiet_environ

#: Of a server that has little to do between two kills.
QUICK = {
    "flush_interval_s": 0.02,
    "drain_interval_s": 0.1,
    "min_free_bytes": 0,
    "log_level": "info",
}


class FaultServer(ServerProcess):
    """A server that is started fast, may have a bug, and may lose its power.

    Parameters
    ----------
    settings
        SMON_ variables, without the prefix, in lower case.
    plant
        Name of a bug (`tests.faults.planted_server.PLANTS`); empty: none.
    power_cut
        Whether a kill is one: then what was not synced is lost.
    warm
        Whether imports are saved (`tests.faults.forge`).
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object] | None = None,
        *,
        role: str = "api",
        plant: str = "",
        power_cut: bool = False,
        warm: bool = True,
    ) -> None:
        special = bool(plant) or power_cut
        module = "tests.faults.planted_server" if special else "smon.cli"
        super().__init__(folder, role=role, module=module, **{**QUICK, **(settings or {})})
        self.plant, self.power_cut, self.warm = plant, power_cut, warm
        self.cut = Cut()
        self._chance = random.Random(0)  # noqa: S311  # no secret

    @property
    def data(self) -> Path:
        """Its data folder."""
        return Path(str(self.settings["data_dir"]))

    @property
    def notes(self) -> Path:
        """Of its syncs."""
        return self.folder / "synced.jsonl"

    @property
    def environ(self) -> Mapping[str, str]:
        """What the process gets."""
        environ = {**super().environ, "PYTHONPATH": str(ROOT)}
        if self.plant:
            environ[planted_server.VARIABLE] = self.plant
        if self.power_cut:
            environ[synced.VARIABLE] = f"{self.notes}{os.pathsep}{self.data}"
        return environ

    def start(self, *, wait: bool = True) -> FaultServer:
        """Start it, and wait until it is ready."""
        if not self.warm:
            super().start(wait=wait)
            return self
        self.data.mkdir(parents=True, exist_ok=True)
        made: Any = forge().start(self.module, self.command()[3:], self.environ, self.log)
        self.process = made
        if wait:
            self.wait_ready()
        return self

    def kill(self) -> None:
        """SIGKILL, to it and to its worker; the power goes too, if it is to."""
        if self.process is None:
            return
        for send, target in ((os.killpg, self.process.pid), (os.kill, self.process.pid)):
            # A fork that has just begun has no group of its own yet.
            with suppress(ProcessLookupError):
                send(target, signal.SIGKILL)
        self.process.wait()
        self.process = None
        if self.power_cut:
            self.cut += self._lose_power()

    def _lose_power(self) -> Cut:
        return cut_power(self.notes, self.data, self._chance)

    @property
    def wal_records(self) -> int:
        """Batches that are in its log and not stored yet."""
        return int(self.metrics()["smon_wal_records"])


class AgentProcess:
    """A real ``smon-agent run`` of one spool.

    Parameters
    ----------
    settings
        SMON_ variables, without the prefix, in lower case.

    Attributes
    ----------
    environ
        Other variables.
    """

    def __init__(
        self,
        server: str,
        spool: Path,
        host: str,
        settings: Mapping[str, object] | None = None,
        *,
        module: str = "ingest_agents.cli",
        log_folder: Path | None = None,
    ) -> None:
        self.spool = spool
        self.environ: Mapping[str, str] = {"PYTHONPATH": str(ROOT)}
        self.module = module
        self.log = (log_folder or spool.parent) / f"{host}.log"
        self.settings = {
            "server": server,
            "spool_dir": spool,
            "hostname": host,
            "poll_s": 0.02,
            "retry_min_s": 0.02,
            "retry_max_s": 0.3,
            "timeout_s": 10.0,
            "stop_s": 5.0,
            **(settings or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> AgentProcess:
        """Start it."""
        given = {f"SMON_{name.upper()}": str(value) for name, value in self.settings.items()}
        environ = {**quiet_environ(), **given, **self.environ}
        command = [sys.executable, "-m", self.module, "run"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=ROOT)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; its exit code."""
        if self.process is None:
            return 0
        self.process.terminate()
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()


def unsent(spool: Path) -> list[Path]:
    """Streams that are still in a spool."""
    others = {"quarantine", "dead"}
    return [
        path
        for path in spool.iterdir()
        if path.is_dir() and path.name not in others and not path.name.startswith(".")
    ]


class WorkerProcess:
    """A real ``smon worker`` beside a server, on its database and event files."""

    def __init__(self, server: FaultServer, name: str) -> None:
        self.name = name
        self._server = server
        self._process: Forked | None = None

    def start(self) -> WorkerProcess:
        """Start it."""
        arguments = ["worker", "--name", self.name]
        log = self._server.folder / f"{self.name}.log"
        self._process = forge().start("smon.cli", arguments, self._server.environ, log)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        os.kill(self._process.pid, number)
