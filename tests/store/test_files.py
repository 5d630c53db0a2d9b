from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from smon.store.backup import create
from smon.store.commit import AlreadyStored
from smon.store.database import Database
from smon.store.files import FileLimits
from smon.store.models import EventFile, FileDrop, FileState, SentFile, Stream
from smon.store.objects import Objects
from smon.store.queries.admin import delete_job
from smon.store.reconcile import compare
from smon.store.restore import restore
from smon.store.retention import expire
from smon.wire.parts import FilePart
from tests.worker.feed import Store, make_store
from tests.worker.sent import file_parts, file_stream, send_parts

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def store(database: Database, tmp_path: Path) -> Store:
    """A store on SQLite, then on PostgreSQL."""
    return make_store(database, tmp_path)


@pytest.fixture
def parts() -> list[FilePart]:
    """A file in three parts."""
    return file_parts(CONTENT, size=4096, first_step=5, last_step=9)


def only(store: Store) -> SentFile:
    """The only file."""
    (found,) = store.all(SentFile)
    assert isinstance(found, SentFile)
    return found


def drops(store: Store) -> dict[str, tuple[int, str]]:
    """(files, last name) of what was dropped, by reason."""
    return {one.reason: (one.files, one.name) for one in store.all(FileDrop)}


def stored_paths(store: Store) -> set[str]:
    """Files below the root."""
    return {one.path for one in store.objects.list("events")}


def test_a_file_is_whole_when_all_parts_have_come_in_any_order(
    store: Store, parts: list[FilePart]
) -> None:
    """Rows and files agree all the time."""
    stream = file_stream(store, 4)
    send_parts(store, stream, [parts[2]])
    assert only(store).state == FileState.GATHERING
    send_parts(store, stream, [parts[0], parts[1]])
    found = only(store)
    assert (found.state, [number for number, _ in found.have]) == (FileState.WHOLE, [0, 1, 2])
    content = b"".join(store.objects.get(path) for _, path in found.have)
    assert content == CONTENT
    assert stored_paths(store) == {one.path for one in store.all(EventFile)}
    assert {one.kind for one in store.all(EventFile)} == {"part"}


def test_a_part_that_comes_again_is_stored_once(store: Store, parts: list[FilePart]) -> None:
    """From another stream, as after a restart with an empty spool: its copy goes."""
    send_parts(store, file_stream(store, 4), parts[:2])
    send_parts(store, file_stream(store, 4, key="other"), parts[1:])
    assert only(store).state == FileState.WHOLE
    assert len(stored_paths(store)) == len(store.all(EventFile)) == 3
    assert drops(store) == {}


def test_a_batch_that_is_stored_already_stores_no_part(store: Store, parts: list[FilePart]) -> None:
    """As of any batch: one transaction, all or nothing."""
    stream = file_stream(store, 4)
    send_parts(store, stream, parts[:1])
    store.seqs[stream.id] = 0
    with pytest.raises(AlreadyStored):
        send_parts(store, stream, parts[1:2])
    assert len(only(store).have) == 1


def test_files_of_two_ranks_may_be_alike(store: Store, parts: list[FilePart]) -> None:
    """Dumps that list nothing are."""
    stream = file_stream(store, 4)
    send_parts(store, stream, parts)
    send_parts(store, stream, [replace(part, rank=1) for part in parts])
    assert len(store.all(SentFile)) == 2


def test_parts_that_contradict_each_other_drop_their_file(
    store: Store, parts: list[FilePart]
) -> None:
    """Nobody knows which of them is right."""
    stream = file_stream(store, 4)
    send_parts(store, stream, parts[:1])
    assert send_parts(store, stream, [replace(parts[1], parts=4)]) == ("contradiction",)
    assert store.all(SentFile) == []
    assert (stored_paths(store), store.all(EventFile)) == (set(), [])
    assert drops(store) == {"contradiction": (1, "file")}


