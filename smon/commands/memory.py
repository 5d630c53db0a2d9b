"""Memory that a long-lived process does not need any more goes back to the system.

Servers and workers have several threads, and glibc a heap for each: what was freed in the middle of
one stays with the process, a little more from hour to hour, though nothing holds it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final

#: Giving back takes milliseconds.
_EVERY_S: Final = 60.0


def give_back_regularly(every_s: float = _EVERY_S) -> bool:
    """Give free memory back now and then, in a thread; False where the C library cannot."""
    trim = _trim()
    if trim is None:
        return False
    pause = threading.Event()

    def run() -> None:
        while not pause.wait(every_s):
            trim(0)

    threading.Thread(target=run, name="memory", daemon=True).start()
    return True


def _trim() -> Callable[[int], int] | None:
    """``malloc_trim`` of glibc; None with another C library."""
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
