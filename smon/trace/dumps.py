"""What one rank had called and not finished when its Flight Recorder was dumped.

A dump has no durations and no steps: it tells who has called which collective, not how long
anything took.

Flow: `smon.trace.formats.flight_recorder` → **here** → `smon.hangs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smon.errors import TraceError
from smon.trace.events import Collective, ProcessGroup


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, send or receive that a rank has called and that has not finished.

    Attributes
    ----------
    group
        Index into the groups of its dump.
    seq
        Number within the communicator: of collectives the same on all members, of messages the
        rank's own count.
    kind
        None where the name is none that SMon knows.
    shape
        Size of the first input, e.g. ``4027 × 5120``; may be empty.
    peer
        Of a message: the global rank at the other end, None where unknown.
    created_ns
        When it was called, unix ns on the host's clock; 0 where unknown.
    """

    group: int
    seq: int
    kind: Collective | None
    name: str
    shape: str = ""
    peer: int | None = None
    created_ns: int = 0

    @property
    def label(self) -> str:
        """What it does, as reports say it."""
        return self.name if self.kind is None else self.kind.label


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come in one communicator: numbers of collectives; None: not known."""

    called: int | None
    finished: int | None


@dataclass(frozen=True, slots=True, eq=False)
class RankDump:
    """The dump of one rank.

    Attributes
    ----------
    world_size
        Ranks of the job as far as the groups tell; 0 if they do not.
    groups
        Communicators the rank belongs to, or has called something in.
    progress
        One for each group.
    calls, messages
        Unfinished collectives, and unfinished sends and receives, in the order of their calls.
    entries
        Usable entries of the file, finished ones included.
    dropped
        (reason, entries) of what the reader left out.
    """

    rank: int
    world_size: int
    groups: tuple[ProcessGroup, ...]
    progress: tuple[Progress, ...]
    calls: tuple[Call, ...]
    messages: tuple[Call, ...]
    entries: int
    backend: str | None = None
    dropped: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether the dump was written, but lists nothing at all."""
        return not self.entries and not self.dropped


def gathered_dumps(parts: Iterable[RankDump]) -> tuple[list[RankDump], list[str]]:
    """One dump per rank, by rank, with notes; of two dumps of a rank the fuller one counts.

    Raises
    ------
    TraceError
        The dumps are of jobs of different size.
    """
    by_rank: dict[int, RankDump] = {}
    notes: list[str] = []
    for part in parts:
        other = by_rank.get(part.rank)
        if other is not None:
            notes.append(f"two dumps of rank {part.rank}: the one with fewer entries is left out")
        if other is None or part.entries > other.entries:
            by_rank[part.rank] = part
    dumps = [by_rank[rank] for rank in sorted(by_rank)]
    _check_world(dumps)
    notes += dict.fromkeys(note for dump in dumps for note in dump.notes)
    dropped: Counter[str] = Counter()
    for dump in dumps:
        dropped.update(dict(dump.dropped))
    notes += [f"{count:,} left out: {reason}" for reason, count in sorted(dropped.items())]
    return dumps, notes


def world_of(dumps: Sequence[RankDump]) -> int:
    """Number of ranks of the job, as far as the dumps tell."""
    return max((max(dump.world_size, dump.rank + 1) for dump in dumps), default=0)


def _check_world(dumps: Sequence[RankDump]) -> None:
    """Every dump that tells the size of the job tells the same, and no rank lies outside."""
    declared = sorted({dump.world_size for dump in dumps} - {0})
    if len(declared) > 1:
        raise TraceError(
            f"expected dumps of one job, found those of jobs of {declared[0]} and {declared[-1]} "
            "ranks"
        )
    highest = dumps[-1].rank if dumps else 0
    if declared and highest >= declared[0]:
        raise TraceError(f"expected ranks below {declared[0]}, found a dump of rank {highest}")
