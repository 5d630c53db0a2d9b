"""What the planner makes of findings: peers in place of suspects, times with some undone.

Flow: `smon.diagnose.verdict` → **here** → `smon.plan.planner`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from smon.diagnose.evidence import Evidence, Floats
from smon.ops import STREAM_COMPUTE, OpType
from smon.simulate.cube import Changes
from smon.simulate.whatif import Worker


def like_peers(evidence: Evidence, workers: Collection[Worker]) -> Changes:
    """These workers compute like the mean of the others at the same step, stage and position.

    Where a worker has no peers, it stays as it is.
    """
    work = {}
    for optype in sorted(STREAM_COMPUTE):
        recorded = evidence.recorded_work(optype)
        if recorded.size == 0:
            continue
        cube = recorded.copy()
        for stage in sorted({stage for _, stage in workers}):
            chosen = sorted({dp for dp, of in workers if of == stage})
            mean = _mean_of(np.delete(recorded[:, :, stage], chosen, axis=1))[:, None]
            own = recorded[:, chosen, stage]
            cube[:, chosen, stage] = np.where(
                np.isnan(mean), own, np.where(np.isnan(own), own, mean)
            )
        work[optype] = cube
    return Changes(work)


def _mean_of(values: Floats) -> Floats:
    """(steps, positions) mean over DP ranks; NaN where there are none."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    mean = np.full(count.shape, np.nan)
    np.divide(np.where(known, values, 0.0).sum(axis=1), count, out=mean, where=count > 0)
    return mean


def without_them(evidence: Evidence, undone: Changes, optype: OpType) -> Floats:
    """Durations of an op type with some findings undone."""
    changed = undone.work.get(optype)
    return evidence.recorded_work(optype) if changed is None else changed
