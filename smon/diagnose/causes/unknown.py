"""unknown: much of the step is above ideal, and no cause explains it. Nobody is named."""

from __future__ import annotations

import numpy as np

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence
from smon.diagnose.thresholds import UNKNOWN_SHARE
from smon.simulate.cube import Changes


def find(evidence: Evidence) -> list[Draft]:
    """What is left of the slowdown once everything that was found is undone."""
    # Stalls are no part of the times that are simulated without launch delays.
    slow = Changes(work=evidence.explained.work)
    undone = float(np.mean(evidence.times.simulated - evidence.cost_ns(slow)))
    left = undone - float(np.mean(evidence.times.ideal))
    recorded = float(np.mean(evidence.times.recorded))
    if left < UNKNOWN_SHARE * recorded:
        return []
    return [
        Draft(
            verdict="none",
            cause="unknown",
            scope="job",
            phase="whole step",
            persistence=Persistence(Kind.PERSISTENT, 1.0),
            confidence=0.2,
            evidence=(
                f"{left / 1e6:.0f} ms per step above the ideal step time have no known cause; the "
                "ledger says which kind of time it is",
            ),
            next=("smon analyze --timeline OUT: look at a few steps, actual over ideal",),
            extra_excess_ns=left,
        )
    ]
