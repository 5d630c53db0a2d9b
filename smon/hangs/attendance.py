"""Who has come to the collectives that did not finish, and who has not.

A collective of one rank is that of another if communicator (name and members) and number agree.
That one of them finished a collective in which everybody meets means that all had come to it.

Flow: `smon.trace.dumps` → **here** → `smon.hangs.waits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smon.trace.dumps import Call, Progress, RankDump
from smon.trace.events import MEETINGS, ProcessGroup

Communicator = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stall:
    """The first collective of a communicator that nobody has finished.

    Attributes
    ----------
    call
        That of the first member that has called it.
    arrived
        Ranks that have called it.
    missing
        Ranks that have a dump and have not called it.
    undumped
        Members without a dump.
    unclear
        Members whose dump does not say.
    odd
        (rank, what it called) of members that called something else than most.
    """

    group: ProcessGroup
    seq: int
    call: Call
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    undumped: tuple[int, ...]
    unclear: tuple[int, ...]
    odd: tuple[tuple[int, str], ...]
    last: Mapping[int, int]

    @property
    def absent(self) -> tuple[int, ...]:
        """Who is waited for: those known to be missing, else those that left no dump."""
        return self.missing or self.undumped


@dataclass(frozen=True, slots=True)
class Behind:
    """Collectives that one rank lists as unfinished and its peers have finished."""

    rank: int
    group: ProcessGroup
    first: int
    last: int
    label: str
    peers: tuple[int, ...]


def communicators(dumps: Sequence[RankDump]) -> Iterator[tuple[ProcessGroup, dict[int, int]]]:
    """Each communicator with listed members: and its index in the dump of each rank."""
    found: dict[Communicator, tuple[ProcessGroup, dict[int, int]]] = {}
    for dump in dumps:
        for at, group in enumerate(dump.groups):
            if dump.rank in group.ranks:
                key = (group.name, group.ranks)
                found.setdefault(key, (group, {}))[1][dump.rank] = at
    yield from found.values()


def stalls_of(dumps: Sequence[RankDump]) -> list[Stall]:
    """The collective that every communicator with unfinished ones stands at."""
    by_rank = {dump.rank: dump for dump in dumps}
    found = (_stall(group, places, by_rank) for group, places in communicators(dumps))
    return [stall for stall in found if stall is not None]


def behind_of(dumps: Sequence[RankDump]) -> list[Behind]:
    """Ranks whose GPU, or whoever watches it, stopped before those of their peers.

    Only collectives in which everybody meets count: others may end on one rank before another.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    found = []
    for group, places in communicators(dumps):
        done = _finished(places, by_rank)
        best = max(done.values(), default=0)
        for rank, at in places.items():
            calls = [call for call in by_rank[rank].calls if call.group == at and call.seq <= best]
            meetings = [call for call in calls if call.kind in MEETINGS]
            if meetings:
                first = min(call.seq for call in meetings)
                peers = tuple(peer for peer, seq in done.items() if seq >= first and peer != rank)
                last = max(call.seq for call in meetings)
                found.append(Behind(rank, group, first, last, meetings[0].label, peers))
    return found


def _stall(
    group: ProcessGroup, places: Mapping[int, int], by_rank: Mapping[int, RankDump]
) -> Stall | None:
    """Where a communicator stands; None if none of its members lists anything unfinished."""
    done = max(_finished(places, by_rank).values(), default=0)
    calls = {
        (rank, call.seq): call
        for rank, at in places.items()
        for call in by_rank[rank].calls
        if call.group == at and call.seq > done
    }
    if not calls:
        return None
    seq = min(number for _, number in calls)
    here = {rank: call for (rank, number), call in calls.items() if number == seq}
    last = {rank: _last(by_rank[rank], at, places, by_rank) for rank, at in places.items()}
    arrived = tuple(rank for rank in places if rank in here or (last[rank] or 0) >= seq)
    return Stall(
        group=group,
        seq=seq,
        call=next(iter(here.values())),
        arrived=arrived,
        missing=tuple(
            rank
            for rank in places
            if rank not in arrived and (last[rank] is not None or by_rank[rank].silent)
        ),
        undumped=tuple(rank for rank in group.ranks if rank not in by_rank),
        unclear=tuple(
            rank
            for rank in group.ranks
            if rank in by_rank
            and rank not in arrived
            and not by_rank[rank].silent
            and last.get(rank) is None
        ),
        odd=_odd(here),
        last={rank: number for rank, number in last.items() if number is not None},
    )


def _finished(places: Mapping[int, int], by_rank: Mapping[int, RankDump]) -> dict[int, int]:
    """The last collective that each member has finished, where known."""
    shared = _has_messages(places, by_rank)
    return {
        rank: done
        for rank, at in places.items()
        if (done := _progress(by_rank[rank], at, shared=shared).finished) is not None
    }


def _last(
    dump: RankDump, at: int, places: Mapping[int, int], by_rank: Mapping[int, RankDump]
) -> int | None:
    """The last collective that a rank has called in a communicator."""
    return _progress(dump, at, shared=_has_messages(places, by_rank)).called


def _progress(dump: RankDump, at: int, *, shared: bool) -> Progress:
    """As the dump says; messages share the counter of a status, so that does not count then."""
    own = any(call.group == at for call in dump.calls)
    return dump.progress[at] if own or not shared else Progress(None, None)


def _has_messages(places: Mapping[int, int], by_rank: Mapping[int, RankDump]) -> bool:
    return any(call.group == at for rank, at in places.items() for call in by_rank[rank].messages)


def _odd(here: Mapping[int, Call]) -> tuple[tuple[int, str], ...]:
    """Who calls something else than most of the members; nobody if there is no majority."""
    counts = Counter(call.label for call in here.values())
    usual, count = counts.most_common(1)[0]
    if 2 * count <= len(here):
        return ()
    return tuple((rank, call.label) for rank, call in here.items() if call.label != usual)
