from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from smon.config import Settings
from smon.store import streams
from smon.store.database import Database
from smon.store.models import Attempt, ClockSample, Job, Mode, Stream, TimeBase
from smon.store.streams import (
    LOST,
    KeyConflictError,
    LayoutConflictError,
    StaleEpochError,
    add_clock_samples,
    count_open,
    end_lost,
    find,
    heartbeat,
)
from smon.topology import Layout
from smon.wire import BatchKind
from tests.service import add_tenant
from tests.store.rows import LAYOUT, NOW, all_rows, note, only, open_stream, request, store


def test_the_same_hello_again_gets_the_same_stream(database: Database) -> None:
    """Registration is idempotent by tenant and key."""
    tenant = add_tenant(database)
    first = open_stream(database, tenant)
    again = open_stream(database, tenant, now=NOW + 5)
    assert first == again
    assert (first.layout, first.mode, first.time_base) == (LAYOUT, Mode.LIVE, TimeBase.UNIX)
    assert (first.window_steps, first.ranks, first.next_seq) == (40, (0, 1), 0)
    assert only(database, Stream)["created_ns"] == NOW


def test_streams_of_one_attempt_share_job_and_attempt(database: Database) -> None:
    """Two hosts of a job are two streams of one attempt."""
    tenant = add_tenant(database)
    first = open_stream(database, tenant)
    second = open_stream(database, tenant, request("k1", ranks=(2, 3), host="node-2"))
    assert first.id != second.id
    assert (first.job_id, first.attempt_id) == (second.job_id, second.attempt_id)
    assert only(database, Job)["name"] == "pretrain"


@pytest.mark.parametrize(
    "asked, steps",
    [
        (request(), 12),
        (request(window_steps=7), 7),
        (request(mode=Mode.RECORDED), 0),
        (request(mode=Mode.RECORDED, window_steps=9), 9),
    ],
)
def test_the_first_hello_decides_about_windows(
    sqlite: Database, asked: streams.StreamRequest, steps: int
) -> None:
    """Live attempts have windows as the server is set, recorded ones a single one; if not asked."""
    tenant = add_tenant(sqlite)
    settings = Settings(window_steps=12)
    assert open_stream(sqlite, tenant, asked, settings=settings).window_steps == steps
    later = replace(asked, key="k1", window_steps=99)
    assert open_stream(sqlite, tenant, later, settings=settings).window_steps == steps


@pytest.mark.parametrize(
    "change",
    [
        {"layout": Layout(dp=4, pp=1)},
        {"mode": Mode.RECORDED},
        {"time_base": TimeBase.STEP},
    ],
)
def test_another_layout_for_the_same_attempt_is_a_conflict(
    database: Database, change: dict[str, object]
) -> None:
    """Nobody can change what an attempt is; nothing is written then."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    with pytest.raises(LayoutConflictError, match="dp2-pp2"):
        open_stream(database, tenant, request("k1", **change))
    assert len(all_rows(database, Stream)) == 1


def flat(key: str, ranks: int) -> streams.StreamRequest:
    """A stream of files whose agent knows how many ranks there are, or (1) not even that."""
    return request(key, source="files", layout=Layout(dp=ranks, pp=1), ranks=())


def test_a_stream_of_files_contradicts_no_layout(database: Database) -> None:
    """Its agent did not know better: the layout stays what others have said."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    for number, ranks in enumerate((1, 64)):
        found = open_stream(database, tenant, flat(f"files-{number}", ranks))
        assert found.layout == LAYOUT


def test_who_knows_more_than_files_decides_about_the_layout(database: Database) -> None:
    """First nothing, then the number of ranks, then all; and no way back."""
    tenant = add_tenant(database)
    layouts = [
        open_stream(database, tenant, asked).layout
        for asked in (flat("a", 1), flat("b", 4), flat("c", 1), request("d"), flat("e", 8))
    ]
    four = Layout(dp=4, pp=1)
    assert layouts == [Layout(dp=1, pp=1), four, four, LAYOUT, LAYOUT]
    with pytest.raises(LayoutConflictError):
        open_stream(database, tenant, request("f", layout=Layout(dp=8, pp=1)))


