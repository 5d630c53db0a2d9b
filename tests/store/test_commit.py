from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import event, update

from smon.errors import MissingError, StoreError
from smon.store.commit import AlreadyStored, BatchNote, NewFile, stored_among
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    ClockSample,
    Coverage,
    EventFile,
    Job,
    Stream,
    Window,
    WindowState,
)
from smon.store.streams import StreamInfo, find
from smon.wire import BatchKind
from tests.service import add_tenant
from tests.store.rows import (
    NOW,
    all_rows,
    file_of,
    finish,
    note,
    only,
    open_stream,
    request,
    store,
)


def test_a_commit_writes_everything_at_once(database: Database) -> None:
    """Coverage, files, windows, stream, attempt and job say the same after one commit."""
    stream = open_stream(database, add_tenant(database))
    files = [
        file_of(stream, 0, first_step=38, last_step=39, rows=7),
        file_of(stream, 1, first_step=40, last_step=44, rows=5),
        file_of(stream, None, kind="context", first_step=-1, last_step=-1, rows=0),
    ]
    notes = [note(stream, 0, events=12, clock=(50, 5)), note(stream, 1, kind=BatchKind.CONTEXT)]
    store(database, notes, files, NOW + 9)
    assert only(database, Coverage)["ranges"] == [[0, 1]]
    windows = {row["number"]: row for row in all_rows(database, Window)}
    spans = [(w["first_step"], w["last_step"], w["rows"]) for w in windows.values()]
    assert sorted(spans) == [(38, 39, 7), (40, 44, 5)]
    assert {(w["state"], w["revision"], w["opened_ns"]) for w in windows.values()} == {
        ("open", 1, NOW + 9)
    }
    by_id = {row["id"]: row for row in all_rows(database, EventFile)}
    assert set(by_id) == {file.id for file in files}
    assert by_id[files[1].id]["window_id"] == windows[1]["id"]
    assert by_id[files[2].id]["window_id"] is None
    attempt = only(database, Attempt)
    assert (attempt["revision"], attempt["last_data_ns"]) == (1, NOW + 9)
    assert only(database, Job)["last_data_ns"] == NOW + 9
    assert (only(database, Stream)["events"], only(database, Stream)["last_data_ns"]) == (
        12,
        NOW + 9,
    )
    assert only(database, ClockSample)["offset_ns"] == 50


def test_what_is_stored_is_refused_before_anything_is_written(database: Database) -> None:
    """A duplicate leaves the transaction without a trace, and names itself."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 0), note(stream, 2)], [file_of(stream)])
    before = [all_rows(database, table) for table in (Stream, Coverage, Window, EventFile, Attempt)]
    again = [note(stream, seq) for seq in range(4)]
    with pytest.raises(AlreadyStored) as caught:
        store(database, again, [file_of(stream)], NOW + 1)
    assert caught.value.keys == {(stream.id, 0, 0), (stream.id, 0, 2)}
    after = [all_rows(database, table) for table in (Stream, Coverage, Window, EventFile, Attempt)]
    assert before == after
    with database.read() as session:
        keys = [each.key for each in again]
        assert stored_among(session, keys) == caught.value.keys
        other_epoch = {(stream.id, 1, 0), ("no-such-stream", 0, 0)}
        assert stored_among(session, other_epoch) == frozenset()


def test_the_same_batch_twice_in_one_commit_is_refused(database: Database) -> None:
    """The caller must say which of the two is meant."""
    stream = open_stream(database, add_tenant(database))
    with pytest.raises(StoreError, match="every batch once"):
        store(database, [note(stream, 0), note(stream, 0)])
    assert all_rows(database, Coverage) == []


def test_another_tenants_stream_takes_no_batch(database: Database) -> None:
    """The tenant of the token must be that of the stream; the message does not tell them apart."""
    stream = open_stream(database, add_tenant(database, "mine"))
    other = add_tenant(database, "other")
    with pytest.raises(MissingError, match="send a hello"):
        store(database, [replace(note(stream, 0), tenant_id=other)])
    with pytest.raises(MissingError, match="send a hello"):
        store(database, [replace(note(stream, 0), stream_id="no-such-stream")])
    assert all_rows(database, Coverage) == []


def test_steps_count_once_everything_before_them_is_there(database: Database) -> None:
    """`steps_done` of a batch beyond a gap waits until the gap is filled."""
    stream = open_stream(database, add_tenant(database))
    expected = [
        (note(stream, 0, steps_done=2), 2),
        (note(stream, 3, steps_done=8), 2),
        (note(stream, 4, steps_done=9), 2),
        (note(stream, 6, steps_done=12), 2),
        (note(stream, 2, steps_done=None), 2),
        (note(stream, 1, steps_done=4), 9),
        (note(stream, 5, steps_done=None), 12),
    ]
    for each, done in expected:
        store(database, [each])
        assert only(database, Stream)["steps_done"] == done
    assert only(database, Coverage)["pending_steps"] == []


def test_what_waits_beyond_a_gap_stays_small(database: Database) -> None:
    """A gap that is never filled does not make the row grow with every batch."""
    stream = open_stream(database, add_tenant(database))
    for first in range(1, 400, 40):
        store(database, [note(stream, seq, steps_done=seq) for seq in range(first, first + 40)])
    row = only(database, Coverage)
    assert row["ranges"] == [[1, 400]]
    assert row["pending_steps"] == [[400, 400]]
    assert only(database, Stream)["steps_done"] is None
    store(database, [note(stream, 0)])
    assert only(database, Stream)["steps_done"] == 400


def test_a_gap_covers_its_range_and_counts_what_is_lost(database: Database) -> None:
    """What the agent had to drop is covered, so that the stream goes on; a resend is refused."""
    stream = open_stream(database, add_tenant(database))
    gap = note(stream, 1, last_seq=5, kind=BatchKind.GAP, events=77, reason="spool full")
    store(database, [note(stream, 0), gap, note(stream, 6, steps_done=9)])
    row = only(database, Stream)
    assert (row["lost_events"], row["events"], row["steps_done"]) == (77, 20, 9)
    assert only(database, Coverage)["ranges"] == [[0, 6]]
    with pytest.raises(AlreadyStored):
        store(database, [note(stream, 3)])


def test_a_gap_over_batches_that_came_is_merged(database: Database) -> None:
    """A batch whose acknowledgement was lost may lie within the gap that the agent reports."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 0), note(stream, 3)])
    store(database, [note(stream, 1, last_seq=4, kind=BatchKind.GAP, events=9)])
    assert only(database, Coverage)["ranges"] == [[0, 4]]


