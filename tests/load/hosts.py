"""The agents of one job on 10,000 GPUs: 1,250 hosts, a connection each, phases hashed as ours are.

``python -m tests.load.hosts --events 120000 1000000`` starts ``smon serve --role api``, registers
the hosts, and sends, for so long at each rate, what each host has in the interval between two
flushes. Prints a list of JSON: for each rate what was taken in, how long an acknowledgement took,
the memory of the server, what was in its log at the end, and how long until that was stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from tests.faults.outside import number
from tests.load.agents import (
    Sender,
    Timing,
    all_refusals,
    all_times,
    connect,
    hello,
    host_name,
    phase_of,
    quantile,
    requests_of,
    stop,
)
from tests.load.samples import family_cpu_s, family_peak_mib, restart_peaks
from tests.system.server import ServerProcess
from tests.waiting import wait_until

#: Bodies of each host that differ; then they come again, with another number.
_BODIES: Final = 2

_PATIENCE_S: Final = 600.0

_SETTINGS: Final[dict[str, object]] = {
    "max_connections_per_address": 8192,
    "min_free_bytes": 0,
    "wal_segment_bytes": 64 << 20,
}


@dataclass(frozen=True, slots=True)
class Size:
    """One rate.

    Attributes
    ----------
    hosts
        Each with one agent, which has one connection and one stream.
    events_per_s
        Of all hosts together.
    flush_s
        Between two batches of a host.
    seconds
        For so long.
    """

    hosts: int
    events_per_s: float
    flush_s: float
    seconds: float

    @property
    def rows(self) -> int:
        """Events of a batch: an even number."""
        return max(round(self.events_per_s * self.flush_s / self.hosts / 2) * 2, 2)


def measure(server: ServerProcess, size: Size) -> dict[str, Any]:
    """Send at one rate to a server that runs."""
    assert server.process is not None
    pid, url, job = server.process.pid, _url(server), f"hosts-{size.rows}"
    begin = time.monotonic()
    ids = hello(server.url, size.hosts, job=job)
    registered_s = time.monotonic() - begin
    requests = [requests_of(dp, rows=size.rows, bodies=_BODIES) for dp in range(size.hosts)]
    restart_peaks(pid)
    spent_s = family_cpu_s(pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        senders, sent_s = runner.run(_generate(server.port, ids, requests, size))
    spent_s = family_cpu_s(pid) - spent_s
    left = server.metrics()
    ended = time.monotonic()
    wait_until(lambda: not server.metrics()["smon_wal_records"], "an empty log", _PATIENCE_S)
    drained_s = time.monotonic() - ended
    times = all_times(senders)
    return {
        "events_per_s_offered": round(size.hosts * size.rows / size.flush_s),
        "hosts": size.hosts,
        "events_of_a_batch": size.rows,
        "seconds": round(sent_s, 2),
        "registering_s": round(registered_s, 2),
        "batches": len(times),
        "events": len(times) * size.rows,
        "refused": len(all_refusals(senders)),
        "connections_lost": sum(sender.lost for sender in senders),
        "events_per_s": round(len(times) * size.rows / sent_s),
        "p50_s": quantile(times, 0.5),
        "p99_s": quantile(times, 0.99),
        "longest_s": quantile(times, 1.0),
        "server_cpu": round(spent_s / sent_s, 2),
        "most_mib": round(family_peak_mib(pid)),
        "log_mib_at_the_end": round(left["smon_wal_bytes"] / (1 << 20), 1),
        "oldest_in_the_log_s": round(left["smon_drain_lag_seconds"], 2),
        "until_stored_s": round(drained_s, 2),
        **_stored(url, job),
    }


async def _generate(
    port: int, ids: Sequence[str], requests: Sequence[list[Any]], size: Size
) -> tuple[list[Sender], float]:
    """The agents, and the seconds from the first connection to the last batch."""
    senders = []
    for place, (each, mine) in enumerate(zip(ids, requests, strict=True)):
        first_s = phase_of(host_name(place)) * size.flush_s
        senders.append(Sender(each, mine, Timing(size.flush_s, first_s)))
    begin = time.monotonic()
    await connect(port, senders)
    await asyncio.sleep(size.seconds)
    sent_s = time.monotonic() - begin
    await stop(senders)
    return senders, sent_s


def _stored(url: str, job: str) -> dict[str, int]:
    """Events of a job in the database: as its streams count them, and as its files do."""
    of_job = f"JOIN jobs ON jobs.id = job_id WHERE jobs.name = '{job}'"
    return {
        "events_of_streams": number(url, f"SELECT sum(events) FROM streams {of_job}"),  # noqa: S608  # names of ours
        "events_in_files": number(
            url,
            f"SELECT sum(event_files.rows) FROM event_files {of_job} "  # noqa: S608  # as above
            "AND kind = 'ops' AND doomed_ns IS NULL",
        ),
    }


def _url(server: ServerProcess) -> str:
    return f"sqlite:///{Path(str(server.settings['data_dir'])) / 'smon.db'}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the size from the command line and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1250)
    parser.add_argument("--events", type=float, nargs="+", default=[120e3, 1e6], help="per second")
    parser.add_argument("--flush", type=float, default=10.0, help="seconds between two batches")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="disk to measure; default: temporary files")
    given = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        server = ServerProcess(Path(name), role="api", module="smon.cli", **_SETTINGS)
        with server:
            sizes = [Size(given.hosts, each, given.flush, given.seconds) for each in given.events]
            found = [measure(server, size) for size in sizes]
    print(json.dumps(found))  # noqa: T201  # a command prints


if __name__ == "__main__":
    main()
