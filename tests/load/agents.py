"""Agents made of raw sockets: bodies as a host makes them, and when they are sent.

One event loop plays thousands of them. Each has one stream, one connection, and one request at a
time; what it was answered, and when, it keeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import pyarrow as pa

from smon.wire import TYPE_ARROW, Batch, BatchKind
from smon.wire.arrow import SCHEMA, encoded, ipc_body

#: As one node of eight GPUs makes of two steps of a job as in the public traces.
EVENTS: Final = 1584

#: Bodies of one stream that differ; then they come again, with another number.
BODIES: Final = 16

_OPS: Final = ("forward-compute", "backward-compute", "forward-send", "forward-recv", "gc")
_OK: Final = b"HTTP/1.1 200"
_RETRY: Final = b"retry-after: "

#: Streams that one hello may register.
_MOST_STREAMS: Final = 4096

#: Who is not asked to wait comes again after so long.
_PAUSE_S: Final = 1.0

#: (head with places for stream and number, the rest of the headers, the body)
Request = tuple[bytes, bytes, bytes]


class Manners(Enum):
    """What an agent does that is refused: comes again when its next batch is due, or when told."""

    EAGER = 0
    POLITE = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is not 200.

    Attributes
    ----------
    retry_after_s
        What it says; None: nothing.
    took_s
        From the request to the answer.
    """

    status: int
    retry_after_s: float | None
    took_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """When an agent sends.

    Attributes
    ----------
    pause_s
        From one batch to the next; 0: as soon as there is an answer.
    first_s
        Until the first; None: chance, within the pause.
    upload_s
        Time that a body takes on its way.
    """

    pause_s: float = 0.0
    first_s: float | None = None
    upload_s: float = 0.0
    manners: Manners = Manners.EAGER


