"""Bootstrap interval of the slowdown: a few sampled steps misjudge a job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: One step has no spread to resample.
MIN_STEPS = 2

_RESAMPLES = 4_000
_SEED = 20_25
_CONFIDENCE = 0.95


def bootstrap_interval(
    simulated: NDArray[np.float64], ideal: NDArray[np.float64]
) -> tuple[float, float] | None:
    """95 % percentile interval of mean(T) / mean(T_ideal), steps resampled with replacement.

    Parameters
    ----------
    simulated, ideal
        (steps,) step times.

    Returns
    -------
    tuple or None
        (low, high), the same for the same input; None with fewer than two steps.
    """
    steps = len(simulated)
    if steps < MIN_STEPS:
        return None
    # Sums over a resample depend only on how often each step was drawn.
    draws = np.random.default_rng(_SEED).multinomial(steps, np.full(steps, 1 / steps), _RESAMPLES)
    ratios = (draws @ simulated) / (draws @ ideal)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return float(low), float(high)
