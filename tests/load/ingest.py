"""How much one ingest process takes in: a real server process, and agents made of raw sockets.

``python -m tests.load.ingest --seconds 10 --json``. The server syncs its log before it answers, and
moves it on to files and database all the while; generator and server share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import uvloop

from smon.wire import TYPE_ARROW, Batch, BatchKind
from smon.wire.arrow import SCHEMA, encoded, ipc_body

#: As one node of eight GPUs makes of two steps of a job as in the public traces.
EVENTS: Final = 1584

#: Bodies of one stream that differ; then they come again, with another number.
_BODIES: Final = 16

_OPS: Final = ("forward-compute", "backward-compute", "forward-send", "forward-recv", "gc")


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured; times in seconds.

    Attributes
    ----------
    rate
        Requests per second that were offered; 0: as many as were answered.
    server_cpu, generator_cpu
        Share of one core.
    server_cpu_ms
        Per request, the drain and all other threads included; it does not depend on who else uses
        the machine.
    stored_events
        Events that were in files and database shortly after the end.
    """

    seconds: float
    connections: int
    rate: float
    requests: int
    refused: int
    requests_per_s: float
    events_per_s: float
    p50_s: float
    p99_s: float
    max_s: float
    server_cpu: float
    generator_cpu: float
    server_cpu_ms: float
    stored_events: int


