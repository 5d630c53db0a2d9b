from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from smon.errors import ConfigError, StoreError, WireError
from smon.ingest.limits import MAX_LOST, MAX_STEP, MAX_VALUES
from smon.ingest.records import Record
from smon.ingest.service import Ack, IngestService, Parts
from smon.ingest.streams import MAX_AHEAD, Deduplication, StreamState
from smon.ingest.wal import Move, Wal
from smon.store.database import Database
from smon.store.objects import Objects
from smon.store.streams import StreamInfo
from smon.wire import Batch
from smon.wire.problems import Problem
from tests.ingest.batches import (
    NOW,
    STREAM,
    FakeStore,
    FaultyDisk,
    end,
    gap,
    head_of,
    info,
    json_ops,
    ops,
    settings,
)
from tests.service import run_aside
from tests.waiting import wait_in_loop

ALL = Move(1 << 40, 1 << 40, 1 << 40)


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who asks."""

    tenant_id: str = "default"


class HeldWal(Wal):
    """A log that writes only while it is let."""

    gate = threading.Event()

    def _commit(self, group: list[Record]) -> None:
        self.gate.wait()
        super()._commit(group)


class NoDeduplication(Deduplication):
    """A planted defect: every batch is new."""

    __slots__ = ()

    def missing(self, state: StreamState, epoch: int, first: int, last: int) -> int | None:
        """Always the first."""
        return first


class Held(FakeStore):
    """A store that keeps the drain from taking anything: the log can be looked at."""

    def ping(self) -> None:
        """Fail."""
        raise StoreError("held")


@dataclasses.dataclass
class Stand:
    """A service, and what is around it."""

    service: IngestService
    store: FakeStore
    disk: FaultyDisk
    seconds: list[float]

    async def put(self, batch: Batch, epoch: int = 0, **options: Any) -> Ack:  # noqa: ANN401  # head fields
        """Put a batch."""
        caller = options.pop("caller", Caller())
        stream = options.pop("stream", STREAM)
        head = head_of(batch, **options)
        with self.service.admit(caller, stream, head):
            return await self.service.put(caller, stream, epoch, batch.seq, head, batch.body)

    async def refused(self, batch: Batch, epoch: int = 0, **options: Any) -> Problem:  # noqa: ANN401  # head fields
        """The problem that a batch is refused with."""
        with pytest.raises(WireError) as caught:
            await self.put(batch, epoch, **options)
        return Problem(caught.value.problem)

    async def until_in_line(self) -> None:
        """Wait until the log has been given a batch."""
        await wait_in_loop(lambda: self.service._wal.pending_bytes, "a batch in the log")

    def logged(self) -> list[int]:
        """Sequence numbers in the log."""
        return [record.key[2] for record in self.service._wal.pending(ALL)]


@asynccontextmanager
async def standing(
    folder: Path,
    store: FakeStore | None = None,
    parts: Parts | None = None,
    **changed: Any,  # noqa: ANN401  # settings
) -> AsyncIterator[Stand]:
    """A service that runs, with a store that keeps nothing unless told otherwise."""
    chosen = settings(folder, **{"stop_timeout_s": 0.2, **changed})
    database, objects = Database("sqlite://"), Objects(str(folder / "objects"))
    disk, seconds = FaultyDisk(), [0.0]
    store = store or Held(info())
    base = parts or Parts()
    service = IngestService(
        chosen,
        database,
        objects,
        registry=CollectorRegistry(),
        server_id="s1",
        clock=lambda: NOW,
        parts=dataclasses.replace(base, store=store, disk=disk, monotonic=lambda: seconds[0]),
    )
    # The drain and its end go by real time; what is tested with a clock is admission and the disk.
    service._drain._clocks = type(service._drain._clocks)(lambda: NOW)
    service.start()
    try:
        yield Stand(service, store, disk, seconds)
    finally:
        await service.stop()
        database.close()


Test = Callable[[Stand], Coroutine[Any, Any, None]]


def run(folder: Path, test: Test, **options: Any) -> None:  # noqa: ANN401  # as standing
    """Run a test with a service."""

    async def main() -> None:
        async with standing(folder, **options) as stand:
            await test(stand)

    run_aside(main)


def test_a_batch_is_stored_once_and_acknowledged_with_what_comes_next(tmp_path: Path) -> None:
    """Contiguous numbers count; one beyond a gap waits for the gap."""

    async def test(stand: Stand) -> None:
        assert await stand.put(ops(0)) == Ack("stored", 1)
        assert await stand.put(ops(2)) == Ack("stored", 1)
        assert await stand.put(ops(1)) == Ack("stored", 3)
        assert await stand.put(json_ops(3, 2000)) == Ack("stored", 4)
        assert stand.logged() == [0, 2, 1, 3]

    run(tmp_path, test)


def _twice(folder: Path, deduplication: Deduplication) -> tuple[Ack, Ack, int]:
    answers: list[Ack] = []
    logged: list[int] = []

    async def test(stand: Stand) -> None:
        answers.extend([await stand.put(ops(0)), await stand.put(ops(0))])
        logged.extend(stand.logged())

    run(folder, test, parts=Parts(deduplication=deduplication))
    return answers[0], answers[1], len(logged)


def test_a_resend_changes_nothing(tmp_path: Path) -> None:
    """It is a duplicate; a server without deduplication fails this very test."""
    assert _twice(tmp_path / "a", Deduplication()) == (Ack("stored", 1), Ack("duplicate", 1), 1)
    assert _twice(tmp_path / "b", NoDeduplication())[2] == 2


def test_a_resend_during_the_first_append_waits_for_its_outcome(tmp_path: Path) -> None:
    """Both are answered when the batch is durable, and it is there once."""

    async def test(stand: Stand) -> None:
        HeldWal.gate.clear()
        tries = [asyncio.create_task(stand.put(ops(0))) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in tries)
        HeldWal.gate.set()
        answers = await asyncio.gather(*tries)
        assert sorted(answer.status for answer in answers) == ["duplicate", "duplicate", "stored"]
        assert {answer.next_seq for answer in answers} == {1}
        assert stand.logged() == [0]

    run(tmp_path, test, parts=Parts(wal=HeldWal))


def test_another_batch_during_the_first_append_is_a_conflict(tmp_path: Path) -> None:
    """Once the first one is durable; if it fails, the second one is taken."""

    async def test(stand: Stand) -> None:
        HeldWal.gate.clear()
        first = asyncio.create_task(stand.put(ops(0)))
        await asyncio.sleep(0)
        second = asyncio.create_task(stand.refused(ops(0, rows=14)))
        await asyncio.sleep(0.01)
        HeldWal.gate.set()
        assert (await first).status == "stored"
        assert await second is Problem.KEY_CONFLICT

    run(tmp_path, test, parts=Parts(wal=HeldWal))


def test_a_resend_shares_a_failure_too(tmp_path: Path) -> None:
    """And may be tried again afterwards."""

    async def test(stand: Stand) -> None:
        HeldWal.gate.clear()
        stand.disk.short = 10
        tries = [asyncio.create_task(stand.refused(ops(0))) for _ in range(2)]
        await stand.until_in_line()
        await asyncio.sleep(0.01)
        HeldWal.gate.set()
        assert await asyncio.gather(*tries) == [Problem.DISK_FULL, Problem.DISK_FULL]
        stand.seconds[0] += 2
        assert await stand.put(ops(0)) == Ack("stored", 1)

    run(tmp_path, test, parts=Parts(wal=HeldWal))


def test_a_client_that_goes_away_does_not_undo_its_batch(tmp_path: Path) -> None:
    """The batch lands, and a resend is a duplicate."""

    async def test(stand: Stand) -> None:
        HeldWal.gate.clear()
        task = asyncio.create_task(stand.put(ops(0)))
        await stand.until_in_line()
        task.cancel()
        HeldWal.gate.set()
        assert (await stand.put(ops(0))).status == "duplicate"
        assert stand.logged() == [0]

    run(tmp_path, test, parts=Parts(wal=HeldWal))


def test_another_body_under_a_known_number_is_a_conflict(tmp_path: Path) -> None:
    """Whether the first is in the log, or stored since; nothing is overwritten."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        assert await stand.refused(ops(0, rows=14)) is Problem.KEY_CONFLICT
        stand.service._wal.release(stand.service._wal.pending(ALL))
        assert await stand.refused(ops(0, rows=14)) is Problem.KEY_CONFLICT
        assert (await stand.put(ops(0))).status == "duplicate"

    run(tmp_path, test)


