"""A fix and what it buys: the value that every module of the planner returns.

Flow: `smon.diagnose` → the fixes, one module each → **here** → `smon.plan.planner`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from smon.diagnose.evidence import Evidence
from smon.simulate.engine import Durations, Floats

#: Nobody would change a job for less, and the simulation misses more: 1.3 % in the median without
#: launch delays (``docs/method.md``, "Simulation error").
MIN_GAIN: Final = 0.005

_HOURS_PER_DAY: Final = 24


class FixName(StrEnum):
    """What is to be done."""

    REPLACE_WORKERS = "replace_workers"
    MOVE_LAYERS = "move_layers"
    REDISTRIBUTE_MICROBATCHES = "redistribute_microbatches"
    REORDER_MICROBATCHES = "reorder_microbatches"
    REMOVE_PAUSES = "remove_pauses"
    PLAN_GC = "plan_gc"
    BACKUP_WORKERS = "backup_workers"
    SYNC_LESS_OFTEN = "sync_less_often"
    HEAL_LINK = "heal_link"
    REMOVE_STALLS = "remove_stalls"
    BALANCE_EXPERTS = "balance_experts"
    BALANCE_DATA = "balance_data"
    BALANCE_STAGES = "balance_stages"


@dataclass(frozen=True, slots=True)
class Fix:
    """One fix.

    Attributes
    ----------
    fix, detail
        What is to be done, and exactly what.
    step_time_ns
        Mean step time with the fix, for the same number of samples as now.
    speedup
        Mean step time now over `step_time_ns`. Both without launch delays, except for the stalls
        that the fix removes.
    assumptions
        What must hold for the number to come true.
    changes_optimisation
        Whether the optimiser sees other gradients than now.
    gpu_hours_per_day, cost_per_day
        What it saves; `cost_per_day` is None without a price.
    """

    fix: FixName
    detail: str
    step_time_ns: float
    speedup: float
    assumptions: tuple[str, ...] = ()
    changes_optimisation: bool = False
    gpu_hours_per_day: float = 0.0
    cost_per_day: float | None = None

    def priced(self, world_size: int, price_per_gpu_hour: float | None) -> Fix:
        """With what it saves on so many GPUs."""
        hours = (1.0 - 1.0 / self.speedup) * world_size * _HOURS_PER_DAY
        cost = None if price_per_gpu_hour is None else hours * price_per_gpu_hour
        return replace(self, gpu_hours_per_day=hours, cost_per_day=cost)


def mean_now(evidence: Evidence) -> float:
    """Mean simulated step time as recorded, without launch delays, in ns."""
    return float(evidence.times.simulated.mean())


def mean_with(evidence: Evidence, durations: Durations) -> Floats:
    """(what_ifs,) mean step times with other durations, without launch delays, in ns."""
    means: Floats = evidence.engine.run(durations).step_ns.mean(axis=1)
    return means


def speedup_of(now_ns: float, then_ns: float) -> float:
    """How many times faster; 1 if a step would take no time, which no fix can do."""
    return now_ns / then_ns if then_ns > 0 and np.isfinite(then_ns) else 1.0


def worthwhile(fixes: Iterable[Fix]) -> list[Fix]:
    """Those that gain at least `MIN_GAIN`, best first."""
    good = [fix for fix in fixes if fix.speedup >= 1.0 + MIN_GAIN]
    return sorted(good, key=lambda fix: -fix.speedup)
