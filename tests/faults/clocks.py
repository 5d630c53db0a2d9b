"""Clocks that are set, or run too fast, while the processes of a host are running.

A file in memory says how far the time of day of a host is ahead; every process that is started with
`HostClock.environ` reads it whenever it asks for the time, also if Python starts it from another
one. Monotonic clocks stay what they are, as on a host whose time is set. (libfaketime cannot do
that: with it, sleeping and waiting fail in Python 3.11.)
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

_VARIABLE: Final = "FAULTS_CLOCK"

#: ns ahead, what is gained per second, and the monotonic clock when that began, ns.
_STATE: Final = struct.Struct("<qdq")
_NS: Final = 10**9

_SITE: Final = Path(__file__).with_name("clocked")
_ROOT: Final = Path(__file__).parents[2]


class HostClock:
    """The time of day of one host; right until it is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(_STATE.pack(0, 0.0, 0))
        with path.open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), _STATE.size)

    @classmethod
    def of(cls, path: str) -> Self:
        """The clock in a file."""
        return cls(Path(path))

    @property
    def environ(self) -> Mapping[str, str]:
        """What a process of this host gets."""
        paths = os.pathsep.join(map(str, (_SITE, _ROOT)))
        return {_VARIABLE: str(self.path), "PYTHONPATH": paths}

    def ahead_ns(self) -> int:
        """By how much it is ahead now."""
        state: tuple[int, float, int] = _STATE.unpack(self._state[:])
        ahead, gain, since = state
        return ahead + int(gain * (time.monotonic_ns() - since))

    def set(self, ahead_s: float, gain: float = 0.0) -> None:
        """Set it; from now on it gains this part of the time that passes."""
        self._state[:] = _STATE.pack(round(ahead_s * _NS), gain, time.monotonic_ns())


def install(clock: HostClock) -> None:
    """Give this process the time of that host."""
    real_ns = time.time_ns

    def time_ns() -> int:
        return real_ns() + clock.ahead_ns()

    vars(time).update(time_ns=time_ns, time=lambda: time_ns() / _NS)