def test_a_conflict_is_found_after_a_restart(tmp_path: Path) -> None:
    """The log has the digests of what is not stored yet."""

    async def first(stand: Stand) -> None:
        await stand.put(ops(0))

    async def second(stand: Stand) -> None:
        assert await stand.refused(ops(0, rows=14)) is Problem.KEY_CONFLICT
        assert await stand.put(ops(0)) == Ack("duplicate", 1)
        assert await stand.put(ops(1)) == Ack("stored", 2)

    run(tmp_path, first)
    run(tmp_path, second)


def test_epochs(tmp_path: Path) -> None:
    """An older one is stale; a newer one is looked up; one that is not registered is not known."""

    async def test(stand: Stand) -> None:
        assert (await stand.put(ops(0))).status == "stored"
        assert await stand.refused(ops(0), 1) is Problem.NOT_FOUND
        stand.store.streams["default", STREAM] = info(epoch=1)
        assert await stand.put(ops(0, rows=14), 1) == Ack("stored", 1)
        assert await stand.refused(ops(1), 0) is Problem.STALE_EPOCH

    run(tmp_path, test)


def test_a_gap_covers_what_is_missing(tmp_path: Path) -> None:
    """Numbers that have come before stay; the rest counts as come; a resend is a duplicate."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        await stand.put(ops(1))
        assert await stand.put(gap(1, 5)) == Ack("stored", 6)
        assert await stand.put(gap(1, 5)) == Ack("duplicate", 6)
        assert (await stand.put(ops(3))).status == "duplicate"
        (_, _, record) = stand.service._wal.pending(ALL)
        assert (record.key[2], record.last_seq) == (2, 5)

    run(tmp_path, test)


def test_streams_of_other_tenants_do_not_exist(tmp_path: Path) -> None:
    """404, as for an id that nobody has."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        assert await stand.refused(ops(1), caller=Caller("other")) is Problem.NOT_FOUND
        assert await stand.refused(ops(1), stream="no-such") is Problem.NOT_FOUND

    run(tmp_path, test)


