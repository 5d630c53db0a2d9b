from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import MissingError, StoreError, WireError
from smon.ingest.decode import Content
from smon.ingest.drain import Clocks, DecodeLogged, Drain, decode_here
from smon.ingest.order import by_window
from smon.ingest.parcels import Parcel
from smon.ingest.ports import SqlStore
from smon.ingest.segments import QUARANTINE
from smon.ingest.wal import Move, Wal
from smon.store.database import Database
from smon.store.events import read_ops
from smon.store.files import Dropped
from smon.store.models import Base, Mode, TimeBase
from smon.store.objects import Objects
from smon.store.streams import StreamRequest, find, register
from smon.wire import Batch, BatchKind
from smon.wire.problems import Problem
from tests.ingest.batches import (
    LAYOUT,
    NOW,
    STREAM,
    FakeStore,
    columns,
    document,
    end,
    gap,
    info,
    metrics,
    ops,
    record_batch,
    record_head,
    settings,
)

ALL = Move(1 << 40, 1 << 40, 1 << 40)


class Plant:
    """A log with batches in it, a store, and the drain between them; the clock stands still."""

    def __init__(
        self,
        folder: Path,
        store: Any = None,  # noqa: ANN401  # any store
        decode: DecodeLogged = decode_here,
        **changed: Any,  # noqa: ANN401  # settings
    ) -> None:
        self.store = store or FakeStore(info())
        self.metrics = metrics()
        self.now_s = 0.0
        self.lost: list[str] = []
        chosen = settings(folder, **changed)
        self.wal = Wal(chosen, self.metrics.wal)
        self.wal.open()
        clocks = Clocks(lambda: NOW, lambda: self.now_s)
        self.drain = Drain(
            self.wal, self.store, chosen, self.metrics, self.lost.append, clocks,
            decode_logged=decode,
        )  # fmt: skip

    def put(self, *batches: Batch, stream: str = STREAM, content: Content | None = None) -> None:
        """Have batches in the log."""
        for batch in batches:
            self.wal.append(record_head(batch, stream), batch.body, lambda _: None, content)
        group = self.wal._next_group()
        assert group is not None
        assert self.wal.write_group(group) is None

    def left(self) -> list[int]:
        """Sequence numbers that wait in the log."""
        return [record.key[2] for record in self.wal.pending(ALL)]


Make = Callable[..., Plant]


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Make]:
    """Makes plants, and closes their logs."""
    made: list[Plant] = []

    def make(store: object = None, folder: Path = tmp_path, **changed: Any) -> Plant:  # noqa: ANN401  # settings
        made.append(Plant(folder, store, **changed))
        return made[-1]

    yield make
    for each in made:
        each.wal.close()


# --- files ------------------------------------------------------------------------------------


def test_batches_become_one_file_per_window(plant: Make) -> None:
    """Of all batches of an attempt; the log is empty afterwards."""
    works = plant()
    works.put(ops(0, step=[7] * 12), ops(1, step=[7, 9, 10, 19, 20, 20] * 2), ops(2))
    assert works.drain.tick()
    files = {file.window_number: file for file in works.store.files}
    assert {number: file.rows for number, file in files.items()} == {0: 28, 1: 4, 2: 4}
    assert (files[0].first_step, files[0].last_step) == (7, 9)
    assert (files[1].first_step, files[1].last_step) == (10, 19)
    assert works.left() == []
    assert [note.seq for note in works.store.notes] == [0, 1, 2]


def test_a_window_of_zero_steps_takes_everything(plant: Make) -> None:
    """Recorded attempts are one window."""
    works = plant()
    batch = ops(0, step=[0, 10**9] * 6)
    head = record_head(batch)
    origin = type(head.origin)("default", "job1", "attempt1", STREAM, 0, step_relative=True)
    whole = type(head)(origin, 0, 0, 0, NOW, head.batch)
    works.wal.append(whole, batch.body, lambda _: None)
    group = works.wal._next_group()
    assert group is not None
    works.wal.write_group(group)
    assert works.drain.tick()
    assert [file.window_number for file in works.store.files] == [0]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("step", "rank", "dp", "stage", "start_ns"))


