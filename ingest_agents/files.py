"""A whole file as batches: one for each part that a server takes (``smon.file/1``).

Flow: a source that has a whole file → **here** → `ingest_agents.spool.writer`. Standard library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingest_agents.payload import UNNUMBERED, clean, encode
from smon.wire import TYPE_FILE, Batch, BatchKind
from smon.wire.parts import (
    MAX_FILE_BYTES,
    MAX_PART_BYTES,
    MAX_RANKS,
    FileFormat,
    FilePart,
    encode_part,
)

#: Larger ones are refused by every server.
MAX_BYTES: Final = MAX_FILE_BYTES

#: Times and steps beyond these are none.
_MAX_STEP: Final = 1 << 53
_FIRST_NS: Final = 946_684_800 * 10**9
_LAST_NS: Final = 1 << 62

_READ_BYTES: Final = 1 << 20

#: (first, last) of steps, or of unix ns.
Span = tuple[int, int]
_None = tuple[None, None]


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file to ship, and what is known of it; see `whole_file`.

    Attributes
    ----------
    name
        For people.
    path, size, sha256
        Where the content lies, and what it is.
    rank, world_size
        None: not known.
    steps, times
        First and last step, and unix ns, that it is of; None: not known.
    """

    name: str
    format: FileFormat
    path: Path
    size: int
    sha256: str
    rank: int | None = None
    world_size: int | None = None
    steps: Span | None = None
    times: Span | None = None


def digest_of(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256 in hexadecimal) of a file.

    Raises
    ------
    OSError
        It cannot be read.
    """
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            size += len(data)
            digest.update(data)
    return size, digest.hexdigest()


def file_batches(file: WholeFile, first: int = 0) -> Iterator[Batch]:
    """The batches of a file, in order; one part at a time is in memory.

    Parameters
    ----------
    first
        Part to begin with: those before it have been written.

    Raises
    ------
    OSError
        It cannot be read.
    """
    steps = _within(file.steps, 0, _MAX_STEP)
    whole = _head(file, steps, _within(file.times, _FIRST_NS, _LAST_NS))
    with file.path.open("rb") as opened:
        opened.seek(first * MAX_PART_BYTES)
        for part in range(first, whole.parts):
            content = opened.read(MAX_PART_BYTES)
            encoding, body = encode(encode_part(replace(whole, part=part, content=content)))
            yield Batch(
                seq=UNNUMBERED,
                kind=BatchKind.FILE,
                content_type=TYPE_FILE,
                encoding=encoding,
                events=1,
                body=body,
                first_step=steps[0],
                last_step=steps[1],
            )


def parts_of(file: WholeFile) -> int:
    """How many batches it is."""
    return max(-(-file.size // MAX_PART_BYTES), 1)


def _head(file: WholeFile, steps: Span | _None, times: Span | _None) -> FilePart:
    rank = file.rank if file.rank is not None and 0 <= file.rank < MAX_RANKS else None
    world = file.world_size
    if world is not None and not (rank or 0) < world <= MAX_RANKS:
        world = None
    return FilePart(
        name=clean(file.name) or "file",
        format=file.format,
        rank=rank,
        world_size=world,
        sha256=file.sha256,
        bytes=file.size,
        part=0,
        parts=parts_of(file),
        first_step=steps[0],
        last_step=steps[1],
        start_ns=times[0],
        end_ns=times[1],
        content=b"",
    )


def _within(span: Span | None, low: int, high: int) -> Span | _None:
    """Both ends if a server takes them, else neither."""
    return span if span is not None and low <= span[0] <= span[1] <= high else (None, None)
