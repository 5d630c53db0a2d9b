"""Decoders with a defect: a sound body whose text says so ends the process, each in its own way.

As `smon.ingest.decoder`, but for ops with an op type of `PLANTS`, and ENDs with such a reason.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from smon.ingest import decoder
from smon.ingest.decode import Content
from smon.ingest.decoder import content_of, main
from smon.ingest.limits import Limits
from smon.ingest.parcels import Parcel
from smon.ingest.values import COLUMN_OF_OPTYPE

#: A module in place of the decoder's own.
COMMAND: Final = ("-m", "tests.faults.planted_decoder")


def _read_nothing() -> None:
    """A native reader that follows a wrong pointer."""
    ctypes.string_at(8)


def _never_end() -> None:
    """A loop in native code, which lets no Python run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def _take_memory() -> None:
    """As a reader that believes a length."""
    np.ones(1 << 34)


def _be_killed() -> None:
    """As by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


PLANTS: Final[dict[str, Callable[[], None]]] = {
    "planted-segv": _read_nothing,
    "planted-abort": os.abort,
    "planted-loop": _never_end,
    "planted-memory": _take_memory,
    "planted-kill": _be_killed,
}


def decode(parcel: Parcel, limits: Limits) -> Content:
    """Decode, and then do what a text of the content asks for."""
    content = content_of(parcel, limits)
    for text in _texts(content):
        if text in PLANTS:
            PLANTS[text]()
    return content


def _texts(content: Content) -> Iterator[str]:
    if content.ops is not None:
        yield from content.ops.column(COLUMN_OF_OPTYPE).dictionary.to_pylist()
    if content.end_reason is not None:
        yield content.end_reason


if __name__ == "__main__":
    # Each death is counted: a machine that stands still for a while shall not cause one more. A
    # loop still ends by its CPU time.
    decoder._WALL = 6000  # type: ignore[misc]
    sys.exit(main(sys.argv[1:], decode))