@pytest.mark.parametrize("shuffled", [False, True])
def test_ops_of_many_batches_are_in_the_order_of_files(*, shuffled: bool) -> None:
    """By step, rank, start; with the op types of all batches under one numbering."""
    rng = np.random.default_rng(1)
    batches = []
    for number, labels in enumerate((["gc", "b"], ["b", "custom"], ["forward-send", "gc"])):
        order = rng.permutation(40) if shuffled else np.arange(40)
        changed: dict[str, Any] = {
            "step": order // 10,
            "rank": 2 - order % 10 // 4,
            "start_ns": NOW + 1000 * number + order,
            "optype": [labels[int(n)] for n in rng.integers(0, 2, 40)],
        }
        batches.append(record_batch(columns(40, **changed)))
    (only,) = by_window(batches[::-1], 0)
    got = only.table.to_pylist()
    wanted = [row for batch in batches for row in batch.to_pylist()]
    assert [_key(row) for row in got] == sorted(map(_key, wanted))
    assert sorted(map(repr, got)) == sorted(map(repr, wanted))
    assert (only.first_step, only.last_step) == (0, 3)


def test_runs_that_overlap_in_time_lose_no_row() -> None:
    """The writer of files sorts what is left to sort."""
    batches = [record_batch(columns(40, start_ns=NOW + np.arange(40) * 7 % 11)) for _ in range(3)]
    (only,) = by_window(batches, 0)
    wanted = [row for batch in batches for row in batch.to_pylist()]
    assert sorted(map(repr, only.table.to_pylist())) == sorted(map(repr, wanted))


def test_an_empty_batch_makes_no_file_but_counts(plant: Make) -> None:
    """Its number is covered, and its step done."""
    works = plant()
    works.put(ops(0, rows=0, steps_done=4))
    assert works.drain.tick()
    assert works.store.files == []
    assert [(note.seq, note.steps_done) for note in works.store.notes] == [(0, 4)]


def test_side_evidence_goes_to_the_window_of_its_first_step(plant: Make) -> None:
    """Without a step it belongs to the attempt."""
    works = plant()
    counters = {"step": [12, 31], "rank": [0, 0], "name": ["a", "a"], "value": [1.0, 2.0]}
    works.put(
        document(BatchKind.CONTEXT, {"schema": "smon.context/1", "counters": counters}, seq=0),
        document(BatchKind.CONTEXT, {"schema": "smon.context/1", "hosts": {"0": "h"}}, seq=1),
    )
    assert works.drain.tick()
    found = [(f.window_number, f.kind, f.first_step, f.last_step) for f in works.store.files]
    assert found == [(1, "context", 12, 31), (None, "context", -1, -1)]


def test_notes_say_what_each_batch_was(plant: Make) -> None:
    """Kinds, numbers, reasons; lost events are counted by reason."""
    works = plant()
    works.put(ops(0, steps_done=8), gap(1, 5, events=77), end(6))
    assert works.drain.tick()
    kinds = [(note.kind, note.seq, note.last_seq, note.reason) for note in works.store.notes]
    assert kinds == [
        (BatchKind.OPS, 0, 0, None),
        (BatchKind.GAP, 1, 5, "spool-full"),
        (BatchKind.END, 6, 6, "finished"),
    ]
    assert works.metrics.lost_events.labels("spool-full")._value.get() == 77


def test_a_reason_that_nobody_knows_makes_no_new_series(plant: Make) -> None:
    """What agents send never becomes a label."""
    works = plant()
    works.put(gap(0, 0, events=3, reason="x-1"), gap(1, 1, events=4, reason="refused-422-invalid"))
    assert works.drain.tick()
    assert works.metrics.lost_events.labels("other")._value.get() == 3
    assert works.metrics.lost_events.labels("refused")._value.get() == 4


def test_what_was_decoded_on_arrival_is_not_decoded_again(plant: Make) -> None:
    """The record batch is handed over in memory."""
    works = plant()
    content = Content(ops=record_batch(columns(20)))
    works.put(ops(0), content=content)
    assert works.drain.tick()
    assert works.store.rows == 20


# --- failures ---------------------------------------------------------------------------------


