"""job_wide over windows: the ideal itself got slower than in the job's earlier windows."""

from __future__ import annotations

import numpy as np

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence
from smon.diagnose.thresholds import JOB_WIDE_RATIO


def find(evidence: Evidence) -> list[Draft]:
    """Everybody is slower than before: no rank stands out within the window, the whole does."""
    history = evidence.history
    if history is None or history.ideal_s <= 0:
        return []
    ideal = float(np.mean(evidence.times.ideal)) / 1e9
    ratio = ideal / history.ideal_s
    if ratio < 1 + JOB_WIDE_RATIO:
        return []
    return [
        Draft(
            verdict="job_wide",
            cause="job_wide",
            scope="job",
            phase="whole step",
            persistence=Persistence(Kind.PERSISTENT, 1.0),
            confidence=0.7,
            evidence=(
                f"the ideal step takes {ideal:.3g} s, {ratio - 1:.1%} more than in the "
                f"{history.windows} earlier windows (until step {history.last_step}): all ranks "
                "alike",
            ),
            next=("what changed since: software, data, other jobs on the network, power, cooling",),
            extra_excess_ns=(ideal - history.ideal_s) * 1e9,
        )
    ]
