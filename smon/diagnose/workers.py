"""Each worker against its peers: how much slower its device is, with the data taken out.

The same microbatch passes every stage of its replica, so the ratio of its compute times on two
stages cancels the data: what is left is the device (``docs/method.md``, "Device or data").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.attribute.peers import peers
from smon.diagnose.evidence import Evidence, Floats, nanmedian, spread
from smon.diagnose.thresholds import MAX_POSITIONS, MIN_NOISE
from smon.ops import OpType

#: The plain ratio to the other replicas is preferred up to so many times the noise of the one
#: with the data taken out: that one takes a fast neighbour for a slow device.
_PLAIN_NOISE = 1.2
#: And up to this noise in any case: a device that is slow enough to matter stands out of it, and
#: two slow stages of four would hide half of each other.
_EVEN_NOISE = 0.02
#: Steps that are so far apart at most are compared for the noise: more pairs tell nothing new.
_MAX_LAG = 8
#: Of so many stages the median hardly depends on a single one.
_MANY_STAGES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Slowness:
    """How much slower workers are than their peers, in one op type.

    Attributes
    ----------
    effect
        (steps, dp_ranks, stages) log ratio to the peers; NaN where there are none.
    noise
        Robust standard deviation of `effect` over the steps of a worker.
    by_device
        Whether other stages of the same replica were used to take the data out.
    """

    effect: Floats
    noise: float
    by_device: bool

    def typical(self) -> Floats:
        """(dp_ranks, stages) median over steps."""
        return nanmedian(self.effect, 0)


def log_work(evidence: Evidence, optype: OpType) -> Floats:
    """(steps, dp_ranks, stages, positions ≤ `MAX_POSITIONS`) log durations, NaN where none."""
    cube = evidence.work(optype)
    count = cube.shape[3]
    if count > MAX_POSITIONS:
        chosen = np.linspace(0, count - 1, MAX_POSITIONS).round().astype(np.intp)
        cube = cube[..., chosen]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(cube)
    logs[~np.isfinite(logs)] = np.nan
    return logs


def slowness(evidence: Evidence, optype: OpType) -> Slowness:
    """Compare every worker with the other DP ranks of its stage, step by step.

    With two or more stages, each op is first compared with the same microbatch on the other stages
    of its replica, if the plain ratio is noisy and that leaves less: it does when data is uneven.
    """
    logs = log_work(evidence, optype)
    plain = _against_replicas(nanmedian(logs, 3))
    if logs.shape[2] == 1:
        return Slowness(plain, _noise(plain), by_device=False)
    others = peers(logs, 2) if logs.shape[2] < _MANY_STAGES else nanmedian(logs, 2)[:, :, None]
    device = _against_replicas(nanmedian(logs - others, 3))
    noise = _noise(plain), _noise(device)
    # A slow device also makes its neighbours look fast, and slow neighbours hide it, so prefer the
    # plain ratio unless the data drowns it.
    if np.isnan(noise[1]) or noise[0] <= max(_PLAIN_NOISE * noise[1], _EVEN_NOISE):
        return Slowness(plain, noise[0], by_device=False)
    return Slowness(device, noise[1], by_device=True)


def _noise(effect: Floats) -> float:
    """Robust scatter over the steps of each worker: lasting slowness is no noise.

    From differences between steps. Of the distances from a worker's own median, a third are 0 in
    three steps, and the noise would look like half of what it is.
    """
    lags = range(1, min(len(effect), _MAX_LAG + 1))
    differences = [(effect[lag:] - effect[:-lag]).reshape(-1) for lag in lags]
    known = spread(np.concatenate([*differences, np.empty(0)])) / float(np.sqrt(2.0))
    return max(known, MIN_NOISE)


def _against_replicas(values: Floats) -> Floats:
    """Minus the median of the other DP ranks."""
    return values - peers(values, 1)


def positions(mask: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Indices where a mask is True, as plain numbers."""
    return [tuple(index) for index in np.argwhere(mask).tolist()]
