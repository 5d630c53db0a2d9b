"""The spool: whole after every cut, honest about every loss."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ingest_agents.payload import Gap, gap_of, last_seq
from ingest_agents.spool.folder import (
    CHECKPOINT_NAME,
    QUARANTINE_NAME,
    read_spec,
    segments_of,
    write_json,
)
from ingest_agents.spool.reader import SpoolReader
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import StoreError
from smon.wire import Batch, BatchKind
from smon.wire.frames import Frame, scan_frames
from tests.agents.builders import SMALL, batch, chance_of, spec, write

ONE_SEGMENT = SpoolLimits(1 << 20, 1e9, 0)


def read_all(folder: Path, at: int = 0) -> list[Batch]:
    """All batches of a stream from a number on."""
    reader, found = SpoolReader(folder), []
    while (each := reader.next(at)) is not None:
        found.append(each)
        at = last_seq(each) + 1
    reader.forget()
    return found


def kinds(batches: list[Batch]) -> str:
    """One letter per batch: O, C, G, E."""
    return "".join(each.kind.name[0] for each in batches)


def test_batches_come_back_in_order_and_byte_for_byte(tmp_path: Path) -> None:
    """Over several segments, numbers go on without gaps, and a batch is what was appended."""
    folder = write(tmp_path, 40)
    found = read_all(folder)
    assert len(segments_of(folder)) > 2
    assert [each.seq for each in found] == list(range(41))
    assert kinds(found) == "O" * 40 + "E"
    assert found[7] == replace(batch(21, 3, step=7, done=7), seq=7)


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    """What is appended later is read later; until then there is nothing."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    reader = SpoolReader(writer.folder)
    assert reader.next(0) is None
    for number in range(30):
        writer.append(batch(number))
        found = reader.next(number)
        assert found is not None
        assert found.seq == number
        assert reader.next(number + 1) is None
    writer.close()


def test_asking_again_gives_the_same(tmp_path: Path) -> None:
    """A number can be asked for twice, and an earlier one after a later one."""
    folder = write(tmp_path, 10)
    reader = SpoolReader(folder)
    assert reader.next(3) == reader.next(3)
    assert reader.next(9) is not None
    first = reader.next(0)
    assert first is not None
    assert first.seq == 0


def test_a_cut_at_any_byte_costs_only_what_was_not_whole(tmp_path: Path) -> None:
    """After a kill at any byte the writer goes on behind the last whole batch."""
    folder = write(tmp_path, 3, end=False, limits=ONE_SEGMENT)
    ((_, path),) = segments_of(folder)
    data = path.read_bytes()
    ends = [part.end for part in scan_frames(data) if isinstance(part, Frame)]
    assert len(ends) == 4, "a position, and three batches"
    edges = {end + near for end in [0, *ends] for near in (-1, 0, 1, 19, 20, 21)}
    sizes = edges | set(range(0, len(data), 13))
    for size in sorted(size for size in sizes if 0 <= size <= len(data)):
        path.write_bytes(data[:size])
        writer = SpoolWriter(tmp_path, spec(), ONE_SEGMENT)
        whole = sum(end <= size for end in ends[1:])
        assert writer.next_seq == whole
        assert writer.torn_bytes == size - max([end for end in ends if end <= size], default=0)
        writer.append(batch(100))
        writer.close()
        assert [each.seq for each in read_all(folder)] == list(range(whole + 1))


def test_every_flipped_byte_costs_at_most_one_batch_and_is_counted(tmp_path: Path) -> None:
    """A damaged record costs itself: its neighbours are there, and a GAP stands in its place."""
    folder = write(tmp_path, 6, limits=ONE_SEGMENT)
    ((_, path),) = segments_of(folder)
    data = path.read_bytes()
    chance = chance_of(7)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        found = read_all(folder)
        assert [each.seq for each in found] == list(range(len(found)))
        lost = [gap_of(each) for each in found if each.kind is BatchKind.GAP]
        # Damage to the last record shows only when something follows.
        assert len(found) - len(lost) >= 6
        assert len(found) >= 6
        assert all(gap.first_seq == gap.last_seq and gap.reason == "damaged" for gap in lost)
        assert all(gap.events in (0, 3) for gap in lost), "right, or not known"


