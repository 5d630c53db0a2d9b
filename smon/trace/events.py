"""What one rank did, as kernels and collectives: the model of formats that know no ops.

A profiler of kernels (Kineto, Nsight) or of collectives (NCCL Inspector) does not know what a
microbatch or a stage is. Its readers deliver events instead of ops: columns of numbers, one row
per event, with what the format cannot tell left empty.

Flow: `smon.trace.formats` → **here** → `smon.trace.annotated` (ops, where annotations name them),
`smon.trace.pipeline` (where a schedule tells them), `smon.collectives` (segments between
collectives, where nothing does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smon.trace.schema import INVALID_NS, MAX_DURATION_NS


class Kind(IntEnum):
    """What an event is."""

    COMPUTE = 0
    COLLECTIVE = 1
    P2P = 2
    ANNOTATION = 3


class Collective(IntEnum):
    """What a communication event does."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BARRIER = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    SEND = 9
    RECV = 10
    SEND_RECV = 11

    @property
    def label(self) -> str:
        """The name in reports, e.g. ``all-reduce``."""
        return self.name.lower().replace("_", "-")


#: In these nobody gets on before everybody has come. The root of a broadcast may, so the length of
#: a broadcast says nothing about who came last.
MEETINGS: Final = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.BARRIER,
    }
)


class Phase(IntEnum):
    """What part of a step a compute event belongs to, where launches or annotations say so."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    DATA = 3


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A communicator.

    Attributes
    ----------
    name
        Unique within the job together with `ranks`; descriptions are not.
    ranks
        Global ranks, ascending; empty where the trace does not list them.
    size
        Number of members; 0 where unknown.
    """

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step of one rank, on its own clock."""

    number: int
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.duration_ns


#: Columns of `RankEvents`: type, and the value that stands for "not in the trace".
EVENT_COLUMNS: Final[Mapping[str, tuple[DTypeLike, int]]] = {
    "start_ns": (np.int64, 0),
    "duration_ns": (np.int64, 0),
    "step": (np.int64, -1),
    "lane": (np.int32, -1),
    "kind": (np.int8, -1),
    "collective": (np.int8, -1),
    "phase": (np.int8, -1),
    "group": (np.int32, -1),
    "seq": (np.int64, -1),
    "size_bytes": (np.int64, -1),
    "peer": (np.int32, -1),
    "name": (np.int32, -1),
    "launch_ns": (np.int64, -1),
}


@dataclass(frozen=True, slots=True, eq=False)
class RankEvents:
    """Events of one rank, sorted by start; -1 in a column: the trace does not say.

    Attributes
    ----------
    rank, world_size
        Global rank; number of ranks of the job, 0 where unknown.
    start_ns, duration_ns
        int64 ns on the clock of the rank's host. A start is unknown where `timed` is False.
    step
        Step number.
    lane
        Stream or thread: events of one lane do not overlap.
    kind, collective, phase
        Codes of `Kind`, `Collective` and `Phase`.
    group
        Index into `groups`.
    seq
        Number of the collective within its communicator, the same on all members.
    size_bytes, peer
        Of communication: payload, and the global rank at the other end.
    name
        Index into `names`.
    launch_ns
        When the host launched it: the order of launches is the order of the program, whatever
        streams the work ran on.
    steps
        Step markers, by start.
    on_gpu
        Whether compute events are GPU kernels, so that a gap between them is idle time.
    timed
        Whether events have a start, not only a duration.
    dropped
        (reason, events) of what the reader left out.
    notes
        What the format cannot tell, and other sentences for the report.
    """

    rank: int
    world_size: int
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    step: NDArray[np.int64]
    lane: NDArray[np.int32]
    kind: NDArray[np.int8]
    collective: NDArray[np.int8]
    phase: NDArray[np.int8]
    group: NDArray[np.int32]
    seq: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    peer: NDArray[np.int32]
    name: NDArray[np.int32]
    launch_ns: NDArray[np.int64]
    groups: tuple[ProcessGroup, ...] = ()
    names: tuple[str, ...] = ()
    steps: tuple[StepSpan, ...] = ()
    host: str | None = None
    backend: str | None = None
    on_gpu: bool = False
    timed: bool = True
    dropped: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """When each event ended."""
        return self.start_ns + self.duration_ns

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> RankEvents:
        """The same rank with these events only (mask or indices)."""
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in EVENT_COLUMNS}
        return replace(self, **taken)

    def of_kind(self, *kinds: Kind) -> RankEvents:
        """The same rank with events of these kinds only."""
        return self.take(np.isin(self.kind, [int(kind) for kind in kinds]))

    def between(self, first: int | None, last: int | None) -> RankEvents:
        """The same rank with events and markers of steps `first` to `last`; None is open."""
        low = -1 if first is None else first
        high = np.iinfo(np.int64).max if last is None else last
        kept = self.take((self.step >= low) & (self.step <= high))
        markers = tuple(step for step in self.steps if low <= step.number <= high)
        return replace(kept, steps=markers)


def event_columns(
    columns: Mapping[str, NDArray[Any]], dropped: Counter[str]
) -> dict[str, NDArray[Any]]:
    """All columns of `RankEvents`, sorted by start, without what cannot be used.

    Parameters
    ----------
    columns
        Some of `EVENT_COLUMNS`, of equal length; `start_ns` and `duration_ns` are `INVALID_NS`
        where the file had no number. What is not given is unknown.
    dropped
        Gets, by reason, the number of events that were left out.
    """
    length = len(columns["start_ns"])
    full = {
        name: np.asarray(columns[name], dtype) if name in columns else np.full(length, none, dtype)
        for name, (dtype, none) in EVENT_COLUMNS.items()
    }
    keep = _usable(full, dropped)
    order = np.flatnonzero(keep)
    order = order[np.argsort(full["start_ns"][order], kind="stable")]
    return _without_repetitions({name: values[order] for name, values in full.items()}, dropped)


def _usable(columns: Mapping[str, NDArray[Any]], dropped: Counter[str]) -> NDArray[np.bool_]:
    start, duration = columns["start_ns"], columns["duration_ns"]
    keep = np.ones(len(start), bool)
    for reason, bad in (
        ("event whose time is not a number", (start == INVALID_NS) | (duration == INVALID_NS)),
        ("event of negative duration", duration < 0),
        ("event longer than 7 days", duration > MAX_DURATION_NS),
        ("event far from all others in time", _stray(start)),
    ):
        fresh = bad & keep
        if fresh.any():
            dropped[reason] += int(np.count_nonzero(fresh))
            keep &= ~bad
    return keep


def _stray(start: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Starts more than seven days from the typical one, e.g. 0 among unix times."""
    known = start[start != INVALID_NS]
    if len(known) == 0:
        return np.zeros(len(start), bool)
    distance = np.abs(start.astype(np.float64) - float(np.median(known)))
    return distance > MAX_DURATION_NS


