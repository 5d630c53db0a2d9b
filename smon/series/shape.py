"""The shape of a series of step times: warm-up, bursts of slow steps, levels.

Flow: `smon.trace.series` → **here** → `smon.series.report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: A value above this many medians is slow.
SLOW: Final = 1.3
#: In a burst about every second value is slow; scattered ones are in a much lower share.
_BURST_SHARE: Final = 0.5
#: With more slow values than that, slow is a level and no burst.
_MOST_SLOW_SHARE: Final = 0.25
_LEAST_SLOW_SHARE: Final = 1e-3
#: Chance of a burst in a series of scattered slow values: 1 in e^7, about 1,000.
_DOUBT: Final = 7.0
_LEAST_SLOW: Final = 5
_MAX_BURSTS: Final = 8

#: Values above this many medians at the very start are warm-up, of at most a tenth of the series.
_WARM_UP: Final = 1.1
_MOST_WARM_UP: Final = 0.1

#: Levels differ by that much, and by that many deviations of the values around them.
LEAST_CHANGE: Final = 1.05
_LEAST_DEVIATIONS: Final = 3.0
_LEAST_LEVEL: Final = 20
_MAX_CUTS: Final = 16
#: Values that are smoothed together.
_NEIGHBOURS: Final = 5
#: A cut gains more than this many variances for each power of e of the length.
_CUT: Final = 8.0
_LEAST_NOISE: Final = 1e-3
#: Median absolute deviation to standard deviation, of a normal distribution.
_MAD: Final = 1.4826


@dataclass(frozen=True, slots=True)
class Span:
    """Values from `first` up to, but without, `end`."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def warm_up(seconds: Floats) -> int:
    """How many values at the start are warm-up."""
    most = math.ceil(_MOST_WARM_UP * len(seconds))
    high = seconds[:most] > _WARM_UP * np.median(seconds)
    return int(np.argmin(high)) if len(high) and not high.all() else len(high)


def bursts_of(slow: Bools) -> list[Span]:
    """Where slow values are much denser than elsewhere, by place.

    A value counts for a burst by how much likelier it is there: the log of the ratio of the shares
    of slow values inside and outside. The stretch with the highest sum is a burst if scattered
    values are very unlikely to have such a sum anywhere.
    """
    share = float(slow.mean()) if len(slow) else 0.0
    if share > _MOST_SLOW_SHARE:
        return []
    usual = max(share, _LEAST_SLOW_SHARE)
    weights = np.where(
        slow, math.log(_BURST_SHARE / usual), math.log((1 - _BURST_SHARE) / (1 - usual))
    )
    least = math.log(max(len(slow), 1)) + _DOUBT
    found = sorted(_heaviest(weights, slow, least), key=lambda span: span.first)
    return found[:_MAX_BURSTS]


def _heaviest(weights: Floats, slow: Bools, least: float) -> Iterator[Span]:
    """Stretches with a sum of at least `least`, each the heaviest of what is left."""
    parts = [Span(0, len(weights))]
    while parts:
        part = parts.pop()
        if len(part) < _LEAST_SLOW:
            continue
        total = np.concatenate(([0.0], np.cumsum(weights[part.first : part.end])))
        below = np.minimum.accumulate(total)
        end = int(np.argmax(total - below))
        if total[end] - below[end] < least:
            continue
        span = Span(part.first + int(np.argmin(total[: end + 1])), part.first + end)
        if slow[span.first : span.end].sum() >= _LEAST_SLOW:
            yield span
        parts += [Span(part.first, span.first), Span(span.end, part.end)]


def levels_of(seconds: Floats) -> list[Span]:
    """Stretches of one typical value each, by place; one if the series keeps its level.

    Cut wherever the mean of the smoothed values changes by more than noise can; then neighbours
    whose typical values are alike are joined again.
    """
    ends = [0, *sorted(_cuts(_smooth(seconds), _noise(seconds))), len(seconds)]
    levels = [Span(first, end) for first, end in pairwise(ends)]
    while len(levels) > 1:
        differences = [_difference(seconds, *pair) for pair in pairwise(levels)]
        least = int(np.argmin(differences))
        if differences[least] >= 1.0:
            break
        levels[least : least + 2] = [Span(levels[least].first, levels[least + 1].end)]
    return levels


def _cuts(smooth: Floats, noise: float) -> Iterator[int]:
    """Where the mean changes, each the clearest place of what is left."""
    least = _CUT * noise**2 * math.log(max(len(smooth), 2))
    parts = [Span(0, len(smooth))]
    found = 0
    while parts and found < _MAX_CUTS:
        part = parts.pop()
        if len(part) < 2 * _LEAST_LEVEL:
            continue
        sums = np.cumsum(smooth[part.first : part.end])
        before = np.arange(_LEAST_LEVEL, len(part) - _LEAST_LEVEL + 1)
        after = len(part) - before
        means = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / after
        gain = before * after / len(part) * (means[0] - means[1]) ** 2
        best = int(np.argmax(gain))
        if gain[best] > least:
            cut = part.first + int(before[best])
            found += 1
            yield cut
            parts += [Span(part.first, cut), Span(cut, part.end)]


def _smooth(seconds: Floats) -> Floats:
    """Medians of neighbours: single slow values do not count."""
    if len(seconds) < _NEIGHBOURS:
        return seconds
    padded = np.pad(seconds, _NEIGHBOURS // 2, mode="edge")
    return np.asarray(np.median(sliding_window_view(padded, _NEIGHBOURS), axis=1), np.float64)


def _noise(seconds: Floats) -> float:
    """Standard deviation of values around their level, from differences of neighbours."""
    if len(seconds) < 2:  # noqa: PLR2004  # one value has no neighbour
        return 0.0
    deviation = _MAD * float(np.median(np.abs(np.diff(seconds)))) / math.sqrt(2)
    return max(deviation, _LEAST_NOISE * float(np.median(seconds)))


def _difference(seconds: Floats, one: Span, other: Span) -> float:
    """How far two levels are apart; 1 is just enough."""
    parts = [seconds[span.first : span.end] for span in (one, other)]
    medians = [float(np.median(part)) for part in parts]
    low, high = sorted(medians)
    left = np.concatenate([part - median for part, median in zip(parts, medians, strict=True)])
    noise = _MAD * float(np.median(np.abs(left)))
    enough = max((LEAST_CHANGE - 1) * low, _LEAST_DEVIATIONS * noise)
    return (high - low) / enough
