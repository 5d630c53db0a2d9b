"""What tells clocks apart: recorded ends that should coincide, without the usual lag of receives.

Flow: `smon.simulate.clock_axis` → **here** → `smon.simulate.clock_fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from smon.graph.fill import Filled
from smon.ops import OpType
from smon.simulate.clock_axis import Clocks, Floats, Indices, TimeAxis

#: About so many ends of each type are evidence enough: of larger windows, steps are picked evenly,
#: and once there are only `_MIN_STEPS` left, every n-th microbatch of them.
_MAX_ENDS = 8_000
_MIN_STEPS = 8

_P2P_KINDS = (OpType.FORWARD_SEND, OpType.BACKWARD_SEND)
_RECEIVES = (OpType.FORWARD_RECV, OpType.BACKWARD_RECV)

_NONE: Indices = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Recorded ends; those of one group should be one.

    Attributes
    ----------
    clock, group
        (n,) whose clock, and which group, from 0.
    kind
        (n,) op type; of a point-to-point pair, the sender's.
    receives
        (n,) the receiving end of a pair.
    end, time
        (n,) in ns since the start of the step; and -1 … 1 over the window.
    """

    clock: Indices
    group: Indices
    kind: Indices
    receives: NDArray[np.bool_]
    end: Floats
    time: Floats

    def __len__(self) -> int:
        return len(self.clock)

    def take(self, keep: NDArray[np.bool_] | Indices) -> Ends:
        """These ends only, groups numbered anew."""
        group = self.group[keep]
        used = np.zeros(int(group.max(initial=-1)) + 1, bool)
        used[group] = True
        group = (np.cumsum(used) - 1)[group]
        return Ends(
            self.clock[keep],
            group,
            self.kind[keep],
            self.receives[keep],
            self.end[keep],
            self.time[keep],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Meets:
    """Ops of one structure that end together with others; ``M`` of them.

    Attributes
    ----------
    slot
        (M,) which op.
    group
        (M,) number of its group: one per step if `synced`, else one per lane.
    synced
        (M,) whether all DP ranks take part.
    kind
        (M,) op type of the group, the sender's of a pair.
    place
        (M,) sequence number in the group's type.
    """

    slot: Indices
    group: Indices
    synced: NDArray[np.bool_]
    kind: Indices
    place: Indices


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Which ends of one type are looked at: in these steps, those of every n-th microbatch."""

    steps: NDArray[np.bool_]
    every: int


def all_ends(lanes: Sequence[Filled], clocks: Clocks, axis: TimeAxis) -> Ends:
    """Ends of all structures; of large windows a sample, spread evenly."""
    count = len(axis.begin)
    keys = sorted({key for filled in lanes for key in filled.program.graph.sync.values()})
    number = {key: index for index, key in enumerate(keys)}
    meets = [_meets(filled, number) for filled in lanes]
    samples = _samples(lanes, meets, count)
    blocks: list[Ends] = []
    first = len(keys) * count
    for filled, meet in zip(lanes, meets, strict=True):
        blocks += [
            _block(filled, _picked(meet, kind, sample.every), sample, clocks, axis, first)
            for kind, sample in samples.items()
        ]
        first += (int(meet.group.max(initial=-1)) + 1) * len(filled.step)
    return _joined(blocks)


def _meets(filled: Filled, number: Mapping[tuple[OpType, int, int], int]) -> _Meets:
    graph = filled.program.graph
    structure = graph.structure
    size = np.bincount(graph.group[graph.group >= 0], minlength=1)
    synced = np.zeros(len(graph), bool)
    synced[list(graph.sync)] = True
    slot = np.flatnonzero(synced | ((graph.group >= 0) & (size[graph.group] > 1)))
    group = graph.group[slot]
    # The lowest op type of a group names it: of a pair, the send. Its place is the sender's, too.
    leader = np.lexsort((structure.seq[slot], structure.optype[slot], group))
    _, lead, inverse = np.unique(group[leader], return_index=True, return_inverse=True)
    lead_slot = np.empty(len(slot), np.intp)
    lead_slot[leader] = slot[leader][lead][inverse]
    keyed = [number[graph.sync[op]] if op in graph.sync else -1 for op in slot.tolist()]
    return _Meets(
        slot=slot,
        group=np.where(synced[slot], keyed, group).astype(np.intp),
        synced=synced[slot],
        kind=structure.optype[lead_slot],
        place=structure.seq[lead_slot],
    )


def _samples(lanes: Sequence[Filled], meets: Sequence[_Meets], count: int) -> dict[int, _Sample]:
    """Of each type, enough ends; rather fewer microbatches than too few steps."""
    total = np.zeros(len(OpType))
    for filled, meet in zip(lanes, meets, strict=True):
        total += np.bincount(meet.kind, minlength=len(OpType)) * float(len(filled.step))
    samples = {}
    for kind in np.flatnonzero(total).tolist():
        in_step = total[kind] / count
        every = max(int(in_step * min(_MIN_STEPS, count) / _MAX_ENDS), 1)
        wanted = max(int(_MAX_ENDS * every / in_step), _MIN_STEPS)
        steps = np.zeros(count, bool)
        steps[np.linspace(0, count - 1, min(wanted, count)).astype(np.intp)] = True
        samples[kind] = _Sample(steps, every)
    return samples


def _picked(meet: _Meets, kind: int, every: int) -> _Meets:
    """Those of one type, and of every n-th microbatch if they are per microbatch."""
    keep = (meet.kind == kind) & (meet.synced | (meet.place % every == 0))
    return _Meets(*(getattr(meet, field.name)[keep] for field in fields(_Meets)))


def _block(
    filled: Filled, meet: _Meets, sample: _Sample, clocks: Clocks, axis: TimeAxis, first: int
) -> Ends:
    """Recorded ends of these ops in the lanes of the sample, slot by slot."""
    lane = np.flatnonzero(sample.steps[filled.step])
    pick = np.ix_(meet.slot, lane)
    end, recorded = filled.end[pick], filled.row[pick] >= 0
    structure = filled.program.graph.structure
    step = filled.step[lane]
    in_step = meet.group[:, None] * len(axis.begin) + step
    in_lane = first + meet.group[:, None] * len(filled.step) + lane
    receives = np.isin(structure.optype[meet.slot], _RECEIVES)
    return Ends(
        clock=clocks.of_worker[filled.dp[lane], structure.stage[meet.slot][:, None]][recorded],
        group=np.where(meet.synced[:, None], in_step, in_lane)[recorded],
        kind=np.broadcast_to(meet.kind[:, None], end.shape)[recorded],
        receives=np.broadcast_to(receives[:, None], end.shape)[recorded],
        end=end[recorded],
        time=axis.of(end, step)[recorded],
    )


def _joined(blocks: Sequence[Ends]) -> Ends:
    none = Ends(_NONE, _NONE, _NONE, np.empty(0, bool), np.empty(0), np.empty(0))
    names = [field.name for field in fields(Ends)]
    return Ends(*(np.concatenate([getattr(b, name) for b in (none, *blocks)]) for name in names))


def compared(ends: Ends) -> Ends:
    """Without the ends that have no other to be compared with, on another clock."""
    if not len(ends):
        return ends
    # Numbers of all groups of the window would be many more than those of the sample.
    group = np.unique(ends.group, return_inverse=True)[1]
    ends = replace(ends, group=group.astype(np.intp))
    lowest = np.full(int(ends.group.max()) + 1, np.iinfo(np.intp).max)
    np.minimum.at(lowest, ends.group, ends.clock)
    highest = np.full(len(lowest), -1)
    np.maximum.at(highest, ends.group, ends.clock)
    ends = ends.take((highest > lowest)[ends.group])
    # One time for all of a group: by their own clocks, a drift that all share would seem to matter.
    mean = np.bincount(ends.group, ends.time) / np.bincount(ends.group)
    return _without_lag(replace(ends, time=mean[ends.group]))


def _without_lag(ends: Ends) -> Ends:
    """Take off what a receive ends later than its send, on each link.

    Both directions of a link have the same lag (as NTP assumes), so that it is the mean of what the
    two show, whatever the clocks. Links that carry one direction only are left as they are. In the
    public traces: 0 to 73 µs.
    """
    receive = np.flatnonzero(ends.receives)
    if not len(receive):
        return ends
    send_of = np.empty(int(ends.group.max()) + 1, np.intp)
    sends = np.flatnonzero(np.isin(ends.kind, _P2P_KINDS) & ~ends.receives)
    send_of[ends.group[sends]] = sends
    send = send_of[ends.group[receive]]
    sender, receiver = ends.clock[send], ends.clock[receive]
    later = ends.end[receive] - ends.end[send]
    low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
    link = np.unique(low * (int(high.max()) + 1) + high, return_inverse=True)[1]
    up = medians(later[sender < receiver], link[sender < receiver], int(link.max()) + 1)
    down = medians(later[sender > receiver], link[sender > receiver], int(link.max()) + 1)
    lag = np.nan_to_num((up + down) / 2)
    end = ends.end.copy()
    end[receive] -= lag[link]
    return replace(ends, end=end)


def medians(values: Floats, group: Indices, count: int) -> Floats:
    """(count,) median of each group, NaN where it has no value."""
    order = np.lexsort((values, group))
    size = np.bincount(group, minlength=count)
    first = np.cumsum(size) - size
    found = np.full(count, np.nan)
    some = size > 0
    middle = values[order][first[some] + size[some] // 2]
    below = values[order][first[some] + (size[some] - 1) // 2]
    found[some] = (middle + below) / 2
    return found


# --- who can be compared with whom ----------------------------------------------------------


def components(ends: Ends, clocks: Clocks) -> Indices:
    """(clocks,) component of each clock, the largest first; -1 for clocks that nobody uses."""
    label = labels(ends, clocks.count)
    size = np.bincount(label[clocks.used], minlength=clocks.count)
    rank = np.empty(clocks.count, np.intp)
    rank[np.argsort(-size, kind="stable")] = np.arange(clocks.count)
    component: Indices = np.where(clocks.used, rank[label], -1)
    return component


def labels(ends: Ends, count: int) -> Indices:
    """(count,) lowest clock that each clock can be compared with, directly or through others."""
    label = np.arange(count)
    if not len(ends):
        return label
    any_of = np.empty(int(ends.group.max()) + 1, np.intp)
    any_of[ends.group] = ends.clock
    edges = np.unique(ends.clock * count + any_of[ends.group])
    one, other = edges // count, edges % count
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, one, label[other])
        np.minimum.at(lowest, other, label[one])
        lowest = lowest[lowest]
        if np.array_equal(lowest, label):
            return label
        label = lowest
