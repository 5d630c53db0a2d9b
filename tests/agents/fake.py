"""A server of protocol v1 that keeps everything in memory, and fails as it is told."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import zstandard

from ingest_agents.transport import Response, TransportError
from smon.errors import WireError
from smon.wire import BatchKind, parse_headers
from smon.wire.problems import KINDS, TYPE_PREFIX, Problem


@dataclass(frozen=True)
class Fail:
    """What becomes of the next request: an answer, or none, before or after it was done."""

    status: int = 0
    problem: str = ""
    retry_after: int | None = None
    drop: str = ""  # "before" or "after"
    sleep_s: float = 0.0
    only: str = "PUT"


@dataclass
class Stored:
    """A batch as it came in."""

    seq: int
    last: int
    kind: BatchKind
    digest: str
    events: int
    document: dict[str, Any]
    steps_done: int | None
    attempt: int
    clock: tuple[int, int] | None
    content_type: str
    raw: bytes


@dataclass
class Stream:
    """A stream as the server knows it."""

    id: str
    request: dict[str, Any]
    epoch: int
    stored: dict[tuple[int, int], Stored] = field(default_factory=dict)

    def next_seq(self) -> int:
        """First number of the present epoch that is not covered."""
        at = 0
        while (self.epoch, at) in self.stored:
            at = self.stored[self.epoch, at].last + 1
        return at


class Fake:
    """The server: `handle` is all of it.

    Attributes
    ----------
    fails
        What becomes of the next requests, first in first out.
    poison
        Answer to a batch by its content, for as long as this is set.
    """

    def __init__(self, *, body_limit: int = 4 << 20, flush_s: float = 0.01) -> None:
        self.streams: dict[str, Stream] = {}
        self.fails: deque[Fail] = deque()
        self.poison: Callable[[Stored], Fail | None] = lambda _stored: None
        self.greet: Callable[[dict[str, Any]], Fail | None] = lambda _stream: None
        self.server_id = "fake-1"
        self.body_limit, self.flush_s = body_limit, flush_s
        self.heartbeats: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.duplicates = 0
        self.skew_ns = 0
        self.lock = threading.RLock()

    # --- the protocol -------------------------------------------------------------------------

    def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer one request; headers by lower-case name."""
        with self.lock:
            self.requests.append((method, path))
            fail = self._fail(method)
        if fail is not None:
            if fail.sleep_s:
                time.sleep(fail.sleep_s)
            if fail.drop == "after":
                self._route(method, path, headers, body)
            if fail.drop:
                raise TransportError("connection dropped")
            if fail.status:
                return problem(fail)
        with self.lock:
            return self._route(method, path, headers, body)

    def _fail(self, method: str) -> Fail | None:
        if self.fails and self.fails[0].only in {method, ""}:
            return self.fails.popleft()
        return None

    def _route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        if (
            self.tokens
            and headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens
        ):
            return problem(Fail(401, "unauthorized"))
        parts = path.split("/")
        if (method, path) == ("GET", "/api/v1/time"):
            now = time.time_ns() + self.skew_ns
            return answer({"received_ns": now, "sent_ns": time.time_ns() + self.skew_ns})
        if (method, path) == ("POST", "/api/v1/agents/hello"):
            return self._hello(json.loads(body))
        if (method, path) == ("POST", "/api/v1/agents/heartbeat"):
            return self._heartbeat(json.loads(body))
        if method == "PUT" and parts[1:4] == ["api", "v1", "ingest"]:
            return self._put(parts[4], int(parts[5]), int(parts[6]), headers, body)
        return problem(Fail(404, "not-found"))

    def _hello(self, document: dict[str, Any]) -> Response:
        assert document["protocol"] == 1
        streams = [self._greeted(each) for each in document["streams"]]
        return answer(
            {
                "protocol": 1,
                "server_id": self.server_id,
                "time_ns": time.time_ns(),
                "limits": {"body_bytes": self.body_limit},
                "flush": {"interval_s": self.flush_s, "phase_s": 0.0},
                "heartbeat_s": 0.2,
                "streams": streams,
            }
        )

    def _greeted(self, request: dict[str, Any]) -> dict[str, Any]:
        key = request["key"]
        fail = self.greet(request)
        if fail is not None:
            return {"key": key, "problem": json.loads(problem(fail).body)}
        stream = self.streams.get(key)
        if stream is None:
            name = hashlib.sha256(key.encode()).hexdigest()[:8]
            stream = self.streams[key] = Stream(name, request, request["epoch"])
        if request["epoch"] < stream.epoch:
            return {"key": key, "problem": json.loads(problem(Fail(409, "stale-epoch")).body)}
        stream.epoch, stream.request = request["epoch"], request
        return {
            "key": key,
            "stream_id": stream.id,
            "epoch": stream.epoch,
            "next_seq": stream.next_seq(),
        }

    def _heartbeat(self, document: dict[str, Any]) -> Response:
        self.heartbeats.append(document)
        known = {stream.id for stream in self.streams.values()}
        unknown = [s["stream_id"] for s in document["streams"] if s["stream_id"] not in known]
        return answer(
            {
                "server_id": self.server_id,
                "time_ns": time.time_ns(),
                "flush": {"interval_s": self.flush_s, "phase_s": 0.0},
                "unknown_streams": unknown,
            }
        )

    def _put(  # noqa: PLR0911  # one for each refusal
        self, stream_id: str, epoch: int, seq: int, headers: Mapping[str, str], body: bytes
    ) -> Response:
        stream = next((s for s in self.streams.values() if s.id == stream_id), None)
        if stream is None:
            return problem(Fail(404, "not-found"))
        if epoch != stream.epoch:
            return problem(Fail(409, "stale-epoch"))
        if len(body) > self.body_limit:
            return problem(Fail(413, "too-large"))
        try:
            batch = read_batch(seq, headers, body)
        except WireError as error:
            return problem(Fail(KINDS[Problem(error.problem)].status, error.problem))
        fail = self.poison(batch)
        if fail is not None:
            return problem(fail)
        known = stream.stored.get((epoch, seq))
        if known is not None and known.digest != batch.digest:
            return problem(Fail(409, "key-conflict"))
        status = "stored" if known is None else "duplicate"
        self.duplicates += known is not None
        stream.stored.setdefault((epoch, seq), batch)
        return answer({"status": status, "next_seq": stream.next_seq()})

    # --- what tests look at -------------------------------------------------------------------

    @property
    def only(self) -> Stream:
        """The one stream there is."""
        (stream,) = self.streams.values()
        return stream

    def batches(self) -> list[Stored]:
        """All batches of all streams, in the order of their numbers."""
        return [
            stream.stored[place]
            for stream in self.streams.values()
            for place in sorted(stream.stored)
        ]

    def ops(self) -> list[int]:
        """Start of every op: tests make them distinct."""
        return [
            start
            for batch in self.batches()
            if batch.kind is BatchKind.OPS
            for start in batch.document["columns"]["start_ns"]
        ]

    def gaps(self) -> list[dict[str, Any]]:
        """Documents of all GAPs."""
        return [batch.document for batch in self.batches() if batch.kind is BatchKind.GAP]

    def lost(self) -> int:
        """Events that are known to be lost."""
        return sum(gap["events"] for gap in self.gaps())

    def ended(self) -> bool:
        """Whether every stream there is has ended."""
        ends = [
            any(batch.kind is BatchKind.END for batch in stream.stored.values())
            for stream in self.streams.values()
        ]
        return bool(ends) and all(ends)