def test_a_key_belongs_to_one_attempt(database: Database) -> None:
    """A spool that is used for the next attempt of the job must be made anew."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    with pytest.raises(KeyConflictError):
        open_stream(database, tenant, request(attempt=2))
    assert only(database, Attempt)["ended_ns"] is None


def test_a_higher_epoch_moves_the_stream_and_a_lower_one_is_refused(database: Database) -> None:
    """A spool that was made anew starts at 0 again; the old one can no longer send."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    store(database, [note(stream, 0, steps_done=3), note(stream, 1)])
    moved = open_stream(database, tenant, request(epoch=4))
    assert (moved.epoch, moved.next_seq, moved.covered) == (4, 0, {0: ((0, 1),)})
    with pytest.raises(StaleEpochError, match="expected epoch 4"):
        open_stream(database, tenant, request(epoch=3))
    assert only(database, Stream)["steps_done"] == 3


def test_a_batch_of_an_earlier_epoch_still_counts(database: Database) -> None:
    """It was acknowledged before the stream moved on; its END says nothing about the new epoch."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    open_stream(database, tenant, request(epoch=1))
    store(database, [note(stream, 0, steps_done=5), note(stream, 1, kind=BatchKind.END, events=0)])
    row = only(database, Stream)
    assert (row["steps_done"], row["ended"], row["events"]) == (5, False, 10)


def test_a_later_attempt_ends_the_earlier_ones(database: Database) -> None:
    """A restart of the job says that the run before is over, although nobody has said END."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    open_stream(database, tenant, request("k1", attempt=3, layout=Layout(dp=1, pp=2)), now=NOW + 7)
    ended = {row["number"]: (row["ended_ns"], row["end_reason"]) for row in rows_of(database)}
    assert ended == {1: (NOW + 7, "attempt 3 began"), 3: (None, None)}


def test_a_stream_that_comes_late_opens_the_attempt_again(database: Database) -> None:
    """All streams so far had ended, but one of them had not even said hello."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    store(database, [note(stream, 0, kind=BatchKind.END, events=0, reason="finished")])
    assert only(database, Attempt)["end_reason"] == "all streams ended"
    open_stream(database, tenant, request("k1"))
    assert only(database, Attempt)["ended_ns"] is None


def test_a_new_epoch_opens_an_ended_stream_again(database: Database) -> None:
    """The producer goes on after its END."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    store(database, [note(stream, 0, kind=BatchKind.END, events=0, reason="finished")])
    moved = open_stream(database, tenant, request(epoch=1))
    assert not moved.ended
    assert only(database, Attempt)["ended_ns"] is None


def rows_of(database: Database) -> list[dict[str, object]]:
    """All attempts."""
    return all_rows(database, Attempt)


def test_ranks_follow_the_latest_hello(database: Database) -> None:
    """A stream that did not know its ranks at first says so later; silence changes nothing."""
    tenant = add_tenant(database)
    assert open_stream(database, tenant, request(ranks=())).ranks == ()
    assert open_stream(database, tenant, request(ranks=(3,))).ranks == (3,)
    assert open_stream(database, tenant, request(ranks=())).ranks == (3,)


def test_another_tenants_stream_is_not_found(database: Database) -> None:
    """The same key and job name of two tenants are two streams of two jobs, each its own."""
    mine, other = add_tenant(database, "mine"), add_tenant(database, "other")
    stream, theirs = open_stream(database, mine), open_stream(database, other)
    assert stream.id != theirs.id
    assert stream.job_id != theirs.job_id
    with database.write() as session:
        assert find(session, mine, theirs.id) is None
        assert find(session, other, theirs.id) == theirs
        assert not heartbeat(session, mine, theirs.id, {"a": 1}, (1, 2), NOW)
        assert count_open(session, mine) == 1
    assert all(row["heartbeat_ns"] is None for row in all_rows(database, Stream))
    assert all_rows(database, ClockSample) == []


def test_hostile_names_stay_text(database: Database) -> None:
    """A name of a job or host is data: it comes back as it was, and ids never hold it."""
    tenant = add_tenant(database)
    names = ["../../etc/passwd", "a'; DROP TABLE jobs; --", "%s {0} \\", "日本", "x" * 256]
    for n, name in enumerate(names):
        stream = open_stream(database, tenant, request(f"key-{name}", job=name, host=name))
        assert stream.job_id.isalnum()
        assert stream.host == name
        assert len(all_rows(database, Job)) == n + 1
    assert {row["name"] for row in all_rows(database, Job)} == set(names)