def test_a_database_that_is_down_costs_nothing_but_time(plant: Make) -> None:
    """Batches stay in the log, nothing is written, and later everything is stored once."""
    works = plant()
    works.put(ops(0), ops(1))
    works.store.down = True
    assert [works.drain.tick() for _ in range(3)] == [False, False, False]
    assert works.store.written == {}
    assert works.left() == [0, 1]
    assert works.drain.problems()
    works.put(ops(2))
    works.store.down = False
    assert works.drain.tick()
    assert works.drain.problems() == []
    assert [note.seq for note in works.store.notes] == [0, 1, 2]
    assert works.store.rows == 36
    assert works.metrics.drain_failures._value.get() == 3


def test_a_store_that_fails_between_file_and_commit_stores_once(plant: Make) -> None:
    """Nobody knows whether the commit took place: the next try writes files of its own."""
    works = plant()
    works.put(ops(0))
    works.store.fails = ["commit"]
    assert not works.drain.tick()
    orphan = set(works.store.written)
    assert works.drain.tick()
    assert works.store.rows == 12
    named = {file.path for file in works.store.files}
    assert not orphan & named
    assert works.store.deleted == []


class Forgetful(FakeStore):
    """A store whose first commit takes place, but whose answer is lost."""

    def commit(self, notes: Any, files: Any, now_ns: int, sent: Any) -> Sequence[Dropped]:  # noqa: ANN401  # as FakeStore
        """Commit, and lose the connection."""
        first = not self.notes
        dropped = super().commit(notes, files, now_ns, sent)
        if first:
            raise StoreError("the connection was lost")
        return dropped


def test_a_commit_whose_answer_is_lost_loses_no_file(plant: Make) -> None:
    """The second try finds the batches stored; the files of the first one stay."""
    works = plant(Forgetful(info()))
    works.put(ops(0))
    assert not works.drain.tick()
    assert works.drain.tick()
    (file,) = works.store.files
    assert file.path in works.store.written
    assert works.left() == []
    assert len(works.store.written) == 1


def test_batches_that_another_server_has_stored_are_dropped(plant: Make) -> None:
    """The others are stored, in new files; those with the double batches are removed."""
    works = plant()
    works.put(ops(0), ops(1), ops(2))
    works.store.stored = {(STREAM, 0, 1)}
    assert works.drain.tick()
    assert [note.seq for note in works.store.notes] == [0, 2]
    assert works.store.rows == 24
    assert len(works.store.deleted) == 1
    assert {file.path for file in works.store.files} == set(works.store.written)
    assert works.metrics.drain_duplicates._value.get() == 1
    assert works.left() == []


def test_of_a_gap_that_is_stored_in_part_the_rest_is_stored(plant: Make) -> None:
    """Else the numbers behind it would never be complete."""
    works = plant(FakeStore(info(covered={0: ((0, 6),)})))
    works.put(gap(5, 9))
    works.store.stored = {(STREAM, 0, 5)}
    assert works.drain.tick()
    assert [(note.seq, note.last_seq) for note in works.store.notes] == [(7, 9)]


def test_a_batch_that_is_in_the_log_twice_is_stored_once(plant: Make) -> None:
    """As after a crash between a failed sync and a resend."""
    works = plant()
    works.put(ops(0), ops(0), ops(1))
    assert works.drain.tick()
    assert works.store.rows == 24
    assert works.left() == []


def test_an_object_store_that_fails_leaves_no_half(plant: Make) -> None:
    """What was written of a move is removed, and the move is made anew."""

    class Filling(FakeStore):
        full = True

        def write_ops(self, path: str, table: Any, *, step_relative: bool) -> int:  # noqa: ANN401  # as FakeStore
            if self.full and len(self.written) == 2:
                raise StoreError("no space")
            return super().write_ops(path, table, step_relative=step_relative)

    store = Filling(info())
    works = plant(store)
    works.put(ops(0, step=[7, 17, 27] * 4))
    assert not works.drain.tick()
    assert store.written == {}
    assert works.left() == [0]
    store.full = False
    assert works.drain.tick()
    assert store.rows == 12


def test_batches_of_a_stream_that_was_removed_are_given_up(plant: Make) -> None:
    """The others are stored; the loss is counted."""

    class Removing(FakeStore):
        def commit(self, notes: Any, files: Any, now_ns: int, sent: Any) -> Sequence[Dropped]:  # noqa: ANN401  # as FakeStore
            if any(note.stream_id not in {key[1] for key in self.streams} for note in notes):
                raise MissingError("a stream is gone")
            return super().commit(notes, files, now_ns, sent)

    works = plant(Removing(info()))
    works.put(ops(0))
    works.put(ops(0), stream="gone")
    assert works.drain.tick()
    assert [note.stream_id for note in works.store.notes] == [STREAM]
    assert works.metrics.quarantined.labels("stream-removed")._value.get() == 1
    assert works.lost == ["gone"]
    assert works.left() == []


