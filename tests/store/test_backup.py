from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from smon.errors import ConfigError, StoreError
from smon.store import schema
from smon.store.backup import create
from smon.store.database import Database
from smon.store.events import read_ops
from smon.store.housekeeping import backup_runs
from smon.store.manifest import kept_tables, read_manifest, sealed, verify
from smon.store.models import EventFile, Node, Result, Stream, Window
from smon.store.objects import Objects
from smon.store.restore import restore
from smon.store.streams import find, heartbeat
from tests.service import BOTH, sqlite_database
from tests.store.rows import (
    NOW,
    Stored,
    add_row,
    all_rows,
    finish,
    live_paths,
    note,
    ops,
    put_ops,
    store,
    stored_job,
)


def contents(database: Database) -> dict[str, list[dict[str, Any]]]:
    """All rows that a backup keeps, by table."""
    with database.read() as session:
        return {
            table.name: [
                dict(row)
                for row in session.execute(
                    table.select().order_by(*table.primary_key.columns)
                ).mappings()
            ]
            for table in kept_tables()
        }


def filled(database: Database, objects: Objects) -> Stored:
    """A job with windows, a report, a heartbeat, text of many kinds."""
    job = stored_job(database, objects, windows=2, files=2)
    windows = all_rows(database, Window)
    path = f"results/job={job.stream.job_id}/r-workers.parquet"
    objects.put(path, b"workers")
    add_row(
        database,
        Result,
        tenant_id=job.tenant,
        job_id=job.stream.job_id,
        attempt_id=job.stream.attempt_id,
        window_id=windows[0]["id"],
        code_version="1",
        revision=1,
        fence=2**62,
        created_ns=NOW,
        analysis_s=0.1 + 0.2,
        verdict="base64:none",
        slowdown=1 / 3,
        coverage_ratio=1.0,
        report=bytes(range(256)),
        workers_path=path,
    )
    with database.write() as session:
        heartbeat(session, job.tenant, job.stream.id, {"a": "ä\n'\"", "n": [None, 1.5]}, None, NOW)
        session.execute(update(Window).where(Window.number == 1).values(pinned=True, reason="日"))
    return job