def test_a_stream_ends_when_all_before_its_end_has_come(database: Database) -> None:
    """An END that overtakes other batches ends nothing yet."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 2, kind=BatchKind.END, events=0, reason="finished")])
    row = only(database, Stream)
    assert (row["ended"], row["end_reason"]) == (False, "finished")
    assert only(database, Attempt)["ended_ns"] is None
    store(database, [note(stream, 1)])
    assert not only(database, Stream)["ended"]
    store(database, [note(stream, 0)], now=NOW + 3)
    assert only(database, Stream)["ended"]
    attempt = only(database, Attempt)
    assert (attempt["ended_ns"], attempt["end_reason"]) == (NOW + 3, "all streams ended")


def test_an_attempt_ends_with_its_last_stream(database: Database) -> None:
    """One of two streams that ends leaves the attempt open."""
    tenant = add_tenant(database)
    streams = [open_stream(database, tenant, request(f"k{n}")) for n in range(2)]
    for n, stream in enumerate(streams):
        assert only(database, Attempt)["ended_ns"] is None
        store(database, [note(stream, 0, kind=BatchKind.END, events=0)], now=NOW + n)
    assert only(database, Attempt)["ended_ns"] == NOW + 1


@pytest.mark.parametrize("state", [WindowState.DONE, WindowState.FAILED])
def test_late_data_opens_a_finished_window_again(database: Database, state: WindowState) -> None:
    """It is analysed once more, with all tries, and compacted once more."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 0)], [file_of(stream, first_step=3, last_step=5)])
    with database.write() as session:
        session.execute(update(Window).values(state=state.value, tries=3, compacted_ns=NOW))
    late = file_of(stream, first_step=2, last_step=4, rows=1)
    store(database, [note(stream, 1)], [late], NOW + 8)
    row = only(database, Window)
    assert (row["state"], row["tries"], row["compacted_ns"]) == ("ready", 0, None)
    assert (row["first_step"], row["last_step"], row["rows"]) == (2, 5, 11)
    assert (row["revision"], row["ready_ns"], row["updated_ns"]) == (2, NOW + 8, NOW + 8)