def test_known_streams_are_taken_while_the_database_is_down(tmp_path: Path) -> None:
    """Of others nothing can be said: the store is unavailable."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        stand.store.down = True
        assert (await stand.put(ops(1))).status == "stored"
        assert (await stand.put(ops(5))).status == "stored"
        assert (await stand.put(ops(6))).status == "stored"
        with pytest.raises(StoreError):
            await stand.put(ops(0), stream="other")

    run(tmp_path, test)


def test_one_question_per_stream_at_a_time(tmp_path: Path) -> None:
    """A thousand first batches of one stream ask the database once."""

    async def test(stand: Stand) -> None:
        await asyncio.gather(*(stand.put(ops(number)) for number in range(20)))
        assert stand.store.calls.count("find") == 1

    run(tmp_path, test)


def test_what_another_server_has_stored_is_asked_for_when_numbers_are_missing(
    tmp_path: Path,
) -> None:
    """Now and then, not with each batch."""

    async def test(stand: Stand) -> None:
        now = [NOW]
        stand.service.clock = lambda: now[0]
        assert await stand.put(ops(4)) == Ack("stored", 0)
        stand.store.streams["default", STREAM] = info(covered={0: ((0, 3),)})
        assert await stand.put(ops(5)) == Ack("stored", 0)
        assert stand.store.calls.count("find") == 1
        now[0] += 3 * 10**9
        assert await stand.put(ops(6)) == Ack("stored", 7)
        assert stand.store.calls.count("find") == 2
        now[0] += 3 * 10**9
        assert await stand.put(ops(7)) == Ack("stored", 8)
        assert stand.store.calls.count("find") == 2

    run(tmp_path, test)


def test_a_database_that_hangs_holds_up_no_batch_of_a_known_stream(tmp_path: Path) -> None:
    """Not even where numbers are missing, and large bodies are decoded meanwhile."""
    hang = threading.Event()

    class Hanging(Held):
        hangs = False

        def find(self, tenant_id: str, stream_id: str) -> StreamInfo | None:
            if self.hangs:
                hang.wait()
            return super().find(tenant_id, stream_id)

    store = Hanging(info())

    async def test(stand: Stand) -> None:
        now = [NOW]
        stand.service.clock = lambda: now[0]
        await stand.put(ops(0))
        await stand.put(ops(2))
        store.hangs = True
        strangers = [
            asyncio.create_task(stand.refused(ops(0), stream=f"s{number}")) for number in range(8)
        ]
        for number in range(4, 10):
            now[0] += 3 * 10**9
            assert (await stand.put(json_ops(number, 2000))).status == "stored"
        hang.set()
        assert set(await asyncio.gather(*strangers)) == {Problem.NOT_FOUND}

    run(tmp_path, test, store=store)


def test_too_many_stretches_ahead_are_refused(tmp_path: Path) -> None:
    """A sender that leaves a hole after each batch does not fill the memory."""
    holes = tuple((2 * number + 2, 2 * number + 2) for number in range(MAX_AHEAD - 1))

    async def test(stand: Stand) -> None:
        assert (await stand.put(ops(2 * MAX_AHEAD + 8))).status == "stored"
        assert (await stand.put(ops(2 * MAX_AHEAD + 10))).status == "stored"
        assert await stand.refused(ops(2 * MAX_AHEAD + 12)) is Problem.OVERLOADED
        # What fills a hole is taken: it is what the refusal asks for.
        for number in (5, 0, 1, 2 * MAX_AHEAD + 11):
            assert (await stand.put(ops(number))).status == "stored"

    run(tmp_path, test, store=Held(info(covered={0: holes})))


def test_limits_are_checked_before_a_body_is_read(tmp_path: Path) -> None:
    """Below and at the limit there is room; above there is none."""

    async def test(stand: Stand) -> None:
        for length in (999, 1000):
            with stand.service.admit(Caller(), STREAM, head_of(ops(), length=length)):
                pass
        for options, problem in (
            ({"length": 1001}, Problem.TOO_LARGE),
            ({"events": 101}, Problem.TOO_MANY_EVENTS),
        ):
            with (
                pytest.raises(WireError) as caught,
                stand.service.admit(Caller(), STREAM, head_of(ops(), **options)),
            ):
                pass
            assert caught.value.problem == problem
        with stand.service.admit(Caller(), STREAM, head_of(ops(), events=100)):
            pass

    run(tmp_path, test, max_body_bytes=1000, max_events=100)


def test_counts_of_other_kinds_have_limits_too(tmp_path: Path) -> None:
    """What is summed up in the database must fit there."""

    async def test(stand: Stand) -> None:
        assert await stand.refused(gap(0, 1, MAX_LOST + 1)) is Problem.TOO_MANY_EVENTS
        assert await stand.refused(end(0), events=MAX_VALUES + 1) is Problem.TOO_MANY_EVENTS
        assert await stand.refused(ops(0), steps_done=MAX_STEP + 1) is Problem.WRONG_VALUES
        assert (await stand.put(ops(0), steps_done=MAX_STEP)).status == "stored"

    run(tmp_path, test)


def test_a_tenant_over_its_rate_waits(tmp_path: Path) -> None:
    """429 with the time to wait; another tenant is not touched."""

    async def test(stand: Stand) -> None:
        for number in range(4):
            await stand.put(ops(number))
        assert await stand.refused(ops(4)) is Problem.RATE_LIMITED
        assert await stand.refused(ops(4), caller=Caller("other")) is Problem.NOT_FOUND
        stand.seconds[0] += 1
        assert (await stand.put(ops(4))).status == "stored"

    run(tmp_path, test, tenant_requests_per_s=2.0)


def test_a_batch_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    """Wrong digest, damaged body, wrong values: not in the log, and its number is free."""

    async def test(stand: Stand) -> None:
        batch = ops(0)
        spoiled = dataclasses.replace(batch, body=batch.body[:-1] + b"\0")
        assert await stand.refused(spoiled, digest=batch.digest()) is Problem.DIGEST_MISMATCH
        assert await stand.refused(spoiled) is Problem.MALFORMED_BODY
        assert await stand.refused(ops(0, dp=[9] * 12)) is Problem.WRONG_VALUES
        assert stand.logged() == []
        assert await stand.put(batch) == Ack("stored", 1)

    run(tmp_path, test)


def test_what_is_acknowledged_is_counted(tmp_path: Path) -> None:
    """Batches by result, events and bytes of what is new."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        await stand.put(ops(0))
        await stand.put(gap(1, 2))
        metrics = stand.service.metrics
        assert metrics.stored._value.get() == 2
        assert metrics.duplicate._value.get() == 1
        assert metrics.events._value.get() == 12
        assert metrics.bytes._value.get() == len(ops(0).body) + len(gap(1, 2).body)
        assert metrics.in_flight._value.get() == 0

    run(tmp_path, test)