@pytest.fixture(params=BOTH)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A new database to restore into: SQLite, then PostgreSQL."""
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/restored.db")
    return Database(str(request.getfixturevalue("empty_postgres_url")))


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    """A log with a segment, and a lock that is no part of it."""
    folder = tmp_path / "wal"
    folder.mkdir()
    (folder / "000000000007.wal").write_bytes(b"segment" * 1000)
    (folder / ".lock").write_bytes(b"")
    return folder


def test_a_backup_comes_back_in_either_database(
    database: Database, target: Database, any_root: str, wal: Path, tmp_path: Path
) -> None:
    """From SQLite and PostgreSQL to both, from local files and S3: rows, files, log."""
    objects = Objects(any_root)
    job = filled(database, objects)
    before = contents(database)
    manifest = create(database, objects, wal, tmp_path / "backup")
    assert verify(tmp_path / "backup") == []
    assert manifest.missing == ()
    restored = Objects(str(tmp_path / "restored"))
    done = restore(target, restored, tmp_path / "new-wal", tmp_path / "backup")
    assert contents(target) == before
    assert done.rows == {name: len(rows) for name, rows in before.items()}
    assert schema.is_current(target)
    assert schema.differences(target) == []
    for file in (*objects.list("events"), *objects.list("results")):
        assert restored.get(file.path) == objects.get(file.path)
    assert len(read_ops(restored, live_paths(target))) == sum(map(len, job.tables))
    segment = tmp_path / "new-wal" / "000000000007.wal"
    assert segment.read_bytes() == b"segment" * 1000
    assert not segment.with_name(".lock").exists()
    with target.read() as session:
        assert find(session, job.tenant, job.stream.id) is not None
    target.close()


def test_the_restored_server_goes_on(sqlite: Database, root: str, tmp_path: Path) -> None:
    """New batches are stored on top, duplicates are still known."""
    objects = Objects(root)
    job = filled(sqlite, objects)
    create(sqlite, objects, tmp_path / "no-wal", tmp_path / "backup")
    database, restored = Database(f"sqlite:///{tmp_path}/new.db"), Objects(str(tmp_path / "o"))
    restore(database, restored, tmp_path / "w", tmp_path / "backup")
    with pytest.raises(StoreError, match="stored already"):
        store(database, [note(job.stream, 0)])
    store(database, [note(job.stream, 4)], [put_ops(restored, job.stream, ops(steps=1))])
    assert len(all_rows(database, EventFile)) == 5


def test_a_null_stays_a_null(sqlite: Database, root: str, tmp_path: Path) -> None:
    """Columns of JSON without a value are found by IS NULL before and after."""
    objects = Objects(root)
    stored_job(sqlite, objects)
    create(sqlite, objects, tmp_path, tmp_path / "backup")
    database = Database(f"sqlite:///{tmp_path}/new.db")
    restore(database, Objects(str(tmp_path / "o")), tmp_path / "w", tmp_path / "backup")
    for each in (sqlite, database):
        with each.read() as session:
            rows = session.connection().exec_driver_sql(
                "SELECT count(*) FROM streams WHERE heartbeat IS NULL"
            )
            assert rows.scalar() == 1


def test_batches_that_come_meanwhile_do_no_harm(
    database: Database, root: str, tmp_path: Path
) -> None:
    """The tables are one moment: what is stored while they are copied is in none of them."""
    objects = Objects(root)
    job = stored_job(database, objects)

    class Slow(Objects):
        """While its files are copied, more data comes, and is compacted."""

        def size(self, path: str) -> int | None:
            store(
                database,
                [note(job.stream, len(all_rows(database, EventFile)))],
                [put_ops(objects, job.stream, ops(steps=1))],
            )
            assert backup_runs(database, all_rows(database, Node)[0]["seen_ns"])
            return super().size(path)

    manifest = create(database, Slow(root), tmp_path / "w", tmp_path / "backup")
    assert len(manifest.objects) == 1
    assert {Path(part.path).stem: part.rows for part in manifest.tables}["event_files.jsonl"] == 1
    assert len(all_rows(database, EventFile)) == 2
    assert all_rows(database, Node) == []
    new = Database(f"sqlite:///{tmp_path}/new.db")
    restore(new, Objects(str(tmp_path / "o")), tmp_path / "w2", tmp_path / "backup")
    assert len(all_rows(new, EventFile)) == 1


def test_replaced_files_are_left_out(sqlite: Database, root: str, tmp_path: Path) -> None:
    """Their successors are in the backup; so nothing is in it twice."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=2)
    with sqlite.write() as session:
        path = all_rows(sqlite, EventFile)[0]["path"]
        session.execute(update(EventFile).where(EventFile.path == path).values(doomed_ns=NOW))
    manifest = create(sqlite, objects, tmp_path / "w", tmp_path / "backup")
    assert len(manifest.objects) == 1
    assert f"objects/{path}" not in {part.path for part in manifest.objects}


def test_a_lost_file_is_told(sqlite: Database, root: str, tmp_path: Path) -> None:
    """A backup of what there still is, that says what there is not."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=2)
    path = live_paths(sqlite)[0]
    objects.delete(path)
    manifest = create(sqlite, objects, tmp_path / "w", tmp_path / "backup")
    assert manifest.missing == (path,)
    assert read_manifest(tmp_path / "backup") == manifest


def damage_content(folder: Path) -> None:
    """Flip one bit of an event file."""
    path = next(folder.glob("objects/**/*.parquet"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_table(folder: Path) -> None:
    """Cut the last byte of a table."""
    path = folder / "tables" / "streams.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-1])


def remove_segment(folder: Path) -> None:
    """Remove a segment of the log."""
    next(folder.glob("wal/*")).unlink()


def add_file(folder: Path) -> None:
    """Add a file that nobody knows."""
    (folder / "objects" / "extra").write_bytes(b"x")


def point_outside(folder: Path) -> None:
    """Let the manifest name a file outside the backup."""
    change_manifest(folder, lambda document: document["objects"][0].update(path="objects/../../x"))


def change_manifest(folder: Path, change: Any) -> None:  # noqa: ANN401  # a function
    """Write the manifest anew, with a checksum that fits."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(sealed(document)), encoding="utf-8")


@pytest.fixture
def backup(sqlite: Database, root: str, wal: Path, tmp_path: Path) -> Path:
    """A sound backup."""
    objects = Objects(root)
    filled(sqlite, objects)
    create(sqlite, objects, wal, tmp_path / "backup")
    return tmp_path / "backup"


