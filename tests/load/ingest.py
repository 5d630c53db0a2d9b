"""How much one ingest process takes in: a real server process, and agents made of raw sockets.

``python -m tests.load.ingest --seconds 10 --json``. The server syncs its log before it answers, and
moves it on to files and database all the while; generator and server share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from tests.load.agents import (
    EVENTS,
    Sender,
    Timing,
    all_times,
    connect,
    hello,
    quantile,
    requests_of,
    stop,
)
from tests.load.samples import family_cpu_s


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
        Per request, the drain and the decoders included; it does not depend on who else uses
        the machine.
    acknowledged_events, stored_events
        Events of batches that were acknowledged; of those in files and database after the end.
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
    acknowledged_events: int
    stored_events: int


async def generate(port: int, connections: int, seconds: float, rate: float) -> list[Sender]:
    """Send for so long; the senders with what they measured."""
    ids = await asyncio.to_thread(hello, f"http://127.0.0.1:{port}", connections)
    timing = Timing(pause_s=connections / rate if rate else 0.0)
    senders = [Sender(each, requests_of(dp), timing) for dp, each in enumerate(ids)]
    await connect(port, senders)
    await asyncio.sleep(seconds)
    await stop(senders)
    return senders


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
            before = (
                family_cpu_s(server.pid),
                resource.getrusage(resource.RUSAGE_SELF),
                time.monotonic(),
            )
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                senders = runner.run(generate(port, connections, seconds, rate))
            took = time.monotonic() - before[2]
            server_cpu = family_cpu_s(server.pid) - before[0]
            usage = resource.getrusage(resource.RUSAGE_SELF)
        finally:
            server.send_signal(signal.SIGTERM)
            text = server.communicate(timeout=60)[0]
        mine = sum(
            getattr(usage, name) - getattr(before[1], name) for name in ("ru_utime", "ru_stime")
        )
    times, refused = all_times(senders), sum(sender.refused for sender in senders)
    return Load(
        seconds=seconds,
        connections=connections,
        rate=rate,
        requests=len(times) + refused,
        refused=refused,
        requests_per_s=round(len(times) / seconds, 1),
        events_per_s=round(len(times) * EVENTS / seconds),
        p50_s=quantile(times, 0.5),
        p99_s=quantile(times, 0.99),
        max_s=quantile(times, 1.0),
        server_cpu=round(server_cpu / took, 2),
        generator_cpu=round(mine / took, 2),
        server_cpu_ms=round(1000 * server_cpu / max(len(times) + refused, 1), 3),
        acknowledged_events=len(times) * EVENTS,
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
