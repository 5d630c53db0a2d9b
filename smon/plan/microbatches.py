"""Deal whole microbatches to other DP ranks within each step, or run them in another order.

A microbatch takes its computes on all stages with it. Each rank keeps its number of microbatches,
so no rank holds more activations than now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.evidence import Evidence, Floats, nanmedian
from smon.ops import STREAM_COMPUTE, OpType
from smon.plan.fix import Fix, FixName, mean_now, mean_with, speedup_of
from smon.plan.found import without_them
from smon.simulate.cube import Changed, Changes

Index = NDArray[np.intp]

#: Forward and backward of a microbatch are long together if that is the data's doing. In clean
#: jobs the correlation is 0, in the public trace with uneven data 0.99.
MIN_CORRELATION: Final = 0.5
_FEWEST: Final = 8

#: A worker this much above its peers, in this share of so many steps, is slow whatever its data.
_LASTING_RATIO: Final = 1.05
_LASTING_SHARE: Final = 0.8
_LASTING_STEPS: Final = 5

_SAME_BATCH: Final = "the optimiser sees the same batch: only the order of its parts differs"


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """Durations by microbatch.

    Attributes
    ----------
    data
        By op type, (steps, dp_ranks, stages, microbatches) durations without slow workers.
    slow
        By op type, (steps, dp_ranks, stages, 1) how much longer the worker takes.
    weight
        (steps, dp_ranks, microbatches) time over all stages; NaN where there is none.
    mirrored
        Op types that go through the microbatches from the last to the first.
    """

    data: dict[OpType, Floats]
    slow: dict[OpType, Floats]
    weight: Floats
    mirrored: frozenset[OpType]

    def dealt(self, source: Index) -> Changes:
        """Durations after dealing.

        Parameters
        ----------
        source
            (steps, dp_ranks, microbatches) which microbatch of the step comes here, counted over
            ranks and positions.
        """
        work = {}
        for optype, cube in self.data.items():
            flat = np.moveaxis(cube, 2, 3).reshape(len(cube), -1, cube.shape[2])
            steps = np.arange(len(cube))[:, None, None]
            moved = np.moveaxis(flat[steps, source], 3, 2) * self.slow[optype]
            work[optype] = _mirror(moved) if optype in self.mirrored else moved
        return Changes(work)


def _mirror(cube: Floats) -> Floats:
    """The known positions of each lane in reverse; the rest stays where it is."""
    count = np.count_nonzero(~np.isnan(cube), axis=-1, keepdims=True)
    position = np.arange(cube.shape[-1])
    index = np.where(position < count, count - 1 - position, position)
    return np.take_along_axis(cube, index, axis=-1)


def deal_microbatches(evidence: Evidence, undone: Changes) -> list[Fix]:
    """Redistribute over DP ranks; reorder inside each rank.

    Parameters
    ----------
    undone
        What undoes slow workers: their slowness does not move with the microbatch.

    Returns
    -------
    list
        Empty if microbatches are alike, cannot be told apart, or there is but one.
    """
    load = _load(evidence, undone)
    if load is None:
        return []
    fixes = []
    ranks, count = load.weight.shape[1:]
    if ranks > 1:
        fixes.append(_fix(evidence, load, _redistributed(load.weight), _REDISTRIBUTE))
    if count > 1:
        own = np.broadcast_to(np.arange(ranks * count).reshape(ranks, count), load.weight.shape)
        fixes.append(_fix(evidence, load, own, _REORDER))
    return fixes


_REDISTRIBUTE: Final = (
    FixName.REDISTRIBUTE_MICROBATCHES,
    "deal the microbatches of each step to the DP ranks by their length, longest first to the "
    "rank with the least to do",
    "the lengths of all microbatches of a step are known before it begins",
)
_REORDER: Final = (
    FixName.REORDER_MICROBATCHES,
    "each DP rank keeps its microbatches",
    "the lengths of a rank's microbatches are known before the step begins",
)


def _fix(evidence: Evidence, load: _Load, source: Index, what: tuple[FixName, str, str]) -> Fix:
    """In the order of the microbatches that is best."""
    name, detail, knows = what
    orders = {
        "in the order in which they come": np.sort(source, axis=2),
        "the longest first": _by_weight(load.weight, source, -1),
        "the shortest first": _by_weight(load.weight, source, 1),
    }
    means = {
        how: float(
            mean_with(evidence, Changed(evidence.window, load.dealt(_known_first(load, order))))[0]
        )
        for how, order in orders.items()
    }
    best = min(means, key=lambda how: means[how])
    return Fix(
        fix=name,
        detail=f"{detail}; run {best}",
        step_time_ns=means[best],
        speedup=speedup_of(mean_now(evidence), means[best]),
        assumptions=(knows, "every rank keeps its number of microbatches", _SAME_BATCH),
    )


def _by_weight(weight: Floats, source: Index, sign: int) -> Index:
    flat = weight.reshape(len(weight), -1)
    dealt = np.take_along_axis(flat, source.reshape(len(weight), -1), 1).reshape(source.shape)
    return np.take_along_axis(source, np.argsort(sign * dealt, axis=2, kind="stable"), 2)


def _known_first(load: _Load, source: Index) -> Index:
    """Positions of a lane are filled from the first on: places without a microbatch go last."""
    flat = np.isnan(load.weight).reshape(len(source), -1)
    empty = np.take_along_axis(flat, source.reshape(len(source), -1), 1).reshape(source.shape)
    return np.take_along_axis(source, np.argsort(empty, axis=2, kind="stable"), 2)


def _redistributed(weight: Floats) -> Index:
    """Greedy, longest first, to the rank with the least load that has a place left."""
    steps, ranks, count = weight.shape
    places = np.count_nonzero(~np.isnan(weight), axis=2)
    flat = weight.reshape(steps, -1)
    order = np.argsort(-flat, axis=1, kind="stable")
    sorted_weight = np.take_along_axis(flat, order, 1)
    load, taken = np.zeros((steps, ranks)), np.zeros((steps, ranks), np.intp)
    load[places == 0] = np.inf
    # Empty places keep a source that is empty as well.
    source = np.full((steps, ranks, count), -1, np.intp)
    step = np.arange(steps)
    for number in range(int(places.sum(axis=1).max(initial=0))):
        there = step[number < places.sum(axis=1)]
        rank = np.argmin(load[there], axis=1)
        source[there, rank, taken[there, rank]] = order[there, number]
        load[there, rank] += sorted_weight[there, number]
        taken[there, rank] += 1
        full = taken[there, rank] == places[there, rank]
        load[there[full], rank[full]] = np.inf
    for index in np.flatnonzero(places.sum(axis=1) < ranks * count).tolist():
        empty = order[index, int(places[index].sum()) :]
        source[index][source[index] < 0] = empty
    return source


def _load(evidence: Evidence, undone: Changes) -> _Load | None:
    recorded = {op: evidence.recorded_work(op) for op in sorted(STREAM_COMPUTE)}
    recorded = {op: cube for op, cube in recorded.items() if cube.size}
    if not _alike(evidence, recorded):
        return None
    data = {op: _evened(without_them(evidence, undone, op)) for op in recorded}
    mirrored = _mirrored(data)
    if mirrored is None:
        return None
    data = {op: _mirror(cube) if op in mirrored else cube for op, cube in data.items()}
    slow = {
        op: _slowness(_mirror(cube) if op in mirrored else cube, data[op])
        for op, cube in recorded.items()
    }
    # A lane has all stages of a microbatch, or none.
    weight = np.sum([cube.sum(axis=2) for cube in data.values()], axis=0)
    return _Load(data, slow, np.asarray(weight, float), mirrored)


def _evened(cube: Floats) -> Floats:
    """Without what makes a worker long in nearly every step: that is its own, not its data's."""
    mean = nanmedian(cube, 3)
    ratio = mean / nanmedian(mean, 1)[:, None]
    with np.errstate(invalid="ignore"):
        lasting = (ratio > _LASTING_RATIO).mean(axis=0) >= _LASTING_SHARE
    factor = np.where(lasting & (len(cube) >= _LASTING_STEPS), nanmedian(ratio, 0), 1.0)
    return cube / factor[..., None]


