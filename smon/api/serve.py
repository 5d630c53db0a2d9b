"""One server process: ingest, REST and pages on one port, health on another, a worker beside it.

Flow: `smon.commands.serve` → **here** → `smon.api.app`, `smon.ingest`, `smon.api.ops`, and
``smon worker`` as a child process. Ports are bound first, so that a wrong one is one clear line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry

from smon.api.access import Gate, gate_for
from smon.api.app import create_app
from smon.api.child import ChildProcess, worker_command
from smon.api.descriptors import ask_for
from smon.api.ingest import FastLane
from smon.api.ops import OpsServer
from smon.api.pages.static import pack_early
from smon.api.protocol import bounded_protocol
from smon.config import PARENT_VARIABLE, Settings
from smon.errors import ConfigError
from smon.ingest.service import IngestService
from smon.metrics.jobs import JobCollector
from smon.metrics.process import register_links, register_process
from smon.store.database import Database
from smon.store.objects import Objects

_log = logging.getLogger(__name__)

_BACKLOG = 1024


class Role(StrEnum):
    """What a server process does."""

    ALL = "all"
    API = "api"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server can be reached."""

    url: str
    ops_url: str


def bind(settings: Settings) -> tuple[socket.socket, socket.socket]:
    """The sockets of API and operations.

    Raises
    ------
    ConfigError
        An address cannot be bound.
    """
    api = _bound(settings.host, settings.port)
    try:
        return api, _bound(settings.ops_host or settings.host, _ops_port(settings, api))
    except ConfigError:
        api.close()
        raise


def _ops_port(settings: Settings, api: socket.socket) -> int:
    if settings.ops_port >= 0 or not settings.port:
        return max(settings.ops_port, 0)
    return int(api.getsockname()[1]) + 1


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}: choose another with --host, --port "
            "or --ops-port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket, as a URL for this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # not bound here
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


class Server:
    """A server process, from start to stop.

    Parameters
    ----------
    settings
        With data folder, database and objects in place.
    sockets
        As `bind` makes them.
    environ
        Of this process; the worker beside it gets it too.
    """

    def __init__(
        self,
        settings: Settings,
        sockets: tuple[socket.socket, socket.socket],
        environ: Mapping[str, str],
        role: Role = Role.ALL,
    ) -> None:
        port, ops_port = (int(each.getsockname()[1]) for each in sockets)
        self._settings = replace(settings, port=port, ops_port=ops_port)
        self._sockets = sockets
        self._database = Database(settings.database)
        self._objects = Objects(settings.traces)
        self._registry = CollectorRegistry()
        self._gate: Gate = gate_for(self._settings, self._database)
        self._ingest = IngestService(
            self._settings,
            self._database,
            self._objects,
            registry=self._registry,
        )
        register_process(self._registry, role)
        register_links(self._registry, self._settings)
        self._registry.register(JobCollector(self._database, self._settings))
        self._worker = _worker(self._settings, environ) if role is Role.ALL else None

    @property
    def listening(self) -> Listening:
        """Where it listens."""
        return Listening(url_of(self._sockets[0]), url_of(self._sockets[1]))

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish what has begun."""
        # uvicorn stops on these, and then raises them again for whoever handled them before: the
        # default handlers would end the process before the log is drained.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _noted)
        ask_for(self._settings.max_connections)
        ops = OpsServer(self._settings, self._registry, self._ingest.ready, self._sockets[1])
        ops.start()
        if self._worker is not None:
            self._worker.start()
        try:
            self._serve()
        finally:
            if self._worker is not None:
                self._worker.stop()
            ops.stop()
            self._database.close()

    def _serve(self) -> None:
        app = create_app(self._settings, self._database, self._objects, self._ingest, self._gate)
        pack_early()
        config = uvicorn.Config(
            FastLane(app, self._ingest, self._gate),
            http=bounded_protocol(self._settings, self._registry),
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=max(round(self._settings.keep_alive_s), 1),
            timeout_graceful_shutdown=max(round(self._settings.stop_timeout_s / 2), 1),
        )
        server = uvicorn.Server(config)

        async def serve() -> None:
            self._ingest.start()
            try:
                await server.serve([self._sockets[0]])
            finally:
                await self._ingest.stop()

        factory = config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve())


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The signal has done its work."""


def _worker(settings: Settings, environ: Mapping[str, str]) -> ChildProcess:
    variables = {**environ, **settings.to_env(), PARENT_VARIABLE: str(os.getpid())}
    return ChildProcess(worker_command(), variables, settings.stop_timeout_s)
