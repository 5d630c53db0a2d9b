"""Garbage collection: no pauses at all, or all ranks at once, every N steps."""

from __future__ import annotations

from typing import Final

import numpy as np

from smon.diagnose.evidence import Evidence, F
from smon.plan.fix import Fix, FixName, mean_now, mean_with, speedup_of
from smon.simulate.cube import Changed, Changes
from smon.simulate.engine import Floats

#: All ranks wait for the longest collection; the very longest may be something else.
_LONG: Final = 0.9


def plan_collections(evidence: Evidence, extra: Floats) -> list[Fix]:
    """What unplanned pauses cost, and what they cost if all ranks pause together.

    Parameters
    ----------
    extra
        (steps, dp_ranks, stages, positions) ns that each forward takes longer; 0 or NaN if none.
    """
    pauses = extra > 0
    if not pauses.any():
        return []
    work = evidence.recorded_work(F) - np.where(pauses, extra, 0.0)
    now = mean_now(evidence)
    without = float(mean_with(evidence, Changed(evidence.window, Changes({F: work})))[0])
    every = _steps_between(pauses, evidence)
    long_ns = float(np.quantile(extra[pauses], _LONG))
    planned = without + long_ns / every
    return [
        Fix(
            fix=FixName.REMOVE_PAUSES,
            detail="switch automatic collection off: gc.disable(), gc.freeze() after the start",
            step_time_ns=without,
            speedup=speedup_of(now, without),
            assumptions=(
                "all pauses in forwards are garbage collections",
                "an upper bound: host memory must do without collections",
            ),
        ),
        Fix(
            fix=FixName.PLAN_GC,
            detail=f"collect on all ranks in the same step, every {every} steps",
            step_time_ns=planned,
            speedup=speedup_of(now, planned),
            assumptions=(
                "all pauses in forwards are garbage collections",
                f"each rank collects as often as now, all ranks together, {long_ns / 1e6:.0f} ms",
            ),
        ),
    ]


def _steps_between(pauses: np.ndarray, evidence: Evidence) -> int:
    """Steps between two pauses of one worker, on average."""
    count = int(np.count_nonzero(pauses.any(axis=3)))
    known = ~np.isnan(evidence.recorded_work(F)[..., 0])
    return max(1, round(int(np.count_nonzero(known)) / count))