@pytest.mark.parametrize("state", [WindowState.OPEN, WindowState.READY, WindowState.CLAIMED])
def test_late_data_leaves_an_unfinished_window_as_it_is(
    database: Database, state: WindowState
) -> None:
    """The worker that has it sees by the revision that there is more."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 0)], [file_of(stream)])
    finish(database, state)
    store(database, [note(stream, 1)], [file_of(stream)])
    row = only(database, Window)
    assert (row["state"], row["revision"]) == (state, 2)


def test_a_window_whose_files_expired_keeps_its_report(database: Database) -> None:
    """Latecomers alone make no better report than the one that there is."""
    stream = open_stream(database, add_tenant(database))
    store(database, [note(stream, 0)], [file_of(stream)])
    with database.write() as session:
        session.execute(update(Window).values(state="done", expired_ns=NOW))
    store(database, [note(stream, 1)], [file_of(stream)])
    assert only(database, Window)["state"] == "done"


def test_side_evidence_counts_no_rows(database: Database) -> None:
    """`rows` of a window are its ops."""
    stream = open_stream(database, add_tenant(database))
    files = [file_of(stream, rows=10), file_of(stream, rows=1, kind="context")]
    store(database, [note(stream, 0)], files)
    assert only(database, Window)["rows"] == 10


def statements_of(database: Database, notes: Sequence[BatchNote], files: Sequence[NewFile]) -> int:
    """Statements of one commit; one with many sets of parameters is one."""
    seen: list[str] = []

    def listen(*arguments: object) -> None:
        seen.append(str(arguments[2]))

    event.listen(database.engine, "before_cursor_execute", listen)
    store(database, notes, files)
    event.remove(database.engine, "before_cursor_execute", listen)
    return len(seen)


def test_a_large_commit_needs_few_statements(database: Database) -> None:
    """500 batches of 125 streams: the number of statements does not grow with them."""
    tenant = add_tenant(database)
    streams = [open_stream(database, tenant, request(f"k{n}")) for n in range(125)]
    notes = [
        note(stream, seq, clock=(1, 2), steps_done=seq) for stream in streams for seq in range(4)
    ]
    few = [replace(each, seq=each.seq + 4, last_seq=each.seq + 4) for each in notes[:4]]
    counts = [
        statements_of(database, part, [file_of(streams[0], window) for window in range(3)])
        for part in (notes[:4], few, notes[4:])
    ]
    assert max(counts) < 25
    assert len(all_rows(database, Coverage)) == 125


@pytest.mark.postgres
def test_two_servers_that_race_store_each_batch_once(postgres_url: str) -> None:
    """Both drain the same batches at once; exactly one wins, the other is told which."""
    database = Database(postgres_url)
    tenant = add_tenant(database)
    streams = [open_stream(database, tenant, request(f"k{n}")) for n in range(6)]
    gate = threading.Barrier(4)
    outcomes: list[str] = []

    def drain(order: int) -> None:
        mine = streams if order % 2 else streams[::-1]
        for seq in range(8):
            gate.wait()
            notes = [note(stream, seq) for stream in mine]
            files = [file_of(mine[0], window) for window in (0, 1)]
            try:
                store(database, notes, files)
                outcomes.append("stored")
            except AlreadyStored as error:
                told = error.keys == {each.key for each in notes}
                outcomes.append("told" if told else "misled")

    threads = [threading.Thread(target=drain, args=(order,)) for order in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("stored"), outcomes.count("told")) == (8, 24)
    assert {row["events"] for row in all_rows(database, Stream)} == {80}
    assert {row["revision"] for row in all_rows(database, Window)} == {8}
    assert len(all_rows(database, EventFile)) == 16
    database.close()


def end_stream(database: Database, stream: StreamInfo, gate: threading.Barrier) -> None:
    """Commit the END of a stream, when all others are about to."""
    gate.wait()
    store(database, [note(stream, 0, kind=BatchKind.END, events=0)])


@pytest.mark.postgres
def test_the_last_two_streams_may_end_at_once(postgres_url: str) -> None:
    """Two servers that each end one stream see each other: the attempt ends."""
    database = Database(postgres_url)
    tenant = add_tenant(database)
    for attempt in range(1, 6):
        streams = [
            open_stream(database, tenant, request(f"{attempt}-{n}", job=f"job-{attempt}"))
            for n in range(3)
        ]
        gate = threading.Barrier(3)
        threads = [
            threading.Thread(target=end_stream, args=(database, stream, gate)) for stream in streams
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(row["ended_ns"] for row in all_rows(database, Attempt))
    database.close()


def test_the_view_of_ingest_follows(database: Database) -> None:
    """What a server that starts reads of a stream is what the commits have left."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    store(database, [note(stream, seq) for seq in (0, 1, 2, 5, 6)])
    with database.read() as session:
        found = find(session, tenant, stream.id)
    assert found is not None
    assert (found.covered, found.next_seq) == ({0: ((0, 2), (5, 6))}, 3)