def restore_new(backup: Path) -> Database:
    """Restore into a new folder beside the backup."""
    new = backup.parent / "new"
    database = Database(f"sqlite:///{new}/smon.db")
    restore(database, Objects(str(new / "objects")), new / "wal", backup)
    return database


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_content, "content has changed"),
        (cut_table, "bytes"),
        (remove_segment, "missing"),
        (add_file, "not of this backup"),
        (point_outside, "outside the backup"),
    ],
)
def test_damage_is_found_and_nothing_is_restored(backup: Path, damage: Any, message: str) -> None:  # noqa: ANN401  # a function
    """Every byte of a backup is checked before the first is written."""
    damage(backup)
    faults = verify(backup)
    assert any(message in fault for fault in faults), faults
    with pytest.raises(ConfigError, match="sound backup"):
        restore_new(backup)
    assert not (backup.parent / "new" / "wal").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(schema="smon.backup/2"),
        lambda document: document.pop("tables"),
        lambda document: document.update(objects=[1]),
        lambda document: document.update(revision="9999"),
        lambda document: document["tables"][0].update(rows=77),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(backup: Path, change: Any) -> None:  # noqa: ANN401  # a function
    """Also if every file is as it was."""
    change_manifest(backup, change)
    with pytest.raises(ConfigError):
        restore_new(backup)


@pytest.mark.parametrize("key", ["created_ns", "version", "missing", "sha256"])
def test_a_manifest_that_was_changed_is_refused(backup: Path, key: str) -> None:
    """What it says of itself is covered by a checksum too."""
    path = backup / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document[key] = 7
    path.write_text(json.dumps(document), encoding="utf-8")
    for attempt in (verify, restore_new):
        with pytest.raises(ConfigError, match="has changed"):
            attempt(backup)


def test_an_incomplete_backup_is_none(backup: Path) -> None:
    """The manifest is written last: without it, the backup was cut off."""
    (backup / "manifest.json").unlink()
    for attempt in (verify, restore_new):
        with pytest.raises(ConfigError, match="not completed"):
            attempt(backup)


def test_a_backup_overwrites_nothing(sqlite: Database, root: str, tmp_path: Path) -> None:
    """It wants a folder of its own."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_bytes(b"x")
    with pytest.raises(ConfigError, match="new or empty folder"):
        create(sqlite, Objects(root), tmp_path / "w", tmp_path / "full")
    with pytest.raises(StoreError, match="cannot write the backup"):
        create(sqlite, Objects(root), tmp_path / "w", tmp_path / "full" / "precious")
    assert all_rows(sqlite, Node) == []


def test_a_restore_overwrites_nothing(backup: Path, sqlite: Database, tmp_path: Path) -> None:
    """Database, event files and log must be empty: otherwise two jobs would be mixed."""
    used = restore_new(backup)
    rows = len(all_rows(used, Stream))
    new = backup.parent / "new"
    with pytest.raises(ConfigError, match="empty database"):
        restore(used, Objects(str(tmp_path / "o1")), tmp_path / "w1", backup)
    empty = sqlite_database(tmp_path / "e2")
    with pytest.raises(ConfigError, match="empty root"):
        restore(empty, Objects(str(new / "objects")), tmp_path / "w2", backup)
    with pytest.raises(ConfigError, match="empty log"):
        restore(empty, Objects(str(tmp_path / "o3")), new / "wal", backup)
    assert len(all_rows(used, Stream)) == rows
    assert all_rows(empty, Stream) == []


class Crash(Exception):  # noqa: N818  # stands for the power that fails
    """The process dies here."""


def test_a_restore_that_was_cut_off_leaves_no_rows(backup: Path, tmp_path: Path) -> None:
    """Rows come last and all at once: there is never a server that lacks something."""

    def die(step: str) -> None:
        if step == "rows":
            raise Crash

    database = sqlite_database(tmp_path / "cut")
    with pytest.raises(Crash):
        restore(database, Objects(str(tmp_path / "o")), tmp_path / "w", backup, die)
    assert all_rows(database, Stream) == []
    shutil.rmtree(tmp_path / "o")
    shutil.rmtree(tmp_path / "w")
    restore(database, Objects(str(tmp_path / "o")), tmp_path / "w", backup)
    finish(database)
    assert len(all_rows(database, Stream)) == 1
