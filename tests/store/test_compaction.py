from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sqlalchemy import update

from smon.config import Settings
from smon.errors import StoreError
from smon.store.compaction import compact, remove_doomed, spans
from smon.store.database import Database
from smon.store.events import open_ops, read_ops, steps_of, write_ops
from smon.store.models import EventFile, Window
from smon.store.objects import Objects
from smon.store.reconcile import ORPHAN_NS, reconcile
from smon.wire.arrow import SCHEMA
from tests.service import add_tenant, record_batch
from tests.store.rows import (
    NOW,
    Stored,
    all_rows,
    file_of,
    finish,
    live_paths,
    note,
    only,
    open_stream,
    ops,
    put_ops,
    store,
    stored_job,
)

SETTINGS = Settings(compact_after_s=60, doomed_grace_s=600)
LATER = NOW + 61 * 10**9


def rows(objects: Objects, database: Database) -> list[tuple[int, ...]]:
    """All ops that rows of files lead to, in an order of their own."""
    table = read_ops(objects, live_paths(database))
    return sorted(zip(*(values.tolist() for values in table.columns.values()), strict=True))


def expected(job: Stored) -> list[tuple[int, ...]]:
    """All ops of a job."""
    return sorted(
        row
        for table in job.tables
        for row in zip(*(values.tolist() for values in table.columns.values()), strict=True)
    )


