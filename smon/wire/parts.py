"""The body of a FILE batch (``smon.file/1``): one part of a file that a rank has written.

Flow: an agent that has a whole file → **here** → `smon.wire.Batch` → the server, which puts the
parts together again. Standard library only. ``u32 length of the head | head, JSON | content``,
big endian.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from smon.errors import WireError
from smon.wire.columns import MAX_TEXT, TEXT_EXTRA
from smon.wire.problems import Problem

#: Bytes of a whole file, and parts that it may come in.
MAX_FILE_BYTES: Final = 64 << 20
MAX_PARTS: Final = 64

#: Bytes of the content of one part: with its head it stays below 2 MiB.
MAX_PART_BYTES: Final = 3 << 19

#: Bytes of a head: names and numbers at their longest take a third of it.
MAX_HEAD_BYTES: Final = 2048

#: Bytes of a body before it is compressed.
MAX_BODY_BYTES: Final = 4 + MAX_HEAD_BYTES + MAX_PART_BYTES

#: Ranks of a job; steps that every JSON reader has exactly; twice such a time fits into 64 bits.
MAX_RANKS: Final = 1 << 20
_MAX_STEP: Final = 1 << 53
_MAX_NS: Final = 1 << 62

_LENGTH: Final = struct.Struct(">I")
_NAME: Final = re.compile(rf"[A-Za-z0-9{re.escape(TEXT_EXTRA)}]{{1,{MAX_TEXT}}}", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


#: The field `bytes` hides the type in the class that has it.
_Content = bytes


class FileFormat(StrEnum):
    """What a file is; others are refused."""

    RANK_EVENTS = "rank-events"
    FLIGHT_RECORDER = "flight-recorder"


@dataclass(frozen=True, slots=True)
class FilePart:
    """One part of a file.

    Attributes
    ----------
    name
        What the file is called where it was written; shown to people, never a path.
    rank
        Global rank that wrote it; None if that is not known.
    world_size
        Ranks of the job; None if that is not known.
    sha256
        Of the content of all parts together, hexadecimal.
    bytes
        Of the content of all parts together.
    part, parts
        Place of this one, from 0, and how many there are.
    first_step, last_step
        Steps that the file is of; None if it knows none.
    start_ns, end_ns
        Unix time that the file is of; None if that is not known.
    content
        The bytes of this part.
    """

    name: str
    format: FileFormat
    rank: int | None
    world_size: int | None
    sha256: str
    bytes: int
    part: int
    parts: int
    first_step: int | None
    last_step: int | None
    start_ns: int | None
    end_ns: int | None
    content: _Content


_KEYS: Final = tuple(field.name for field in fields(FilePart) if field.name != "content")


def encode_part(part: FilePart) -> bytes:
    """The body of the batch that carries this part, before it is compressed."""
    head = json.dumps({key: getattr(part, key) for key in _KEYS}, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(head)), head, part.content))


def decode_part(body: bytes) -> FilePart:
    """The part of a body; every value is inside its range, and none contradicts another.

    Raises
    ------
    WireError
        It is malformed.
    """
    head, content = _split(body)
    rank, world_size = (_optional(head, "rank", MAX_RANKS - 1), _size(head))
    if rank is not None and world_size is not None and rank >= world_size:
        raise _wrong("expected rank below world_size")
    parts = _whole(head, "parts", 1, MAX_PARTS)
    first_step, last_step = _range(head, "first_step", "last_step", _MAX_STEP)
    start_ns, end_ns = _range(head, "start_ns", "end_ns", _MAX_NS)
    size = _whole(head, "bytes", 1, MAX_FILE_BYTES)
    if not 1 <= len(content) <= min(MAX_PART_BYTES, size):
        raise _wrong(f"expected a content of 1 to {MAX_PART_BYTES} bytes, and of at most `bytes`")
    return FilePart(
        name=_text(head, "name", _NAME, f"1 to {MAX_TEXT} letters, digits and {TEXT_EXTRA}"),
        format=_format(head),
        rank=rank,
        world_size=world_size,
        sha256=_text(head, "sha256", _SHA256, "64 digits from 0 to f"),
        bytes=size,
        part=_whole(head, "part", 0, parts - 1),
        parts=parts,
        first_step=first_step,
        last_step=last_step,
        start_ns=start_ns,
        end_ns=end_ns,
        content=content,
    )


def _split(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Head and content."""
    if len(body) < _LENGTH.size:
        raise _malformed("expected a length of 4 bytes, and a head")
    (length,) = _LENGTH.unpack_from(body)
    if length > MAX_HEAD_BYTES or _LENGTH.size + length > len(body):
        raise _malformed(f"expected a head of at most {MAX_HEAD_BYTES} bytes inside the body")
    end = _LENGTH.size + length
    try:
        head = json.loads(body[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise _malformed("expected a head of JSON") from error
    if not isinstance(head, dict) or any(key not in head for key in _KEYS):
        raise _wrong(f"expected a head with {', '.join(_KEYS)}")
    return head, body[end:]


def _whole(head: dict[str, Any], name: str, low: int, high: int) -> int:
    value = head[name]
    if type(value) is not int or not low <= value <= high:
        raise _wrong(f"expected {name} to be a whole number from {low} to {high}")
    return value


def _optional(head: dict[str, Any], name: str, high: int) -> int | None:
    return None if head[name] is None else _whole(head, name, 0, high)


def _size(head: dict[str, Any]) -> int | None:
    return None if head["world_size"] is None else _whole(head, "world_size", 1, MAX_RANKS)


def _range(head: dict[str, Any], first: str, last: str, high: int) -> tuple[int | None, int | None]:
    """Both ends, in order, or neither."""
    low_end, high_end = _optional(head, first, high), _optional(head, last, high)
    if low_end is None and high_end is None:
        return None, None
    if low_end is None or high_end is None or low_end > high_end:
        raise _wrong(f"expected {first} and {last} in order, or null for both")
    return low_end, high_end


def _text(head: dict[str, Any], name: str, pattern: re.Pattern[str], expected: str) -> str:
    value = head[name]
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise _wrong(f"expected {name} of {expected}")
    return value


def _format(head: dict[str, Any]) -> FileFormat:
    value = head["format"]
    if not isinstance(value, str) or value not in set(FileFormat):
        raise _wrong(f"expected format to be one of {', '.join(FileFormat)}")
    return FileFormat(value)


def _wrong(message: str) -> WireError:
    return WireError(Problem.WRONG_VALUES, message)


def _malformed(message: str) -> WireError:
    return WireError(Problem.MALFORMED_BODY, message)
