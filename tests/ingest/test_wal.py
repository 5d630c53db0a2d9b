from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import ConfigError, SMonError, WireError
from smon.ingest.decode import decode
from smon.ingest.records import Record
from smon.ingest.segments import QUARANTINE
from smon.ingest.wal import Move, Seams, Wal
from smon.wire import Batch
from smon.wire.frames import Frame, encode_frame, scan_frames
from smon.wire.problems import Problem
from tests.ingest.batches import (
    LIMITS,
    FaultyDisk,
    gap,
    metrics,
    ops,
    record_head,
    settings,
)

ALL = Move(1 << 40, 1 << 40, 1 << 40)


class Bench:
    """A log, what it has told those who wait, and the levers of its disk and clock."""

    def __init__(self, folder: Path, wal: type[Wal] = Wal, **changed: Any) -> None:  # noqa: ANN401  # settings
        self.disk = FaultyDisk()
        self.now_s = 100.0
        self.metrics = metrics()
        self.outcomes: dict[int, SMonError | None] = {}
        self._told = threading.Condition()
        seams = Seams(self.disk, self._settle, lambda: self.now_s)
        self.wal = wal(settings(folder, **changed), self.metrics.wal, seams)
        self.recovered = self.wal.open()
        self.wal.start()

    def _settle(self, records: Sequence[Record], error: SMonError | None) -> None:
        with self._told:
            self.outcomes |= {record.number: error for record in records}
            self._told.notify_all()

    def put(self, *numbers: int, rows: int = 12) -> list[SMonError | None]:
        """Append batches with these sequence numbers as one group; their outcomes."""
        batches = [ops(number, rows) for number in numbers]
        records = [
            self.wal.append(record_head(batch), batch.body, lambda _: None) for batch in batches
        ]
        self.wal.flush()
        with self._told:
            done = self._told.wait_for(
                lambda: all(record.number in self.outcomes for record in records), 20
            )
        assert done
        return [self.outcomes[record.number] for record in records]

    def seqs(self) -> list[int]:
        """Sequence numbers that wait to be stored."""
        return [record.key[2] for record in self.wal.pending(ALL)]

    def problem(self) -> str:
        """What an append is refused with."""
        with pytest.raises(WireError) as caught:
            self.wal.append(record_head(ops()), ops().body, lambda _: None)
        return caught.value.problem


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes logs, and closes them."""
    made: list[Bench] = []

    def make(folder: Path = tmp_path, wal: type[Wal] = Wal, **changed: Any) -> Bench:  # noqa: ANN401  # settings
        made.append(Bench(folder, wal, **changed))
        return made[-1]

    yield make
    for each in made:
        each.wal.close()


Make = Callable[..., Bench]


def segments(folder: Path) -> list[Path]:
    """Segment files."""
    return sorted((folder / "wal").glob("*.wal"))


def restarted(folder: Path, source: Path, make: Make, **changed: Any) -> Bench:  # noqa: ANN401  # settings
    """A log on a copy of another one's files, as after a crash."""
    shutil.copytree(source / "wal", folder / "wal")
    return make(folder, **changed)


# --- the way through --------------------------------------------------------------------------


def test_what_is_appended_comes_back(bench: Make) -> None:
    """Head and body, from the segment."""
    log = bench()
    assert log.put(0, 1) == [None, None]
    found = list(log.wal.read(log.wal.pending(ALL)))
    assert [head.key[2] for _, head, _ in found] == [0, 1]
    assert [body for _, _, body in found] == [ops(0).body, ops(1).body]
    assert found[0][1] == record_head(ops(0))


def test_a_group_costs_one_sync(bench: Make) -> None:
    """However many batches wait."""
    log = bench()
    log.put(*range(20))
    (histogram,) = log.metrics.wal.fsync_seconds.collect()
    assert {sample.value for sample in histogram.samples if "count" in sample.name} == {1}


def test_what_is_stored_leaves_the_log(bench: Make, tmp_path: Path) -> None:
    """Its segment is removed once all of it is stored, and not before."""
    log = bench(wal_segment_bytes=4096)
    for number in range(12):
        log.put(number)
    assert len(segments(tmp_path)) > 2
    first, *rest = log.wal.pending(ALL)
    log.wal.release(rest)
    assert segments(tmp_path)[0].name == "000000000000.wal"
    assert len(segments(tmp_path)) <= 2
    log.wal.release([first])
    assert "000000000000.wal" not in {path.name for path in segments(tmp_path)}
    assert (log.wal.pending_bytes, log.wal.pending_records) == (0, 0)


