"""Bodies that end the process which decodes them: each costs itself, and nothing else.

The decoders have a planted defect: they decode, and then die of a body that says so, each in its
own way. First such bodies come over HTTP, beside healthy streams; then they lie in the log of a
server that is started with such decoders.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from smon.ingest.fence import DEATHS, KILLS
from smon.wire import Batch
from smon.wire.problems import Problem
from tests.faults.mortal_server import MODULE
from tests.faults.outside import number
from tests.faults.planted_decoder import PLANTS
from tests.ingest.batches import gap, ops
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.proof.sending import Connection, Said, register
from tests.system.server import ServerProcess
from tests.waiting import wait_until

#: Bodies that end decoders, of each way to do so.
_DEADLY: Final = {Form.SHORT: 1, Form.LONG: 40}

#: Streams beside them, and what they send at least.
_HEALTHY: Final = 4
_SENT: Final = 20
_ROWS: Final = 24

_QUICK: Final[dict[str, Any]] = {
    "decode_timeout_s": 0.2,
    "decode_memory_bytes": 256 << 20,
    "min_free_bytes": 0,
    "drain_interval_s": 0.05,
}

#: Of a log that nobody moves on.
_HELD_S: Final = 3600.0

#: No deadly body is like another: they are told apart by their digests.
_SALTS: Final = {"first": 1_000_000, "second": 1}

_MIB: Final = 1 << 20
_WAIT_S: Final = 120.0


@dataclass(slots=True)
class _Beside:
    """What healthy streams were told, and what they sent."""

    statuses: Counter[int] = field(default_factory=Counter)
    batches: int = 0
    slowest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, said: Said, took_s: float) -> None:
        """Count an answer."""
        with self.lock:
            self.statuses[said.status] += 1
            self.batches += said.status == 200
            self.slowest_s = max(self.slowest_s, took_s)


def prove(form: Form, folder: Path) -> Line:
    """Over HTTP, then from the log."""
    begin = time.monotonic()
    wire, figures = _over_http(folder / "http", _DEADLY[form])
    log = _from_the_log(folder / "log", _DEADLY[form])
    seconds = round(time.monotonic() - begin, 1)
    return Line("crash", form, (*wire, *log), figures, seconds)


def deadly(seq: int, plant: str, salt: int) -> Batch:
    """A sound batch like no other that ends a planted decoder."""
    durations = 500 + salt + np.arange(_ROWS)
    return ops(seq, _ROWS, optype=[plant] * _ROWS, duration_ns=durations)


def _plants(each: int) -> Iterator[tuple[int, str]]:
    return enumerate(itertools.chain.from_iterable(itertools.repeat(list(PLANTS), each)))


def _fatal(plant: str) -> int:
    """How many decoders may die of a body before it is refused for good."""
    return KILLS if plant == "planted-kill" else DEATHS


#: Deaths of one body of each plant.
_DEATHS: Final = sum(map(_fatal, PLANTS))


# --- over HTTP ------------------------------------------------------------------------------------


def _over_http(folder: Path, each: int) -> tuple[list[Goal], dict[str, float]]:
    count = each * len(PLANTS)
    server = ServerProcess(folder, role="api", module=MODULE, **_QUICK)
    with server:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        before = (process.pid, process.create_time())
        # One of each first: what is loaded and kept once is not growth.
        first = _all_at_once(server, "first", 1)
        memory, descriptors = process.memory_info().rss, _descriptors(server, process)
        beside, told = _all_at_once(server, "second", each)
        same = process.is_running() and before == (process.pid, process.create_time())
        grown = process.memory_info().rss - memory
        more = _descriptors(server, process) - descriptors
        deaths = _deaths(server)
        ready = server.ready()
        server.stop()
    stored = number(_database(folder), "SELECT sum(events) FROM streams")
    wanted = _ROWS * (first[0].batches + beside.batches + count + len(PLANTS))
    goals = [
        exactly("bodies that ended their decoder: told so and to come again, then refused for "
                "good, of all sent", told, count),
        exactly("deaths of decoders that were counted", deaths, _DEATHS * (each + 1)),
        exactly("the server's process is the same, and ready", int(same and ready), 1),
        exactly("batches of healthy streams beside them with another answer than 200",
                beside.statuses.total() - beside.statuses[200], 0),
        at_least("batches of healthy streams beside them", beside.batches, _HEALTHY * _SENT),
        exactly("ops of healthy batches, and of those that came after deadly ones, that are not "
                "stored, or twice", abs(stored - wanted), 0),
        at_most("memory that the server gained, MiB", max(grown, 0) / _MIB, 32),
        at_most("descriptors that the server gained", more, 4),
    ]  # fmt: skip
    figures = {
        "bodies_that_end_decoders": count,
        "deaths": deaths,
        "healthy_batches": beside.batches,
        "slowest_healthy_answer_s": round(beside.slowest_s, 2),
    }
    return goals, figures


def _all_at_once(server: ServerProcess, name: str, each: int) -> tuple[_Beside, int]:
    """Healthy streams, and deadly bodies beside them; how many had the answers they should have."""
    streams = register(server, name, each * len(PLANTS))
    good = 0
    with _healthy(server, name) as beside, Connection(server.port) as connection:
        for (place, plant), stream in zip(_plants(each), streams, strict=True):
            batch = deadly(0, plant, _SALTS[name] + place)
            good += _told(connection, stream, batch, _fatal(plant))
    _until_moved(server, each)
    return beside, good


def _until_moved(server: ServerProcess, each: int) -> None:
    """Wait until the log is empty."""
    end = time.monotonic() + _WAIT_S * each
    while server.metrics()["smon_wal_records"] and time.monotonic() < end:
        time.sleep(0.05)


def _told(connection: Connection, stream: str, batch: Batch, fatal: int) -> bool:
    """Send one until it is refused for good, then a gap in its place, then a sound batch."""
    answers = [connection.put(stream, batch) for _ in range(fatal)]
    again, last = answers[:-1], answers[-1]
    good = all(
        (said.status, said.problem) == (503, Problem.DECODER_DIED) and said.retry_after
        for said in again
    )
    good = good and (last.status, last.problem) == (422, Problem.UNDECODABLE)
    reason = f"refused-{last.status}-{last.problem}"
    for after in (gap(0, 0, events=_ROWS, reason=reason), ops(1, _ROWS)):
        good = good and connection.put(stream, after).status == 200
    return bool(good)


@contextmanager
def _healthy(server: ServerProcess, name: str) -> Iterator[_Beside]:
    """Streams that send all the while, and for a while at least."""
    beside, stop = _Beside(), threading.Event()
    threads = [
        threading.Thread(target=_send, args=(server, stream, beside, stop))
        for stream in register(server, f"beside-{name}", _HEALTHY)
    ]
    for thread in threads:
        thread.start()
    try:
        yield beside
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _send(server: ServerProcess, stream: str, beside: _Beside, stop: threading.Event) -> None:
    with Connection(server.port) as connection:
        for seq in itertools.count():
            if stop.is_set() and seq >= _SENT:
                break
            begin = time.monotonic()
            beside.note(connection.put(stream, ops(seq, _ROWS)), time.monotonic() - begin)


def _descriptors(server: ServerProcess, process: psutil.Process) -> int:
    """Open in the server when all connections are closed."""
    wait_until(lambda: not server.metrics()["smon_ingest_connections"], "no connections")
    return process.num_fds()


def _deaths(server: ServerProcess) -> int:
    name = "smon_ingest_decoder_deaths_total{"
    return int(sum(count for key, count in server.metrics().items() if key.startswith(name)))


def _database(folder: Path) -> str:
    return f"sqlite:///{folder / 'data' / 'smon.db'}"


# --- from the log ---------------------------------------------------------------------------------


def _from_the_log(folder: Path, each: int) -> list[Goal]:
    """Such bodies are in the log already, taken by decoders that did not die of them."""
    count = each * len(PLANTS)
    sound = _fill(folder, each)
    lost = 'smon_ingest_lost_events_total{reason="decoder-died"}'
    with ServerProcess(folder, role="api", module=MODULE, **_QUICK) as server:
        assert server.process is not None
        pid = server.process.pid
        _until_moved(server, each)
        figures, deaths = server.metrics(), _deaths(server)
        same = psutil.pid_exists(pid) and server.process.poll() is None and server.ready()
        server.stop()
    stored = number(_database(folder), "SELECT sum(rows) FROM event_files WHERE kind = 'ops'")
    kept = len(list((folder / "data" / "wal" / "quarantine").glob("*.bin")))
    return [
        exactly("log: batches that are left in it", int(figures["smon_wal_records"]), 0),
        exactly("log: deadly batches that were set aside, with stream and number", kept, count),
        exactly("log: their ops, counted as lost", int(figures[lost]), count * _ROWS),
        exactly("log: deaths of decoders that were counted", deaths, _DEATHS * each),
        exactly("log: ops of all other batches that are not stored, or twice",
                abs(stored - sound * _ROWS), 0),
        exactly("log: the server's process is the same, and ready", int(same), 1),
    ]  # fmt: skip


def _fill(folder: Path, each: int) -> int:
    """Have deadly batches in a log, a sound one before and behind each; how many sound ones."""
    held = ServerProcess(folder, role="api", **{**_QUICK, "drain_interval_s": _HELD_S})
    with held as server:
        streams = register(server, "logged", each * len(PLANTS))
        with Connection(server.port) as connection:
            for (place, plant), stream in zip(_plants(each), streams, strict=True):
                for batch in (ops(0, _ROWS), deadly(1, plant, place), ops(2, _ROWS)):
                    said = connection.put(stream, batch)
                    if said.status != 200:
                        raise RuntimeError(f"a batch for the log was answered with {said}")
        # Killed: a server that stops would move its log on.
        server.kill()
    return 2 * len(streams)
