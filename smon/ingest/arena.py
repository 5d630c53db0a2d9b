"""Memory that a server shares with a process that decodes: bodies lie in it, and what they hold.

Flow: `smon.ingest.fence` writes bodies → **here** → `smon.ingest.decoder` writes what is in them.
Through the socket between the two go only numbers that say where to look (`Note`).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

#: What a decoder is at: round, place of the body in it. Written before each body.
_AT: Final = struct.Struct("<QQ")

#: Place of a round of which no body was begun.
NOT_BEGUN: Final = 1 << 32

_NOTE: Final = struct.Struct("<BQQQ")

#: Columns begin at multiples of this.
_ALIGNED: Final = 64

#: Pages of a round that needed more than this are given back to the system.
_KEEP_BYTES: Final = 8 << 20


class Said(IntEnum):
    """What a note says."""

    ASK = 1
    READY = 2
    ANSWERED = 3
    DIED = 4


@dataclass(frozen=True, slots=True)
class Note:
    """One message on the socket between server and decoder.

    Attributes
    ----------
    round
        Which round it is of.
    first, second
        ASK and ANSWERED: where the JSON lies that says more, and its length. DIED: the body that
        was being decoded, by its place in the round, and the status that ``waitpid`` gave.
    """

    said: Said
    round: int = 0
    first: int = 0
    second: int = 0

    def encode(self) -> bytes:
        """As it is sent."""
        return _NOTE.pack(self.said, self.round, self.first, self.second)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What came."""
        said, *numbers = _NOTE.unpack(data)
        return cls(Said(said), *numbers)


#: Longest note.
NOTE_BYTES: Final = _NOTE.size


def create(size: int) -> int:
    """Descriptor of new memory of this size, of which nothing is used yet.

    Raises
    ------
    OSError
        The system does not give it.
    """
    descriptor = os.memfd_create("smon-decode")
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Arena:
    """The memory of one descriptor, and how much of it this round has used.

    Parameters
    ----------
    descriptor
        As `create` makes it; it may be closed afterwards.
    """

    __slots__ = ("_memory", "_used", "size")

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size)
        self._used = _AT.size

    def begin(self) -> None:
        """A new round: what was in it is not needed any more."""
        if self._used > _KEEP_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, 0, self.size)
        self._used = _AT.size

    def room(self, size: int) -> bool:
        """Whether so many bytes more fit."""
        return self._used + _ALIGNED + size <= self.size

    def put(self, data: bytes | memoryview, size: int) -> int:
        """Copy bytes in; where they lie.

        Raises
        ------
        ValueError
            They do not fit.
        """
        if not self.room(size):
            raise ValueError("the arena is full")
        at = -(-self._used // _ALIGNED) * _ALIGNED
        self._memory[at : at + size] = data
        self._used = at + size
        return at

    def take(self, at: int, size: int) -> bytes:
        """A copy of bytes.

        Raises
        ------
        ValueError
            They do not lie inside.
        """
        if not 0 <= at <= at + size <= self.size:
            raise ValueError("outside the arena")
        return self._memory[at : at + size]

    def resume(self, at: int) -> None:
        """What comes next lies behind this place: the other side has filled what is before it."""
        self._used = at

    def set_at(self, round_: int, place: int) -> None:
        """Note which body is decoded next."""
        _AT.pack_into(self._memory, 0, round_, place)

    def at(self) -> tuple[int, int]:
        """Round, and place in it, of the body that was begun last."""
        round_, place = _AT.unpack_from(self._memory, 0)
        return round_, place

    def close(self) -> None:
        """Give it back."""
        self._memory.close()
