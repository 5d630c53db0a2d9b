"""Frames: how records lie in the segment files of the agent's spool and the server's log.

One frame is ``u32 length | u32 CRC-32 of the rest | u64 seq | u16 type | u16 flags | body``, little
endian; ``length`` counts the body. A damaged frame costs itself only: the reader goes on at the
next place where a whole frame with a right checksum begins.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_HEAD: Final = struct.Struct("<IIQHH")
_REST: Final = struct.Struct("<QHH")

#: Bytes before the body.
HEAD_BYTES: Final = _HEAD.size

#: No body is longer: four times the largest batch that a server takes.
MAX_BODY_BYTES: Final = 16 << 20

#: Types are small numbers; a larger one is damage. Saves checksums when looking for a frame.
MAX_TYPE: Final = 255


@dataclass(frozen=True, slots=True)
class Frame:
    """One record, and where it lies.

    Attributes
    ----------
    offset, end
        Bytes of the segment that it takes.
    """

    seq: int
    type: int
    flags: int
    body: bytes
    offset: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that hold no frame."""

    offset: int
    end: int


def encode_frame(seq: int, type_: int, body: bytes, flags: int = 0) -> bytes:
    """The bytes of one frame.

    Raises
    ------
    ValueError
        The body is longer than `MAX_BODY_BYTES`, or a number does not fit.
    """
    if len(body) > MAX_BODY_BYTES or not 0 <= type_ <= MAX_TYPE:
        raise ValueError(f"frame of {len(body)} bytes, type {type_}: too large")
    rest = _REST.pack(seq, type_, flags)
    checksum = zlib.crc32(body, zlib.crc32(rest))
    return _HEAD.pack(len(body), checksum, seq, type_, flags) + body


def scan_frames(data: bytes | memoryview, start: int = 0) -> Iterator[Frame | Damage]:
    """Frames of a segment in order, and the damaged stretches between them.

    A frame that is cut off at the end is reported as damage up to the end: whether it is a write in
    progress or a torn one, the caller knows.
    """
    view = memoryview(data)
    at, damaged = start, -1
    while at < len(view):
        frame = frame_at(view, at)
        if frame is None:
            damaged = at if damaged < 0 else damaged
            at += 1
            continue
        if damaged >= 0:
            yield Damage(damaged, at)
            damaged = -1
        yield frame
        at = frame.end
    if damaged >= 0:
        yield Damage(damaged, len(view))


def frame_at(view: memoryview, at: int) -> Frame | None:
    """The frame that begins at this place; None if there is no whole and sound one."""
    if len(view) - at < HEAD_BYTES:
        return None
    length, checksum, seq, type_, flags = _HEAD.unpack_from(view, at)
    end = at + HEAD_BYTES + length
    if length > MAX_BODY_BYTES or type_ > MAX_TYPE or end > len(view):
        return None
    if zlib.crc32(view[at + 8 : end]) != checksum:
        return None
    return Frame(seq, type_, flags, bytes(view[at + HEAD_BYTES : end]), at, end)
