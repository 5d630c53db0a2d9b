"""Which events of different ranks are one collective.

By communicator and sequence number where the trace has them, else by order within the step. What
cannot be matched is counted by reason; nothing is guessed.

Flow: `smon.trace.events` → **here** → `smon.collectives.segments`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.trace.events import MEETINGS, Collective, Kind, ProcessGroup, RankEvents

Rows = NDArray[np.intp]

#: A collective of fewer ranks than this has nobody to wait for.
LEAST_MEMBERS: Final = 2


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group as matching sees it: `ranks` are the members that have a file."""

    group: ProcessGroup
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people: its description, else its name."""
        return self.group.description or self.group.name


@dataclass(frozen=True, slots=True)
class Place:
    """One collective of a step: the `index`-th of its kind and communicator."""

    communicator: int
    index: int
    collective: Collective


@dataclass(frozen=True, slots=True, eq=False)
class Matched:
    """Collectives of all steps; ``W`` ranks.

    Attributes
    ----------
    ranks
        The ranks with a file, ascending; `rows` refer to their events.
    steps
        By step number, the collectives in it: rows of the members' events, -1 for ranks that are
        no member, (W,).
    unmatched
        (reason, events) that have no counterpart.
    total
        Events that could have been matched.
    assumed
        Whether the group of some collectives is an assumption, because the trace does not say.
    by_order
        Whether some were matched by their order, for want of sequence numbers.
    """

    ranks: tuple[RankEvents, ...]
    communicators: tuple[Communicator, ...]
    steps: dict[int, dict[Place, Rows]]
    unmatched: tuple[tuple[str, int], ...]
    total: int
    assumed: bool
    by_order: bool

    @property
    def matched(self) -> int:
        """Events that have their counterparts."""
        return self.total - sum(count for _, count in self.unmatched)


def match(ranks: Sequence[RankEvents]) -> Matched:
    """Match the collectives of all ranks that have a file."""
    return _Matcher(tuple(sorted(ranks, key=lambda rank: rank.rank))).run()


#: Rows of one communicator in one step: by position of the rank.
_Members = dict[int, Rows]


class _Matcher:
    def __init__(self, ranks: tuple[RankEvents, ...]) -> None:
        self.ranks = ranks
        self.numbers = [rank.rank for rank in ranks]
        self.unmatched: Counter[str] = Counter()
        self.total = 0
        self.assumed = False
        self.by_order = False
        self.everyone = ProcessGroup("", "all ranks", tuple(self.numbers), len(self.numbers))
        self.one_group = _has_one_group(ranks)

    def run(self) -> Matched:
        found = self._rows()
        communicators = [
            Communicator(group, tuple(self.numbers[at] for at in sorted(places)))
            for group, places in found.items()
        ]
        steps: dict[int, dict[Place, Rows]] = defaultdict(dict)
        for number, places in enumerate(found.values()):
            for step, members in _by_step(self.ranks, places):
                for place, rows in self._match_step(number, communicators[number], members):
                    steps[step][place] = rows
        return Matched(
            ranks=self.ranks,
            communicators=tuple(communicators),
            steps=dict(sorted(steps.items())),
            unmatched=tuple(sorted(self.unmatched.items())),
            total=self.total,
            assumed=self.assumed,
            by_order=self.by_order,
        )

    def _rows(self) -> dict[ProcessGroup, _Members]:
        """Events by communicator and rank; those that cannot take part are counted."""
        found: dict[ProcessGroup, _Members] = defaultdict(dict)
        for at, rank in enumerate(self.ranks):
            usable = self._usable(rank)
            for number in np.unique(rank.group[usable]).tolist():
                rows = usable[rank.group[usable] == number]
                group = self._group(rank, number)
                if group is None:
                    self._leave_out("its process group is not in the trace", len(rows))
                else:
                    known = found[group].get(at)
                    found[group][at] = rows if known is None else np.concatenate([known, rows])
        return found

    def _usable(self, rank: RankEvents) -> Rows:
        talks = np.isin(rank.kind, [Kind.COLLECTIVE, Kind.P2P])
        exchange = self._pairwise(rank) & (rank.collective == Collective.SEND_RECV)
        meets = np.isin(rank.collective, [int(each) for each in MEETINGS]) | exchange
        self.total += int(np.count_nonzero(talks))
        for reason, bad in (
            ("it is outside of every step", talks & (rank.step < 0)),
            (
                "a send, a receive or one-sided: its length does not tell who came last",
                talks & (rank.step >= 0) & ~meets,
            ),
        ):
            self._leave_out(reason, int(np.count_nonzero(bad)))
        usable = np.flatnonzero(talks & meets & (rank.step >= 0))
        # Members return together from a rendezvous, so order by end is order by start.
        return usable[np.argsort(rank.start_ns[usable], kind="stable")]

    def _pairwise(self, rank: RankEvents) -> NDArray[np.bool_]:
        """Whether an exchange of messages is one between two ranks, whatever its direction."""
        sizes = np.array([*(group.size for group in rank.groups), rank.world_size])
        pairs: NDArray[np.bool_] = sizes[rank.group] == LEAST_MEMBERS
        return pairs

    def _group(self, rank: RankEvents, number: int) -> ProcessGroup | None:
        if number >= 0:
            group = rank.groups[number]
            return ProcessGroup(group.name, group.description, group.ranks, group.size)
        if not self.one_group:
            return None
        self.assumed = True
        return self.everyone

    def _leave_out(self, reason: str, count: int) -> None:
        if count:
            self.unmatched[reason] += count

    # --- one communicator in one step

    def _match_step(
        self, number: int, communicator: Communicator, members: _Members
    ) -> Iterator[tuple[Place, Rows]]:
        count = sum(map(len, members.values()))
        if len(communicator.ranks) < LEAST_MEMBERS:
            self._leave_out("no other member of its group has a file", count)
            return
        if len(members) < len(communicator.ranks):
            self._leave_out("some members of its group have none in this step", count)
            return
        aligned = self._by_number(members)
        if aligned is None:
            aligned = self._by_order(members)
        self._leave_out("no counterpart on the other members of its group", count - aligned.size)
        yield from self._places(number, list(members), aligned)

    def _by_number(self, members: _Members) -> Rows | None:
        """(collectives, members) rows with the same sequence number; None without numbers."""
        seqs = [self.ranks[at].seq[rows] for at, rows in members.items()]
        if not all(len(seq) and seq.min() >= 0 and len(np.unique(seq)) == len(seq) for seq in seqs):
            return None
        common = seqs[0]
        for seq in seqs[1:]:
            common = np.intersect1d(common, seq)
        picked = [
            rows[np.argsort(seq, kind="stable")][np.searchsorted(np.sort(seq), common)]
            for rows, seq in zip(members.values(), seqs, strict=True)
        ]
        return np.stack(picked, axis=1)

    def _by_order(self, members: _Members) -> Rows:
        """(collectives, members) rows: the n-th of a kind is the n-th of the same kind.

        Kinds are counted apart: on streams of their own their order may differ between ranks. A
        kind of which members have different numbers is left out.
        """
        kinds = {
            int(kind)
            for at, rows in members.items()
            for kind in np.unique(self.ranks[at].collective[rows])
        }
        aligned = [np.empty((0, len(members)), np.intp)]
        for kind in sorted(kinds):
            mine = [rows[self.ranks[at].collective[rows] == kind] for at, rows in members.items()]
            if len({len(rows) for rows in mine}) == 1:
                self.by_order = True
                aligned.append(np.stack(mine, axis=1))
        return np.concatenate(aligned)

    def _places(
        self, number: int, positions: list[int], aligned: Rows
    ) -> Iterator[tuple[Place, Rows]]:
        counts: Counter[int] = Counter()
        for rows in aligned:
            types = {
                int(self.ranks[at].collective[row])
                for at, row in zip(positions, rows.tolist(), strict=True)
            }
            if len(types) > 1:
                self._leave_out("members of its group run another collective there", len(rows))
                continue
            kind = types.pop()
            whole = np.full(len(self.ranks), -1, np.intp)
            whole[positions] = rows
            yield Place(number, counts[kind], Collective(kind)), whole
            counts[kind] += 1


def _has_one_group(ranks: Sequence[RankEvents]) -> bool:
    """Whether a collective whose group is not told can only be one of all ranks."""
    sets = {group.ranks for rank in ranks for group in rank.groups if len(group.ranks) > 1}
    return len(sets) <= 1


def _by_step(ranks: Sequence[RankEvents], places: _Members) -> Iterator[tuple[int, _Members]]:
    """Rows of one communicator by step and rank."""
    steps: dict[int, _Members] = defaultdict(dict)
    for at, rows in sorted(places.items()):
        numbers = ranks[at].step[rows]
        for step in np.unique(numbers).tolist():
            steps[step][at] = rows[numbers == step]
    yield from steps.items()
