"""A window ready for simulation: graphs, lanes, and the durations measured from recorded times.

Launch delay and transfer time are defined in ``docs/method.md`` section 3.

Flow: `smon.graph` → **here** → `smon.simulate.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.graph.build import Graph
from smon.graph.fill import Filled
from smon.graph.program import Program
from smon.ops import OpType
from smon.simulate.lanes import Meeting, meeting

#: Launch delays and transfer times at or below this are clock or graph errors, and count as 0;
#: small negatives are rounding of the recorder and are kept (``docs/method.md`` section 3).
IMPOSSIBLE_NS = -10_000_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Lanes of one structure; ``N`` ops, ``L`` lanes, times in float64 ns.

    Attributes
    ----------
    program
        How to simulate them.
    step, dp
        (L,) index into the window's steps, and DP rank.
    row
        (N, L) row of the op table, -1 where an op was filled in.
    start, end
        (N, L) recorded times since the start of the step, missing ops filled.
    work
        (N, L) what simulation uses as duration: the recorded duration of local ops, the transfer
        time of grouped ones.
    delay
        (N, L) launch delay.
    """

    program: Program
    step: NDArray[np.intp]
    dp: NDArray[np.int32]
    row: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    work: NDArray[np.float64]
    delay: NDArray[np.float64]

    @property
    def graph(self) -> Graph:
        """The graph of these lanes."""
        return self.program.graph

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Everything that one analysis simulates.

    Attributes
    ----------
    steps
        (steps,) step numbers, ascending.
    stages, dp_ranks
        Pipeline size, and DP size of the layout (a step may have fewer).
    parts
        One per structure.
    meeting
        Lanes of one step meet in the DP-synchronised collectives.
    impossible_delays, impossible_transfers
        How many launch delays and transfer times were taken as 0, see `IMPOSSIBLE_NS`.
    """

    steps: NDArray[np.int64]
    stages: int
    dp_ranks: int
    parts: tuple[Part, ...]
    meeting: Meeting
    impossible_delays: int
    impossible_transfers: int

    def recorded(self) -> NDArray[np.float64]:
        """(steps,) recorded step time in ns: end of the last optimizer op."""
        ends = [part.end[list(part.program.finals)].max(axis=0) for part in self.parts]
        return self.meeting.latest(ends)


def make_window(
    steps: NDArray[np.int64], stages: int, dp_ranks: int, lanes: Sequence[Filled]
) -> Window:
    """Measure launch delays and transfer times.

    Parameters
    ----------
    steps
        Step numbers; every one of them has a lane.
    lanes
        Lanes of each structure, missing ops filled in.
    """
    meet = meeting([filled.step for filled in lanes], len(steps))
    transfers = _transfers(lanes, meet)
    parts, delays, bad_transfers = [], 0, 0
    for filled, transfer in zip(lanes, transfers, strict=True):
        graph = filled.program.graph
        delay = filled.start - latest_dependency(graph, filled.end)
        delays += _zero_impossible(delay)
        grouped = graph.group >= 0
        work = np.where(grouped[:, None], transfer, filled.end - filled.start)
        bad_transfers += _zero_impossible(work)
        parts.append(
            Part(
                program=filled.program,
                step=filled.step,
                dp=filled.dp,
                row=filled.row,
                start=filled.start,
                end=filled.end,
                work=work,
                delay=delay,
            )
        )
    return Window(steps, stages, dp_ranks, tuple(parts), meet, delays, bad_transfers)


def _zero_impossible(values: NDArray[np.float64]) -> int:
    bad = values <= IMPOSSIBLE_NS
    count = int(np.count_nonzero(bad))
    if count:
        values[bad] = 0.0
    return count


def latest_dependency(graph: Graph, end: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, L) latest end of what each op depends on; 0, the start of the step, if nothing."""
    latest = np.zeros_like(end)
    number, _ = _occurrence(graph.after)
    for k in range(int(number.max(initial=-1)) + 1):
        edges = number == k
        before, after = graph.before[edges], graph.after[edges]
        latest[after] = end[before] if k == 0 else np.maximum(latest[after], end[before])
    return latest


def _occurrence(keys: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """For sorted keys: how many equal ones stand before each, and its position."""
    position = np.arange(len(keys))
    return position - np.searchsorted(keys, keys), position


def _transfers(lanes: Sequence[Filled], meet: Meeting) -> list[NDArray[np.float64]]:
    """Per structure (N, L): end minus the latest start in the group; garbage for local ops."""
    latest = [_latest_start(filled.program.graph, filled.start) for filled in lanes]
    keys: dict[tuple[OpType, int, int], list[NDArray[np.float64] | None]] = {}
    members: dict[tuple[OpType, int, int], list[tuple[int, list[int]]]] = {}
    for index, filled in enumerate(lanes):
        for slot, key in filled.program.graph.sync.items():
            keys.setdefault(key, [None] * len(lanes))[index] = latest[index][slot]
            members.setdefault(key, []).append((index, [slot]))
    for key, parts in keys.items():
        over_dp = meet.latest(parts)
        for index, slots in members[key]:
            latest[index][slots] = over_dp[meet.step[index]]
    return [filled.end - start for filled, start in zip(lanes, latest, strict=True)]


def _latest_start(graph: Graph, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, L) latest start in the communication group of each op, within the lane."""
    latest = start.copy()
    grouped = np.flatnonzero(graph.group >= 0)
    order = grouped[np.argsort(graph.group[grouped], kind="stable")]
    group = graph.group[order]
    number, _ = _occurrence(group)
    leader = order[np.searchsorted(group, group)]
    for k in range(1, int(number.max(initial=0)) + 1):
        members = number == k
        latest[leader[members]] = np.maximum(latest[leader[members]], start[order[members]])
    latest[order] = latest[leader]
    return latest
