"""Move whole layers between pipeline stages.

Splits are compared on one lane with median durations, many side by side; the best one is then
simulated on all steps and replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.evidence import Evidence
from smon.errors import ConfigError
from smon.ops import OpType
from smon.plan.fix import MIN_GAIN, Fix, FixName, mean_now, mean_with, speedup_of
from smon.plan.lanes import engine_of, typical
from smon.plan.stages import SHARES, Stages, measure_stages
from smon.simulate.cube import Changes
from smon.simulate.engine import Floats
from smon.simulate.window import Window

Split = NDArray[np.int64]

#: Rounds of the search; each moves a layer, or ends it.
_MAX_ROUNDS: Final = 6
#: Stages that give, and stages that take, in one round.
_MAX_STAGES: Final = 8
#: So many splits are simulated on all steps and replicas.
_CANDIDATES: Final = 6
#: Among splits this close, the one that moves least is the best.
_TIE: Final = 0.001


class Scaled:
    """Recorded durations times a factor by op type and stage; what-ifs side by side.

    Parameters
    ----------
    factors
        By op type, (what_ifs, stages).
    """

    def __init__(self, window: Window, factors: dict[OpType, Floats]) -> None:
        self.window = window
        self.what_ifs = len(next(iter(factors.values())))
        self._factors = []
        for part in window.parts:
            structure = part.graph.structure
            of_op = np.ones((self.what_ifs, len(structure)))
            for optype, factor in factors.items():
                slots = structure.optype == optype
                of_op[:, slots] = factor[:, structure.stage[slots]]
            self._factors.append(of_op[..., None])

    def row(self, part: int, op: int) -> Floats:
        """(what_ifs, L) durations of one op."""
        row: Floats = self.window.parts[part].work[op] * self._factors[part][:, op]
        return row


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A search for the fastest split.

    Attributes
    ----------
    limit
        (stages,) most layers on each stage.
    """

    stages: Stages
    window: Window
    limit: Split

    def best(self) -> Split:
        """(splits, stages) the fastest ones, from the split with the shortest longest stage on."""
        engine = engine_of(self.window)
        best = self._shortest_longest()[None]
        for _ in range(_MAX_ROUNDS):
            splits = np.stack([*best, self.stages.counts, *self._neighbours(best[0])])
            splits = splits[((splits >= 1) & (splits <= self.limit)).all(axis=1)]
            scaled = Scaled(self.window, self.stages.factors(splits))
            chosen = choose(self.stages, splits, engine.run(scaled).step_ns[:, 0])
            if np.array_equal(chosen[0], best[0]):
                break
            best = chosen
        return best

    def _shortest_longest(self) -> Split:
        """Layers dealt one by one to the stage that is shortest with it."""
        counts = self.stages.counts
        split = np.ones_like(counts)
        layer = sum(self.stages.layer.values())
        time = self.stages.total(split)
        for _ in range(int(counts.sum()) - len(split)):
            stage = int(np.argmin(np.where(split < self.limit, time, np.inf)))
            split[stage] += 1
            time[stage] += layer
        return split

    def _neighbours(self, split: Split) -> list[Split]:
        order = np.argsort(-self.stages.total(split), kind="stable")
        moves = [
            (giver, taker)
            for giver in order[:_MAX_STAGES].tolist()
            for taker in order[::-1][:_MAX_STAGES].tolist()
            if giver != taker
        ]
        one = np.eye(len(split), dtype=np.int64)
        return [split - one[giver] + one[taker] for giver, taker in moves]


def choose(stages: Stages, splits: Split, times: Floats) -> Split:
    """The few fastest; first, among those that are as good as equal, the nearest to today's."""
    moved = np.abs(splits - stages.counts).sum(axis=1)
    equal = times <= times.min() * (1 + _TIE)
    order = np.lexsort((times, np.where(equal, moved, 0), ~equal))
    chosen: Split = splits[order[:_CANDIDATES]]
    return chosen