def ops(rng: np.random.Generator, dp: int, step: int, now_ns: int) -> pa.RecordBatch:
    """A batch of one worker of stage 0, as plausible as needs be."""
    rows = EVENTS
    columns = {
        "step": np.repeat(np.arange(step, step + 2), rows // 2),
        "dp": np.full(rows, dp, np.int32),
        "stage": np.zeros(rows, np.int32),
        "rank": np.full(rows, dp, np.int32),
        "start_ns": now_ns + np.cumsum(rng.integers(50_000, 900_000, rows)),
        "duration_ns": rng.integers(20_000, 900_000, rows),
        "seq": np.tile(np.arange(rows // 2, dtype=np.int32), 2),
        "chunk": np.full(rows, -1, np.int16),
        "global_chunk": np.full(rows, -1, np.int16),
        "microbatch": (np.arange(rows) % 16).astype(np.int32),
    }
    codes = pa.array(rng.integers(0, len(_OPS), rows).astype(np.int8))
    labels = pa.DictionaryArray.from_arrays(codes, pa.array(list(_OPS)))
    arrays = [labels if name == "optype" else pa.array(columns[name]) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class Sender(asyncio.Protocol):
    """One agent: one stream, one connection, one request at a time."""

    def __init__(self, stream_id: str, requests: list[tuple[bytes, bytes]], pause_s: float) -> None:
        self.times: list[float] = []
        self.refused = 0
        self._stream_id = stream_id
        self._requests = requests
        self._pause_s = pause_s
        self._seq = 0
        self._buffer = b""
        self._sent = self._next = 0.0
        self._stopped = False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, at a random moment of the pause."""
        self._transport: Any = transport
        loop = asyncio.get_running_loop()
        self._next = loop.time() + random.random() * self._pause_s  # noqa: S311  # no secret
        loop.call_at(self._next, self._send)

    def _send(self) -> None:
        if self._stopped:
            self.done.set_result(None)
            return
        head, rest = self._requests[self._seq % len(self._requests)]
        self._sent = time.perf_counter()
        self._transport.write(head % (self._stream_id.encode(), self._seq) + rest)

    def data_received(self, data: bytes) -> None:
        """Answer complete: note it, and go on."""
        self._buffer += data
        end = self._buffer.find(b"}")
        if end < 0:
            return
        self.times.append(time.perf_counter() - self._sent)
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self.refused += 1
        self._buffer = b""
        self._seq += 1
        self._next += self._pause_s
        loop = asyncio.get_running_loop()
        if self._pause_s and self._next > loop.time():
            loop.call_at(self._next, self._send)
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server is gone."""
        if not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        """Send no more."""
        self._stopped = True


def _requests(dp: int) -> list[tuple[bytes, bytes]]:
    """(head with places for stream and number, rest) of the requests of one stream."""
    rng = np.random.default_rng(dp)
    made = []
    for number in range(_BODIES):
        body = encoded(ipc_body(ops(rng, dp, 2 * number, time.time_ns())))
        batch = Batch(0, BatchKind.OPS, TYPE_ARROW, "zstd", EVENTS, body, steps_done=2 * number)
        headers = "".join(
            f"{name}: {value}\r\n" for name, value in batch.headers(clock=(1000, 500)).items()
        )
        head = b"PUT /api/v1/ingest/%s/0/%d HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        made.append((head, headers.encode() + b"\r\n" + body))
    return made


def _hello(url: str, count: int) -> list[str]:
    streams = [
        {
            "key": f"load-{dp}",
            "job": "load",
            "attempt": 1,
            "layout": {"dp": count, "pp": 1},
            "mode": "live",
            "time": "unix",
            "window_steps": None,
            "host": f"host-{dp}",
            "source": "load",
            "ranks": [dp],
            "epoch": 0,
            "notes": [],
        }
        for dp in range(count)
    ]
    agent = {"version": "0", "host": "load", "pid": os.getpid()}
    document = {"protocol": 1, "agent": agent, "streams": streams}
    request = urllib.request.Request(  # noqa: S310  # our own server
        f"{url}/api/v1/agents/hello",
        json.dumps(document).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310  # our own server
        return [stream["stream_id"] for stream in json.load(response)["streams"]]


async def generate(port: int, connections: int, seconds: float, rate: float) -> list[Sender]:
    """Send for so long; the senders with what they measured."""
    ids = await asyncio.to_thread(_hello, f"http://127.0.0.1:{port}", connections)
    pause_s = connections / rate if rate else 0.0
    loop = asyncio.get_running_loop()
    senders = [Sender(each, _requests(dp), pause_s) for dp, each in enumerate(ids)]
    for sender in senders:
        await loop.create_connection(lambda made=sender: made, "127.0.0.1", port)  # type: ignore[misc]  # mypy does not infer lambdas with defaults
    await asyncio.sleep(seconds)
    for sender in senders:
        sender.stop()
    await asyncio.wait([sender.done for sender in senders], timeout=10)
    return senders


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    seconds: float, connections: int, rate: float = 0.0, folder: Path | None = None
) -> Load:
    """Start a server, send to it, stop it.

    Parameters
    ----------
    rate
        Requests per second to offer; 0: each connection sends as soon as it has its answer.
    folder
        Where the server keeps its data; None: a temporary one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as data:
        command = [sys.executable, "-m", "tests.load.server", data]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            port = int((server.stdout.readline() if server.stdout else "").strip())
            before = _cpu_s(server.pid), resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                senders = runner.run(generate(port, connections, seconds, rate))
            took = time.monotonic() - before[2]
            server_cpu = _cpu_s(server.pid) - before[0]
            usage = resource.getrusage(resource.RUSAGE_SELF)
        finally:
            server.send_signal(signal.SIGTERM)
            text = server.communicate(timeout=60)[0]
        mine = sum(
            getattr(usage, name) - getattr(before[1], name) for name in ("ru_utime", "ru_stime")
        )
    times = np.sort(np.concatenate([sender.times for sender in senders]))
    refused = sum(sender.refused for sender in senders)
    return Load(
        seconds=seconds,
        connections=connections,
        rate=rate,
        requests=len(times),
        refused=refused,
        requests_per_s=round((len(times) - refused) / seconds, 1),
        events_per_s=round((len(times) - refused) * EVENTS / seconds),
        p50_s=round(float(np.quantile(times, 0.5)), 5),
        p99_s=round(float(np.quantile(times, 0.99)), 5),
        max_s=round(float(times[-1]), 5),
        server_cpu=round(server_cpu / took, 2),
        generator_cpu=round(mine / took, 2),
        server_cpu_ms=round(1000 * server_cpu / len(times), 3),
        stored_events=int(text.split()[-1]) if text.split() else -1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests per second; 0: all it can"
    )
    parser.add_argument("--folder", type=Path, help="disk to measure; default: temporary files")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args(arguments)
    load = measure(parsed.seconds, parsed.connections, parsed.rate, parsed.folder)
    if parsed.json:
        print(json.dumps(asdict(load)))  # noqa: T201  # a command prints
    else:
        for name, value in asdict(load).items():
            print(f"{name:16} {value}")  # noqa: T201  # a command prints
    return 0 if load.refused == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
