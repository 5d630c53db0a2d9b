"""Fixes that let replicas wait less for each other: backup workers, fewer synchronisations.

Both change what the optimiser sees. Sources: Chen et al. 2016, "Revisiting Distributed Synchronous
SGD" (backup workers); local SGD (replicas drift between synchronisations).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.evidence import Evidence
from smon.plan.fix import Fix, FixName, mean_now, speedup_of
from smon.plan.lanes import engine_of, without
from smon.simulate.engine import Floats
from smon.simulate.whatif import Recorded

#: With fewer replicas too much of each batch would be lost.
MIN_REPLICAS: Final = 4
_DROPPED: Final = (1, 2)
_EVERY: Final = (2, 4, 8)


def backup_workers(evidence: Evidence, alone: Floats) -> list[Fix]:
    """Steps end without the slowest one or two replicas of each.

    The step time is that for as many samples as now: what the dropped replicas computed is lost.

    Parameters
    ----------
    alone
        (steps, dp_ranks) step times of replicas that wait for nobody, NaN where absent.
    """
    present = int(np.count_nonzero(~np.isnan(alone), axis=1).min())
    fixes: list[Fix] = []
    for count in _DROPPED:
        if present < max(MIN_REPLICAS, 2 * count):
            break
        fix = _backup(evidence, alone, count)
        if not fixes or fix.speedup > fixes[-1].speedup:
            fixes.append(fix)
    return fixes


def _backup(evidence: Evidence, alone: Floats, count: int) -> Fix:
    smaller = without(evidence.window, _slowest(alone, count))
    times = engine_of(smaller).run(Recorded(smaller)).step_ns[0]
    present = np.count_nonzero(~np.isnan(alone), axis=1)
    used = float(np.mean((present - count) / present))
    now, then = mean_now(evidence), float(times.mean()) / used
    replicas = "replica" if count == 1 else f"{count} replicas"
    return Fix(
        fix=FixName.BACKUP_WORKERS,
        detail=f"go on without the slowest {replicas} of each step: steps take "
        f"{times.mean() / 1e9:.4g} s, with {used:.1%} of the samples",
        step_time_ns=then,
        speedup=speedup_of(now, then),
        assumptions=(
            f"each update lacks {count} of {int(present.max())} replicas; the gain is per sample",
            "where long microbatches make a replica slow, the update sees fewer of them",
            "dropping a replica takes no time, and it is back for the next step",
        ),
        changes_optimisation=True,
    )


def _slowest(alone: Floats, count: int) -> NDArray[np.bool_]:
    """(steps, dp_ranks) the slowest `count` of each step."""
    order = np.argsort(np.where(np.isnan(alone), -np.inf, alone), axis=1)
    chosen = np.zeros(alone.shape, bool)
    np.put_along_axis(chosen, order[:, -count:], values=True, axis=1)
    return chosen


def sync_less_often(evidence: Evidence, alone: Floats) -> list[Fix]:
    """Gradients are exchanged only every k steps: the maximum of sums, not the sum of maxima."""
    always = alone[:, ~np.isnan(alone).any(axis=0)]
    steps, replicas = always.shape
    if replicas <= 1:
        return []
    return [_every(evidence, always, k) for k in _EVERY if 2 * k <= steps]


def _every(evidence: Evidence, alone: Floats, k: int) -> Fix:
    together = np.lib.stride_tricks.sliding_window_view(alone, k, axis=0)
    drifting = together.sum(axis=2).max(axis=1)
    meeting = together.max(axis=1).sum(axis=1)
    now = mean_now(evidence)
    then = now * float(drifting.sum() / meeting.sum())
    return Fix(
        fix=FixName.SYNC_LESS_OFTEN,
        detail=f"synchronise gradients every {k} steps",
        step_time_ns=then,
        speedup=speedup_of(now, then),
        assumptions=(
            f"replicas take {k} optimiser steps of their own between synchronisations",
            "every replica holds its whole optimiser state",
            "what collectives take by themselves is not counted as saved",
        ),
        changes_optimisation=True,
    )
