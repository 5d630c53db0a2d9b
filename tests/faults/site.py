"""A little site for tests of one fault: one server, a relay, hosts with spools and agents."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Self

from tests.faults.events import Appended, Stored, Verdict, compare
from tests.faults.outside import read_stored
from tests.faults.processes import AgentProcess, FaultServer, unsent
from tests.faults.producers import Load, Producer
from tests.faults.proxy import Proxy
from tests.system.server import request
from tests.waiting import PATIENCE_S, wait_until

_NS = 10**9


class Site:
    """What a test breaks.

    Parameters
    ----------
    spools
        Folder of the spools, e.g. on another disk.
    url
        Of the database; by default the first server's SQLite.
    """

    def __init__(
        self,
        folder: Path,
        servers: Sequence[FaultServer],
        *,
        load: Load | None = None,
        spools: Path | None = None,
        url: str = "",
    ) -> None:
        load = load or Load(hosts=2)
        self.servers = list(servers)
        self.url = url or f"sqlite:///{self.server.data / 'smon.db'}"
        traces = str(self.server.settings.get("trace_url") or self.server.data / "objects")
        self.objects = Path(traces)
        self.appended = Appended(time.time_ns() - 3600 * _NS)
        self.proxy = Proxy([server.port for server in servers])
        base = spools or folder
        paths = [base / f"spool-{number}" for number in range(load.hosts)]
        self.producers = [
            Producer(number, path, load, self.appended) for number, path in enumerate(paths)
        ]
        self.agents = [
            AgentProcess(self.proxy.url, path, f"host-{number}", log_folder=folder)
            for number, path in enumerate(paths)
        ]

    @property
    def server(self) -> FaultServer:
        """The only one, or the first."""
        return self.servers[0]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for server in self.servers:
            server.start(wait=False)
        for server in self.servers:
            server.wait_ready()
        for agent in self.agents:
            agent.start()
        for producer in self.producers:
            producer.start()
        self.wait_for_batches()

    def __exit__(self, *_error: object) -> None:
        for agent in self.agents:
            agent.kill()
        for producer in self.producers:
            if producer.is_alive():
                producer.finish()
        for server in self.servers:
            server.kill()
        self.proxy.close()

    @property
    def acknowledged(self) -> int:
        """Batches that agents know to be safe."""
        return len(self.proxy.counts.acknowledged)

    def wait_for_batches(self, more: int = 10, seconds: float = PATIENCE_S) -> None:
        """Wait until so many more are acknowledged."""
        goal = self.acknowledged + more
        wait_until(lambda: self.acknowledged >= goal, f"{more} more batches", seconds)

    def wait_for_answer(self, status: str) -> None:
        """Wait until a batch is answered so once more."""
        before = self.proxy.counts.answers[status]
        wait_until(lambda: self.proxy.counts.answers[status] > before, f"an answer {status}")

    def reasons(self) -> str:
        """Why the server is not ready; empty: it is."""
        status, body = request(self.server.ops_port, "GET", "/readyz")
        return "" if status == 200 else json.dumps(json.loads(body))

    def crash(self) -> None:
        """SIGKILL the server and start it again; it need not become ready, but must be there."""
        self.server.kill()
        self.server.start(wait=False)
        wait_until(self._is_up, "a server that answers")

    def _is_up(self) -> bool:
        process = self.server.process
        assert process is not None
        assert process.poll() is None, self.server.log.read_text()[-3000:]
        try:
            return request(self.server.ops_port, "GET", "/healthz")[0] == 200
        except (OSError, HTTPException):
            return False

    def restart_agents(self) -> None:
        """SIGKILL and start: they forget how long the server has told them to wait."""
        for agent in self.agents:
            agent.kill()
            agent.start()

    def finish(self) -> Verdict:
        """Stop writing, wait until everything is stored, and compare."""
        for producer in self.producers:
            producer.finish()
        wait_until(lambda: not any(unsent(agent.spool) for agent in self.agents), "empty spools")
        wait_until(lambda: not any(server.wal_records for server in self.servers), "empty logs")
        return compare(self.appended, self.stored())

    def stored(self) -> Stored:
        """What is in database and files now."""
        return read_stored(self.url, self.objects)
