"""Disks that are full: nothing that was acknowledged is lost, and all goes on by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.disk import SmallDisk
from tests.faults.events import NOTHING_WRONG
from tests.faults.outside import lost_events, number
from tests.faults.processes import FaultServer
from tests.faults.producers import Load
from tests.faults.site import Site
from tests.system.server import request
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20

MakeDisk = Callable[[int], SmallDisk]


@pytest.mark.parametrize("min_free_bytes", [0, MIB // 2])
def test_a_full_log_refuses_and_says_so_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: MakeDisk, min_free_bytes: int
) -> None:
    """507, not ready with the reason, alive all the while; then ready by itself, all there once."""
    disk = small_disk(4 * MIB)
    server = FaultServer(
        tmp_path / "server",
        {
            "wal_dir": disk.folder,
            "wal_segment_bytes": MIB // 4,
            "min_free_bytes": min_free_bytes,
        },
    )
    with Site(tmp_path, [server]) as site:
        disk.fill()
        site.wait_for_answer("507")
        assert "log cannot be written" in site.reasons()
        assert request(server.ops_port, "GET", "/healthz")[0] == 200
        assert server.metrics()["smon_wal_read_only"] == 1
        # A crash while the disk is full: what was acknowledged is still in the log.
        site.crash()
        site.restart_agents()
        site.wait_for_answer("507")
        disk.free()
        wait_until(lambda: not site.reasons(), "a server that is ready")
        site.restart_agents()
        site.wait_for_batches()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


def test_a_log_that_fills_itself_refuses_until_batches_can_be_stored(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    """No room for files either: the log takes what fits, then 507; in the end all there once."""
    log, files = small_disk(MIB // 2), small_disk(16 * MIB)
    server = FaultServer(
        tmp_path / "server",
        {
            "wal_dir": log.folder,
            "wal_segment_bytes": MIB // 16,
            "trace_url": files.folder,
        },
    )
    load = Load(hosts=2, batch_events=2000, pause_s=0.05)
    with Site(tmp_path, [server], load=load) as site:
        files.fill()
        site.wait_for_answer("507")
        assert "log cannot be written" in site.reasons()
        for producer in site.producers:
            producer.finish()
        files.free()
        wait_until(lambda: not site.reasons(), "a server that is ready")
        site.restart_agents()
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


def test_batches_stay_in_the_log_while_files_cannot_be_written(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    """They are acknowledged, tried again, not ready with the reason; then stored once."""
    disk = small_disk(4 * MIB)
    server = FaultServer(tmp_path / "server", {"trace_url": disk.folder})
    with Site(tmp_path, [server]) as site:
        disk.fill()
        wait_until(lambda: server.metrics()["smon_drain_failures_total"] > 0, "a failed move")
        site.wait_for_batches(20)
        assert "cannot write" in site.reasons()
        assert server.wal_records >= 20
        # A crash: they are still in the log.
        site.crash()
        site.wait_for_batches(20)
        assert server.wal_records >= 40
        disk.free()
        wait_until(lambda: not site.reasons(), "a server that is ready")
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


def test_batches_stay_in_the_log_while_the_database_cannot_be_written(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    """SQLite on a full disk: acknowledged from the log, not ready with the reason; stored once."""
    disk = small_disk(16 * MIB)
    url = f"sqlite:///{disk.folder / 'smon.db'}"
    server = FaultServer(tmp_path / "server", {"database_url": url})
    with Site(tmp_path, [server], url=url) as site:
        disk.fill()
        wait_until(lambda: server.metrics()["smon_drain_failures_total"] > 0, "a failed move")
        site.wait_for_batches(20)
        assert "database" in site.reasons()
        # A crash: the schema is there, so that the server starts, and takes in what it knows.
        site.crash()
        wait_until(site.reasons, "a reason not to be ready")
        disk.free()
        wait_until(lambda: not site.reasons(), "a server that is ready")
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


def test_a_full_spool_costs_what_does_not_fit_and_counts_it(
    tmp_path: Path, small_disk: MakeDisk
) -> None:
    """The producer goes on, what it cannot write is a GAP; what it could is stored once."""
    disk = small_disk(4 * MIB)
    server = FaultServer(tmp_path / "server")
    with Site(tmp_path, [server], spools=disk.folder) as site:
        disk.fill()
        wait_until(lambda: all(each.refused for each in site.producers), "events that do not fit")
        # An agent that comes back to a full disk ships what is there.
        site.restart_agents()
        wait_until(lambda: all(each.refused > 2000 for each in site.producers), "more of them")
        disk.free()
        written = site.appended.batches
        wait_until(lambda: site.appended.batches > written + 10, "batches that fit again")
        verdict = site.finish()
        refused = sum(each.refused for each in site.producers)
        assert verdict == NOTHING_WRONG
        assert lost_events(site.url) == refused == sum(each.dropped for each in site.producers)
        assert number(site.url, "SELECT count(*) FROM streams WHERE NOT ended") == 0
