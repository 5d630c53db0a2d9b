"""How this process asks the system for memory: large arrays are kept, and in one place.

An analysis makes and drops arrays of tens of megabytes. By default glibc asks the system anew for
each of them, which has to find and clear every page, and gives each thread an arena of its own,
whose holes the others cannot use.

Flow: `smon.commands` → **here**, before there is a second thread.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

#: Names of ``malloc.h``.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

#: Larger blocks are asked for one by one, and given back at once.
BLOCK_BYTES: Final = 128 << 20

#: So much that is free at the end of the heap is kept.
KEPT_BYTES: Final = 512 << 20


def one_arena() -> bool:
    """Let all threads use the memory that any of them has freed; False if that cannot be asked.

    Call it before there are threads: those that are there keep their arenas.
    """
    return _ask((_M_ARENA_MAX, 1))


def keep(kept_bytes: int = KEPT_BYTES) -> bool:
    """Keep what is freed for the next array, up to so many bytes; False if that cannot be asked.

    In one arena, and so to be called before there are threads.
    """
    return _ask(
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, min(BLOCK_BYTES, kept_bytes)),
        (_M_TRIM_THRESHOLD, kept_bytes),
    )


def _ask(*wanted: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    asked = [mallopt(option, value) for option, value in wanted]
    return asked == [1] * len(asked)