def test_a_flip_at_the_end_of_a_sealed_segment_is_counted(tmp_path: Path) -> None:
    """The next segment's name says up to where numbers must have gone."""
    folder = write(tmp_path, 40)
    _, path = segments_of(folder)[0]
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    found = read_all(folder)
    assert kinds(found).count("G") == 1
    assert kinds(found).count("O") == 39
    gap = next(gap_of(each) for each in found if each.kind is BatchKind.GAP)
    assert gap.events == 3, "the record's head was legible"


def test_a_segment_without_one_sound_record_goes_to_quarantine(tmp_path: Path) -> None:
    """It is kept for people to look at, and all that it held is one GAP."""
    folder = write(tmp_path, 60)
    (_, first), (second_seq, second), (third_seq, _), *_ = segments_of(folder)
    second.write_bytes(os.urandom(second.stat().st_size))
    found = read_all(folder)
    (gap,) = [gap_of(each) for each in found if each.kind is BatchKind.GAP]
    assert (gap.first_seq, gap.last_seq) == (second_seq, third_seq - 1)
    kept = list((tmp_path / QUARANTINE_NAME).iterdir())
    assert [path.name for path in kept] == [f"{folder.name}-{second.name}"]
    assert first.exists()


def test_a_segment_that_cannot_be_read_goes_to_quarantine(tmp_path: Path) -> None:
    """A read that fails costs the segment, not the stream."""
    folder = write(tmp_path, 60)
    _, second = segments_of(folder)[1]
    second.unlink()
    second.mkdir()
    found = read_all(folder)
    assert kinds(found).count("G") == 1
    assert not second.exists()


def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    """Whoever removes a file by hand makes a loss that is told."""
    folder = write(tmp_path, 60)
    first_seq, path = segments_of(folder)[1]
    path.unlink()
    (gap,) = [gap_of(each) for each in read_all(folder) if each.kind is BatchKind.GAP]
    assert gap.first_seq == first_seq


def test_a_number_that_was_acknowledged_is_not_used_again(tmp_path: Path) -> None:
    """The last record is damaged after it was sent: its number belongs to the server."""
    folder = write(tmp_path, 3, end=False, limits=ONE_SEGMENT)
    ((_, path),) = segments_of(folder)
    os.truncate(path, path.stat().st_size - 1)
    write_json(folder / CHECKPOINT_NAME, {"next_seq": 3})
    writer = SpoolWriter(tmp_path, spec(), ONE_SEGMENT)
    assert writer.next_seq == 3
    writer.close()


def test_two_writers_never_share_a_stream(tmp_path: Path) -> None:
    """The second one is an error, until the first is closed."""
    first = SpoolWriter(tmp_path, spec(), SMALL)
    with pytest.raises(StoreError, match="only writer"):
        SpoolWriter(tmp_path, spec(), SMALL)
    first.close()
    SpoolWriter(tmp_path, spec(), SMALL).close()


def test_the_description_comes_back(tmp_path: Path) -> None:
    """`stream.json` has all that a hello needs."""
    folder = write(tmp_path, 1)
    assert read_spec(folder) == spec()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1}', "\x00", "[" * 10_000])
def test_a_damaged_description_is_an_error(tmp_path: Path, text: str) -> None:
    """Whatever stands in `stream.json`, it is one sentence."""
    folder = write(tmp_path, 1)
    (folder / "stream.json").write_text(text)
    with pytest.raises(StoreError):
        read_spec(folder)


