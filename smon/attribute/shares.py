"""How much of the slowdown a few workers or the last stage explain (OSDI 2025 paper, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from smon.attribute.slowdown import StepTimes, slowdown
from smon.simulate.engine import Engine
from smon.simulate.ideal import Ideal
from smon.simulate.whatif import MadeIdeal, MadeLikePeers, Worker
from smon.simulate.window import Window

Floats = NDArray[np.float64]

#: Share of the workers that M_W fixes, rounded up.
SLOWEST_RATIO = 0.03


def approximate_workers(times: StepTimes) -> Floats:
    """(dp_ranks, stages) min(S_dp, S_stage): the paper's stand-in for S_w."""
    by_dp = slowdown(times.by_dp_rank, times.ideal)
    by_stage = slowdown(times.by_stage, times.ideal)
    return np.minimum(by_dp[:, None], by_stage[None, :])


def slowest_workers(approximate: Floats) -> list[Worker]:
    """The slowest 3 % of the workers by the paper's measure; lower rank first on a tie.

    Parameters
    ----------
    approximate
        (dp_ranks, stages); NaN for workers that are absent.
    """
    present = [
        (float(-approximate[dp, stage]), stage, dp)
        for dp, stage in np.argwhere(~np.isnan(approximate)).tolist()
    ]
    count = math.ceil(SLOWEST_RATIO * len(present))
    # Global rank grows with the stage first: rank = dp + DP * stage.
    return [(dp, stage) for _, stage, dp in sorted(present)[:count]]


def fixed_share(
    window: Window, ideal: Ideal, engine: Engine, times: StepTimes, workers: Collection[Worker]
) -> float | None:
    """(T − T_fixed) / (T − T_ideal) with these workers ideal; None if nothing is lost at all."""
    fixed = engine.run(MadeIdeal(window, ideal, workers)).step_ns[0]
    lost = float(np.mean(times.simulated) - np.mean(times.ideal))
    if lost == 0.0:
        return None
    return float(np.mean(times.simulated) - np.mean(fixed)) / lost


def repaired_slowdown(
    window: Window, engine: Engine, times: StepTimes, workers: Collection[Worker]
) -> float:
    """T over T with the compute of these workers replaced by their peers' (``docs/method.md`` 5.6).

    Raises
    ------
    SimulationError
        A worker does not exist, or has no peers.
    """
    repaired = engine.run(MadeLikePeers(window, workers)).step_ns[0]
    return float(np.mean(times.simulated) / np.mean(repaired))
