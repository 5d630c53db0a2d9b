"""SIGTERM: a server ends in time and in good order, and two of them can be restarted in turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from smon.wire.frames import Frame, scan_frames
from tests.faults.events import NOTHING_WRONG
from tests.faults.outside import query
from tests.faults.postgres import Postgres, postgres
from tests.faults.processes import FaultServer
from tests.faults.producers import Load
from tests.faults.proxy import Batch
from tests.faults.site import Site

pytestmark = pytest.mark.slow

STOP_S = 10.0

#: For the end of the process itself, on a busy machine.
_GRACE_S = 30.0

#: More than a server takes to move its log on.
_PATIENCE_S = 60.0


def stored_batches(url: str) -> set[Batch]:
    """(stream, epoch, seq) of all batches that the database knows to be stored."""
    found = set()
    for stream, epoch, text in query(url, "SELECT stream_id, epoch, ranges FROM coverage"):
        ranges = json.loads(text) if isinstance(text, str) else text
        found |= {(stream, epoch, seq) for first, last in ranges for seq in range(first, last + 1)}
    return found


def logged_batches(folder: Path) -> set[Batch]:
    """Those that are in a log."""
    found = set()
    for path in folder.glob("*.wal"):
        for part in scan_frames(path.read_bytes()):
            if isinstance(part, Frame):
                length = int.from_bytes(part.body[:4], "little")
                head = json.loads(part.body[4 : 4 + length])
                found.add((head["stream"], head["epoch"], head["seq"]))
    return found


@pytest.fixture
def database() -> Iterator[Postgres]:
    """A PostgreSQL server of its own."""
    with postgres() as server:
        yield server


def test_sigterm_under_load_ends_in_time_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """Exit code 0 within the time for stopping; acknowledged is stored, or in the log."""
    server = FaultServer(tmp_path / "server", {"stop_timeout_s": STOP_S}, warm=False)
    load = Load(hosts=4, batch_events=1000, pause_s=0.05)
    with Site(tmp_path, [server], load=load) as site:
        site.wait_for_batches(60)
        assert server.stop(STOP_S + _GRACE_S) == 0
        for producer in site.producers:
            producer.finish()
        acknowledged = set(site.proxy.counts.acknowledged)
        kept = stored_batches(site.url) | logged_batches(server.data / "wal")
        assert acknowledged <= kept
        server.start()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


@pytest.mark.postgres
def test_sigterm_while_the_database_is_down_ends_in_time_too(
    tmp_path: Path, database: Postgres
) -> None:
    """What cannot be stored stays in the log, and the process ends all the same."""
    url = database.new("stopping")
    settings = {"stop_timeout_s": 2.0, "database_url": url}
    server = FaultServer(tmp_path / "server", settings, warm=False)
    with Site(tmp_path, [server], url=url) as site:
        database.stop()
        site.wait_for_batches(10)
        assert server.stop(2.0 + _GRACE_S) == 0
        kept = logged_batches(server.data / "wal")
        database.start()
        assert set(site.proxy.counts.acknowledged) <= kept | stored_batches(url)
        server.start()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


@pytest.mark.postgres
def test_a_rolling_restart_fails_no_batch(tmp_path: Path, database: Postgres) -> None:
    """Two API processes behind a balancer, stopped and started in turn: agents notice nothing."""
    url = database.new("rolling")
    # What is in a log when the time for stopping is over stays there: here it shall not be over.
    settings = {
        "database_url": url, "trace_url": tmp_path / "objects", "stop_timeout_s": _PATIENCE_S,
    }  # fmt: skip
    servers = [FaultServer(tmp_path / f"server-{name}", settings) for name in "ab"]
    with Site(tmp_path, servers, load=Load(hosts=3), url=url) as site:
        for _ in range(2):
            for server in servers:
                site.wait_for_batches(20)
                assert server.stop(_PATIENCE_S + _GRACE_S) == 0
                assert not logged_batches(server.data / "wal") - stored_batches(url)
                site.wait_for_batches(20)
                server.start()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps
        assert not any((agent.spool / "dead").exists() for agent in site.agents)
        refused = {status for status in site.proxy.counts.answers if status.startswith("4")}
        assert not refused