def move_layers(
    evidence: Evidence,
    undone: Changes,
    *,
    layers: Sequence[int] | None = None,
    most_activations: int | None = None,
) -> list[Fix]:
    """The best split within today's memory, and the best one of all if it gains more.

    Parameters
    ----------
    undone
        What undoes slow workers: a slow worker is not a long stage.
    layers
        Layers of each stage now; None if nobody knows.
    most_activations
        Layers × microbatches in flight that a stage can hold; the most of any stage today, if
        None.

    Raises
    ------
    ConfigError
        `layers` does not fit the pipeline.
    """
    stages = measure_stages(evidence, undone, layers)
    if stages is None:
        return []
    window = typical(evidence.window)
    cap = stages.activations if most_activations is None else most_activations
    spare = int(stages.counts.sum()) - len(stages.counts) + 1
    inside = np.maximum(cap // stages.in_flight, 1)
    limits = [np.minimum(np.maximum(inside, 1), spare)]
    if limits[0].sum() < stages.counts.sum():
        limits = []
    limits.append(np.full_like(stages.counts, spare))
    fixes: list[Fix] = []
    for limit in limits:
        split = _fastest(evidence, stages, _Search(stages, window, limit).best())
        if np.array_equal(split, stages.counts):
            continue
        fix = _fix(evidence, stages, split, cap)
        if not fixes or fix.speedup > fixes[-1].speedup + MIN_GAIN:
            fixes.append(fix)
    return fixes


def _fastest(evidence: Evidence, stages: Stages, splits: Split) -> Split:
    """The best of a few splits on all steps and replicas."""
    times = mean_with(evidence, Scaled(evidence.window, stages.factors(splits)))
    best: Split = choose(stages, splits, times)[0]
    return best


def with_split(
    evidence: Evidence, undone: Changes, layers: Sequence[int], split: Sequence[int]
) -> Fix:
    """What one split buys, whatever memory it takes.

    Raises
    ------
    ConfigError
        `layers` does not fit the pipeline, or `split` does not fit `layers`.
    """
    stages = measure_stages(evidence, undone, layers)
    if stages is None:
        raise ConfigError("layers of one stage, or of several model chunks, cannot be moved")
    if len(split) != len(layers) or sum(split) != sum(layers) or min(split) < 1:
        raise ConfigError(
            f"expected {sum(layers)} layers on {len(layers)} stages, each at least 1, found "
            f"{','.join(map(str, split))}: correct the split"
        )
    return _fix(evidence, stages, np.array(split, np.int64), stages.activations)


def _fix(evidence: Evidence, stages: Stages, split: Split, cap: int) -> Fix:
    scaled = Scaled(evidence.window, stages.factors(split[None]))
    now, then = mean_now(evidence), float(mean_with(evidence, scaled)[0])
    return Fix(
        fix=FixName.MOVE_LAYERS,
        detail=_detail(stages, split),
        step_time_ns=then,
        speedup=speedup_of(now, then),
        assumptions=(
            f"layers cost the same: {_milliseconds(stages)}"
            if stages.known
            else "layers cost the same; stages have equally many, unless an inner one is longer",
            _memory(stages, split, cap),
        ),
    )


def _milliseconds(stages: Stages) -> str:
    names = {OpType.FORWARD_COMPUTE: "forward", OpType.BACKWARD_COMPUTE: "backward"}
    parts = []
    for optype, layer in stages.layer.items():
        extras = [("loss", stages.loss[optype]), ("embedding", stages.embedding[optype])]
        told = [f", {what} {ns / 1e6:.3g} ms" for what, ns in extras if ns > layer / 10]
        parts.append(f"{names.get(optype, optype.label)} {layer / 1e6:.3g} ms{''.join(told)}")
    return "; ".join(parts)


def _detail(stages: Stages, split: Split) -> str:
    if stages.known:
        before, after = ("/".join(map(str, part.tolist())) for part in (stages.counts, split))
        return f"{before} → {after} layers"
    moved = split - stages.counts
    gives = [
        f"{Fraction(-int(moved[stage]), int(stages.counts[stage]))} of its layers off stage {stage}"
        for stage in np.flatnonzero(moved < 0).tolist()
    ]
    takes = [
        f"{Fraction(int(moved[stage]), SHARES)} of a stage to stage {stage}"
        for stage in np.flatnonzero(moved > 0).tolist()
    ]
    return ", ".join(gives + takes)


def _memory(stages: Stages, split: Split, cap: int) -> str:
    held = split * stages.in_flight
    stage = int(np.argmax(held))
    if held[stage] <= cap:
        return "no stage holds more activations than the fullest one today"
    more = held[stage] / cap - 1
    return f"stage {stage} has room for {more:.0%} more activations than the fullest one today"