def test_a_service_moves_its_log_and_says_when_it_cannot(tmp_path: Path) -> None:
    """Not ready while the database is down or the disk is full; ready again by itself."""

    async def test(stand: Stand) -> None:
        assert await _until(lambda: stand.service.ready() == [])
        await stand.put(ops(0))
        assert await _until(lambda: bool(stand.store.notes))
        stand.store.down = True
        await stand.put(ops(1))
        assert await _until(lambda: bool(stand.service.ready()))
        stand.store.down = False
        assert await _until(lambda: len(stand.store.notes) == 2)
        assert await _until(lambda: stand.service.ready() == [])
        stand.disk.free = 10
        assert await stand.refused(ops(2)) is Problem.DISK_FULL
        assert "log" in stand.service.ready()[0]
        stand.disk.free = None
        stand.seconds[0] += 2
        assert await _until(lambda: stand.service.ready() == [])
        assert (await stand.put(ops(2))).status == "stored"

    run(tmp_path, test, store=FakeStore(info()), min_free_bytes=1000)


async def _until(true: Callable[[], bool]) -> bool:
    """Whether it becomes true before long; how long does not matter."""
    for _ in range(4000):
        if true():
            return True
        await asyncio.sleep(0.005)
    return False


def test_a_stopped_service_has_moved_its_log_and_takes_nothing(tmp_path: Path) -> None:
    """What was in flight is finished; what comes is told to come again."""
    store = FakeStore(info())

    async def test(stand: Stand) -> None:
        await asyncio.gather(*(stand.put(ops(number)) for number in range(10)))
        await stand.service.stop()
        assert await stand.refused(ops(10)) is Problem.OVERLOADED
        assert stand.service.ready()

    run(tmp_path, test, store=store, stop_timeout_s=60.0)
    assert sorted(note.seq for note in store.notes) == list(range(10))
    assert not list((tmp_path / "wal").glob("*.wal"))


def test_a_hello_takes_over_what_the_log_has(tmp_path: Path) -> None:
    """An agent that asks after a crash of the server is told what is there."""

    async def first(stand: Stand) -> None:
        await stand.put(ops(0))
        await stand.put(ops(1))

    async def second(stand: Stand) -> None:
        assert stand.service.adopt(info()) == 2

    run(tmp_path, first)
    run(tmp_path, second)


def test_two_services_never_share_a_log(tmp_path: Path) -> None:
    """The second one does not start."""

    async def test(_stand: Stand) -> None:
        with pytest.raises(ConfigError, match="SMON_WAL_DIR"):
            async with standing(tmp_path):
                pass

    run(tmp_path, test)


def test_a_record_of_a_stream_that_is_lost_is_expected_again(tmp_path: Path) -> None:
    """What is known of the stream is read anew from the database."""

    async def test(stand: Stand) -> None:
        await stand.put(ops(0))
        stand.service._wal.release(stand.service._wal.pending(ALL))
        stand.service._forget_soon(STREAM)
        await asyncio.sleep(0.01)
        assert await stand.put(ops(1)) == Ack("stored", 0)

    run(tmp_path, test)
