"""Parts of the report about collectives: each of them, and their communicators.

Flow: `smon.collectives.segments` → **here** → `smon.collectives.report`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from smon.collectives.matching import Communicator, Matched, Place, Rows
from smon.report import CollectivePart, GroupPart

#: The report has so many collectives: those that are waited for most.
MAX_COLLECTIVES: Final = 64
#: And so many communicators.
MAX_GROUPS: Final = 64
_MAX_RANKS: Final = 16
_TAIL: Final = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """One collective of one step; `durations_ns` by rank."""

    step: int
    index: int
    place: Place
    communicator: Communicator
    ranks: tuple[int, ...]
    durations_ns: np.ndarray
    size_bytes: int

    @property
    def transfer_ns(self) -> int:
        """The shortest duration."""
        return int(self.durations_ns.min())

    @property
    def last(self) -> int:
        """The rank that came last: its duration is the shortest."""
        return self.ranks[int(np.argmin(self.durations_ns))]

    @property
    def waited_ns(self) -> int:
        """What all members together waited."""
        return int((self.durations_ns - self.transfer_ns).sum())


def meetings_of(matched: Matched) -> list[Meeting]:
    """All matched collectives, by step and order in it."""
    found = []
    for step, places in matched.steps.items():
        starts = {place: _typical_start(matched, rows) for place, rows in places.items()}
        for index, place in enumerate(sorted(places, key=lambda place: starts[place])):
            found.append(_meeting(matched, step, index, place))
    return found


def _typical_start(matched: Matched, rows: Rows) -> float:
    """Start since the rank's first event, in the middle of the members."""
    since = [
        int(rank.start_ns[row] - rank.start_ns[0])
        for rank, row in zip(matched.ranks, rows.tolist(), strict=True)
        if row >= 0
    ]
    return float(median(since))


def _meeting(matched: Matched, step: int, index: int, place: Place) -> Meeting:
    rows = matched.steps[step][place]
    members = [(rank, row) for rank, row in zip(matched.ranks, rows.tolist(), strict=True)
               if row >= 0]  # fmt: skip
    return Meeting(
        step=step,
        index=index,
        place=place,
        communicator=matched.communicators[place.communicator],
        ranks=tuple(rank.rank for rank, _ in members),
        durations_ns=np.array([rank.duration_ns[row] for rank, row in members], np.int64),
        size_bytes=max(int(rank.size_bytes[row]) for rank, row in members),
    )


def collective_parts(meetings: Sequence[Meeting]) -> tuple[CollectivePart, ...]:
    """The collectives that are waited for most, by step and order in it."""
    most = sorted(meetings, key=lambda one: -one.waited_ns)[:MAX_COLLECTIVES]
    return tuple(_part(one) for one in sorted(most, key=lambda one: (one.step, one.index)))


def _part(meeting: Meeting) -> CollectivePart:
    waits = (meeting.durations_ns - meeting.transfer_ns) / 1e9
    others = np.delete(waits, int(np.argmin(meeting.durations_ns)))
    return CollectivePart(
        step=meeting.step,
        index=meeting.index,
        kind=meeting.place.collective.label,
        group=meeting.communicator.name,
        members=len(meeting.ranks),
        ranks=meeting.ranks[:_MAX_RANKS],
        size_bytes=meeting.size_bytes if meeting.size_bytes >= 0 else None,
        transfer_s=meeting.transfer_ns / 1e9,
        last_rank=meeting.last,
        late_s=float(np.median(others)),
        waits_s=tuple(waits[:_MAX_RANKS].tolist()),
    )


def group_parts(meetings: Sequence[Meeting]) -> list[GroupPart]:
    """Communicators by kind of collective, slowest beside comparable ones first."""
    by_group: dict[tuple[int, int], list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        by_group[meeting.place.communicator, int(meeting.place.collective)].append(meeting)
    found = [_group(mine, list(_peers(mine, by_group.values()))) for mine in by_group.values()]
    return sorted(found, key=_excess)


def _excess(group: GroupPart) -> float:
    return (group.peers_p50_s or group.transfer_p50_s) - group.transfer_p50_s


def _peers(mine: Sequence[Meeting], groups: Iterable[list[Meeting]]) -> Iterator[float]:
    """Transfer times of other communicators of the same kind, size and payload, in ns."""
    own = mine[0]
    sizes = {one.size_bytes for one in mine} - {-1}
    for others in groups:
        other = others[0]
        if (
            other.place.collective == own.place.collective
            and other.place.communicator != own.place.communicator
            and len(other.ranks) == len(own.ranks)
        ):
            yield from (one.transfer_ns for one in others if one.size_bytes in sizes)


def _group(mine: Sequence[Meeting], peers: Sequence[float]) -> GroupPart:
    transfers = np.array([one.transfer_ns for one in mine]) / 1e9
    last = [one.last for one in mine]
    ranks, counts = np.unique(last, return_counts=True)
    return GroupPart(
        kind=mine[0].place.collective.label,
        dp=None,
        stage=None,
        members=len(mine[0].ranks),
        ranks=mine[0].ranks[:_MAX_RANKS],
        transfer_p50_s=float(np.median(transfers)),
        transfer_p99_s=float(np.quantile(transfers, _TAIL)),
        peers_p50_s=float(np.median(peers)) / 1e9 if len(peers) else None,
        last_rank=int(ranks[counts.argmax()]),
        last_share=float(counts.max() / len(mine)),
    )