def test_a_closed_log_with_nothing_in_it_leaves_no_segment(bench: Make, tmp_path: Path) -> None:
    """A restart has nothing to look through."""
    log = bench()
    log.put(0)
    log.wal.release(log.wal.pending(ALL))
    log.wal.close()
    assert segments(tmp_path) == []


def test_a_restart_finds_what_was_not_stored(bench: Make, tmp_path: Path) -> None:
    """With numbers that go on."""
    log = bench()
    log.put(0, 1, 2)
    log.wal.close()
    again = bench()
    assert again.seqs() == [0, 1, 2]
    assert again.put(3) == [None]
    assert [record.number for record in again.wal.pending(ALL)] == [0, 1, 2, 3]


def test_the_log_knows_what_it_holds_of_a_stream(bench: Make) -> None:
    """Numbers, gaps and digests: for duplicates while the database does not know them yet."""
    log = bench()
    batch = gap(5, 9)
    log.put(0)
    log.wal.append(record_head(batch), batch.body, lambda _: None)
    log.wal.close()
    key = record_head(ops(0)).key
    again = bench()
    assert again.wal.logged(key[0]) == [(0, 0, 0), (0, 5, 9)]
    assert again.wal.digest(key) == ops(0).digest()
    assert not again.wal.digest(record_head(batch).key)
    again.wal.release(again.wal.pending(ALL))
    assert again.wal.logged(key[0]) == []
    assert again.wal.digest(key) is None


def test_two_processes_never_share_a_log(bench: Make, tmp_path: Path) -> None:
    """The second one is told what to do."""
    bench()
    with pytest.raises(ConfigError, match="SMON_WAL_DIR"):
        bench()


def test_a_batch_too_large_for_a_frame_is_a_setting_error(bench: Make) -> None:
    """Found at start, not when the first such batch comes."""
    with pytest.raises(ConfigError, match="SMON_MAX_BODY_BYTES"):
        bench(max_body_bytes=16 << 20)


def test_the_log_has_a_largest_size(bench: Make) -> None:
    """Beyond it batches are refused, until some are stored."""
    log = bench(max_wal_bytes=4096 * 3)
    while log.wal.pending_bytes + 4096 + len(ops().body) <= 4096 * 3:
        log.put(len(log.seqs()))
    assert log.problem() == Problem.OVERLOADED
    log.wal.release(log.wal.pending(ALL))
    assert log.put(99) == [None]


def test_a_move_is_bounded(bench: Make) -> None:
    """By bytes, events and records; but one record always goes."""
    log = bench()
    log.put(0, 1, 2)
    assert len(log.wal.pending(Move(1, 1 << 40, 1 << 40))) == 1
    assert len(log.wal.pending(Move(1 << 40, 24, 1 << 40))) == 2
    assert len(log.wal.pending(Move(1 << 40, 1 << 40, 2))) == 2
    assert [record.number for record in log.wal.pending(ALL, without={0, 2})] == [1]