def test_losses_of_the_producer_take_a_number(tmp_path: Path) -> None:
    """What was dropped before it became a batch is a GAP of its own."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    writer.append(batch(0))
    writer.lose(12, "queue-full", (3, 5))
    writer.append(batch(3))
    writer.close()
    found = read_all(writer.folder)
    assert kinds(found) == "OGO"
    assert gap_of(found[1]) == Gap(1, 1, 12, "queue-full", 3, 5)


def test_positions_are_committed_with_their_batch(tmp_path: Path) -> None:
    """A cut between a position and its batch leaves neither; over segments it is carried."""
    writer = SpoolWriter(tmp_path, spec(), ONE_SEGMENT)
    for number in range(4):
        assert writer.try_append(batch(number), {"at": number, f"file-{number}": number})
    writer.close()
    ((_, path),) = segments_of(writer.folder)
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        again = SpoolWriter(tmp_path, spec(), ONE_SEGMENT)
        assert again.position.get("at", -1) == again.next_seq - 1
        assert len(again.position) == (again.next_seq and again.next_seq + 1)
        again.close()


def test_positions_are_carried_into_the_next_segment(tmp_path: Path) -> None:
    """The last segment alone says where the source was."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    for number in range(60):
        writer.try_append(batch(number), {"at": number, f"file-{number % 3}": number})
    writer.close()
    *before, _ = segments_of(writer.folder)
    for _, path in before:
        path.unlink()
    again = SpoolWriter(tmp_path, spec(), SMALL)
    assert again.position == {"at": 59, "file-0": 57, "file-1": 58, "file-2": 59}
    again.close()


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("NO MOUNT: a full disk needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_costs_what_did_not_fit_and_it_is_told(small_disk: Path) -> None:
    """Short writes are cut back; with space again, a GAP says what is missing, and all goes on."""
    writer = SpoolWriter(small_disk, spec(), ONE_SEGMENT)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 20_000))
    written = dropped = 0
    for number in range(400):
        if writer.append(batch(number * 10, 10, step=number)):
            written += 10
        else:
            dropped += 10
    assert dropped
    assert writer.dropped["disk-full"] == dropped
    ballast.unlink()
    writer.flush()
    for number in range(400, 420):
        assert writer.append(batch(number * 10, 10, step=number))
        written += 10
    writer.close()
    found = read_all(writer.folder)
    assert [each.seq for each in found if each.kind is BatchKind.OPS][-1] == 419
    gaps = [gap_of(each) for each in found if each.kind is BatchKind.GAP]
    assert sum(gap.events for gap in gaps) == dropped
    assert {gap.reason for gap in gaps} == {"disk-full"}
    assert sum(each.events for each in found if each.kind is BatchKind.OPS) == written
    assert all(
        isinstance(part, Frame)
        for _, path in segments_of(writer.folder)
        for part in scan_frames(path.read_bytes())
    )


# --- kill -9 ------------------------------------------------------------------------------------

PRODUCER = """
import sys
from pathlib import Path
from ingest_agents.spool.writer import SpoolWriter
from tests.agents.builders import SMALL, batch, spec

writer = SpoolWriter(Path(sys.argv[1]), spec(), SMALL)
print("ready", flush=True)
at = writer.position.get("at", 0)
while True:
    writer.try_append(batch(at, 3, step=at), {"at": at + 3})
    at += 3
"""


def test_killed_writers_leave_neither_gap_nor_repetition(tmp_path: Path) -> None:
    """Killed at any moment, and started again: numbers and ops go on as if nothing was."""
    chance = chance_of(3)
    for _ in range(20):
        command = [sys.executable, "-c", PRODUCER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as producer:
            assert producer.stdout is not None
            producer.stdout.readline()
            time.sleep(chance.random() * 0.02)
            producer.send_signal(signal.SIGKILL)
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    expected = writer.position["at"]
    writer.close()
    found = read_all(writer.folder)
    assert [each.seq for each in found] == list(range(len(found)))
    assert kinds(found) == "O" * len(found)
    assert [each.first_step for each in found] == list(range(0, expected, 3))


def test_a_file_that_another_writes_into_is_passed_over(tmp_path: Path) -> None:
    """Names that are no segments do not matter."""
    folder = write(tmp_path, 3)
    for name in ("seg-", "seg-x", "seg-٣", "notes.txt"):
        with contextlib.suppress(OSError):
            (folder / name).write_bytes(b"x")
    assert kinds(read_all(folder)) == "OOOE"
