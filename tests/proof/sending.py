"""Streams and batches over plain HTTP, for proofs that look at each answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Self

from smon.wire import Batch
from smon.wire.problems import TYPE_PREFIX
from tests.system.server import ServerProcess


@dataclass(frozen=True, slots=True)
class Said:
    """An answer; status 0: there was none.

    Attributes
    ----------
    problem
        Name of the problem; empty: none.
    retry_after
        Of the header; empty: it has none.
    """

    status: int
    problem: str = ""
    retry_after: str = ""


def register(server: ServerProcess, name: str, count: int) -> list[str]:
    """Ids of new streams, a job each, of recorded ops on 4 DP ranks and 2 stages."""
    layout = {"dp": 4, "pp": 2, "tp": 1, "cp": 1, "ep": 1, "vpp": 1}
    streams = [
        {
            "key": f"{name}-{number}", "job": f"{name}-{number}", "attempt": 0,
            "layout": layout, "mode": "recorded", "time": "unix", "window_steps": None,
            "host": "node", "source": "proof", "ranks": list(range(8)), "epoch": 0, "notes": [],
        }
        for number in range(count)
    ]  # fmt: skip
    agent = {"version": "0", "host": "node", "pid": 1}
    answer = server.post("agents/hello", {"protocol": 1, "agent": agent, "streams": streams})
    return [stream["stream_id"] for stream in answer["streams"]]


class Connection:
    """One connection that sends batches; it is opened anew when it breaks."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    def put(self, stream: str, batch: Batch, headers: dict[str, str] | None = None) -> Said:
        """Send a batch; `headers` in place of its own."""
        path = f"/api/v1/ingest/{stream}/0/{batch.seq}"
        try:
            sent = batch.headers() if headers is None else headers
            self._connection.request("PUT", path, batch.body, sent)
            answer = self._connection.getresponse()
            body = answer.read()
        except (HTTPException, OSError):
            self._connection.close()
            return Said(0)
        retry_after = answer.headers.get("Retry-After", "")
        return Said(answer.status, _problem(answer.status, body), retry_after)

    def close(self) -> None:
        """End it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _problem(status: int, body: bytes) -> str:
    """Name of the problem in a body; empty if it tells none."""
    if status == 200:
        return ""
    try:
        return str(json.loads(body)["type"]).removeprefix(TYPE_PREFIX)
    except (ValueError, TypeError, KeyError):
        return ""
