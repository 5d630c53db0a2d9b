"""warmup: the first steps compile and connect; they say nothing about the job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.thresholds import WARMUP_FACTOR, WARMUP_SHARE

#: A window that begins later than this does not hold the start of the job.
_FIRST_STEPS = 10
_MIN_STEPS = 4


def warmup_steps(times_ns: NDArray[np.float64], steps: NDArray[np.int64]) -> int:
    """How many steps at the start of the job are warm-up.

    Parameters
    ----------
    times_ns
        (steps,) recorded step times.
    steps
        (steps,) step numbers: only a window that begins with the job's first steps has any.
    """
    if len(steps) < _MIN_STEPS or steps[0] > _FIRST_STEPS:
        return 0
    slow = times_ns > WARMUP_FACTOR * np.median(times_ns)
    count = int(np.argmin(slow)) if not slow.all() else 0
    return count if count <= max(3, WARMUP_SHARE * len(steps)) else 0
