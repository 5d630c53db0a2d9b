"""What lies in a watched folder: plain files, a few folders deep, and what is passed over.

Flow: folder → **here** → sources of files, ``smon-agent check``. Follows no link, so that no loop
and no file outside is reached; opens no device or pipe.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

#: Folders below the one that is watched: profilers make one per step or rank.
_MAX_DEPTH: Final = 3

#: A folder with more is not looked through to its end.
MAX_FILES: Final = 20_000

#: Read of a file to see whether it is whole, or what it is.
_TAIL_BYTES: Final = 4096
_HEAD_BYTES: Final = 1 << 16

_GZIP: Final = b"\x1f\x8b"
#: Head and trailer of an empty gzip.
_MIN_GZIP: Final = 18

_PROFILE: Final = (".json", ".json.gz")
_LOG: Final = re.compile(r".+\.(log|jsonl?)([-_.][0-9][0-9.\-_T:]*)?$", re.IGNORECASE)
_UNFINISHED: Final = (".tmp", ".part", ".partial", ".swp", ".lock", "~")
_NO_DUMP: Final = (".log", ".txt", ".md", ".yaml", ".yml", ".py")

#: One of these stands in every dump of Flight Recorder.
_DUMP_MARKS: Final = (b"pg_config", b"pg_status", b"collective_seq_id")
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")


class FileKind(StrEnum):
    """What a watched folder is expected to hold."""

    KINETO = "kineto"
    INSPECTOR = "inspector"
    FLIGHT_RECORDER = "flight-recorder"


class Passed(StrEnum):
    """Why a file is passed over."""

    OTHER_NAME = "other-name"
    NO_FILE = "no-plain-file"
    UNREADABLE = "unreadable-file"
    EMPTY = "empty-file"
    TOO_MANY = "too-many"
    TOO_OLD = "too-old"
    TOO_LARGE = "too-large"
    NOT_WHOLE = "not-whole"
    NOT_THIS = "other-content"
    MOVED = "moved"
    COPY = "copy"
    NO_SPACE = "no-space"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a watched folder.

    Attributes
    ----------
    name
        With the folders below the one that is watched.
    key
        Which file this is, in this state: one that is written to has another.
    """

    path: Path
    name: str
    inode: int
    size: int
    mtime_ns: int

    @property
    def key(self) -> str:
        """Inode, size and time of the last change."""
        return f"{self.inode}-{self.size}-{self.mtime_ns}"


def listed(folder: Path) -> Iterator[Listed | tuple[str, Passed]]:
    """The plain files of a folder that are not hidden, and (name, reason) of what is none."""
    for count, found in enumerate(_walk(folder, "", _MAX_DEPTH)):
        if count == MAX_FILES:
            yield ".", Passed.TOO_MANY
            return
        yield found


def _walk(folder: Path, above: str, depth: int) -> Iterator[Listed | tuple[str, Passed]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        yield above or ".", Passed.UNREADABLE
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{above}{entry.name}"
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            # It went away, or may not be looked at.
            continue
        if stat.S_ISDIR(status.st_mode) and depth:
            yield from _walk(folder / entry.name, f"{name}/", depth - 1)
        elif stat.S_ISREG(status.st_mode):
            path = folder / entry.name
            yield Listed(path, name, status.st_ino, status.st_size, status.st_mtime_ns)
        else:
            yield name, Passed.NO_FILE


def named_otherwise(name: str, kind: FileKind) -> bool:
    """Whether a file of this name is none of this kind, or not ready by its name."""
    lower = name.rpartition("/")[2].lower()
    if lower.endswith(_UNFINISHED):
        return True
    if kind is FileKind.KINETO:
        return not lower.endswith(_PROFILE)
    if kind is FileKind.INSPECTOR:
        return _LOG.match(lower) is None
    return lower.endswith(_NO_DUMP)


def state_of(file: Listed, kind: FileKind) -> Passed | None:
    """Why a file that does not change any more is not taken; None if it is.

    Of a gzip only the beginning is looked at: whether it is whole shows when it is read.
    """
    if not file.size:
        return Passed.EMPTY
    try:
        with file.path.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
            opened.seek(max(file.size - _TAIL_BYTES, 0))
            tail = opened.read(_TAIL_BYTES).rstrip()
    except OSError:
        return Passed.UNREADABLE
    if kind is FileKind.FLIGHT_RECORDER and not _is_dump(head):
        return Passed.NOT_THIS
    return None if _ends(head, tail) else Passed.NOT_WHOLE


def _ends(head: bytes, tail: bytes) -> bool:
    """Whether a file's end is one, by its last byte."""
    if head.startswith(_GZIP):
        return len(tail) >= _MIN_GZIP
    if _PICKLE.match(head):
        return tail.endswith(b".")
    return tail.endswith((b"}", b"]"))


def _is_dump(head: bytes) -> bool:
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return False
    return any(mark in head for mark in _DUMP_MARKS)


def is_whole_gzip(path: Path) -> bool:
    """Whether a file is no gzip, or one with its end.

    Raises
    ------
    OSError
        It cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_GZIP)) != _GZIP:
            return True
        file.seek(0)
        try:
            with gzip.GzipFile(fileobj=file) as packed:
                while packed.read(1 << 20):
                    pass
        except EOFError:
            return False
        except (OSError, zlib.error):
            # Damaged, but not cut off: its reader says what is wrong.
            return True
    return True
