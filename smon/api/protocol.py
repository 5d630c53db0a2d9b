"""HTTP at the socket: how long a request may take to arrive, and how many connections there are.

Flow: socket → **here** → `smon.api.app`. uvicorn has no deadline for receiving a request: whoever
sends one byte a second keeps a connection for ever, and a few thousand of them keep everybody else
out. Its own cap on concurrency would answer health checks with 503. So each connection has a
deadline, each address a number of connections, and each head a size.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections import Counter as Counts
from typing import Any, ClassVar, Final, cast

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from smon.api.problems import CONTENT_TYPE, problem_document
from smon.config import Settings
from smon.wire import API
from smon.wire.problems import KINDS, Problem

#: Request line and headers together.
MAX_HEAD_BYTES: Final = 64 << 10

#: What a header takes besides name and value.
_HEADER_OVERHEAD: Final = 4


#: Files are uploaded below here; they may take as long as a slow line needs, within a day.
_UPLOADS: Final = f"{API}/imports/".encode()
_UPLOAD_BYTES_PER_S: Final = 128 << 10
_UPLOAD_MOST_S: Final = 86_400.0


class Connections:
    """The connections of one server, by address.

    Parameters
    ----------
    settings
        ``max_connections``, ``max_connections_per_address``, ``receive_timeout_s``.
    """

    __slots__ = ("_by_address", "_closed", "_open", "_settings", "receive_timeout_s", "slow")

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self.receive_timeout_s = settings.receive_timeout_s
        self._by_address: Counts[str] = Counts()
        self._open = Gauge(
            "smon_ingest_connections", "Connections that are open.", registry=registry
        )
        closed = Counter(
            "smon_ingest_connections_refused_total",
            "Connections that were closed at once, by what there were too many of.",
            ["limit"],
            registry=registry,
        )
        self._closed = {limit: closed.labels(limit) for limit in ("address", "all")}
        self.slow = Counter(
            "smon_ingest_requests_too_slow_total",
            "Requests that did not arrive in time.",
            registry=registry,
        )

    def enter(self, address: str) -> bool:
        """Count a connection; False if it is one too many."""
        limit = None
        if self._by_address[address] >= self._settings.max_connections_per_address:
            limit = "address"
        elif self._by_address.total() >= self._settings.max_connections:
            limit = "all"
        if limit is not None:
            self._closed[limit].inc()
            return False
        self._by_address[address] += 1
        self._open.inc()
        return True

    def leave(self, address: str) -> None:
        """A connection that was counted is gone."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self._open.dec()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline, caps, and problem documents for what is no HTTP.

    The deadline runs from the first byte of a request (of the first one: from the connection) to
    the last byte of its body. While a request is being answered there is none.

    A body with ``Transfer-Encoding`` may end elsewhere for something that is on the way: no route
    takes one, and nothing behind it on the connection is taken for a request.
    """

    bounds: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # as uvicorn calls it
        super().__init__(*args, **kwargs)
        self._deadline: TimerHandle | None = None
        self._address: str | None = None
        self._receiving = False
        self._in_head = False
        self._head_bytes = 0
        self._ends_in_doubt = False
        self._deaf = False

    # --- connection -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Let the connection in, unless there are too many."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self.bounds.enter(address):
            transport.abort()
            return
        self._address = address
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._disarm()
        if self._address is not None:
            self.bounds.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, of which the head of a request may have only so many."""
        if self._address is None or self._deaf or self.transport.is_closing():
            return
        # Before the parser sees a request: line ends between two requests begin none, and would
        # keep the connection for ever.
        if self._deadline is None and not self._is_answering():
            self._arm()
        self._head_bytes += len(data) if self._in_head or not self._receiving else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._reject(Problem.BAD_REQUEST, _HEAD_TOO_LARGE)

    # --- request --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._deaf:
            # What follows goes into places of its own, not into those of the last request.
            return
        self._receiving = self._in_head = True
        self._arm()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        if self._deaf:
            return
        self._in_head = False
        self._head_bytes = 0
        size = len(self.url) + sum(
            len(name) + len(value) + _HEADER_OVERHEAD for name, value in self.headers
        )
        if size > MAX_HEAD_BYTES:
            self._reject(Problem.BAD_REQUEST, _HEAD_TOO_LARGE)
            return
        self._extend()
        super().on_headers_complete()
        self._ends_in_doubt = any(name == b"transfer-encoding" for name, _ in self.headers)
        if self._ends_in_doubt and (request := self._request()) is not None:
            request.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of its body is there."""
        if not self._deaf and not self._is_rejected():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there: it has arrived in time."""
        if self._deaf:
            return
        self._receiving = False
        self._disarm()
        if not self._is_rejected():
            super().on_message_complete()
        self._deaf = self._ends_in_doubt

    # --- deadline -------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.bounds.receive_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _extend(self) -> None:
        """Give an uploaded file the time that its size takes on a slow line."""
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        if self.url.startswith(_UPLOADS) and length.isdigit():
            self._disarm()
            seconds = self.bounds.receive_timeout_s + int(length) / _UPLOAD_BYTES_PER_S
            self._deadline = self.loop.call_later(min(seconds, _UPLOAD_MOST_S), self._too_slow)

    def on_response_complete(self) -> None:
        """The answer is sent; what still comes of the request has no more time than any other."""
        super().on_response_complete()
        if self._receiving and self._deadline is not None:
            self._disarm()
            self._arm()

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        self.bounds.slow.inc()
        seconds = f"{self.bounds.receive_timeout_s:g}"
        if self._receiving:
            self._reject(
                Problem.TOO_SLOW, f"expected the whole request within {seconds} s, found a part"
            )
        else:
            # Nobody has asked for anything: there is nothing to answer.
            self.transport.close()

    # --- answers to what never becomes a request --------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; as uvicorn calls it."""
        self._reject(Problem.BAD_REQUEST, f"expected HTTP/1.1: {msg.rstrip('.').lower()}")

    def _request(self) -> RequestResponseCycle | None:
        """The request that is received or answered last, if there was one."""
        # uvicorn declares that there always is.
        return cast("RequestResponseCycle | None", self.cycle)

    def _is_answering(self) -> bool:
        """Whether the answer to a request is not complete."""
        request = self._request()
        return request is not None and not request.response_complete

    def _is_rejected(self) -> bool:
        """Whether a head was refused within the bytes that the parser still works on."""
        return self.transport.is_closing() and self._request() is None

    def _reject(self, problem: Problem, detail: str) -> None:
        """Say why, and close; if an answer has begun already, only close."""
        self._disarm()
        if self.transport.is_closing():
            return
        request = self._request() if self._is_answering() else None
        if request is None or not request.response_started:
            self.transport.write(_answer(problem, detail))
        if request is not None:
            # Whoever reads the body learns that no more of it will come.
            request.disconnected = True
            request.message_event.set()
        self.transport.close()


_HEAD_TOO_LARGE: Final = f"expected request line and headers of at most {MAX_HEAD_BYTES} bytes"


def _answer(problem: Problem, detail: str) -> bytes:
    body = orjson.dumps(problem_document(problem, detail))
    return b"".join(
        (
            STATUS_LINE[KINDS[problem].status],
            f"content-type: {CONTENT_TYPE}\r\n".encode(),
            f"content-length: {len(body)}\r\n".encode(),
            b"connection: close\r\n\r\n",
            body,
        )
    )


def bounded_protocol(settings: Settings, registry: CollectorRegistry) -> type[BoundedProtocol]:
    """The protocol of one server, for ``uvicorn.Config(http=…)``."""
    connections = Connections(settings, registry)

    class Protocol(BoundedProtocol):
        """With the bounds of this server."""

        bounds = connections

    return Protocol
