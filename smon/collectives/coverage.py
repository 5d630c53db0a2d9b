"""How much of an interval a set of events covers.

Flow: `smon.trace.events` → **here** → `smon.collectives.segments`, `smon.collectives.activity`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.trace.events import RankEvents

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """The union of the events of one rank.

    Attributes
    ----------
    edges
        Begin and end of each piece of the union, in turn, ns since some origin.
    sums
        How much of the time before each edge is covered.
    """

    edges: Floats
    sums: Floats

    @staticmethod
    def of(events: RankEvents, origin_ns: int) -> Coverage:
        """What events cover; times count from `origin_ns`."""
        start = (events.start_ns - origin_ns).astype(np.float64)
        end = (events.end_ns - origin_ns).astype(np.float64)
        return _union(start, end)

    def joined(self, other: Coverage) -> Coverage:
        """What either covers."""
        start = np.concatenate([self.edges[::2], other.edges[::2]])
        end = np.concatenate([self.edges[1::2], other.edges[1::2]])
        order = np.argsort(start, kind="stable")
        return _union(start[order], end[order])

    def within(self, begin: Floats, end: Floats) -> Floats:
        """Covered ns of each interval; 0 where one is NaN or ends before it begins."""
        if not len(self.edges):
            return np.zeros(begin.shape)
        known = end > begin
        low = np.interp(np.where(known, begin, 0.0), self.edges, self.sums)
        high = np.interp(np.where(known, end, 0.0), self.edges, self.sums)
        covered: Floats = np.where(known, high - low, 0.0)
        return covered


def _union(start: Floats, end: Floats) -> Coverage:
    """The union of intervals that are sorted by start."""
    if not len(start):
        return Coverage(np.empty(0), np.empty(0))
    latest = np.maximum.accumulate(end)
    fresh = np.ones(len(start), bool)
    fresh[1:] = start[1:] > latest[:-1]
    first = np.flatnonzero(fresh)
    begins = start[first]
    ends = latest[np.append(first[1:], len(start)) - 1]
    edges = np.stack([begins, ends], axis=1).reshape(-1)
    lengths = np.stack([np.zeros(len(begins)), ends - begins], axis=1).reshape(-1)
    return Coverage(edges, np.cumsum(lengths))
