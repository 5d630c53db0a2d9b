"""Warm-up: the first steps after a start compile and connect, and say nothing about the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: A step of the beginning is warm-up above this multiple of the typical one. Profilers, compilers
#: and communicators make first steps 1.3 to 10 times as long.
WARMUP_FACTOR = 1.3
#: At most so many steps, or this share of a window, are warm-up.
WARMUP_STEPS = 3
WARMUP_SHARE = 0.2
#: And everybody must be slow: the typical worker's compute, above this multiple. A single slow
#: worker in the first step is no warm-up.
WARMUP_PACE = 1.15
_MIN_STEPS = 4


def warmup_steps(
    recorded_ns: NDArray[np.float64],
    ideal_ns: NDArray[np.float64],
    pace: NDArray[np.float64],
) -> int:
    """How many steps at the start of a window are warm-up.

    Parameters
    ----------
    recorded_ns, ideal_ns
        (steps,) recorded and ideal step times: a step with more microbatches is no warm-up.
    pace
        (steps,) compute time of the typical worker, over that in the typical step.
    """
    if len(recorded_ns) < _MIN_STEPS:
        return 0
    ratio = recorded_ns / ideal_ns
    slow = (ratio > WARMUP_FACTOR * np.median(ratio)) & (pace > WARMUP_PACE)
    count = 0 if slow.all() else int(np.argmin(slow))
    return count if count <= max(WARMUP_STEPS, WARMUP_SHARE * len(recorded_ns)) else 0