def test_a_window_that_rested_has_one_file_with_the_same_ops(
    database: Database, any_root: str
) -> None:
    """Sorted, with the same rows, steps and time base; the old files are doomed."""
    objects = Objects(any_root)
    job = stored_job(database, objects, files=5)
    old = live_paths(database)
    assert compact(database, objects, SETTINGS, LATER) == 1
    (path,) = live_paths(database)
    assert path not in old
    assert rows(objects, database) == expected(job)
    read = read_ops(objects, [path])
    assert (np.diff(np.lexsort((read.start_ns, read.rank, read.step))) == 1).all()
    assert steps_of(objects, path) == dict.fromkeys(range(4), len(read) // 4)
    assert only(database, Window)["compacted_ns"] == LATER
    assert sorted(r["path"] for r in all_rows(database, EventFile) if r["doomed_ns"]) == old
    assert compact(database, objects, SETTINGS, LATER + 1) == 0


def test_replaced_files_go_after_the_grace(database: Database, root: str) -> None:
    """A reader that has begun with them can finish; then rows and files go."""
    objects = Objects(root)
    job = stored_job(database, objects, files=3)
    compact(database, objects, SETTINGS, LATER)
    assert remove_doomed(database, objects, SETTINGS, LATER + 599 * 10**9) == (0, 0)
    doomed = [row for row in all_rows(database, EventFile) if row["doomed_ns"]]
    count, size = remove_doomed(database, objects, SETTINGS, LATER + 600 * 10**9)
    assert (count, size) == (3, sum(row["bytes"] for row in doomed))
    assert [file.path for file in objects.list("events")] == live_paths(database)
    assert rows(objects, database) == expected(job)


@pytest.mark.parametrize("state", ["open", "ready", "claimed"])
def test_only_finished_windows_are_compacted(sqlite: Database, root: str, state: str) -> None:
    """The others are being written or read."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=2)
    with sqlite.write() as session:
        session.execute(update(Window).values(state=state))
    assert compact(sqlite, objects, SETTINGS, LATER) == 0
    assert len(live_paths(sqlite)) == 2


def test_a_window_must_have_rested(sqlite: Database, root: str) -> None:
    """Late data would only be compacted again."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=2)
    assert compact(sqlite, objects, SETTINGS, NOW + 59 * 10**9) == 0


def test_a_window_of_one_file_is_left_as_it_is(sqlite: Database, root: str) -> None:
    """And not looked at again."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=1)
    before = live_paths(sqlite)
    assert compact(sqlite, objects, SETTINGS, LATER) == 0
    assert live_paths(sqlite) == before
    assert only(sqlite, Window)["compacted_ns"] == LATER


class Crash(Exception):  # noqa: N818  # stands for the power that fails
    """The process dies here."""


@pytest.mark.parametrize("where", ["write", "commit"])
def test_a_crash_loses_and_doubles_nothing(database: Database, root: str, where: str) -> None:
    """Wherever it dies: the ops are the same, and the next round does the work."""
    objects = Objects(root)
    job = stored_job(database, objects, files=3)

    def die(step: str) -> None:
        if step == where:
            raise Crash

    with pytest.raises(Crash):
        compact(database, objects, SETTINGS, LATER, die)
    assert rows(objects, database) == expected(job)
    assert compact(database, objects, SETTINGS, LATER) == 1
    assert rows(objects, database) == expected(job)
    orphans = 1 if where == "commit" else 0
    assert len(list(objects.list("events"))) == 3 + 1 + orphans
    after = max(file.modified_ns for file in objects.list("events")) + ORPHAN_NS + 1
    assert reconcile(database, objects, after).quarantined == orphans
    assert rows(objects, database) == expected(job)


def test_data_that_comes_meanwhile_wins(database: Database, root: str) -> None:
    """The window has changed since it was read: nothing is replaced, the new file goes."""
    objects = Objects(root)
    job = stored_job(database, objects, files=2)
    more = put_ops(objects, job.stream, ops(steps=1, microbatches=1))

    def late(step: str) -> None:
        if step == "commit":
            store(database, [note(job.stream, 99)], [more])

    assert compact(database, objects, SETTINGS, LATER, late) == 0
    assert len(live_paths(database)) == 3
    assert sorted(file.path for file in objects.list("events")) == live_paths(database)
    finish(database)
    assert compact(database, objects, SETTINGS, LATER) == 1
    assert len(live_paths(database)) == 1


def test_two_workers_at_once_replace_once(database: Database, root: str) -> None:
    """The second one finds that the window has been compacted, and takes its file back."""
    objects = Objects(root)
    job = stored_job(database, objects, files=3)

    def other(step: str) -> None:
        if step == "commit":
            assert compact(database, objects, SETTINGS, LATER) == 1

    assert compact(database, objects, SETTINGS, LATER, other) == 0
    assert rows(objects, database) == expected(job)
    assert len(list(objects.list("events"))) == 4


def test_a_damaged_file_stops_nothing_else(sqlite: Database, root: str) -> None:
    """Its window stays as it is, for what can still be read; the others are compacted."""
    objects = Objects(root)
    stored_job(sqlite, objects, windows=3, files=2)
    damaged = next(row for row in all_rows(sqlite, EventFile) if row["first_step"] >= 40)
    path = Path(root) / damaged["path"]
    path.write_bytes(path.read_bytes()[:-20])
    assert compact(sqlite, objects, SETTINGS, LATER) == 2
    assert len(live_paths(sqlite)) == 1 + 1 + 2
    assert path.exists()


def test_a_root_that_takes_no_file_leaves_the_work_for_later(sqlite: Database, root: str) -> None:
    """A full disk is not the window's fault: the next round tries again."""
    objects = Objects(root)
    stored_job(sqlite, objects, files=2)
    day = (Path(root) / live_paths(sqlite)[0]).parent
    aside = day.rename(day.with_name("aside"))
    day.with_name("moved").symlink_to(aside)
    with sqlite.write() as session:
        for row in all_rows(sqlite, EventFile):
            moved = row["path"].replace(day.name, "moved")
            session.execute(update(EventFile).where(EventFile.id == row["id"]).values(path=moved))
    day.write_bytes(b"no folder")
    with pytest.raises(StoreError, match="cannot write"):
        compact(sqlite, objects, SETTINGS, LATER)
    assert only(sqlite, Window)["compacted_ns"] is None


def test_unknown_op_types_survive_compaction(sqlite: Database, root: str) -> None:
    """Files may have different dictionaries of names, more of them than fit into a byte."""
    objects = Objects(root)
    stream = open_stream(sqlite, add_tenant(sqlite))
    index = SCHEMA.get_field_index("optype")
    names = []
    for part in range(3):
        batch = record_batch(ops())
        labels = [f"kernel-{part}-{n % 60}" for n in range(batch.num_rows)]
        names += labels
        column = pa.array(labels, SCHEMA.field(index).type)
        batch = batch.set_column(index, SCHEMA.field(index), column)
        file = file_of(stream, rows=batch.num_rows, first_step=0, last_step=3)
        write_ops(objects, file.path, batch, step_relative=False)
        store(sqlite, [note(stream, part)], [file])
    finish(sqlite)
    assert compact(sqlite, objects, SETTINGS, LATER) == 1
    with open_ops(objects, live_paths(sqlite)[0]) as file:
        assert sorted(file.read().column("optype").to_pylist()) == sorted(names)


def test_a_window_with_steps_far_apart_is_compacted(sqlite: Database, root: str) -> None:
    """Step numbers can be anything: nothing is made as large as they are."""
    objects = Objects(root)
    stream = open_stream(sqlite, add_tenant(sqlite))
    for seq, shift in enumerate((0, 2**62)):
        table = ops(steps=2)
        file = put_ops(objects, stream, replace(table, step=table.step + shift))
        store(sqlite, [note(stream, seq)], [file])
    finish(sqlite)
    assert compact(sqlite, objects, SETTINGS, LATER) == 1
    assert list(steps_of(objects, live_paths(sqlite)[0])) == [0, 1, 2**62, 2**62 + 1]


def test_spans_bound_what_is_in_memory() -> None:
    """Consecutive steps share a span while they fit; a step is never split."""
    counts = {0: 4, 1: 4, 2: 4, 5: 30, 9: 1, 10: 1}
    assert list(spans(counts, 10)) == [(0, 1), (2, 2), (5, 5), (9, 10)]
    assert list(spans({}, 10)) == []
