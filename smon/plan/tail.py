"""The tail forecast: step time at other DP sizes, E[max of N replicas].

Every step waits for the slowest of its replicas; more replicas make a slower slowest one. How far
replicas lie apart is taken from the trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from smon.diagnose.evidence import Evidence
from smon.plan.fix import mean_now
from smon.plan.lanes import alone_ns
from smon.simulate.engine import Floats
from smon.simulate.whatif import Worker

#: Sizes up to so many times today's.
_MAX_GROWTH: Final = 16
_RESAMPLES: Final = 200
_SEED: Final = 2016
_TAIL: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class ForecastPoint:
    """One DP size.

    Attributes
    ----------
    dp
        DP size.
    step_time_ns
        Expected mean step time.
    low_ns, high_ns
        95 % interval: other steps and other machines of the same kind.
    beyond_data
        More replicas than (step, replica) pairs were seen: rarer slowness than any that was seen
        is missing, and the truth lies above.
    """

    dp: int
    step_time_ns: float
    low_ns: float
    high_ns: float
    beyond_data: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    """Step time over DP size.

    Attributes
    ----------
    points
        By DP size, ascending; empty if there is but one replica to learn from.
    now_ns
        Mean step time today, all replicas.
    left_out
        DP ranks with a suspect: one bad machine is not multiplied.
    assumptions
        What must hold for the numbers to come true.
    """

    points: tuple[ForecastPoint, ...]
    now_ns: float
    left_out: tuple[int, ...]
    assumptions: tuple[str, ...]

    def series(self) -> tuple[list[int], list[float], list[float], list[float]]:
        """DP sizes, and seconds expected, low and high, for a plot."""
        return (
            [point.dp for point in self.points],
            [point.step_time_ns / 1e9 for point in self.points],
            [point.low_ns / 1e9 for point in self.points],
            [point.high_ns / 1e9 for point in self.points],
        )


def forecast(
    evidence: Evidence, *, suspects: Collection[Worker] = (), alone: Floats | None = None
) -> Forecast:
    """Step times at half, once, twice … sixteen times today's DP size.

    Parameters
    ----------
    suspects
        (dp, stage) of slow workers; their replicas are left out.
    alone
        Step times of replicas that wait for nobody, if they are known already.
    """
    every = alone_ns(evidence.window) if alone is None else alone
    left_out = sorted({dp for dp, _ in suspects})
    kept = np.delete(every, left_out, axis=1)
    steps = np.count_nonzero(~np.isnan(kept), axis=1) > 1
    now = mean_now(evidence)
    if not steps.any():
        return Forecast((), now, tuple(left_out), ("one replica shows no scatter",))
    scale = now / float(np.nanmax(every, axis=1).mean())
    points = _points(kept[steps] * scale, evidence.window.dp_ranks)
    return Forecast(tuple(points), now, tuple(left_out), _assumptions(left_out))


def _assumptions(left_out: list[int]) -> tuple[str, ...]:
    suspects = (
        (f"replicas with suspects are left out: DP {', '.join(map(str, left_out))}",)
        if left_out
        else ()
    )
    return (
        *suspects,
        "each replica keeps its microbatches: the batch grows with DP",
        "new replicas scatter like those seen, independently of each other",
        "collectives take as long as now: they get longer with DP",
    )


def _points(times: Floats, dp: int) -> Iterator[ForecastPoint]:
    """Exact expectation of the maximum over independent draws from all deviations seen.

    What a step has in common is kept apart: only the deviations from its mean are drawn.
    """
    known = ~np.isnan(times)
    count = known.sum(axis=1, keepdims=True)
    common = np.where(known, times, 0.0).sum(axis=1, keepdims=True) / count
    # Deviations from the mean of n are smaller than those from the truth.
    ratio = (times / common - 1.0) * np.sqrt(count / (count - 1))
    place = np.flatnonzero(known)
    order = place[np.argsort(ratio.reshape(-1)[place])]
    values = ratio.reshape(-1)[order]
    weights = _weights(known).reshape(-1, known.size)[:, order]
    step_weights = _step_weights(known)
    base = (step_weights @ common[:, 0]) / step_weights.sum(axis=1)
    cumulative = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    for size in _sizes(dp):
        below = cumulative**size
        chance = np.diff(below, axis=1, prepend=0.0)
        expected = base * (1.0 + chance @ values)
        low, high = np.quantile(expected[1:], _TAIL)
        yield ForecastPoint(size, float(expected[0]), float(low), float(high), size > len(values))


def _sizes(dp: int) -> list[int]:
    sizes = [dp // 2] if dp > 1 else []
    growth = 1
    while growth <= _MAX_GROWTH:
        sizes.append(dp * growth)
        growth *= 2
    return sizes


def _weights(known: np.ndarray) -> Floats:
    """(1 + resamples, steps, dp_ranks) the data as it is, then with steps and replicas redrawn."""
    replicas = known.shape[1]
    rng = np.random.default_rng(_SEED)
    by_replica = rng.multinomial(replicas, np.full(replicas, 1 / replicas), _RESAMPLES)
    both = _step_weights(known)[1:, :, None] * by_replica[:, None, :] * known
    # A draw that hits only what is absent says nothing: the data as it is stands in.
    both[both.sum(axis=(1, 2)) == 0] = known
    return np.concatenate([known[None].astype(float), both.astype(float)])


def _step_weights(known: np.ndarray) -> Floats:
    """(1 + resamples, steps) how often each step counts."""
    steps = len(known)
    rng = np.random.default_rng(_SEED + 1)
    drawn = rng.multinomial(steps, np.full(steps, 1 / steps), _RESAMPLES)
    return np.concatenate([np.ones((1, steps)), drawn.astype(float)])
