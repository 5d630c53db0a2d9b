"""Two API processes and two workers share one PostgreSQL: each window is analysed exactly once."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow.parquet as pq
import pytest

from smon.ops import OP_TYPES
from smon.synth.scenario import Scenario, generate
from smon.trace.table import OpTable
from smon.wire import Batch
from tests.faults.outside import number, query
from tests.faults.postgres import Postgres, postgres
from tests.faults.processes import FaultServer, WorkerProcess
from tests.system.replay import end_batch, ops_batch
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

WINDOWS = 100
WINDOW_STEPS = 2

#: Share of batches that are sent to both servers at the same moment.
_BOTH = 0.3

_COLUMNS = ("step", "dp", "stage", "rank", "start_ns", "duration_ns", "seq", "chunk", "microbatch")

Row = tuple[Any, ...]


@pytest.fixture
def database() -> Iterator[Postgres]:
    """A PostgreSQL server of its own."""
    with postgres() as server:
        yield server


class Host(threading.Thread):
    """Sends one stream to servers in turn, some batches to both; until each is acknowledged."""

    def __init__(
        self, servers: list[FaultServer], stream: str, batches: list[Batch], seed: int
    ) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self.both: list[list[str]] = []
        self.failed = 0
        #: The last quarter waits for it.
        self.go_on = threading.Event()
        self._servers, self._stream, self._batches = servers, stream, batches
        self._chance = random.Random(seed)  # noqa: S311  # no secret

    def run(self) -> None:
        """Send all."""
        for batch in self._batches:
            if self.sent >= len(self._batches) * 3 // 4:
                self.go_on.wait(PATIENCE_S)
            if self._chance.random() < _BOTH:
                self._to_both(batch)
            turn = batch.seq
            # To both or not: one answer is enough, and none is known here.
            while self._put(self._servers[turn % 2], batch) is None:
                self.failed += 1
                turn += 1
            self.sent += 1

    def _to_both(self, batch: Batch) -> None:
        answers: list[str] = []
        start = threading.Barrier(2)

        def send(server: FaultServer) -> None:
            start.wait()
            answer = self._put(server, batch)
            if answer is not None:
                answers.append(answer)

        threads = [threading.Thread(target=send, args=(server,)) for server in self._servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.both.append(answers)

    def _put(self, server: FaultServer, batch: Batch) -> str | None:
        """Status of the answer; None: there was none, or it was none of 200."""
        connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            path = f"/api/v1/ingest/{self._stream}/0/{batch.seq}"
            connection.request("PUT", path, batch.body, batch.headers())
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()
        assert answer.status in {200, 503}, body
        return str(body["status"]) if answer.status == 200 else None


def register(server: FaultServer, dp: int, ranks: list[int]) -> str:
    """The id of a stream of one replica."""
    stream = {
        "key": f"shared-{dp}",
        "job": "shared",
        "attempt": 0,
        "layout": {"dp": 2, "pp": 2},
        "mode": "recorded",
        "time": "unix",
        "window_steps": WINDOW_STEPS,
        "host": f"host-{dp}",
        "source": "test",
        "ranks": ranks,
        "epoch": 0,
        "notes": [],
    }
    agent = {"version": "0", "host": f"host-{dp}", "pid": 1}
    answer = server.post("agents/hello", {"protocol": 1, "agent": agent, "streams": [stream]})
    return str(answer["streams"][0]["stream_id"])


def batches_of(table: OpTable) -> list[Batch]:
    """A batch per step, and the end."""
    steps = np.unique(table.step).tolist()
    parts = [ops_batch(seq, table.take(table.step == step)) for seq, step in enumerate(steps)]
    return [*parts, end_batch(len(parts))]


def rows_sent(table: OpTable) -> Counter[Row]:
    """Rows that were sent."""
    columns = [getattr(table, name).tolist() for name in _COLUMNS]
    labels = [OP_TYPES[code].label for code in table.optype.tolist()]
    return Counter(zip(labels, *columns, strict=True))


def rows_stored(url: str, objects: Path) -> Counter[Row]:
    """Rows of all files that count."""
    found: Counter[Row] = Counter()
    files = "SELECT path FROM event_files WHERE kind = 'ops' AND doomed_ns IS NULL"
    for (path,) in query(url, files):
        table = pq.ParquetFile(objects / path).read()
        columns = [table[name].to_pylist() for name in ("optype", *_COLUMNS)]
        found.update(zip(*columns, strict=True))
    return found


@contextmanager
def unfinished(url: str) -> Iterator[None]:
    """No window can be finished meanwhile: its result waits for a lock."""
    with psycopg.connect(url.replace("+psycopg", "")) as session:
        session.execute("LOCK TABLE results IN SHARE MODE")
        yield


def kill_at_work(url: str, worker: WorkerProcess) -> None:
    """SIGKILL a worker while it has a window."""
    mine = (
        "SELECT count(*) FROM windows WHERE state = 'claimed' "  # noqa: S608  # a name of ours
        f"AND owner = '{worker.name}'"
    )
    wait_until(lambda: number(url, mine), "a worker that has a window")
    worker.kill()


def test_windows_of_two_servers_are_analysed_once_each(tmp_path: Path, database: Postgres) -> None:
    """An API process and a worker are killed in mid-flight: each window one result, rows once."""
    url, objects = database.new("shared"), tmp_path / "objects"
    shared = {"database_url": url, "trace_url": objects, "lease_s": 1.0}
    servers = [FaultServer(tmp_path / name, shared) for name in ("a", "b")]
    made = generate(Scenario(dp=2, pp=2, microbatches=2, steps=WINDOWS * WINDOW_STEPS))
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        workers = [WorkerProcess(servers[1], f"worker-{number}").start() for number in range(2)]
        for worker in workers:
            stack.callback(worker.kill)
        hosts = []
        for dp in range(2):
            mine = made.table.take(made.table.dp == dp)
            stream = register(servers[dp], dp, np.unique(mine.rank).tolist())
            hosts.append(Host(servers, stream, batches_of(mine), seed=dp))
        for host in hosts:
            host.start()
        wait_until(lambda: min(host.sent for host in hosts) > WINDOWS // 2, "batches")
        servers[0].kill()
        for host in hosts:
            host.go_on.set()
        wait_until(lambda: min(host.sent for host in hosts) > WINDOWS, "batches to the other")
        servers[0].start()
        # There are windows once all is sent.
        with unfinished(url):
            for host in hosts:
                host.join()
            kill_at_work(url, workers[0])
        done = "SELECT count(*) FROM windows WHERE state = 'done'"
        wait_until(lambda: number(url, done) == WINDOWS, "all windows")
        wait_until(lambda: not any(server.wal_records for server in servers), "empty logs")
    assert number(url, "SELECT count(*) FROM windows") == WINDOWS
    results = query(url, "SELECT window_id, count(*) FROM results GROUP BY window_id")
    assert Counter(count for _, count in results) == {1: WINDOWS}
    stale = "SELECT count(*) FROM windows WHERE analysed_revision IS DISTINCT FROM revision"
    assert number(url, stale) == 0
    assert number(url, "SELECT sum(rows) FROM windows") == len(made.table)
    assert rows_stored(url, objects) == rows_sent(made.table)
    # Both faults have hit something, and both servers have taken the same batch at the same time.
    assert sum(host.failed for host in hosts)
    assert any(answers == ["stored", "stored"] for host in hosts for answers in host.both)
