"""A real server on a port of its own, and a client that speaks bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from starlette.applications import Starlette

from smon.api.access import Access, Scope
from smon.api.agents import agent_routes
from smon.api.ingest import ingest_routes
from smon.api.ops import OpsServer
from smon.api.protocol import bounded_protocol
from smon.config import Settings
from smon.errors import StoreError, WireError
from smon.ingest.service import IngestService, Parts
from smon.store.database import Database
from smon.store.models import Base
from smon.store.objects import Objects
from smon.wire import Batch
from smon.wire.problems import Problem
from tests.ingest.batches import STREAM, settings

#: Longer than anything takes; a test that waits for so long has failed.
PATIENCE_S = 30.0

TOKENS = {
    "good": Access("default", frozenset({Scope.INGEST})),
    "reader": Access("default", frozenset({Scope.READ})),
    "other": Access("other", frozenset({Scope.INGEST})),
}


class TokenGate:
    """Knows three tokens; fails while it is down.

    Attributes
    ----------
    asked
        How often it was asked.
    """

    def __init__(self) -> None:
        self.down = False
        self.asked = 0

    def access(self, headers: Mapping[str, str]) -> Access:
        """What the request may do."""
        self.asked += 1
        if self.down:
            raise StoreError("the database cannot be used: connection to 10.0.0.1 refused")
        access = TOKENS.get(headers.get("authorization", "").removeprefix("Bearer "))
        if access is None:
            raise WireError(Problem.UNAUTHORIZED, "expected a token")
        return access


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:  # noqa: ANN401  # JSON
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """Name of the problem, of a sound problem document."""
        assert self.headers["content-type"] == "application/problem+json"
        assert self.document["status"] == self.status
        assert {"type", "title", "status", "detail"} <= self.document.keys()
        assert (self.status in {429, 503, 507}) == ("retry-after" in self.headers)
        if "retry-after" in self.headers:
            assert int(self.headers["retry-after"]) >= 1
        return str(self.document["type"]).removeprefix("urn:smon:problem:")


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def closed(self) -> bool:
        """Wait until the server closes; whether it did so without a word."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def answer(self) -> Answer:
        """Read one answer."""
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
        status = int(line.split()[1])
        length = 0 if status == 100 else int(headers["content-length"])
        while len(self._rest) < length:
            self._more()
        body, self._rest = self._rest[:length], self._rest[length:]
        return Answer(status, headers, body)

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("closed")
        self._rest += data

    def put(self, batch: Batch, **options: Any) -> Answer:  # noqa: ANN401  # as request_of
        """Send a batch."""
        self.send(request_of(batch, **options))
        return self.answer()

    def ask(
        self, method: str, path: str, body: bytes = b"", *, type_: str = "application/json"
    ) -> Answer:
        """Send another request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer good\r\n"
            f"Content-Type: {type_}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.send(head.encode() + body)
        return self.answer()

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def request_of(
    batch: Batch,
    *,
    place: str = "",
    token: str = "good",  # noqa: S107  # no secret
    method: str = "PUT",
    headers: Mapping[str, str | None] | None = None,
) -> bytes:
    """The bytes of a request; headers that are None are left out."""
    place = place or f"{STREAM}/0/{batch.seq}"
    lines: dict[str, str | None] = {"Host": "localhost", "Authorization": f"Bearer {token}"}
    lines |= batch.headers()
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} /api/v1/ingest/{place} HTTP/1.1\r\n{head}\r\n".encode() + batch.body


@dataclass
class Running:
    """A server that runs in a thread."""

    settings: Settings
    parts: Parts = field(default_factory=Parts)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.database = Database(self.settings.database)
        Base.metadata.create_all(self.database.engine)
        with self.database.write() as session:
            for tenant in ("default", "other"):
                session.execute(
                    text("INSERT INTO tenants (id, name, created_ns) VALUES (:t, :t, 0)"),
                    {"t": tenant},
                )
        self.gate = TokenGate()
        self.service = IngestService(
            self.settings,
            self.database,
            Objects(self.settings.traces),
            registry=self.registry,
            parts=self.parts,
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._clients: list[Client] = []
        self._ops: OpsServer | None = None
        self._server: uvicorn.Server | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Returns when it answers."""
        self._ops = OpsServer(self.settings, self.registry, self.service.ready)
        self._ops.start()
        self._thread.start()
        assert self._up.wait(PATIENCE_S)

    def _run(self) -> None:
        routes = [
            *ingest_routes(self.service, self.gate),
            *agent_routes(self.service, self.gate),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            http=bounded_protocol(self.settings, self.registry),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=max(1, round(self.settings.keep_alive_s)),
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

        async def serve() -> None:
            assert self._server is not None
            self.service.start()
            serving = asyncio.create_task(self._server.serve([self._listener]))
            while not self._server.started:  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.002)
            self._up.set()
            await serving
            await self.service.stop()

        asyncio.run(serve())

    def stop(self) -> None:
        """End it."""
        for client in self._clients:
            client.close()
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
        if self._ops is not None:
            self._ops.stop()
        self.database.close()

    def client(self) -> Client:
        """A new connection."""
        self._clients.append(Client(self.port))
        return self._clients[-1]

    def health(self, path: str) -> Answer:
        """Ask the ops port."""
        assert self._ops is not None
        client = Client(self._ops.port)
        try:
            return client.ask("GET", path)
        finally:
            client.close()

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric."""
        return self.registry.get_sample_value(name, labels) or 0.0


def folder_settings(folder: Path, **changed: Any) -> Settings:  # noqa: ANN401  # settings
    """Settings for a server on ports that are free."""
    usual = {"drain_interval_s": 0.05, "stop_timeout_s": 0.5}
    return settings(folder, port=0, **{**usual, **changed})
