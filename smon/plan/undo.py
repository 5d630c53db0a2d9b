"""Fixes that undo one finding: other machines, healthy links, no stalls.

The finding brings what undoes it, as changed durations or as stalls that go away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from smon.diagnose.evidence import Evidence
from smon.diagnose.found import Found, combined
from smon.plan.fix import Fix, FixName, mean_now, speedup_of
from smon.plan.found import like_peers
from smon.simulate.cube import Changes
from smon.simulate.whatif import Worker

#: What undoes which cause. Not here: causes with a fix of their own, and those that
#: nothing in the job can undo (planned pauses, warm-up, job-wide slowness).
FIX_OF: Final = {
    "slow_gpu": FixName.REPLACE_WORKERS,
    "thermal": FixName.REPLACE_WORKERS,
    "slow_forward": FixName.REPLACE_WORKERS,
    "slow_backward": FixName.REPLACE_WORKERS,
    "slow_link": FixName.HEAL_LINK,
    "flapping_link": FixName.HEAL_LINK,
    "congestion": FixName.HEAL_LINK,
    "nvlink": FixName.HEAL_LINK,
    "dataloader": FixName.REMOVE_STALLS,
    "host_contention": FixName.REMOVE_STALLS,
    "moe_load": FixName.BALANCE_EXPERTS,
}

_ASSUMPTIONS: Final = {
    FixName.REPLACE_WORKERS: (
        "the new machine computes like its peers",
        "the slowness stays with the old machine",
    ),
    FixName.HEAL_LINK: ("transfers of the group take as long as those of comparable groups",),
    FixName.REMOVE_STALLS: ("the host work behind the stalls is hidden or moved elsewhere",),
    FixName.BALANCE_EXPERTS: (
        "an upper bound: every expert-parallel rank gets the same number of tokens",
    ),
    FixName.BALANCE_DATA: (
        "an upper bound: the data of each step is spread perfectly evenly",
        "the optimiser sees the same batch",
    ),
    FixName.BALANCE_STAGES: ("an upper bound: the work is spread perfectly evenly over stages",),
}

#: One half of the compute being slow is rarely the device.
_ONE_HALF: Final = {"slow_forward", "slow_backward"}


def undo(evidence: Evidence, found: Found, fix: FixName | None = None) -> Fix | None:
    """The job without one finding; None if nothing is known to undo it.

    Parameters
    ----------
    fix
        What to call it; by default what `FIX_OF` has for the cause.
    """
    name = fix or FIX_OF.get(found.cause)
    if name is None:
        return None
    if not (found.changes.work or found.changes.stall):
        return None
    now, gain = _now_and_gain(evidence, found.changes)
    extra = ("it may be the software of that rank: extra work, a hook",)
    return Fix(
        fix=name,
        detail=found.detail,
        step_time_ns=now - gain,
        speedup=speedup_of(now, now - gain),
        assumptions=_ASSUMPTIONS[name] + (extra if found.cause in _ONE_HALF else ()),
        changes_optimisation=name is FixName.BALANCE_EXPERTS,
    )


def undo_each(evidence: Evidence, findings: Sequence[Found]) -> list[Fix]:
    """Every finding undone alone, and those with the same fix together."""
    alone = [(found, fix) for found in findings if (fix := undo(evidence, found)) is not None]
    fixes = [fix for _, fix in alone]
    for name in dict.fromkeys(fix.fix for fix in fixes):
        group = [found for found, fix in alone if fix.fix is name]
        if (
            len(group) > 1
            and (together := undo(evidence, _together(evidence, group), name)) is not None
        ):
            fixes.append(together)
    return fixes


def replace_workers(evidence: Evidence, workers: Collection[Worker]) -> Fix | None:
    """These workers compute like their peers; None if there is none."""
    named = ", ".join(f"DP {dp} stage {stage}" for dp, stage in sorted(workers))
    return undo(evidence, Found("slow_gpu", named, like_peers(evidence, workers)))


def _together(evidence: Evidence, group: Sequence[Found]) -> Found:
    return Found(
        cause=group[0].cause,
        detail="all of: " + "; ".join(found.detail for found in group),
        changes=combined(evidence, [found.changes for found in group]),
        workers=tuple(dict.fromkeys(worker for found in group for worker in found.workers)),
    )


def _now_and_gain(evidence: Evidence, changes: Changes) -> tuple[float, float]:
    """Mean step time with the stalls that go away, and what goes away; in ns."""
    gain = float(np.mean(evidence.cost_ns(changes)))
    if not changes.stall:
        return mean_now(evidence), gain
    stalls = float(np.mean(evidence.cost_ns(Changes(stall=changes.stall))))
    return mean_now(evidence) + stalls, gain