def test_a_heartbeat_is_kept_with_the_clock(database: Database) -> None:
    """The last heartbeat stands at the stream; offsets of the clock make a series, thinned out."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    with database.write() as session:
        for n in range(8):
            document = {"agent": {"version": "1"}, "n": n}
            at = NOW + n * 15 * 10**9
            assert heartbeat(session, tenant, stream.id, document, (n, 100), at)
        assert not heartbeat(session, tenant, "no-such-stream", {}, None, NOW)
    row = only(database, Stream)
    assert row["heartbeat"] == {"agent": {"version": "1"}, "n": 7}
    assert row["heartbeat_ns"] == NOW + 7 * 15 * 10**9
    samples = [(row["offset_ns"], row["error_ns"]) for row in all_rows(database, ClockSample)]
    assert samples == [(0, 100), (2, 100), (4, 100), (6, 100)]


def test_the_same_clock_sample_twice_is_no_error(database: Database) -> None:
    """Two servers may note the same moment."""
    stream = open_stream(database, add_tenant(database))
    for _ in range(2):
        with database.write() as session:
            add_clock_samples(session, [(stream.id, NOW, 5, 6), (stream.id, NOW, 5, 6)])
    assert len(all_rows(database, ClockSample)) == 1


def test_only_open_streams_are_counted(database: Database) -> None:
    """Neither those that have ended, nor those of attempts that have."""
    tenant = add_tenant(database)
    ended = open_stream(database, tenant)
    for n in range(1, 4):
        open_stream(database, tenant, request(f"k{n}"))
    store(database, [note(ended, 0, kind=BatchKind.END, events=0)])
    open_stream(database, tenant, request("other", job="another"))
    with database.read() as session:
        assert count_open(session, tenant) == 4
    open_stream(database, tenant, request("restart", attempt=2))
    with database.read() as session:
        assert count_open(session, tenant) == 2


def test_hosts_that_say_hello_at_once_get_one_attempt(database: Database) -> None:
    """Threads that race for the same job make it once."""
    tenant = add_tenant(database)
    gate = threading.Barrier(6)
    found = []

    def hello(n: int) -> None:
        gate.wait()
        found.append(open_stream(database, tenant, request(f"k{n % 3}")))

    threads = [threading.Thread(target=hello, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({stream.id for stream in found}) == 3
    assert len({stream.attempt_id for stream in found}) == 1


# --- jobs of which nothing is heard -----------------------------------------------------------

SECOND = 10**9


def lost(database: Database, now: int, silent_s: int = 100) -> int:
    """How many attempts end for silence."""
    with database.write() as session:
        return len(end_lost(session, now - silent_s * SECOND, now))


def test_a_live_attempt_of_which_nothing_is_heard_is_over(database: Database) -> None:
    """Neither data nor heartbeat for so long, not less; it is ended once."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    assert lost(database, NOW + 100 * SECOND) == 0
    assert lost(database, NOW + 101 * SECOND) == 1
    assert lost(database, NOW + 102 * SECOND) == 0
    attempt = only(database, Attempt)
    assert (attempt["ended_ns"], attempt["end_reason"]) == (NOW + 101 * SECOND, LOST)


def test_one_agent_that_lives_keeps_an_attempt_going(database: Database) -> None:
    """A job that hangs sends nothing, but its agents are there."""
    tenant = add_tenant(database)
    open_stream(database, tenant)
    other = open_stream(database, tenant, request("k1", ranks=(2, 3)))
    with database.write() as session:
        heartbeat(session, tenant, other.id, {}, None, NOW + 90 * SECOND)
    assert lost(database, NOW + 150 * SECOND) == 0
    assert lost(database, NOW + 191 * SECOND) == 1


def test_recorded_attempts_wait_for_their_files(database: Database) -> None:
    """Nobody has a heartbeat there, and an upload may take its time."""
    open_stream(database, add_tenant(database), request(mode=Mode.RECORDED))
    assert lost(database, NOW + 10_000 * SECOND) == 0


def test_an_attempt_that_was_lost_goes_on_when_data_come(database: Database) -> None:
    """The network of a site was away, not the job; without a new registration."""
    stream = open_stream(database, add_tenant(database))
    assert lost(database, NOW + 200 * SECOND) == 1
    store(database, [note(stream, 0)], now=NOW + 300 * SECOND)
    attempt = only(database, Attempt)
    assert (attempt["ended_ns"], attempt["end_reason"]) == (None, None)
    assert lost(database, NOW + 390 * SECOND) == 0
