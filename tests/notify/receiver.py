"""Somebody who is told: a small HTTP server that keeps what it gets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What stands in the address and must stand nowhere else.
SECRET = "T0K3N-of-the-channel"  # noqa: S105  # of a test


@dataclass(slots=True)
class Received:
    """One message, when it came, and what stood above it."""

    document: dict[str, Any]
    path: str
    headers: dict[str, str]
    at: float


@dataclass(slots=True, eq=False)
class Receiver:
    """What has come; `status` is what the next ones are answered."""

    port: int = 0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it listens, with a secret in the path."""
        return f"http://127.0.0.1:{self.port}/hooks/{SECRET}"

    def events(self) -> list[str]:
        """What the messages say, in their order."""
        return [one.document["event"] for one in self.received]

    def wait(self, event: str, timeout_s: float) -> Received:
        """The first message that says this, once it has come."""
        end = time.monotonic() + timeout_s
        while event not in self.events() and time.monotonic() < end:
            time.sleep(0.02)
        assert event in self.events(), f"only these messages came: {self.events()}"
        return self.received[self.events().index(event)]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver, while the context lasts."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.status == 200:
                receiver.received.append(
                    Received(json.loads(body), self.path, dict(self.headers), time.time())
                )
            self.send_response(receiver.status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