def test_tenants_share_a_move(bench: Make) -> None:
    """Whoever sends much, or what becomes many files, does not hold up the others."""
    log = bench()

    def put(tenant: str, batch: Batch) -> None:
        head = record_head(batch, f"stream of {tenant}")
        head = replace(head, origin=replace(head.origin, tenant_id=tenant, attempt_id=tenant))
        content = decode(head.batch, batch.body, batch.seq, LIMITS)
        log.wal.append(head, batch.body, lambda _: None, content)

    for number in range(4):
        put("scatters", ops(number, 50, step=10 * np.arange(50) + 500 * number))
    for number in range(8):
        put("gathers", ops(number, 50, step=np.arange(50) // 10))
    log.put(99)
    chosen = log.wal.pending(Move(1 << 40, 1 << 40, 1 << 40, files=150))
    # A third of the files each: one batch of 50 windows, and all that lie in one window.
    assert Counter(record.tenant_id for record in chosen) == {
        "scatters": 1, "gathers": 8, "default": 1,
    }  # fmt: skip
    assert [record.number for record in chosen] == sorted(record.number for record in chosen)
    assert log.wal.pending(Move(1, 1, 1))[0].tenant_id == "scatters"
    log.wal.release(log.wal.pending(ALL))
    assert log.wal.pending(ALL) == []


# --- crashes and damage -----------------------------------------------------------------------


def test_a_crash_at_any_byte_of_the_last_record_loses_that_record_only(
    bench: Make, tmp_path: Path
) -> None:
    """Cut at each offset: the records before it are there, and the log goes on."""
    log = bench(tmp_path / "a")
    log.put(0, 1, 2)
    (segment,) = segments(tmp_path / "a")
    data = segment.read_bytes()
    *_, last = [part for part in scan_frames(data) if isinstance(part, Frame)]
    for size in range(last.offset, last.end):
        folder = tmp_path / "cut" / "wal"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / segment.name).write_bytes(data[:size])
        again = Bench(tmp_path / "cut")
        assert again.seqs() == [0, 1]
        torn = again.metrics.wal.damaged.labels("torn")._value.get()
        assert torn == (1 if size > last.offset else 0)
        assert (folder / segment.name).stat().st_size == last.offset
        again.wal.close()


def test_a_log_that_was_cut_takes_new_records(bench: Make, tmp_path: Path) -> None:
    """They go into a new segment and survive the next crash."""
    log = bench(tmp_path / "a")
    log.put(0, 1)
    (segment,) = segments(tmp_path / "a")
    os.truncate(segment, segment.stat().st_size - 1)
    again = restarted(tmp_path / "b", tmp_path / "a", bench)
    assert again.put(1) == [None]
    third = restarted(tmp_path / "c", tmp_path / "b", bench)
    assert third.seqs() == [0, 1]


def test_a_changed_byte_costs_one_record_at_most(bench: Make, tmp_path: Path) -> None:
    """And is counted, wherever it is."""
    log = bench(tmp_path / "a")
    log.put(0, 1, 2, 3)
    (segment,) = segments(tmp_path / "a")
    data = segment.read_bytes()
    for at in range(0, len(data), 7):
        folder = tmp_path / "flip" / "wal"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        spoiled = bytearray(data)
        spoiled[at] ^= 0x55
        (folder / segment.name).write_bytes(spoiled)
        again = Bench(tmp_path / "flip")
        assert len(again.seqs()) == 3
        counted = [again.metrics.wal.damaged.labels(kind)._value.get() for kind in KINDS]
        assert sum(counted) == 1
        again.wal.close()


KINDS = ("damaged", "torn")


def test_a_sound_frame_that_is_no_record_is_kept_for_a_person(bench: Make, tmp_path: Path) -> None:
    """It is counted and goes to quarantine; the others are found."""
    log = bench(tmp_path / "a")
    log.put(0)
    (segment,) = segments(tmp_path / "a")
    with segment.open("ab") as file:
        file.write(encode_frame(1, 1, b"no record"))
    again = restarted(tmp_path / "b", tmp_path / "a", bench)
    assert again.seqs() == [0]
    (kept,) = (tmp_path / "b" / "wal" / QUARANTINE).iterdir()
    assert kept.read_bytes() == b"no record"


def test_a_record_that_is_damaged_by_the_time_it_is_read_is_left_out(
    bench: Make, tmp_path: Path
) -> None:
    """The others are read."""
    log = bench()
    log.put(0, 1, 2)
    middle = log.wal.pending(ALL)[1]
    with segments(tmp_path)[0].open("r+b") as file:
        file.seek(middle.offset + middle.size - 1)
        file.write(b"\xff")
    assert [head.key[2] for _, head, _ in log.wal.read(log.wal.pending(ALL))] == [0, 2]


# --- the disk says no -------------------------------------------------------------------------


def test_a_short_write_is_cut_back_and_refused(bench: Make, tmp_path: Path) -> None:
    """A full disk writes less without an error: what is there of it must not stay."""
    log = bench()
    log.put(0)
    good = segments(tmp_path)[0].stat().st_size
    log.disk.short = 100
    outcomes = log.put(1, 2)
    assert [outcome.problem for outcome in outcomes if isinstance(outcome, WireError)] == [
        Problem.DISK_FULL,
        Problem.DISK_FULL,
    ]
    assert segments(tmp_path)[0].stat().st_size == good
    assert "full" in log.wal.read_only()
    assert log.metrics.wal.read_only._value.get() == 1
    assert log.problem() == Problem.DISK_FULL


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "create"])
def test_an_error_of_the_disk_is_refused_and_passes(bench: Make, code: int, call: str) -> None:
    """The log reads only, looks again after a second, and goes on by itself."""
    log = bench()
    log.disk.errors.append((call, OSError(code, os.strerror(code))))
    (outcome,) = log.put(0)
    assert isinstance(outcome, WireError)
    assert outcome.problem == Problem.DISK_FULL
    assert outcome.retry_after_s
    assert log.problem() == Problem.DISK_FULL
    log.now_s += 1.5
    assert log.wal.read_only() == ""
    assert log.put(0) == [None]
    assert log.seqs() == [0]


