"""Spans on lanes (streams, threads), and which of them surround a moment.

Flow: `smon.trace.formats` → **here** → `smon.trace.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.trace.schema import INVALID_NS


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Start and duration in ns, lane and name of rows."""

    start: NDArray[np.int64]
    duration: NDArray[np.int64]
    lane: NDArray[np.int64]
    name: NDArray[np.int64]

    @property
    def end(self) -> NDArray[np.int64]:
        """When each row ended."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)


def enclosing(when: NDArray[np.int64], lane: NDArray[np.int64], spans: Times) -> NDArray[np.intp]:
    """Of each moment on a lane, the last span of that lane that began before and ends after it.

    -1 where there is none. Spans of one lane that lie inside each other count as the inner one.
    """
    found = np.full(len(when), -1, np.intp)
    for number in np.unique(spans.lane).tolist():
        mine = np.flatnonzero((spans.lane == number) & (spans.start != INVALID_NS))
        mine = mine[np.argsort(spans.start[mine], kind="stable")]
        moments = np.flatnonzero(lane == number)
        if not len(mine) or not len(moments):
            continue
        at = np.searchsorted(spans.start[mine], when[moments], side="right") - 1
        # What ends latest among all that began before covers a moment if anything does.
        latest = np.maximum.accumulate(spans.end[mine])
        covered = (at >= 0) & (when[moments] <= latest[np.maximum(at, 0)])
        direct = covered & (when[moments] <= spans.end[mine][np.maximum(at, 0)])
        leader = np.maximum.accumulate(np.where(spans.end[mine] == latest, np.arange(len(mine)), 0))
        chosen = np.where(direct, at, leader[np.maximum(at, 0)])
        found[moments[covered]] = mine[chosen[covered]]
    return found