@pytest.mark.parametrize("error", [StoreError("refused"), ValueError("a defect")])
def test_a_batch_that_cannot_be_stored_does_not_hold_up_the_others(
    plant: Make, error: Exception
) -> None:
    """Moves shrink until it is alone; it is set aside, kept in the log, and tried again later."""

    class Picky(FakeStore):
        ill = True

        def commit(self, notes: Any, files: Any, now_ns: int, sent: Any) -> Sequence[Dropped]:  # noqa: ANN401  # as FakeStore
            if self.ill and any(note.seq == 5 for note in notes):
                raise error
            return super().commit(notes, files, now_ns, sent)

    store = Picky(info())
    works = plant(store)
    works.put(*(ops(number) for number in range(12)))
    for _ in range(30):
        works.drain.tick()
    assert works.left() == [5]
    assert sorted(note.seq for note in works.store.notes) == [0, 1, 2, 3, 4, *range(6, 12)]
    store.ill = False
    works.drain.tick()
    assert works.left() == [5]
    works.now_s += 61
    assert works.drain.tick()
    assert works.left() == []


def test_a_batch_that_cannot_be_decoded_any_more_is_kept_and_covered(
    plant: Make, tmp_path: Path
) -> None:
    """It goes to quarantine, and a gap says so."""
    works = plant()
    broken = ops(1)
    works.put(ops(0))
    works.put(type(broken)(1, broken.kind, broken.content_type, "zstd", 12, b"not zstd"))
    assert works.drain.tick()
    found = [(note.kind, note.seq, note.events, note.reason) for note in works.store.notes]
    assert found == [(BatchKind.OPS, 0, 12, None), (BatchKind.GAP, 1, 12, "undecodable")]
    (kept,) = (tmp_path / "wal" / QUARANTINE).iterdir()
    assert b"not zstd" in kept.read_bytes()
    assert works.metrics.quarantined.labels("undecodable")._value.get() == 1
    assert works.metrics.lost_events.labels("undecodable")._value.get() == 12


def test_a_batch_that_decoders_die_of_is_kept_and_covered(plant: Make, tmp_path: Path) -> None:
    """It costs itself: the others of its move are stored, and it is not tried for ever."""

    def decode(parcels: Sequence[Parcel]) -> Sequence[Content | WireError]:
        deadly = WireError(Problem.UNDECODABLE, "decoders died of it")
        return [deadly if each.seq == 1 else decode_here([each])[0] for each in parcels]

    works = plant(decode=decode)
    works.put(ops(0), ops(1), ops(2))
    assert works.drain.tick()
    found = [(note.kind, note.seq, note.reason) for note in works.store.notes]
    assert found == [
        (BatchKind.OPS, 0, None),
        (BatchKind.GAP, 1, "decoder-died"),
        (BatchKind.OPS, 2, None),
    ]
    assert works.left() == []
    (kept,) = (tmp_path / "wal" / QUARANTINE).iterdir()
    assert kept.name == f"{STREAM}-0-1.bin"
    assert works.metrics.quarantined.labels("decoder-died")._value.get() == 1
    assert works.metrics.lost_events.labels("decoder-died")._value.get() == 12


@pytest.mark.parametrize("problem", [Problem.OVERLOADED, Problem.INTERNAL])
def test_a_decoder_that_is_out_of_order_costs_no_batch(plant: Make, problem: Problem) -> None:
    """Nothing is known of the batch: it stays in the log until somebody can decode it."""
    broken = [True]

    def decode(parcels: Sequence[Parcel]) -> Sequence[Content | WireError]:
        return [WireError(problem, "not now")] * len(parcels) if broken else decode_here(parcels)

    works = plant(decode=decode)
    works.put(ops(0), ops(1))
    assert not works.drain.tick()
    assert works.left() == [0, 1]
    assert "not now" in works.drain.problems()[0]
    broken.clear()
    assert works.drain.tick()
    assert works.store.rows == 24 or works.drain.tick()
    assert works.store.rows == 24


