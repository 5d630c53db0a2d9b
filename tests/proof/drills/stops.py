"""SIGTERM to processes that are at work, and servers that are restarted in turn."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.events import NOTHING_WRONG
from tests.faults.outside import number
from tests.faults.postgres import Postgres
from tests.faults.processes import FaultServer, WorkerProcess
from tests.faults.producers import Load
from tests.faults.site import Site
from tests.faults.test_stop import logged_batches, stored_batches
from tests.waiting import wait_until

_LOAD: Final = Load(hosts=2, batch_events=1000, pause_s=0.05, window_steps=5)

#: How long a process may take before it counts as one that does not end.
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Stop:
    """One SIGTERM.

    Attributes
    ----------
    lost
        Batches that were acknowledged, and are neither stored nor in the log.
    """

    process: str
    meanwhile: str
    s: float
    code: int
    lost: int = 0


def under_load(folder: Path) -> Iterator[Stop]:
    """A server and an agent while batches come, on SQLite; then everything must be there."""
    server = FaultServer(folder / "server")
    with Site(folder, [server], load=_LOAD) as site:
        site.wait_for_batches(20)
        begin = time.monotonic()
        code = site.agents[0].stop(_PATIENCE_S)
        yield Stop("agent", "batches are written", _since(begin), code)
        site.agents[0].start()
        site.wait_for_batches(10)
        yield _stopped(site, server, "batches come")
        server.start()
        verdict = site.finish()
        if verdict != NOTHING_WRONG or site.proxy.counts.gaps:
            raise RuntimeError(f"after a restart: {verdict}")


def without_database(folder: Path, database: Postgres) -> Iterator[Stop]:
    """Server, worker and agent, at work, and then while the database is away."""
    url = database.new("stopping")
    server = FaultServer(folder / "server", {"database_url": url})
    with Site(folder, [server], load=_LOAD, url=url) as site:
        worker = WorkerProcess(server, "first").start()
        wait_until(lambda: number(url, "SELECT count(*) FROM results"), "a report")
        yield _ended(worker, "windows come")
        worker = WorkerProcess(server, "second").start()
        wait_until(lambda: number(url, "SELECT count(*) FROM nodes WHERE id = 'second'"), "it")
        database.stop()
        site.wait_for_batches(10)
        yield _ended(worker, "the database is away")
        yield _stopped(site, server, "the database is away", database)
        begin = time.monotonic()
        code = site.agents[0].stop(_PATIENCE_S)
        yield Stop("agent", "the server is away", _since(begin), code)
        site.agents[0].start()
        server.start()
        verdict = site.finish()
        if verdict != NOTHING_WRONG:
            raise RuntimeError(f"after a restart: {verdict}")


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 2)


def _stopped(
    site: Site, server: FaultServer, meanwhile: str, database: Postgres | None = None
) -> Stop:
    """Stop a server; its database, if that is away, is back afterwards."""
    begin = time.monotonic()
    code = server.stop(_PATIENCE_S)
    seconds = _since(begin)
    acknowledged = set(site.proxy.counts.acknowledged)
    logged = logged_batches(server.data / "wal")
    if database is not None:
        database.start()
    lost = acknowledged - logged - stored_batches(site.url)
    return Stop("server", meanwhile, seconds, code, len(lost))


def _ended(worker: WorkerProcess, meanwhile: str) -> Stop:
    begin = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker._process is not None
    code = worker._process.wait()
    return Stop("worker", meanwhile, _since(begin), code)


@dataclass(frozen=True, slots=True)
class Rolled:
    """Two servers restarted in turn behind a balancer.

    Attributes
    ----------
    refused
        Answers to batches other than 200.
    gave_up
        Agents with refused batches in ``dead/``, and losses that were told.
    """

    restarts: int
    batches: int
    refused: int
    gave_up: int
    wrong: int


def rolling(folder: Path, database: Postgres, rounds: int) -> Rolled:
    """Stop and start each in turn, so often, under load."""
    url = database.new("rolling")
    settings = {"database_url": url, "trace_url": folder / "objects"}
    servers = [FaultServer(folder / f"server-{name}", settings) for name in "ab"]
    with Site(folder, servers, load=Load(hosts=3), url=url) as site:
        for _ in range(rounds):
            for server in servers:
                site.wait_for_batches(20)
                server.stop(_PATIENCE_S)
                site.wait_for_batches(20)
                server.start()
        verdict = site.finish()
        answers = site.proxy.counts.answers
        good = answers["stored"] + answers["duplicate"]
        return Rolled(
            restarts=2 * rounds,
            batches=len(site.proxy.counts.acknowledged),
            refused=answers.total() - good,
            gave_up=len(site.proxy.counts.gaps)
            + sum((agent.spool / "dead").exists() for agent in site.agents),
            wrong=int(verdict != NOTHING_WRONG),
        )
