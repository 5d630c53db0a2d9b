"""Health and metrics on a port of their own, which answers whatever happens on the other.

Flow: Prometheus, load balancers, systemd → **here** → `smon.ingest.service.IngestService.ready` and
the registry. Own thread, own event loop, own caps: neither an overload nor slow clients of the API
keep it from answering.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import orjson
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from smon.api.problems import problem_response
from smon.api.protocol import bounded_protocol
from smon.config import Settings
from smon.errors import ConfigError
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

HEALTH: Final = "/healthz"
READY: Final = "/readyz"
METRICS: Final = "/metrics"

_START_TIMEOUT_S: Final = 10.0
_BACKLOG: Final = 128
_KEEP_ALIVE_S: Final = 15
_GRACE_S: Final = 1
_POLL_S: Final = 0.005

_OK: Final = 200
_NOT_READY: Final = 503

Ready = Callable[[], list[str]]


class OpsApp:
    """The application: ``/healthz``, ``/readyz``, ``/metrics``.

    Parameters
    ----------
    ready
        Why this process should get no requests; empty if it should.
    """

    __slots__ = ("_ready", "_registry")

    def __init__(self, registry: CollectorRegistry, ready: Ready) -> None:
        self._registry = registry
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        response = await self._answer(scope)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        if scope["path"] not in {HEALTH, READY, METRICS}:
            return problem_response(Problem.NOT_FOUND, f"expected {HEALTH}, {READY} or {METRICS}")
        if scope["method"] not in {"GET", "HEAD"}:
            return problem_response(Problem.METHOD_NOT_ALLOWED, "expected GET")
        if scope["path"] == HEALTH:
            return PlainTextResponse("ok\n")
        if scope["path"] == METRICS:
            # In a thread: a collector may ask the database, and health must answer meanwhile.
            text = await asyncio.to_thread(generate_latest, self._registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)
        reasons = await asyncio.to_thread(self._ready)
        document = {"ready": not reasons, "reasons": reasons}
        return Response(
            orjson.dumps(document), 503 if reasons else 200, media_type="application/json"
        )


class OpsServer:
    """The server of the ops port, in a thread of its own.

    Parameters
    ----------
    ready
        Why this process should get no requests; empty if it should. Called from any thread.
    listener
        A socket that is bound; None: one for ``ops_host`` and ``operations_port``.

    Raises
    ------
    ConfigError
        The address cannot be bound.
    """

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        ready: Ready,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener or bound(settings)
        # Its own counters are not told apart from the API's, so they are not published.
        protocol = bounded_protocol(
            replace(settings, keep_alive_s=_KEEP_ALIVE_S), CollectorRegistry()
        )
        config = uvicorn.Config(
            OpsApp(registry, ready),
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smon-ops", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to answer; returns when it does."""
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            _log.error("the ops port does not answer yet")

    def stop(self) -> None:
        """End, after the requests that are being answered."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._server.serve([self._listener]))
        # uvicorn has a flag for having started, and no event.
        while not self._server.started and not serving.done():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._started.set()
        await serving


def bound(settings: Settings) -> socket.socket:
    """A socket for ``ops_host`` and ``operations_port``.

    Raises
    ------
    ConfigError
        The address cannot be bound.
    """
    host = settings.ops_host or settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, settings.operations_port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {settings.operations_port}: {error.strerror}: choose "
            "another with --ops-port"
        ) from error
    return listener