def test_a_record_that_rotted_in_the_log_is_counted_and_asked_for_again(
    plant: Make, tmp_path: Path
) -> None:
    """What is known of the stream is forgotten, so that its number is expected again."""
    works = plant()
    works.put(ops(0), ops(1))
    first = works.wal.pending(ALL)[0]
    with (tmp_path / "wal" / "000000000000.wal").open("r+b") as file:
        file.seek(first.offset + first.size - 1)
        file.write(b"\xff")
    assert works.drain.tick()
    assert [note.seq for note in works.store.notes] == [1]
    assert works.lost == [STREAM]
    assert works.metrics.wal.damaged.labels("damaged")._value.get() == 1


def test_a_drain_that_does_not_keep_up_is_a_reason_not_to_be_ready(plant: Make) -> None:
    """The age of the oldest batch tells."""
    works = plant()
    works.put(ops(0))
    assert works.drain.problems() == []
    works.drain._clocks = Clocks(lambda: NOW + 300 * 10**9, lambda: 0.0)
    assert "300 s" in works.drain.problems()[0]


def test_stopping_moves_what_is_there(plant: Make) -> None:
    """The log is empty after an orderly end."""
    works = plant()
    works.put(*(ops(number) for number in range(5)))
    works.drain._clocks = Clocks()
    works.drain.start()
    works.drain.stop(20.0)
    assert works.left() == []
    assert len(works.store.notes) == 5


def test_stopping_does_not_wait_for_ever(plant: Make) -> None:
    """With the database down, batches stay in the log for the next start."""
    works = plant()
    works.put(ops(0))
    works.store.down = True
    works.drain._clocks = Clocks()
    works.drain.start()
    works.drain.stop(0.05)
    assert works.left() == [0]


# --- the real store ---------------------------------------------------------------------------


@pytest.fixture
def sql(tmp_path: Path) -> Iterator[tuple[SqlStore, Database, Objects]]:
    """A database and a folder of objects."""
    database = Database(f"sqlite:///{tmp_path / 'smon.db'}")
    Base.metadata.create_all(database.engine)
    objects = Objects(str(tmp_path / "objects"))
    yield SqlStore(database, objects), database, objects
    database.close()


def test_the_real_store_gets_each_batch_once(
    plant: Make, sql: tuple[SqlStore, Database, Objects], tmp_path: Path
) -> None:
    """A crash after the commit, before the log forgets: the restart stores nothing twice."""
    from sqlalchemy import text

    store, database, objects = sql
    with database.write() as session:
        session.execute(
            text("INSERT INTO tenants (id, name, created_ns) VALUES ('default', 'default', 0)")
        )
        request = StreamRequest(
            key="k",
            job="../../evil",
            attempt=1,
            layout=LAYOUT,
            mode=Mode.LIVE,
            time_base=TimeBase.UNIX,
            window_steps=10,
            host="h",
            source="s",
            ranks=(1,),
            epoch=0,
        )
        stream = register(session, "default", request, settings(tmp_path), NOW)
    works = plant(store)
    heads = []
    for number in range(3):
        batch = ops(number, steps_done=7 + number)
        head = record_head(batch, stream.id)
        origin = type(head.origin)(
            "default", stream.job_id, stream.attempt_id, stream.id, 10, step_relative=False
        )
        heads.append((type(head)(origin, 0, number, number, NOW, head.batch), batch.body))
    for head, body in heads:
        works.wal.append(head, body, lambda _: None)
    group = works.wal._next_group()
    assert group is not None
    works.wal.write_group(group)
    records = works.wal.pending(ALL)
    works.drain._store_all(works.drain._items(records))
    # The crash: the log still has all of it.
    assert works.drain.tick()
    assert works.metrics.drain_duplicates._value.get() == 3
    with database.read() as session:
        found = find(session, "default", stream.id)
        paths = session.execute(text("SELECT path FROM event_files")).scalars().all()
        assert session.execute(text("SELECT steps_done FROM streams")).scalar() == 9
    assert found is not None
    assert found.covered == {0: ((0, 2),)}
    assert len(read_ops(objects, list(paths))) == 36
    assert len(list(objects.list("events"))) == len(paths)
    assert all("evil" not in path for path in paths)
