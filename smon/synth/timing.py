"""How long each op takes: default durations, seeded noise, faults and launch delays.

Flow: `smon.synth.plan` → **here** → `smon.synth.model`. Each step draws from generators of its own,
so that a step is the same whichever other steps, faults or no-ops are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import COMPUTE, DP_SYNCED, OpType
from smon.synth.faults.base import Draft, Fault, Stream, check_range, generator
from smon.synth.faults.compute import SlowCompute
from smon.synth.plan import Plan
from smon.synth.schedule import Schedule

__all__ = [
    "MIN_FACTOR",
    "WEIGHT_SHARE",
    "Durations",
    "Noise",
    "SlowCompute",
    "apply_faults",
    "draw_delays",
    "draw_work",
]

#: A noise factor below this is raised to it: no op takes no time, or less.
MIN_FACTOR: Final = 0.05

#: Share of a backward that is its weight-gradient half, where a schedule splits it: in large
#: transformers both halves are one matrix product per forward product (Qi et al. 2023, table 1).
WEIGHT_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that each op takes without noise or fault.

    Communication is the transfer alone, once all members have come. Compute, all-gather and
    reduce-scatter are given for a whole stage: each of its VPP model chunks takes the VPP-th part.

    Attributes
    ----------
    separate_s
        Gradients reduced on their own at the end of a step with overlapped reduction.
    noop_s
        Recorded duration of a send or receive without a peer; nothing waits for it.
    """

    forward_s: float = 0.060
    backward_s: float = 0.120
    all_gather_s: float = 0.040
    reduce_scatter_s: float = 0.120
    separate_s: float = 0.005
    p2p_s: float = 0.001
    embedding_s: float = 0.010
    clip_s: float = 0.004
    optimizer_s: float = 0.020
    layernorm_s: float = 0.0005
    gc_s: float = 0.0
    noop_s: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            check_range(field.name, getattr(self, field.name), 0.0, 3600.0)

    def of(self, schedule: Schedule, vpp: int) -> Mapping[OpType, float]:
        """Seconds of one op of each type; the receive of a pair takes its time from the send."""
        weight = WEIGHT_SHARE if schedule is Schedule.ZERO_BUBBLE else 0.0
        return {
            OpType.FORWARD_COMPUTE: self.forward_s / vpp,
            OpType.BACKWARD_COMPUTE: self.backward_s * (1 - weight) / vpp,
            OpType.WEIGHT_GRAD_COMPUTE: self.backward_s * weight / vpp,
            OpType.OPTIMIZER: self.optimizer_s,
            OpType.GC: self.gc_s,
            OpType.FORWARD_SEND: self.p2p_s,
            OpType.FORWARD_RECV: self.p2p_s,
            OpType.BACKWARD_SEND: self.p2p_s,
            OpType.BACKWARD_RECV: self.p2p_s,
            OpType.PARAMS_ALL_GATHER: self.all_gather_s / vpp,
            OpType.GRADS_REDUCE_SCATTER: self.reduce_scatter_s / vpp,
            OpType.SEPARATE_GRADS_ALL_REDUCE: self.separate_s,
            OpType.LAYERNORM_GRADS_ALL_REDUCE: self.layernorm_s,
            OpType.EMBEDDING_GRADS_ALL_REDUCE: self.embedding_s,
            OpType.OPTIMIZER_CLIP_MAIN_GRAD: self.clip_s,
        }


@dataclass(frozen=True, slots=True)
class Noise:
    """Random variation.

    Attributes
    ----------
    compute_ratio
        Standard deviation of the factor on each compute op.
    communication_ratio
        Standard deviation of the factor on each communication group in each step.
    launch_delay_s
        Mean of an exponential delay between an op being able to start and starting.
    """

    compute_ratio: float = 0.01
    communication_ratio: float = 0.02
    launch_delay_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("compute_ratio", self.compute_ratio, 0.0, 1.0)
        check_range("communication_ratio", self.communication_ratio, 0.0, 1.0)
        check_range("launch_delay_s", self.launch_delay_s, 0.0, 3600.0)


def draw_work(
    plan: Plan, steps: Sequence[int], durations: Durations, noise: Noise, seed: int
) -> NDArray[np.float64]:
    """Durations of all ops without faults, in ns; shape ``(rows, steps, dp)``.

    The members of a collective over the data-parallel ranks get one value.
    """
    work = np.empty((len(plan), len(steps), plan.shape.dp))
    for lane, step in enumerate(steps):
        work[:, lane] = generator(seed, Stream.WORK, step).standard_normal(
            (len(plan), plan.shape.dp)
        )
    synced = np.isin(plan.optype, list(DP_SYNCED))
    work[synced] = work[synced, :, :1]
    compute = np.isin(plan.optype, list(COMPUTE))
    sigma = np.where(compute, noise.compute_ratio, noise.communication_ratio)
    work *= sigma[:, None, None]
    work += 1.0
    np.maximum(work, MIN_FACTOR, out=work)
    work *= _base_ns(plan, durations)[:, None, None]
    return work


def _base_ns(plan: Plan, durations: Durations) -> NDArray[np.float64]:
    seconds = durations.of(plan.shape.schedule, plan.shape.vpp)
    by_code = np.array([seconds[optype] for optype in OpType])
    return by_code[plan.optype] * 1e9


def apply_faults(draft: Draft, faults: Sequence[Fault]) -> None:
    """Let the faults change the draft: first those by a factor, then those that add seconds."""
    for fault in sorted(faults, key=lambda fault: fault.adds):
        fault.apply(draft)


def draw_delays(
    plan: Plan, steps: Sequence[int], noise: Noise, seed: int
) -> NDArray[np.int64] | None:
    """Launch delays in ns, shape ``(rows, steps, dp)``; None if there are none."""
    if noise.launch_delay_s == 0:
        return None
    delays = np.empty((len(plan), len(steps), plan.shape.dp), np.int64)
    for lane, step in enumerate(steps):
        size = (len(plan), plan.shape.dp)
        delays[:, lane] = generator(seed, Stream.DELAY, step).exponential(
            noise.launch_delay_s * 1e9, size
        )
    return delays
