"""Simulation of steps made of segments and collectives, under any durations.

A member arrives at a collective when everything that it depends on has ended (or, if that may
still run, when it arrived there), plus its segment; or, where kernels run beside the collective
before, its segment after its own arrival there (`smon.collectives.segments`). The collective ends
when the last has arrived, plus its transfer. A step ends with its last collective.

Flow: `smon.collectives.segments` → **here** → `smon.collectives.attribute`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.collectives.segments import Floats, Structure

#: So many lengths of segments are simulated at once: 256 MiB.
_MOST_VALUES: Final = 1 << 25


class Simulator:
    """Simulates the steps of one structure.

    Parameters
    ----------
    structure
        The collectives, their members and dependencies.
    """

    def __init__(self, structure: Structure) -> None:
        self._ranks = structure.members.shape[1]
        self._visits = [_visit(structure, now) for now in range(len(structure.members))]

    def run(self, segment: Floats, transfer: Floats) -> Floats:
        """Step times in ns.

        Parameters
        ----------
        segment
            (S, J, W) lengths of the segments.
        transfer
            (S, J) transfer times.

        Returns
        -------
        array
            (S,)
        """
        steps = max(len(segment), len(transfer))
        end = np.zeros((steps, len(self._visits)))
        arrived = np.zeros((steps, self._ranks))
        for now, visit in enumerate(self._visits):
            ready = np.zeros((steps, len(visit.members)))
            for earlier, shared in visit.before:
                ready[:, shared] = np.maximum(ready[:, shared], end[:, earlier, None])
            work = segment[:, now, visit.members]
            if visit.beside:
                own = arrived[:, visit.members] + work
                arrival = np.maximum(own, ready + visit.lag)
            else:
                if len(visit.apart):
                    running = arrived[:, visit.members[visit.apart]]
                    ready[:, visit.apart] = np.maximum(ready[:, visit.apart], running)
                arrival = ready + work
            arrived[:, visit.members] = arrival
            end[:, now] = arrival.max(axis=1) + transfer[:, now]
        times: Floats = end.max(axis=1)
        return times

    def run_all(self, cases: Sequence[tuple[Floats, Floats]]) -> list[Floats]:
        """(S,) step times of several what-ifs, as `run`; together they take little longer than one.

        Steps of all of them are simulated side by side, as far as memory allows.
        """
        steps = max(max(len(segment), len(transfer)) for segment, transfer in cases)
        each = steps * len(self._visits) * self._ranks
        at_once = max(1, _MOST_VALUES // max(each, 1))
        found: list[Floats] = []
        for first in range(0, len(cases), at_once):
            group = cases[first : first + at_once]
            segment = np.concatenate([_whole(case[0], steps) for case in group])
            transfer = np.concatenate([_whole(case[1], steps) for case in group])
            found += np.split(self.run(segment, transfer), len(group))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """What the simulation needs of one collective, in the order of its members."""

    members: NDArray[np.intp]
    before: tuple[tuple[int, NDArray[np.bool_] | slice], ...]
    apart: NDArray[np.intp]
    beside: bool
    lag: float


def _visit(structure: Structure, now: int) -> _Visit:
    members = np.flatnonzero(structure.members[now])
    before = []
    for earlier in structure.before[now]:
        shared = structure.members[earlier][members]
        before.append((earlier, slice(None) if shared.all() else shared))
    return _Visit(
        members=members,
        before=tuple(before),
        apart=np.flatnonzero(structure.apart[now, members]),
        beside=bool(structure.beside[now]),
        lag=float(structure.lag[now]),
    )


def _whole(values: Floats, steps: int) -> Floats:
    """Values of each step, where one row stands for all."""
    return np.broadcast_to(values, (steps, *values.shape[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class Ideal:
    """Ideal durations of one structure.

    Attributes
    ----------
    segment
        (1, J, W) mean over ranks and steps of the segments before the same collective.
    transfer
        (1, J) median over the collectives of the same kind, size and number of members.
    compared
        Per collective, how many communicators that median is over.
    """

    segment: Floats
    transfer: Floats
    compared: tuple[int, ...]


#: Kind, members and payload of a collective, and its place where the payload is unknown.
_Pool = tuple[int, int, int, int]

#: A median over fewer communicators is no yardstick for one of them.
LEAST_GROUPS: Final = 3


def ideals_of(structures: Sequence[Structure]) -> list[Ideal]:
    """Ideal durations of each structure; like collectives are compared over all of them.

    As in the published method, computes take the mean and transfers the median; but a segment is
    compared only with the same segment elsewhere, since segments differ by nature.
    """
    pools: dict[_Pool, list[Floats]] = defaultdict(list)
    groups: dict[_Pool, set[int]] = defaultdict(set)
    for structure in structures:
        for at, key in enumerate(_pools_of(structure)):
            pools[key].append(structure.transfer[:, at])
            groups[key].add(structure.places[at].communicator)
    typical = {key: float(np.median(np.concatenate(parts))) for key, parts in pools.items()}
    return [
        Ideal(
            segment=np.broadcast_to(
                np.nanmean(structure.segment, axis=(0, 2))[None, :, None],
                (1, *structure.segment.shape[1:]),
            ),
            transfer=np.array([[typical[key] for key in _pools_of(structure)]]),
            compared=tuple(len(groups[key]) for key in _pools_of(structure)),
        )
        for structure in structures
    ]


def _pools_of(structure: Structure) -> list[_Pool]:
    """What each collective is compared by: without a known size, only with itself."""
    keys = []
    for at, place in enumerate(structure.places):
        size = int(structure.size_bytes[at])
        members = int(np.count_nonzero(structure.members[at]))
        alone = (place.communicator << 32) + place.index if size < 0 else -1
        keys.append((int(place.collective), members, size, alone))
    return keys