class Sender(asyncio.Protocol):
    """One agent: one stream, one connection, one request at a time; a refused batch comes again.

    Attributes
    ----------
    times
        Seconds to each acknowledgement.
    lost
        Whether the connection broke before `stop`.
    done
        Set when nothing is under way any more after `stop`, or the server is gone.
    """

    def __init__(self, stream_id: str, requests: Sequence[Request], timing: Timing) -> None:
        self.times: list[float] = []
        self.refusals: list[Refusal] = []
        self.lost = False
        self.done = asyncio.get_running_loop().create_future()
        self._stream_id = stream_id.encode()
        self._requests = requests
        self._timing = timing
        self._seq = 0
        self._buffer = b""
        self._unsent = b""
        self._sent = self._next = 0.0
        self._stopped = self._waits = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def refused(self) -> int:
        """How many times it was refused."""
        return len(self.refusals)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, at the first moment or a random one of the pause."""
        self._transport: Any = transport
        first_s = self._timing.first_s
        if first_s is None:
            first_s = random.random() * self._timing.pause_s  # noqa: S311  # no secret
        self._next = asyncio.get_running_loop().time() + first_s
        self._at(self._next)

    def _at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._send)

    def _send(self) -> None:
        self._timer = None
        if self._stopped:
            self._finish()
            return
        head, headers, body = self._requests[self._seq % len(self._requests)]
        self._sent, self._waits = time.perf_counter(), True
        start = head % (self._stream_id, self._seq) + headers
        if self._timing.upload_s:
            self._unsent = body
            self._transport.write(start)
            asyncio.get_running_loop().call_later(self._timing.upload_s, self._send_rest)
        else:
            self._transport.write(start + body)

    def _send_rest(self) -> None:
        """The body, once: also if it is refused before it was sent."""
        if self._unsent:
            self._transport.write(self._unsent)
            self._unsent = b""

    def data_received(self, data: bytes) -> None:
        """Answer complete: note it, and go on."""
        self._buffer += data
        if self._buffer.find(b"}") < 0:
            return
        answer, self._buffer = self._buffer, b""
        self._waits = False
        self._send_rest()
        took_s = time.perf_counter() - self._sent
        loop_s = asyncio.get_running_loop().time()
        if answer.startswith(_OK):
            self.times.append(took_s)
            self._seq += 1
            self._next += self._timing.pause_s
        else:
            refusal = Refusal(int(answer[9:12]), retry_after_s_of(answer), took_s)
            self.refusals.append(refusal)
            self._next = loop_s + self._pause_s(refusal)
        if self._stopped:
            self._finish()
        elif self._next > loop_s:
            self._at(self._next)
        else:
            self._send()

    def _pause_s(self, refusal: Refusal) -> float:
        """Until a refused batch comes again."""
        if self._timing.manners is Manners.POLITE and refusal.retry_after_s is not None:
            return refusal.retry_after_s
        return self._timing.pause_s or _PAUSE_S

    def connection_lost(self, exc: Exception | None) -> None:
        """The server is gone, or does not want it."""
        self.lost = not self._stopped
        self._finish()

    def stop(self) -> None:
        """Send no more; what is under way is awaited."""
        self._stopped = True
        if not self._waits:
            if self._timer is not None:
                self._timer.cancel()
            self._finish()

    def close(self) -> None:
        """Let go of the connection."""
        self._transport.close()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def retry_after_s_of(answer: bytes) -> float | None:
    """After how many seconds an answer says to come again; None: it does not say."""
    head = answer.partition(b"\r\n\r\n")[0].lower()
    at = head.find(_RETRY)
    if at < 0:
        return None
    value = head[at + len(_RETRY) :].partition(b"\r\n")[0].strip()
    return float(value) if value.isdigit() else None


# --- what is sent -----------------------------------------------------------------------------


def ops(
    rng: np.random.Generator, dp: int, step: int, now_ns: int, rows: int = EVENTS
) -> pa.RecordBatch:
    """A batch of one worker of stage 0 over two steps, as plausible as needs be."""
    columns = {
        "step": np.repeat(np.arange(step, step + 2), rows // 2),
        "dp": np.full(rows, dp, np.int32),
        "stage": np.zeros(rows, np.int32),
        "rank": np.full(rows, dp, np.int32),
        "start_ns": now_ns + np.cumsum(rng.integers(50_000, 900_000, rows) * EVENTS // rows),
        "duration_ns": rng.integers(20_000, 900_000, rows) * EVENTS // rows,
        "seq": np.tile(np.arange(rows // 2, dtype=np.int32), 2),
        "chunk": np.full(rows, -1, np.int16),
        "global_chunk": np.full(rows, -1, np.int16),
        "microbatch": (np.arange(rows) % 16).astype(np.int32),
    }
    codes = pa.array(rng.integers(0, len(_OPS), rows).astype(np.int8))
    labels = pa.DictionaryArray.from_arrays(codes, pa.array(list(_OPS)))
    arrays = [labels if name == "optype" else pa.array(columns[name]) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def requests_of(
    dp: int, *, rows: int = EVENTS, bodies: int = BODIES, token: str = ""
) -> list[Request]:
    """The requests of one stream, with so many ops each (an even number)."""
    rng = np.random.default_rng(dp)
    made = []
    for number in range(bodies):
        body = encoded(ipc_body(ops(rng, dp, 2 * number, time.time_ns(), rows)))
        batch = Batch(0, BatchKind.OPS, TYPE_ARROW, "zstd", rows, body, steps_done=2 * number)
        headers = batch.headers(clock=(1000, 500))
        if token:
            headers["Authorization"] = f"Bearer {token}"
        text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = b"PUT /api/v1/ingest/%s/0/%d HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        made.append((head, text.encode() + b"\r\n", body))
    return made


def hello(url: str, count: int, *, job: str = "load", token: str = "") -> list[str]:
    """Register one stream for each of so many hosts; their ids."""
    streams = [
        {
            "key": f"{job}-{dp}",
            "job": job,
            "attempt": 1,
            "layout": {"dp": count, "pp": 1},
            "mode": "live",
            "time": "unix",
            "window_steps": None,
            "host": host_name(dp),
            "source": "load",
            "ranks": [dp],
            "epoch": 0,
            "notes": [],
        }
        for dp in range(count)
    ]
    found: list[str] = []
    for first in range(0, count, _MOST_STREAMS):
        found += _register(url, streams[first : first + _MOST_STREAMS], token)
    return found


def _register(url: str, streams: Sequence[dict[str, Any]], token: str) -> list[str]:
    agent = {"version": "0", "host": "load", "pid": os.getpid()}
    document = {"protocol": 1, "agent": agent, "streams": streams}
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(  # noqa: S310  # our own server
        f"{url}/api/v1/agents/hello", json.dumps(document).encode(), headers
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310  # our own server
        return [stream["stream_id"] for stream in json.load(response)["streams"]]


def host_name(number: int) -> str:
    """Name of a host."""
    return f"host-{number}"


def phase_of(host: str) -> float:
    """Where in the interval between two flushes a host sends, 0 to 1, as the server tells it."""
    return int.from_bytes(hashlib.sha256(host.encode()).digest()[:2], "big") / (1 << 16)


# --- at work ----------------------------------------------------------------------------------


async def connect(port: int, senders: Sequence[Sender]) -> None:
    """Open the connection of each; they begin by themselves."""
    loop = asyncio.get_running_loop()
    for sender in senders:
        await loop.create_connection(lambda made=sender: made, "127.0.0.1", port)  # type: ignore[misc]  # mypy does not infer lambdas with defaults


async def stop(senders: Sequence[Sender], patience_s: float = 60.0) -> None:
    """Have all of them stop, wait for what is under way, and hang up."""
    for sender in senders:
        sender.stop()
    if senders:
        await asyncio.wait([sender.done for sender in senders], timeout=patience_s)
    for sender in senders:
        sender.close()
    # Transports close in the next turns of the loop.
    await asyncio.sleep(0.01)


def quantile(times: Sequence[float], share: float) -> float:
    """Of seconds, to ten microseconds; 0 of none."""
    return round(float(np.quantile(times, share)), 5) if len(times) else 0.0


def all_times(senders: Sequence[Sender]) -> list[float]:
    """Seconds to the acknowledgements of all of them."""
    return [each for sender in senders for each in sender.times]


def all_refusals(senders: Sequence[Sender]) -> list[Refusal]:
    """Refusals of all of them."""
    return [each for sender in senders for each in sender.refusals]