def test_parts_of_one_move_can_contradict_each_other(store: Store, parts: list[FilePart]) -> None:
    """Before any of them has a row."""
    stream = file_stream(store, 4)
    wrong = replace(parts[1], world_size=9)
    assert send_parts(store, stream, [parts[0], wrong]) == ("contradiction",)
    assert store.all(SentFile) == []


@pytest.mark.parametrize("limits", [FileLimits(1, 1 << 30), FileLimits(100, len(CONTENT) + 1)])
def test_an_attempt_may_send_so_many_files_and_bytes(
    store: Store, parts: list[FilePart], limits: FileLimits
) -> None:
    """The next one is dropped and counted; parts of the first still come in."""
    stream = file_stream(store, 4)
    send_parts(store, stream, parts[:1], limits)
    more = [replace(part, rank=1, name="more") for part in parts]
    assert send_parts(store, stream, more, limits) == ("too-many",)
    assert send_parts(store, stream, parts[1:], limits) == ()
    assert only(store).state == FileState.WHOLE
    assert drops(store) == {"too-many": (1, "more")}
    assert len(stored_paths(store)) == 3


def test_a_day_later_there_is_room_again(store: Store, parts: list[FilePart]) -> None:
    """Bytes count for a day."""
    stream, limits = file_stream(store, 4), FileLimits(100, len(CONTENT))
    send_parts(store, stream, parts, limits)
    store.clock.go_on(86_401)
    assert send_parts(store, stream, [replace(part, rank=1) for part in parts], limits) == ()


def test_files_have_a_limit_of_their_own_attempt(store: Store, parts: list[FilePart]) -> None:
    """What one job sends does not hold up another."""
    limits = FileLimits(1, 1 << 30)
    send_parts(store, file_stream(store, 4), parts, limits)
    assert send_parts(store, file_stream(store, 4, job="other"), parts, limits) == ()


def test_files_go_with_their_job(store: Store, parts: list[FilePart]) -> None:
    """Rows and paths."""
    stream = file_stream(store, 4)
    send_parts(store, stream, parts)
    wrong = [replace(parts[0], rank=2, parts=count) for count in (8, 9)]
    assert send_parts(store, stream, wrong) == ("contradiction",)
    with store.database.write() as session:
        paths = delete_job(session, store.tenant_id, stream.job_id)
    assert set(paths) == stored_paths(store)
    for table in (SentFile, FileDrop, EventFile, Stream):
        assert store.all(table) == []


def test_the_files_of_a_capture_expire_with_it(store: Store) -> None:
    """Parts that are in no capture do not: they have their own time."""
    stream = file_stream(store, 2)
    store.settings = replace(store.settings, retention_days=1.0)
    for rank in range(2):
        send_parts(store, stream, file_parts(b"x", rank=rank, world_size=2))
    store.worker().drain()
    loose = file_parts(CONTENT, size=4096, rank=1, world_size=2)
    store.clock.go_on(2 * 86_400)
    expire(store.database, store.objects, store.settings, store.clock())
    assert (store.all(SentFile), store.all(EventFile), stored_paths(store)) == ([], [], set())
    send_parts(store, stream, loose[:1])
    expire(store.database, store.objects, store.settings, store.clock())
    assert len(store.all(SentFile)) == 1
    assert compare(store.database, store.objects) == ([], [])


def test_a_backup_has_files_and_their_parts(
    sqlite: Database, parts: list[FilePart], tmp_path: Path
) -> None:
    """So that a file whose last part comes after the restore becomes whole."""
    one = make_store(sqlite, tmp_path)
    send_parts(one, file_stream(one, 4), parts[:2])
    create(sqlite, one.objects, tmp_path / "no-wal", tmp_path / "backup")
    target = Database(f"sqlite:///{tmp_path / 'restored.db'}")
    objects = Objects(str(tmp_path / "restored"))
    restore(target, objects, tmp_path / "w", tmp_path / "backup")
    found = Store(target, objects, one.settings, one.tenant_id)
    assert [number for number, _ in only(found).have] == [0, 1]
    assert compare(target, objects) == ([], [])
    assert {found.objects.get(path) for _, path in only(found).have} == {
        part.content for part in parts[:2]
    }
    target.close()
