"""What a reader must never do, seen from inside of its process.

The interpreter announces what code does (audit events): starting programs, deleting files, loading
classes out of a pickle. A reader that does one of them has run what a file told it.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, Final

#: Beginnings of audit events. Reading needs none of them once everything is imported.
FORBIDDEN: Final = (
    "ctypes.", "os.exec", "os.fork", "os.kill", "os.link", "os.mkdir", "os.posix_spawn",
    "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.system", "pickle.find_class",
    "shutil.", "socket.", "subprocess.", "urllib.",
)  # fmt: skip

_WRITING: Final = frozenset("wax+")


class ForbiddenError(BaseException):
    """A reader did what no reader may; no handler of ordinary exceptions swallows it."""


class TooLongError(BaseException):
    """A reader takes longer than it may."""


class Guard:
    """Watches this process while it is armed; cannot be taken off again.

    Attributes
    ----------
    seen
        Forbidden events while it was armed.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._armed = False
        sys.addaudithook(self._heard)
        signal.signal(signal.SIGPROF, _too_long)

    def arm(self, seconds: float) -> None:
        """From now on; after so many seconds of CPU time `TooLongError` is raised."""
        self.seen.clear()
        self._armed = True
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def disarm(self) -> None:
        """No more."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._armed = False

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event.startswith(FORBIDDEN) or (event == "open" and _writes(arguments)):
            self.seen.append(event)
            raise ForbiddenError(event)


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode = arguments[1] if len(arguments) > 1 else None
    return isinstance(mode, str) and not _WRITING.isdisjoint(mode)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLongError


def peak_bytes() -> int:
    """The most memory that this process has had.

    Not ``ru_maxrss``, which remembers what the process was before it became this program.
    """
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123  # no Path: fast
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