def _without_repetitions(
    columns: dict[str, NDArray[Any]], dropped: Counter[str]
) -> dict[str, NDArray[Any]]:
    """Without events that repeat another one: the same kind, name and times on one lane."""
    keys = [columns[name] for name in ("name", "collective", "kind", "lane", "duration_ns")]
    order = np.lexsort((*keys, columns["start_ns"]))
    same = np.ones(max(len(order) - 1, 0), bool)
    for key in (*keys, columns["start_ns"]):
        same &= np.diff(key[order]) == 0
    spare = int(np.count_nonzero(same))
    if not spare:
        return columns
    dropped["event that repeats another one"] += spare
    keep = np.ones(len(order), bool)
    keep[order[1:][same]] = False
    return {name: values[keep] for name, values in columns.items()}


def concat_events(parts: list[RankEvents]) -> RankEvents:
    """Events of one rank, from files of different steps, as one; groups and names are joined.

    Identity is the first part's.
    """
    first = parts[0]
    groups = list(dict.fromkeys(group for part in parts for group in part.groups))
    names = list(dict.fromkeys(name for part in parts for name in part.names))
    moved = [_renumbered(part, groups, names) for part in parts]
    columns = {name: np.concatenate([part[name] for part in moved]) for name in EVENT_COLUMNS}
    order = np.argsort(columns["start_ns"], kind="stable")
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(dict(part.dropped))
    merged: dict[str, Any] = {name: values[order] for name, values in columns.items()}
    return replace(
        first,
        **merged,
        groups=tuple(groups),
        names=tuple(names),
        steps=tuple(sorted({step for part in parts for step in part.steps}, key=_by_start)),
        dropped=tuple(sorted(dropped.items())),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _by_start(step: StepSpan) -> int:
    return step.start_ns


def _renumbered(
    part: RankEvents, groups: list[ProcessGroup], names: list[str]
) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {
        field.name: getattr(part, field.name)
        for field in fields(part)
        if field.name in EVENT_COLUMNS
    }
    for column, own, all_of_them in (
        ("group", part.groups, groups),
        ("name", part.names, names),
    ):
        number = {value: index for index, value in enumerate(all_of_them)}
        table = np.array([*(number[value] for value in own), -1], np.int32)
        columns[column] = table[columns[column]]
    return columns
