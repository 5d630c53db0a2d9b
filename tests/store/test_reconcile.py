from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from sqlalchemy import text, update

from smon.config import Settings
from smon.errors import StoreError
from smon.store.database import Database
from smon.store.housekeeping import backup_runs, housekeep_once
from smon.store.models import EventFile, Job, Node, Window
from smon.store.objects import Objects
from smon.store.reconcile import LOST, ORPHAN_NS, QUARANTINE_NS, compare, reconcile
from tests.service import add_tenant
from tests.store.rows import NOW, add_row, all_rows, live_paths, only, stored_job


def in_an_hour() -> int:
    """A time when what is written now is old."""
    return time.time_ns() + ORPHAN_NS + 10**9


def test_a_file_without_a_row_is_set_aside(database: Database, any_root: str) -> None:
    """Not removed; and not before it had time to get its row."""
    objects = Objects(any_root)
    stored_job(database, objects)
    objects.put("events/job=0a/day=2026-09-21/w0-x.parquet", b"orphan")
    objects.put("results/job=0a/x-workers.parquet", b"orphan")
    assert reconcile(database, objects, time.time_ns()).quarantined == 0
    found = reconcile(database, objects, in_an_hour())
    assert (found.quarantined, found.lost) == (2, 0)
    assert [file.path for file in objects.list("events")] == live_paths(database)
    aside = "quarantine/events/job=0a/day=2026-09-21/w0-x.parquet"
    assert objects.get(aside) == b"orphan"
    assert objects.size("quarantine/results/job=0a/x-workers.parquet") == 6
    later = in_an_hour() + QUARANTINE_NS
    assert reconcile(database, objects, later).purged == 2
    assert objects.size(aside) is None


def test_a_file_whose_row_came_very_late_is_brought_back(database: Database, root: str) -> None:
    """Had it been set aside although a commit was still to come, nothing is lost."""
    objects = Objects(root)
    stored_job(database, objects)
    (path,) = live_paths(database)
    objects.move(path, f"quarantine/{path}")
    found = reconcile(database, objects, in_an_hour())
    assert (found.restored, found.lost) == (1, 0)
    assert objects.size(path) == only(database, EventFile)["bytes"]


def test_a_row_without_a_file_is_an_alarm(
    database: Database, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, logged with its path, and noted at the window that it belongs to."""
    objects = Objects(root)
    stored_job(database, objects, windows=2)
    path = live_paths(database)[0]
    objects.delete(path)
    with caplog.at_level(logging.ERROR):
        assert reconcile(database, objects, NOW).lost == 1
    assert path in caplog.text
    reasons = {row["reason"] for row in all_rows(database, Window)}
    assert reasons == {LOST, None}
    assert compare(database, objects) == ([], [path])


def test_half_written_files_go(sqlite: Database, root: str) -> None:
    """What a crash during a write leaves; a write that is in progress is left alone."""
    objects = Objects(root)
    stored_job(sqlite, objects)
    folder = Path(root) / "events"
    (folder / "a.parquet.0f.partial").write_bytes(b"half")
    assert reconcile(sqlite, objects, time.time_ns()).partial == 0
    assert reconcile(sqlite, objects, in_an_hour()).partial == 1
    assert [file.path for file in objects.list("events")] == live_paths(sqlite)


def test_only_jobs_with_recent_data_are_looked_at_every_round(sqlite: Database, root: str) -> None:
    """The list of all files is long; thoroughly it is read at start."""
    objects = Objects(root)
    job = stored_job(sqlite, objects)
    objects.put(f"events/job={job.stream.job_id}/x.parquet", b"orphan")
    objects.delete(live_paths(sqlite)[0])
    with sqlite.write() as session:
        session.execute(update(Job).values(last_data_ns=NOW))
    passed_over = reconcile(sqlite, objects, in_an_hour(), NOW + 1)
    assert (passed_over.quarantined, passed_over.lost) == (0, 0)
    found = reconcile(sqlite, objects, in_an_hour(), NOW)
    assert (found.quarantined, found.lost) == (1, 1)


def test_imports_and_other_folders_are_left_alone(sqlite: Database, root: str) -> None:
    """Uploads have no row of their own."""
    objects = Objects(root)
    objects.put("imports/0a/0", b"upload")
    reconcile(sqlite, objects, in_an_hour())
    assert objects.get("imports/0a/0") == b"upload"


SETTINGS = Settings(compact_after_s=60, retention_days=365, doomed_grace_s=0)


def test_one_round_does_everything(database: Database, root: str) -> None:
    """Compacts, removes what was replaced, looks for what a crash has left; and reports it."""
    objects = Objects(root)
    stored_job(database, objects, windows=2, files=3)
    now = NOW + 61 * 10**9
    report = housekeep_once(database, objects, SETTINGS, now, thorough=True)
    assert (report.compacted, report.doomed) == (2, 6)
    assert report.doomed_bytes > 0
    assert report.errors == ()
    assert len(live_paths(database)) == 2
    quiet = housekeep_once(database, objects, SETTINGS, now + 1)
    assert (quiet.compacted, quiet.doomed, quiet.expired.files) == (0, 0, 0)


def test_while_a_backup_runs_no_file_is_removed(database: Database, root: str) -> None:
    """It copies what its rows name; a backup that died does not hold up anything for long."""
    objects = Objects(root)
    stored_job(database, objects, files=3)
    now = NOW + 61 * 10**9
    add_row(database, Node, id="b", role="backup", host="", started_ns=now, seen_ns=now, version="")
    settings = Settings(compact_after_s=60, doomed_grace_s=0, retention_bytes=1)
    held = housekeep_once(database, objects, settings, now)
    assert held.backup
    assert (held.compacted, held.doomed, held.expired.files) == (1, 0, 0)
    assert len(list(objects.list("events"))) == 4
    later = now + 601 * 10**9
    assert not backup_runs(database, later)
    assert housekeep_once(database, objects, settings, later).doomed == 3


def test_what_cannot_be_done_is_reported_and_the_rest_is(sqlite: Database, root: str) -> None:
    """A folder that cannot be listed does not keep retention from its work."""
    objects = Objects(root)
    stored_job(sqlite, objects, windows=2)
    file = Path(root) / live_paths(sqlite)[0]
    os.rename(file, file.with_suffix(".aside"))  # noqa: PTH104  # shorter
    file.mkdir()
    settings = Settings(retention_days=1)
    report = housekeep_once(sqlite, objects, settings, NOW + 40 * 86_400 * 10**9)
    assert len(report.errors) == 1
    assert "cannot remove" in report.errors[0]
    assert len(all_rows(sqlite, EventFile)) == 0


@pytest.mark.postgres
def test_one_server_at_a_time_keeps_house(postgres_url: str, root: str) -> None:
    """The others leave it to the one that is at it."""
    database = Database(postgres_url)
    add_tenant(database)
    with database.write() as session:
        session.execute(text("SELECT pg_advisory_xact_lock(1397583727)"))
        assert not housekeep_once(database, Objects(root), SETTINGS, NOW).alone
    assert housekeep_once(database, Objects(root), SETTINGS, NOW).alone
    database.close()


def test_a_database_that_is_gone_is_a_store_error(tmp_path: Path, root: str) -> None:
    """The loop of the worker tries again later."""
    gone = Database(f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(StoreError):
        housekeep_once(gone, Objects(root), SETTINGS, NOW)
