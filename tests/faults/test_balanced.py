"""What one server has acknowledged and not stored yet is not given up because another lacks it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smon.store.commit import AlreadyStored
from smon.store.database import Database
from smon.store.models import Coverage, Stream
from smon.wire import BatchKind
from tests.faults.events import NOTHING_WRONG
from tests.faults.outside import number
from tests.faults.postgres import Postgres, postgres
from tests.faults.processes import FaultServer
from tests.faults.producers import Load
from tests.faults.site import Site
from tests.service import add_tenant, sqlite
from tests.store.rows import note, only, open_stream, store
from tests.waiting import wait_until

__all__ = ["sqlite"]

#: Every batch is a segment of its own, and gone from the spool once it is acknowledged.
LOAD = Load(hosts=2, segment_bytes=1)

#: Kills of a server, until one has hit a batch whose answer is on its way; and at most so many.
KILLS, MOST = 8, 40

LOST = {"kind": BatchKind.GAP, "events": 0, "reason": "not-on-server"}


@pytest.fixture
def database() -> Iterator[Postgres]:
    """A PostgreSQL server of its own."""
    with postgres() as server:
        yield server


@pytest.mark.slow
@pytest.mark.postgres
def test_batches_in_the_log_of_a_dead_server_are_waited_for(
    tmp_path: Path, database: Postgres
) -> None:
    """One server dies with a full log, agents go on with the other: all stored once, no GAP."""
    url = database.new("balanced")
    settings = {"database_url": url, "trace_url": tmp_path / "objects"}
    quick = {**settings, "heartbeat_interval_s": 0.3}
    # It acknowledges, and stores nothing as long as it lives.
    first = FaultServer(tmp_path / "first", {**quick, "drain_interval_s": 3600})
    second = FaultServer(tmp_path / "second", quick)
    with Site(tmp_path, [first, second], load=LOAD, url=url) as site:
        site.wait_for_batches(40)
        first.kill()
        site.restart_agents()
        site.wait_for_batches(40)
        first.settings.update(quick, drain_interval_s=0.1)
        first.start()
        assert site.finish() == NOTHING_WRONG
        ends = "SELECT count(*) FROM streams WHERE ended"
        wait_until(lambda: number(url, ends) == 2 * LOAD.hosts, "streams that have ended")
        assert not site.proxy.counts.gaps


@pytest.mark.slow
@pytest.mark.postgres
def test_kills_of_two_servers_in_turn_lose_and_double_nothing(
    tmp_path: Path, database: Postgres
) -> None:
    """Two servers behind a balancer lose power at random, agents are killed: all stored once."""
    url, chance = database.new("turns"), random.Random(5)  # noqa: S311  # no secret
    settings = {
        "database_url": url,
        "trace_url": tmp_path / "objects",
        "heartbeat_interval_s": 0.3,
    }
    servers = [FaultServer(tmp_path / name, settings, power_cut=True) for name in ("a", "b")]
    with Site(tmp_path, servers, load=LOAD, url=url) as site:
        site.proxy.cut_ratio = 0.02
        rounds = 0
        while rounds < KILLS or (not site.proxy.counts.answers["duplicate"] and rounds < MOST):
            rounds += 1
            site.wait_for_batches(5)
            time.sleep(chance.random() * 0.2)
            server, agent = chance.choice(servers), chance.choice(site.agents)
            server.kill()
            agent.kill()
            agent.start()
            site.wait_for_batches(5)
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps
        assert site.proxy.counts.answers["duplicate"]


def test_a_batch_that_its_server_stores_late_counts_although_it_was_given_up(
    sqlite: Database,
) -> None:
    """The agent was told to send what it no longer had; the server that has it comes back."""
    stream = open_stream(sqlite, add_tenant(sqlite))
    gap = note(stream, 1, last_seq=5, **LOST)
    store(sqlite, [note(stream, 0), note(stream, 3), gap, note(stream, 6)])
    assert only(sqlite, Coverage)["ranges"] == [[0, 6]]
    store(sqlite, [note(stream, 2), note(stream, 5)])
    assert only(sqlite, Stream)["events"] == 50
    # And once only; nor does the GAP open what had come before it, or comes again.
    for seq in (0, 2, 3, 5, 6):
        with pytest.raises(AlreadyStored):
            store(sqlite, [note(stream, seq)])
    with pytest.raises(AlreadyStored):
        store(sqlite, [gap])
    store(sqlite, [note(stream, 1), note(stream, 4)])
    assert only(sqlite, Coverage)["awaited"] == []
    assert only(sqlite, Stream)["events"] == 70


def test_a_loss_of_the_host_is_final(sqlite: Database) -> None:
    """What never left the host cannot come from a server: its numbers are taken."""
    stream = open_stream(sqlite, add_tenant(sqlite))
    gap = note(stream, 0, last_seq=2, kind=BatchKind.GAP, events=9, reason="spool-full")
    store(sqlite, [gap])
    with pytest.raises(AlreadyStored):
        store(sqlite, [note(stream, 1)])