def read_batch(seq: int, headers: Mapping[str, str], body: bytes) -> Stored:
    """Read a request as a server does: headers, digest, encoding, content."""
    head = parse_headers(headers)
    digest = hashlib.sha256(body).hexdigest()
    if digest != head.digest:
        raise WireError(Problem.DIGEST_MISMATCH, "digest")
    raw = _decoded(head.encoding, body)
    if len(raw) > 65536 and len(raw) > 20 * len(body):
        raise WireError(Problem.TOO_LARGE, "ratio")
    document = json.loads(raw) if head.content_type == "application/json" else {}
    if head.kind is BatchKind.OPS and document:
        lengths = {len(values) for values in document["columns"].values()}
        assert lengths == {head.events}
    last = seq
    if head.kind is BatchKind.GAP:
        assert document["first_seq"] == seq
        assert document["events"] == head.events
        last = document["last_seq"]
    return Stored(
        seq,
        last,
        head.kind,
        digest,
        head.events,
        document,
        head.steps_done,
        head.attempt,
        head.clock,
        head.content_type,
        raw,
    )


def _decoded(encoding: str, body: bytes) -> bytes:
    if encoding == "zstd":
        return bytes(zstandard.ZstdDecompressor().decompress(body))
    return gzip.decompress(body) if encoding == "gzip" else body


def answer(document: dict[str, Any]) -> Response:
    """An answer of status 200."""
    return Response(200, {"content-type": "application/json"}, json.dumps(document).encode())


def problem(fail: Fail) -> Response:
    """A problem document."""
    headers = {"content-type": "application/problem+json"}
    if fail.retry_after is not None:
        headers["retry-after"] = str(fail.retry_after)
    document = {
        "type": TYPE_PREFIX + fail.problem if fail.problem else "about:blank",
        "title": fail.problem,
        "status": fail.status,
        "detail": f"made to fail with {fail.status}",
    }
    return Response(fail.status, headers, json.dumps(document).encode())


class Wire:
    """A transport without a network: calls the fake.

    Proves that tests of the agent need no sockets; `serve` is for real processes.
    """

    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        """The fake's answer."""
        lower = {name.lower(): value for name, value in headers.items()}
        return self._fake.handle(method, path, lower, body or b"")

    def close(self) -> None:
        """Nothing to close."""


@contextmanager
def serve(fake: Fake) -> Iterator[str]:
    """The fake behind HTTP on a port of its own; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _do(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                response = fake.handle(self.command, self.path, headers, body)
            except TransportError:
                self.close_connection = True
                return
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        do_GET = do_POST = do_PUT = _do  # noqa: N815  # names of http.server

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name there
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Connections of processes that were killed just end."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
