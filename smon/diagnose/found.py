"""A finding together with what undoes it, and nothing else.

Flow: `smon.diagnose.causes` → **here** → `smon.diagnose.verdict`, `smon.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from smon.diagnose.evidence import Evidence, Floats
from smon.ops import OpType
from smon.simulate.cube import Changes
from smon.simulate.whatif import Worker


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the planner needs of a finding.

    Attributes
    ----------
    cause
        A cause of ``docs/causes.md``.
    detail
        Where, in a few words, e.g. ``rank 43 (DP 3, stage 5)``.
    changes
        What undoes the finding, and nothing else: see `own_changes`.
    workers
        The suspects, if it has any.
    """

    cause: str
    detail: str
    changes: Changes = field(default_factory=Changes)
    workers: tuple[Worker, ...] = ()


def own_changes(evidence: Evidence, before: Changes, changes: Changes) -> Changes:
    """What one finding undoes by itself.

    A cause looks at a job in which what was found before is undone already, so its changed
    durations contain the earlier changes as well. Here its factors are put on what was recorded.

    Parameters
    ----------
    before
        What was explained when the cause looked.
    changes
        What the cause returned. Stalls are its own in any case.
    """
    work = {
        optype: _own(
            evidence.recorded_work(optype),
            before.work.get(optype, evidence.recorded_work(optype)),
            changed,
        )
        for optype, changed in changes.work.items()
    }
    return Changes(work, changes.stall)


def combined(evidence: Evidence, own: Sequence[Changes]) -> Changes:
    """What undoes several findings at once: their factors multiply, stalls do not add up."""
    work: dict[OpType, Floats] = {}
    stall: dict[OpType, Floats] = {}
    for changes in own:
        for optype, changed in changes.work.items():
            before = work.get(optype)
            recorded = evidence.recorded_work(optype)
            work[optype] = changed if before is None else _own(before, recorded, changed)
        for optype, part in changes.stall.items():
            stall[optype] = np.fmax(stall[optype], part) if optype in stall else part
    return Changes(work, stall)


def _own(recorded: Floats, before: Floats, changed: Floats) -> Floats:
    factor = np.ones_like(recorded)
    # Durations of 0 and negative transfer times are noise: they stay.
    np.divide(changed, before, out=factor, where=(before > 0) & (changed >= 0))
    own: Floats = recorded * factor
    return own