def test_the_log_resumes_at_one_and_a_half_times_the_free_space(bench: Make) -> None:
    """Below the least free space it stops; a little above it does not start again."""
    log = bench(min_free_bytes=1_000_000)
    log.disk.free = 1_000_100
    (outcome,) = log.put(0)
    assert isinstance(outcome, WireError)
    log.disk.free = 1_499_999
    log.now_s += 2
    assert log.wal.read_only()
    log.disk.free = 1_500_000
    log.now_s += 2
    assert not log.wal.read_only()
    assert log.put(0) == [None]


def test_a_failed_sync_poisons_its_segment(bench: Make, tmp_path: Path) -> None:
    """After it the kernel may call lost pages written: nothing is acknowledged on that file."""
    log = bench(tmp_path / "a")
    log.put(0)
    log.disk.errors.append(("sync", OSError(errno.EIO, "input/output error")))
    (outcome,) = log.put(1)
    assert isinstance(outcome, WireError)
    log.now_s += 2
    assert log.put(2) == [None]
    assert {record.segment for record in log.wal.pending(ALL)} == {0, 1}
    again = restarted(tmp_path / "b", tmp_path / "a", bench)
    assert again.seqs() == [0, 2]


def test_a_segment_that_cannot_be_cut_is_left(bench: Make, tmp_path: Path) -> None:
    """What stays behind the good part was refused; a restart cuts it or finds it whole."""
    log = bench(tmp_path / "a")
    log.put(0)
    log.disk.short = 100
    log.disk.errors.append(("cut", OSError(errno.EIO, "input/output error")))
    log.put(1)
    log.now_s += 2
    assert log.put(2) == [None]
    again = restarted(tmp_path / "b", tmp_path / "a", bench)
    assert again.seqs() == [0, 2]


class EarlyWal(Wal):
    """A planted defect: acknowledges before the disk has said that the records are there."""

    def _commit(self, group: list[Record]) -> None:
        self._seams.settle(group, None)
        self.write_group(group)


def _lost_after_a_power_cut(folder: Path, wal: type[Wal]) -> list[int]:
    """Sequence numbers that were acknowledged and are gone when the power fails in the sync."""
    log = Bench(folder / "before", wal)
    log.disk.errors.append(("sync", OSError(errno.EIO, "power fails")))
    outcomes = log.put(0)
    log.wal.close()
    shutil.copytree(folder / "before", folder / "after")
    again = Bench(folder / "after")
    there = again.seqs()
    again.wal.close()
    acknowledged = [0 for outcome in outcomes if outcome is None]
    return [number for number in acknowledged if number not in there]


def test_nothing_that_is_acknowledged_is_lost_in_a_power_cut(tmp_path: Path) -> None:
    """200 means durable; a log that acknowledges before its sync fails this very test."""
    assert _lost_after_a_power_cut(tmp_path / "sound", Wal) == []
    assert _lost_after_a_power_cut(tmp_path / "planted", EarlyWal) == [0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("NO SMALL DISK: mounting a tmpfs of 4 MiB needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("min_free_bytes", [0, 1 << 20])
def test_a_real_disk_that_fills_up_loses_nothing(
    bench: Make, small_disk: Path, min_free_bytes: int
) -> None:
    """All that was acknowledged is there, the rest was refused; with room the log goes on."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    log = bench(small_disk, min_free_bytes=min_free_bytes, wal_segment_bytes=1 << 20)
    acknowledged = []
    for number in range(2000):
        try:
            (outcome,) = log.put(number, rows=1000)
        except WireError as error:
            outcome = error
        if outcome is None:
            acknowledged.append(number)
        elif len(acknowledged) + 3 < number:
            break
    assert acknowledged
    assert log.wal.read_only()
    assert log.seqs() == acknowledged
    ballast.unlink()
    log.now_s += 2
    assert log.put(5000, rows=1000) == [None]
    bodies = [body for _, _, body in log.wal.read(log.wal.pending(ALL))]
    assert len(bodies) == len(acknowledged) + 1
    log.wal.close()
    again = bench(small_disk, min_free_bytes=min_free_bytes)
    assert again.seqs() == [*acknowledged, 5000]
    assert again.metrics.wal.damaged.labels("damaged")._value.get() == 0
    again.wal.close()


def test_a_kill_in_the_middle_of_writing_loses_nothing_acknowledged(
    bench: Make, tmp_path: Path
) -> None:
    """A process that writes as fast as it can is killed; what it said was durable is there."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.ingest.test_wal import Bench\n"
        "log = Bench(Path(sys.argv[1]))\n"
        "for number in range(100_000):\n"
        "    assert log.put(number) == [None]\n"
        "    print(number, flush=True)\n"
    )
    import sys

    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(50)]
    process.kill()
    rest = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.stdout.close()
    process.wait()
    log = bench()
    assert log.seqs()[: len(seen) + len(rest)] == seen + rest