def _alike(evidence: Evidence, cubes: dict[OpType, Floats]) -> bool:
    """Whether position and microbatch are the same thing: one model chunk, equally many ops."""
    structures = [part.graph.structure for part in evidence.window.parts]
    if any(int(structure.chunk.max(initial=0)) > 0 for structure in structures):
        return False
    if OpType.FORWARD_COMPUTE not in cubes or OpType.BACKWARD_COMPUTE not in cubes:
        return False
    counts = [np.count_nonzero(~np.isnan(cube), axis=3) for cube in cubes.values()]
    first = counts[0][:, :, :1]
    same = all(cube.shape[3] == cubes[OpType.FORWARD_COMPUTE].shape[3] for cube in cubes.values())
    return same and all((count == first).all() for count in counts)


def _slowness(recorded: Floats, data: Floats) -> Floats:
    """(steps, dp_ranks, stages, 1) how many times longer a worker takes than its peers would."""
    ratio = np.ones_like(recorded)
    np.divide(recorded, data, out=ratio, where=data > 0)
    return np.asarray(nanmedian(ratio, 3)[..., None], float)


def _mirrored(data: dict[OpType, Floats]) -> frozenset[OpType] | None:
    """Op types whose order of microbatches is the reverse; None if nothing correlates."""
    forward = _centred(data[OpType.FORWARD_COMPUTE])
    mirrored = set()
    for op, cube in data.items():
        if op == OpType.FORWARD_COMPUTE:
            continue
        other = _centred(cube)
        straight, reverse = _correlation(forward, other), _correlation(forward, _mirror(other))
        if max(straight, reverse) < MIN_CORRELATION:
            return None
        if reverse > straight:
            mirrored.add(op)
    return frozenset(mirrored)


def _centred(cube: Floats) -> Floats:
    """(steps, dp_ranks, microbatches) log time over all stages, minus its lane's and position's.

    Positions differ without any data: the first microbatch of a step is often slower.
    """
    total = cube.sum(axis=2)
    logs = np.full(total.shape, np.nan)
    np.log(total, out=logs, where=total > 0)
    lane = nanmedian(logs, 2)[..., None] if cube.shape[3] > 1 else nanmedian(logs, 0)[None]
    logs = logs - lane
    return logs - nanmedian(logs, (0, 1))


def _correlation(one: Floats, other: Floats) -> float:
    both = ~(np.isnan(one) | np.isnan(other))
    if np.count_nonzero(both) < _FEWEST:
        return 0.0
    x, y = one[both] - one[both].mean(), other[both] - other[both].mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else 0.0
