"""A relay between agents and servers that counts what passes, and cuts connections now and then.

It sees what both sides have really said: which batches were acknowledged, which were sent again,
how many were under way when somebody was killed. Before several servers it is a load balancer.
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import BinaryIO, Final, Self

#: (stream, epoch, seq) of a batch.
Batch = tuple[str, int, int]

_OK: Final = 200
_PUT: Final = b"PUT /api/v1/ingest/"
_TIMEOUT_S: Final = 30.0
_BACKLOG: Final = 128


@dataclass(slots=True)
class Counts:
    """What has passed.

    Attributes
    ----------
    answers
        Answers to batches, by status or by ``stored`` and ``duplicate``.
    sent
        How often each batch was sent.
    acknowledged
        Batches of which an agent was told that they are safe.
    gaps
        Losses that agents have told, as they put them.
    cut
        Requests and answers that broke off somewhere together with their connection.
    """

    answers: Counter[str] = field(default_factory=Counter)
    sent: Counter[Batch] = field(default_factory=Counter)
    acknowledged: set[Batch] = field(default_factory=set)
    gaps: dict[Batch, str] = field(default_factory=dict)
    cut: int = 0

    @property
    def resent(self) -> int:
        """Requests that repeated a batch."""
        return self.sent.total() - len(self.sent)


@dataclass(frozen=True, slots=True)
class _Request:
    head: bytes
    body: bytes
    batch: Batch | None


class Proxy:
    """Listens on a port of its own, with a thread for each connection.

    Parameters
    ----------
    ports
        Of the servers; requests go to each in turn, and past those that refuse connections.
    cut_ratio
        Share of requests with batches, and of answers to them, of which only a part gets through,
        or nothing, before the connection breaks.
    """

    def __init__(self, ports: Sequence[int], *, cut_ratio: float = 0.0, seed: int = 0) -> None:
        self.counts = Counts()
        self.in_flight = 0
        self.cut_ratio = cut_ratio
        self.ports = list(ports)
        self._turn = count()
        self._chance = random.Random(seed)  # noqa: S311  # no secret
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where agents find it."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop."""
        # Wakes the thread that waits in accept; closing alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
        for client, thread in clients.items():
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            with self._lock:
                self._clients[client] = thread
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        upstream = _Upstream(self)
        with client, client.makefile("rb") as reader:
            with suppress(OSError, EOFError):
                while (request := _read_request(reader)) is not None:
                    answer, whole = self._answered(request, upstream)
                    client.sendall(answer)
                    if not whole:
                        break
            upstream.close()
        with self._lock:
            del self._clients[client]

    def _answered(self, request: _Request, upstream: _Upstream) -> tuple[bytes, bool]:
        """What the client gets, and whether that is all; if not, its connection is cut."""
        batch, counts = request.batch, self.counts
        if batch is None:
            return upstream.exchange(request)[1], True
        with self._lock:
            counts.sent[batch] += 1
            if b"smon.gap/1" in request.head:
                counts.gaps[batch] = request.body.decode(errors="replace")
        if self._cuts():
            upstream.send_part(self._part(request.head + request.body))
            return b"", False
        with self._lock:
            self.in_flight += 1
        try:
            status, answer = upstream.exchange(request)
        finally:
            with self._lock:
                self.in_flight -= 1
        with self._lock:
            counts.answers[_kind_of(status, answer)] += 1
        if self._cuts():
            return self._part(answer), False
        if status == _OK:
            counts.acknowledged.add(batch)
        return answer, True

    def _cuts(self) -> bool:
        """Whether the connection breaks here."""
        with self._lock:
            cuts = bool(self.cut_ratio) and self._chance.random() < self.cut_ratio
            self.counts.cut += cuts
        return cuts

    def _part(self, message: bytes) -> bytes:
        """What gets through of a message that breaks off: never all of it."""
        with self._lock:
            return message[: self._chance.randrange(len(message))]

    def turn(self) -> list[int]:
        """Ports in the order in which they are tried now."""
        at = next(self._turn) % len(self.ports)
        return self.ports[at:] + self.ports[:at]


class _Upstream:
    """Connections to the servers, for one client."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._open: dict[int, tuple[socket.socket, BinaryIO]] = {}

    def exchange(self, request: _Request) -> tuple[int, bytes]:
        port = self._connected()
        try:
            self._open[port][0].sendall(request.head + request.body)
            return _read_answer(self._open[port][1])
        except (OSError, EOFError):
            # Whether it was done nobody knows: the client has to ask again.
            self._drop(port)
            raise

    def send_part(self, part: bytes) -> None:
        """Send what gets through of a request, and hang up."""
        port = self._connected()
        with suppress(OSError):
            self._open[port][0].sendall(part)
        self._drop(port)

    def _connected(self) -> int:
        """The port of a server that takes connections."""
        ports = self._proxy.turn()
        for port in ports:
            if port in self._open and not _is_over(self._open[port][0]):
                return port
            self._drop(port)
            try:
                server = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
            except OSError:
                continue
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open[port] = server, server.makefile("rb")
            return port
        raise ConnectionRefusedError

    def _drop(self, port: int) -> None:
        for each in self._open.pop(port, ()):
            each.close()

    def close(self) -> None:
        for port in list(self._open):
            self._drop(port)


def _is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed it: nothing else can come between two answers."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _read_request(reader: BinaryIO) -> _Request | None:
    head = _read_head(reader)
    if not head:
        return None
    body = _read(reader, _length(head))
    line = head[: head.index(b"\r\n")]
    batch = None
    if line.startswith(_PUT):
        stream, epoch, seq = line[len(_PUT) :].split(b" ")[0].split(b"/")
        batch = (stream.decode(), int(epoch), int(seq))
    return _Request(head, body, batch)


def _read_answer(reader: BinaryIO) -> tuple[int, bytes]:
    head = _read_head(reader)
    if not head:
        raise EOFError
    return int(head.split(b" ", 2)[1]), head + _read(reader, _length(head))


def _read_head(reader: BinaryIO) -> bytes:
    """Up to the empty line; empty if nothing comes any more."""
    lines = [reader.readline()]
    while lines[-1] not in (b"\r\n", b""):
        lines.append(reader.readline())
    if lines[-1] == b"" and len(lines) > 1:
        raise EOFError
    return b"".join(lines)


def _read(reader: BinaryIO, size: int) -> bytes:
    data = reader.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _kind_of(status: int, answer: bytes) -> str:
    if status != _OK:
        return str(status)
    return str(json.loads(answer[answer.index(b"\r\n\r\n") :])["status"])
