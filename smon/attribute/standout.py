"""Single steps that stand out, and the op type that makes them: too rare to be a finding."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from smon.attribute.slowdown import StepTimes

#: A step stands out this far above the typical slowdown, and by so many robust deviations.
STANDOUT_RATIO = 0.05
STANDOUT_SCORE = 6.0
#: More steps than this share do not stand out: that is how the job is.
STANDOUT_SHARE = 0.1
_MIN_STEPS = 8
_MAX_SHOWN = 8


def standout_notes(times: StepTimes, steps: NDArray[np.int64]) -> list[str]:
    """One sentence per op type that makes steps stand out.

    Parameters
    ----------
    times
        Step times of the what-ifs.
    steps
        (steps,) step numbers.
    """
    if len(steps) < _MIN_STEPS:
        return []
    slow = times.simulated / times.ideal
    typical = float(np.median(slow))
    scatter = 1.4826 * float(np.median(np.abs(slow - typical)))
    out = np.flatnonzero(slow - typical > max(STANDOUT_RATIO * typical, STANDOUT_SCORE * scatter))
    if len(out) == 0 or len(out) > max(1, STANDOUT_SHARE * len(steps)):
        return []
    kinds = {name: one / times.ideal for name, one in times.by_optype.items()}
    rises = {name: ratio - np.median(ratio) for name, ratio in kinds.items()}
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index in out.tolist():
        by_kind[max(rises, key=lambda name: float(rises[name][index]))].append(index)
    return [_sentence(name, indices, slow, steps) for name, indices in sorted(by_kind.items())]


def _sentence(
    name: str, indices: list[int], slow: NDArray[np.float64], steps: NDArray[np.int64]
) -> str:
    numbers = ", ".join(str(step) for step in steps[indices[:_MAX_SHOWN]])
    more = f" and {len(indices) - _MAX_SHOWN} more" if len(indices) > _MAX_SHOWN else ""
    excess = float(np.mean(slow[indices]) / np.median(slow)) - 1.0
    which = "step" if len(indices) == 1 else "steps"
    return f"{which} {numbers}{more}: {excess:.0%} above the typical step, mostly by {name}"
