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
#: And with two stages, where the other one cannot tell which of both is slow, up to this noise: a
#: device that is slow enough to matter stands out of it.
_EVEN_NOISE = 0.02
_TWO_STAGES = 2
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
    of its replica, if that leaves less noise: it does when the data is uneven.
    """
    logs = log_work(evidence, optype)
    plain = _against_replicas(nanmedian(logs, 3))
    if logs.shape[2] == 1:
        return Slowness(plain, _noise(plain), by_device=False)
    others = peers(logs, 2) if logs.shape[2] < _MANY_STAGES else nanmedian(logs, 2)[:, :, None]
    device = _against_replicas(nanmedian(logs - others, 3))
    noise = _noise(plain), _noise(device)
    # With two stages a slow device also makes its neighbour look fast, so prefer the plain ratio
    # unless the data drowns it.
    even = _EVEN_NOISE if logs.shape[2] == _TWO_STAGES else 0.0
    if np.isnan(noise[1]) or noise[0] <= max(_PLAIN_NOISE * noise[1], even):
        return Slowness(plain, noise[0], by_device=False)
    return Slowness(device, noise[1], by_device=True)


def _noise(effect: Floats) -> float:
    """Robust scatter over the steps of each worker: lasting slowness is no noise."""
    return max(spread(effect - nanmedian(effect, 0)[None]), MIN_NOISE)


def _against_replicas(values: Floats) -> Floats:
    """Minus the median of the other DP ranks."""
    return values - peers(values, 1)


def positions(mask: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Indices where a mask is True, as plain numbers."""
    return [tuple(index) for index in np.argwhere(mask).tolist()]
