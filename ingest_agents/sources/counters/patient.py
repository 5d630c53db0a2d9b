"""Read in a thread, because a driver may hang: the agent goes on, and says so.

Flow: a reader → **here** → `ingest_agents.sources.counters.source`. A call into a driver that does
not return cannot be ended: its thread stays, alone, and nothing is asked until it comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: Runs a function, soon.
Start = Callable[[Callable[[], None]], None]


def in_thread(run: Callable[[], None]) -> None:
    """Run it in a thread of its own, which does not hold up the end of the process."""
    threading.Thread(target=run, name="smon-counters", daemon=True).start()


@dataclass(frozen=True, slots=True)
class Seams:
    """Time, and how readings are run.

    Attributes
    ----------
    clock, wall_ns
        Seconds that never go back, and unix ns.
    """

    clock: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    start: Start = in_thread


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """What was read, and when that began: unix ns."""

    ns: int
    value: T


class Patient(Generic[T]):
    """One thing that is read now and then.

    Parameters
    ----------
    read
        May raise, and may take for ever.

    Attributes
    ----------
    failure
        What the last reading raised, in words; empty if it went well.
    failures
        Readings that raised.
    """

    def __init__(self, read: Callable[[], T], seams: Seams) -> None:
        self.failure, self.failures = "", 0
        self._read, self._seams = read, seams
        self._since: float | None = None
        self._taken: Taken[T] | None = None

    def begin(self) -> bool:
        """Begin a reading; False if the one before is still under way."""
        if self._since is not None:
            return False
        self._since = self._seams.clock()
        try:
            self._seams.start(self._run)
        except RuntimeError as error:
            # There is no room for another thread.
            self._failed(error)
            self._since = None
        return True

    def _run(self) -> None:
        ns = self._seams.wall_ns()
        try:
            self._taken = Taken(ns, self._read())
            self.failure = ""
        except Exception as error:  # noqa: BLE001  # a library of a driver may raise anything
            self._failed(error)
        finally:
            self._since = None

    def _failed(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self.failures += 1

    def take(self) -> Taken[T] | None:
        """What was read since the last call; None if nothing was."""
        taken, self._taken = self._taken, None
        return taken

    def waits_s(self) -> float:
        """For how long the present reading has been under way; 0 if none is."""
        since = self._since
        return 0.0 if since is None else self._seams.clock() - since
