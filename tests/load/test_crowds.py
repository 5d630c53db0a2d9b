from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.load.crowds import Played, Told, Watched
from tests.proof.overload import Run


class _Later(BaseHTTPRequestHandler):
    """Asks everybody to come again in an hour, but takes what is for another stream."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        later = "/later/" in self.path
        self.send_response(429 if later else 200)
        if later:
            self.send_header("Retry-After", "3600")
        body = b"{}" if later else b'{"status": "stored"}'
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of such a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Later)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def _put(port: int, paths: list[str]) -> list[int]:
    connection = HTTPConnection("127.0.0.1", port)
    statuses = []
    for path in paths:
        connection.request("PUT", f"/api/v1/ingest/{path}", b"x")
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
    connection.close()
    return statuses


def test_an_agent_that_does_not_wait_is_seen(port: int) -> None:
    """The first refusal is nobody's fault; what comes before the hour is over is."""
    with Watched(port) as relay:
        assert _put(relay.port, ["now/0/0", "later/0/1"]) == [200, 429]
        assert (relay.told, relay.impatient) == (1, 0)
        assert _put(relay.port, ["later/0/1"]) == [429]
        assert (relay.told, relay.impatient) == (2, 1)


def _told(job: str, batches: int, refused: int) -> Told:
    return Told(job, 1, batches, batches, refused, (), 0, 0.0, 0.01, 0.02, 0.001)


def test_what_a_refusal_costs_is_what_batches_do_not() -> None:
    """And what is taken in is set against what was without an overload, per second."""
    peak = Played(10.0, 2.0, {"crowd a": _told("crowd a", 800, 0), "calm": _told("calm", 200, 0)})
    more = Played(
        20.0, 5.0, {"crowd b": _told("crowd b", 1200, 500), "calm": _told("calm", 400, 0)}
    )
    run = Run("x", peak, more, 3.0)
    assert run.batch_ms == pytest.approx(2.0)
    assert run.goodput_ratio == pytest.approx(0.75)
    assert run.refusal_ms == pytest.approx((5000 - 2 * 1600) / 500)
