"""Segment files of the write-ahead log: names, recovery after a crash, reading back.

Flow: folder of the log → **here** → `smon.ingest.wal`. A record that is damaged costs itself only;
what a crash cut off at the end of a segment was never acknowledged and is cut away.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smon.errors import ConfigError, WireError
from smon.ingest.records import Record, RecordHead, decode_record
from smon.store.objects import make_folder
from smon.wire.frames import HEAD_BYTES, Damage, Frame, frame_at, scan_frames

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9]{12})\.wal", re.ASCII)
_LOCK_NAME: Final = "lock"
QUARANTINE: Final = "quarantine"


@dataclass(slots=True)
class Segment:
    """One file of the log.

    Attributes
    ----------
    size
        Bytes that are durable.
    live
        Records that are not stored yet.
    """

    number: int
    path: Path
    size: int = 0
    live: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a folder held.

    Attributes
    ----------
    damaged
        Records, or runs of them, that were lost in the middle.
    torn
        Ends of segments that were cut away.
    """

    segments: list[Segment]
    records: list[Record]
    damaged: int
    torn: int


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:012d}.wal"


def lock(folder: Path) -> int:
    """Take the folder for this process, until the descriptor is closed or the process is gone.

    Raises
    ------
    ConfigError
        Another process has it, or it cannot be made.
    """
    try:
        make_folder(folder, folder)
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder} for the log: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"the log in {folder} is in use by another server: give this one a folder of its own "
            "(SMON_WAL_DIR)"
        ) from error
    return descriptor


def recover(folder: Path) -> Recovered:
    """All sound records of a folder, oldest first.

    Raises
    ------
    ConfigError
        A segment cannot be read.
    """
    found = Recovered([], [], 0, 0)
    damaged = torn = 0
    try:
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            segment = Segment(int(match[1]), path)
            records, damages = _recover_segment(segment)
            found.segments.append(segment)
            found.records.extend(records)
            torn += sum(damage.end < 0 for damage in damages)
            damaged += sum(damage.end >= 0 for damage in damages)
    except OSError as error:
        raise ConfigError(f"cannot read the log in {folder}: {error}") from error
    return Recovered(found.segments, found.records, damaged, torn)


def _recover_segment(segment: Segment) -> tuple[list[Record], list[Damage]]:
    """Records of one segment, and damage; ``end`` -1: a torn end, which is cut away."""
    data = segment.path.read_bytes()
    records: list[Record] = []
    damages: list[Damage] = []
    segment.size = len(data)
    for part in scan_frames(data):
        if isinstance(part, Damage):
            torn = part.end == len(data) and is_torn(data, part.offset)
            damages.append(Damage(part.offset, -1) if torn else part)
            if part.end == len(data):
                _cut(segment, part.offset)
            continue
        record = _record_of(part, segment)
        if record is None:
            damages.append(Damage(part.offset, part.end))
        else:
            records.append(record)
    segment.live = len(records)
    return records, damages


def is_torn(data: bytes, at: int) -> bool:
    """Whether these last bytes are a frame that was cut off, rather than one that was changed."""
    if len(data) - at < HEAD_BYTES:
        return True
    return at + HEAD_BYTES + int.from_bytes(data[at : at + 4], "little") > len(data)


def _cut(segment: Segment, size: int) -> None:
    with segment.path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    segment.size = size


def _record_of(frame: Frame, segment: Segment) -> Record | None:
    try:
        head, _ = decode_record(frame.body)
    except WireError:
        quarantine(segment.path.parent, f"{segment.number}-{frame.offset}", frame.body)
        return None
    return Record(
        number=frame.seq,
        key=head.key,
        last_seq=head.last_seq,
        events=head.batch.events,
        received_ns=head.received_ns,
        digest=head.known_digest,
        tenant_id=head.origin.tenant_id,
        attempt_id=head.origin.attempt_id,
        segment=segment.number,
        offset=frame.offset,
        size=frame.end - frame.offset,
    )


def read_back(path: Path, records: list[Record]) -> Iterator[tuple[Record, RecordHead, bytes]]:
    """Records of one segment with head and body; those that are damaged by now are left out.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for record in records:
            data = os.pread(descriptor, record.size, record.offset)
            frame = frame_at(memoryview(data), 0)
            if frame is None or frame.seq != record.number:
                continue
            try:
                head, body = decode_record(frame.body)
            except WireError:
                continue
            yield record, head, body
    finally:
        os.close(descriptor)


def quarantine(folder: Path, name: str, data: bytes) -> None:
    """Keep what cannot be used, for a person to look at; failing to is only logged."""
    place = folder / QUARANTINE
    try:
        place.mkdir(exist_ok=True)
        (place / f"{name}.bin").write_bytes(data)
    except OSError as error:
        _log.error("cannot keep the record %s in %s: %s", name, place, error)
