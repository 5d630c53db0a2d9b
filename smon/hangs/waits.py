"""Who waits for whom, and who waits for nobody: the ranks that a job hangs on.

Flow: `smon.hangs.attendance` → **here** → `smon.hangs.findings`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from smon.hangs.attendance import Behind, Stall, behind_of, stalls_of
from smon.trace.dumps import RankDump
from smon.trace.events import Collective, ProcessGroup


@dataclass(frozen=True, slots=True)
class Message:
    """Messages between two ranks of which one end has called more than the other.

    Attributes
    ----------
    waiter, absent
        Who has called more, and who less.
    kind
        What the waiter has called.
    """

    waiter: int
    absent: int
    group: ProcessGroup
    kind: Collective
    count: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Everything that hangs together.

    Attributes
    ----------
    behind
        By rank.
    edges
        Rank to the ranks that it waits for.
    """

    stalls: tuple[Stall, ...]
    behind: Mapping[int, tuple[Behind, ...]]
    messages: tuple[Message, ...]
    edges: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def roots(self) -> list[int]:
        """Ranks that are waited for at a collective and wait for nobody."""
        absent = {rank for stall in self.stalls for rank in stall.absent}
        return sorted(rank for rank in absent if not self.edges.get(rank))

    def message_roots(self) -> list[int]:
        """Ranks that are waited for with a message and wait for nobody."""
        absent = {message.absent for message in self.messages}
        return sorted(rank for rank in absent if not self.edges.get(rank))

    def circle(self) -> tuple[int, ...]:
        """Ranks that wait for each other in turn; empty if nobody does."""
        for start in sorted(self.edges):
            path = [start]
            while (then := min(self.edges.get(path[-1], ()), default=None)) is not None:
                if then in path:
                    return tuple(path[path.index(then) :])
                path.append(then)
        return ()

    def waiting_for(self, rank: int) -> tuple[int, ...]:
        """Ranks that wait for this one, directly or through others."""
        back: defaultdict[int, set[int]] = defaultdict(set)
        for waiter, absent in self.edges.items():
            for one in absent:
                back[one].add(waiter)
        found: set[int] = set()
        queue = [rank]
        while queue:
            for waiter in back[queue.pop()] - found:
                found.add(waiter)
                queue.append(waiter)
        return tuple(sorted(found - {rank}))

    def stalls_at(self, rank: int) -> list[Stall]:
        """Collectives that wait for this rank, the one with the most waiting ranks first."""
        found = [stall for stall in self.stalls if rank in stall.absent]
        return sorted(found, key=lambda stall: (stall.call.created_ns, -len(stall.arrived)))


def waits_of(dumps: Sequence[RankDump]) -> Waits:
    """Who waits for whom, from the dumps of a job's ranks."""
    stalls = stalls_of(dumps)
    behind: defaultdict[int, list[Behind]] = defaultdict(list)
    for each in behind_of(dumps):
        behind[each.rank].append(each)
    messages = _messages(dumps, behind)
    edges: defaultdict[int, set[int]] = defaultdict(set)
    for stall in stalls:
        for waiter in stall.arrived:
            edges[waiter].update(stall.absent)
    for message in messages:
        edges[message.waiter].add(message.absent)
    return Waits(
        stalls=tuple(stalls),
        behind={rank: tuple(found) for rank, found in behind.items()},
        messages=tuple(messages),
        edges={rank: frozenset(absent) for rank, absent in edges.items() if absent},
    )


def _messages(dumps: Sequence[RankDump], stale: Collection[int]) -> list[Message]:
    """Pairs of ranks of which one has called more sends or receives than the other.

    What a rank lists whose own record stopped early (`stale`) is left out.
    """
    counts: Counter[tuple[int, int, bool, ProcessGroup]] = Counter()
    dumped = {dump.rank for dump in dumps} - set(stale)
    for dump in dumps:
        for call in dump.messages:
            if call.peer is not None:
                group = dump.groups[call.group]
                counts[dump.rank, call.peer, call.kind is Collective.SEND, group] += 1
    found = []
    for (rank, peer, sends, group), count in sorted(counts.items(), key=lambda item: item[0][:3]):
        other = counts[peer, rank, not sends, group]
        if count > other and rank in dumped:
            kind = Collective.SEND if sends else Collective.RECV
            found.append(Message(rank, peer, group, kind, count - other))
    return found
