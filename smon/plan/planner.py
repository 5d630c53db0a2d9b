"""All fixes of a job, best first.

Flow: `smon.diagnose` → **here** → `smon.analysis` (the ``fixes`` of a report) and ``smon plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from smon.diagnose.evidence import Evidence, F
from smon.diagnose.found import Found, combined
from smon.plan.fix import Fix, FixName, worthwhile
from smon.plan.found import like_peers
from smon.plan.lanes import alone_ns
from smon.plan.layers import move_layers
from smon.plan.microbatches import deal_microbatches
from smon.plan.pauses import plan_collections
from smon.plan.replicas import backup_workers, sync_less_often
from smon.plan.undo import FIX_OF, undo, undo_each
from smon.simulate.engine import Floats

#: Causes with a fix of their own; and the upper bound that stands in for it where it cannot be
#: simulated, as with several model chunks per stage.
_OWN_FIX: Final = {
    "sequence_length": (FixName.REDISTRIBUTE_MICROBATCHES, FixName.BALANCE_DATA),
    "stage_partition": (FixName.MOVE_LAYERS, FixName.BALANCE_STAGES),
}


def plan(
    evidence: Evidence,
    findings: Sequence[Found] = (),
    *,
    layers: Sequence[int] | None = None,
    most_activations: int | None = None,
    price: float | None = None,
) -> tuple[Fix, ...]:
    """What every fix would buy; those that gain too little are left out.

    Parameters
    ----------
    evidence
        The window as recorded: nothing in it explained.
    findings
        What the diagnosis found, each with what undoes it and nothing else.
    layers
        Layers of each stage now; None if nobody knows.
    most_activations
        Layers × microbatches in flight that a stage can hold; as now, if None.
    price
        Of a GPU-hour.

    Returns
    -------
    tuple
        Best first.

    Raises
    ------
    ConfigError
        `layers` does not fit the pipeline.
    """
    findings = [_complete(evidence, found) for found in findings]
    devices = [found for found in findings if FIX_OF.get(found.cause) is FixName.REPLACE_WORKERS]
    slow = combined(evidence, [found.changes for found in devices])
    fixes = undo_each(evidence, findings)
    fixes += move_layers(evidence, slow, layers=layers, most_activations=most_activations)
    fixes += deal_microbatches(evidence, slow)
    fixes += _pauses(evidence, findings)
    fixes += _replicas(evidence)
    fixes += _bounds(evidence, findings, {fix.fix for fix in fixes})
    world_size = evidence.layout.world_size
    return tuple(fix.priced(world_size, price) for fix in worthwhile(fixes))


def _complete(evidence: Evidence, found: Found) -> Found:
    """A finding about workers that does not say what undoes it: they compute like their peers."""
    if found.workers and not (found.changes.work or found.changes.stall):
        return replace(found, changes=like_peers(evidence, found.workers))
    return found


def _pauses(evidence: Evidence, findings: Sequence[Found]) -> list[Fix]:
    extra = [_extra(evidence, found) for found in findings if found.cause == "gc"]
    return plan_collections(evidence, np.fmax.reduce(extra)) if extra else []


def _extra(evidence: Evidence, found: Found) -> Floats:
    """(steps, dp_ranks, stages, positions) ns of each forward that go away with a finding."""
    recorded = evidence.recorded_work(F)
    return recorded - found.changes.work.get(F, recorded)


def _replicas(evidence: Evidence) -> list[Fix]:
    if evidence.window.dp_ranks == 1:
        return []
    alone = alone_ns(evidence.window)
    return backup_workers(evidence, alone) + sync_less_often(evidence, alone)


def _bounds(evidence: Evidence, findings: Sequence[Found], have: set[FixName]) -> list[Fix]:
    fixes: list[Fix | None] = []
    for found in findings:
        own, bound = _OWN_FIX.get(found.cause, (None, None))
        if own is not None and own not in have:
            fixes.append(undo(evidence, found, bound))
    return [fix for fix in fixes if fix is not None]
