"""Ops that have ended for the trainer, and not yet for the GPU.

Flow: `ingest_agents.recorder.recorder` → **here**, in order, until the GPU has passed their ends →
back to the recorder, which puts them into its journal.

Only threads of the trainer read events: a look at an event from another thread can break a graph
that is being captured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from ingest_agents.recorder.device import DeviceClock, Mark
from ingest_agents.recorder.journal import Done

#: A moment on the recorder's clock: on the host, ns, or on the GPU.
Stamp = int | Mark

#: An op that the GPU has not finished by then is given up.
PATIENCE_NS: Final = 600_000_000_000

NEVER_PASSED: Final = "device-never-passed"
BEHIND: Final = "device-behind"

#: Entries; the GPU is seldom more than a step behind its host.
CAPACITY: Final = 8_192


class Open:
    """An op that has begun: to be given to `Recorder.end`.

    Attributes
    ----------
    begin
        When, on the recorder's clock.
    waits
        Stretches of it in which it only waited for other ranks: they are moved to the end of the
        step, see `Recorder.waited`.
    settles
        Whether it ends when it does, and has begun earlier by all that was waited before.
    """

    __slots__ = ("begin", "chunk", "label", "microbatch", "seq", "settles", "step", "waits")

    def __init__(self, label: str, step: int, seq: int, microbatch: int, chunk: int) -> None:
        self.label, self.step, self.seq = label, step, seq
        self.microbatch, self.chunk = microbatch, chunk
        self.begin: Stamp = 0
        self.waits: list[tuple[Stamp, Stamp]] | None = None
        self.settles = False


class Timed(NamedTuple):
    """An op between two marks; without an op, a wait."""

    begun: Open | None
    step: int
    begin: Mark
    end: Mark
    waits: list[tuple[Mark, Mark]]
    host_ns: int


class Sink(NamedTuple):
    """What becomes of them.

    Attributes
    ----------
    op
        Of an op, start in unix time, duration, and how long it waited for other ranks; ns.
    waited
        Of a wait between ops, its duration, ns.
    done
        Of a step, when all its ops were given.
    lost
        Of an op without a time, its step and why.
    """

    op: Callable[[Open, int, int, int], None]
    waited: Callable[[int], None]
    done: Callable[[int], None]
    lost: Callable[[int, str], None]


class Pending:
    """The queue between trainer and GPU.

    Parameters
    ----------
    clock
        Of the GPU.
    sink
        Gets everything in the order in which it was added.
    """

    def __init__(self, clock: DeviceClock, sink: Sink) -> None:
        self._clock, self._sink = clock, sink
        self._entries: deque[Timed | Done] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Timed | Done) -> None:
        """Take an entry in, or count it as lost if there is no room; any thread."""
        if isinstance(entry, Done) or len(self._entries) < CAPACITY:
            self._entries.append(entry)
        else:
            self._lose(entry, BEHIND)

    def resolve(self, now_ns: int) -> None:
        """Hand on what the GPU has passed; never waits. `now_ns`: on the host's clock."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._clock.capturing():
                while self._entries and self._hand_on(self._entries[0], now_ns):
                    self._entries.popleft()
        finally:
            self._lock.release()

    def give_up(self) -> None:
        """Count everything that is left as lost; steps that are done are still told."""
        while self._entries:
            entry = self._entries.popleft()
            if isinstance(entry, Done):
                self._sink.done(entry.step)
            else:
                self._lose(entry)

    def _hand_on(self, entry: Timed | Done, now_ns: int) -> bool:
        if isinstance(entry, Done):
            self._sink.done(entry.step)
            return True
        marks = _marks(entry)
        if all(self._clock.passed(mark) for mark in marks):
            self._measure(entry)
            for mark in marks:
                self._clock.free(mark)
            return True
        if now_ns - entry.host_ns < PATIENCE_NS:
            return False
        # Its marks are not used again: the GPU may still pass them.
        self._lose(entry)
        return True

    def _measure(self, entry: Timed) -> None:
        if entry.begun is None:
            self._sink.waited(_between(entry.begin, entry.end))
            return
        waited = sum(_between(begin, end) for begin, end in entry.waits)
        start = self._clock.unix_ns(entry.begin)
        self._sink.op(entry.begun, start, _between(entry.begin, entry.end), waited)

    def _lose(self, entry: Timed, reason: str = NEVER_PASSED) -> None:
        if entry.begun is not None:
            self._sink.lost(entry.step, reason)


def _between(begin: Mark, end: Mark) -> int:
    return max(0, round(begin.event.elapsed_time(end.event) * 1e6))


def _marks(entry: Timed) -> list[Mark]:
    # The end first: mostly, it is the last to be passed.
    return [entry.end, entry.begin, *(mark for wait in entry.waits for mark in wait)]
