"""Events that tell who they are: what was appended to spools, and what was found, compared.

The duration of an event follows from its identity (rank, step, op type, seq), so that one that was
changed on its way is found too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ingest_agents.payload import OpRow

#: Op types of the events; place = code inside a key.
LABELS: Final = (
    "forward-compute",
    "backward-compute",
    "forward-send",
    "forward-recv",
    "gc",
)

#: Bits of a key: number of the event within its step, then step, then rank.
_NUMBER_BITS: Final = 14
_STEP_BITS: Final = 26
_RANK_AT: Final = _NUMBER_BITS + _STEP_BITS
_LONGEST_NS: Final = 1_000_000_007

Keys = NDArray[np.int64]


def duration_ns(keys: Keys) -> Keys:
    """The duration that an event must have."""
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(20)) % np.uint64(_LONGEST_NS)).astype(np.int64)


def start_ns(keys: Keys, begin_ns: int) -> Keys:
    """The start that an event must have: by step, and within it by number."""
    number: Keys = keys & ((1 << _NUMBER_BITS) - 1)
    step: Keys = (keys >> _NUMBER_BITS) & ((1 << _STEP_BITS) - 1)
    starts: Keys = begin_ns + step * 10_000_000 + number * 500
    return starts


def keys_of(rank: int, step: int, count: int) -> Keys:
    """Identities of the first `count` events of a step on a rank."""
    keys: Keys = (rank << _RANK_AT) + (step << _NUMBER_BITS) + np.arange(count, dtype=np.int64)
    return keys


def key_of_columns(rank: Keys, step: Keys, label: Keys, seq: Keys) -> Keys:
    """Identities of stored events; `label` is a place in `LABELS`."""
    number = seq * len(LABELS) + label
    keys: Keys = (rank << _RANK_AT) + (step << _NUMBER_BITS) + number
    return keys


def rows_of(rank: int, step: int, count: int, begin_ns: int) -> list[OpRow]:
    """The events themselves."""
    keys = keys_of(rank, step, count)
    starts, durations = start_ns(keys, begin_ns).tolist(), duration_ns(keys).tolist()
    return [
        OpRow(
            step,
            rank,
            0,
            rank,
            LABELS[number % len(LABELS)],
            starts[number],
            durations[number],
            number // len(LABELS),
        )
        for number in range(count)
    ]


class Appended:
    """What went into the spools; several threads may add to it."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = begin_ns
        self.events = self.batches = 0
        self._parts: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def add(self, rank: int, step: int, count: int) -> None:
        """The first `count` events of this step are in a spool."""
        with self._lock:
            self._parts.append((rank, step, count))
            self.events += count
            self.batches += 1

    def keys(self) -> Keys:
        """Identities of all of them."""
        parts = [keys_of(*part) for part in self._parts]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Stored:
    """Events as they were found; `unreadable`: files that have a row but cannot be read."""

    keys: Keys
    starts: Keys
    durations: Keys
    unreadable: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    #: Numbers of the database that should agree with the files.
    row_sums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong; all zero: every event is there exactly once, as it was.

    Attributes
    ----------
    lost, doubled, invented, changed
        Events that are missing, that are there again, that nobody wrote, that are not as written.
    unreadable
        Files with a row that are not there, or not whole.
    miscounted
        Sums of the database that are not the number of events.
    """

    lost: int
    doubled: int
    invented: int
    changed: int
    unreadable: int
    miscounted: int

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self == NOTHING_WRONG


NOTHING_WRONG: Final = Verdict(0, 0, 0, 0, 0, 0)


def compare(appended: Appended, stored: Stored) -> Verdict:
    """Each event that was appended must be stored exactly once, and no other."""
    expected = np.unique(appended.keys())
    found, counts = np.unique(stored.keys, return_counts=True)
    known = np.isin(found, expected, assume_unique=True)
    changed = (stored.durations != duration_ns(stored.keys)) | (
        stored.starts != start_ns(stored.keys, appended.begin_ns)
    )
    wrong_sums = [total for total in stored.row_sums.values() if total != appended.events]
    return Verdict(
        lost=len(expected) - int(known.sum()),
        doubled=int((counts - 1).sum()),
        invented=int((~known).sum()),
        changed=int(changed.sum()),
        unreadable=len(stored.unreadable),
        miscounted=len(wrong_sums),
    )


def joined(parts: Sequence[tuple[Keys, Keys, Keys]]) -> tuple[Keys, Keys, Keys]:
    """Columns of several files."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    keys, starts, durations = zip(*parts, strict=True)
    return np.concatenate(keys), np.concatenate(starts), np.concatenate(durations)
