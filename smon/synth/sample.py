"""Random jobs with random causes, to study how often a diagnosis is right.

Flow: **here** → `smon.synth.spec.Scenario`. A seed gives one scenario, always the same; the share
of the step that its causes cost comes out near the severity asked for, and
`smon.synth.truth.Truth` says what it is exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from smon.errors import ConfigError
from smon.synth import causes as make
from smon.synth.evidence import Evidence, Machines
from smon.synth.faults import GcPauses, MoeLoad, PackedSequences, ThermalRamp, Warmup, When
from smon.synth.faults.base import check_range
from smon.synth.spec import Scenario
from smon.synth.timing import Durations
from smon.synth.truth import Cause, CauseName, Verdict

#: Chances of a job without a cause, and of one with two.
_NO_CAUSE: Final = 0.15
_TWO_CAUSES: Final = 0.25

#: Severities that are drawn if none is asked for, log-uniform.
_SEVERITIES: Final = (0.02, 0.3)

#: Workers, log-uniform, and pipeline sizes.
_WORKERS: Final = (4, 1024)
_STAGES: Final = (1, 2, 3, 4, 6, 8, 12, 16)

_STEPS: Final = (10, 60)

#: A change of the whole job below this share is too little to report.
_JOB_WIDE_SHARE: Final = 0.03

#: Mean of Σ length² / tokens² of packed log-normal(6.5, 1.4) lengths, and the excess at slope 1.25
#: with 8 microbatches on 16 replicas, by which slopes are scaled (scenario C04).
_MEAN_Q: Final = 0.38
_EXCESS_PER_SLOPE: Final = 0.22 / 1.25

#: Share of an MoE stage's compute that grows with the tokens of its experts.
_EXPERT_SHARE: Final = 0.4

#: Causes of which only one can be told at a time, or that end the job.
_ALONE: Final = frozenset({CauseName.HANG})

_LINKS: Final = frozenset({CauseName.SLOW_LINK, CauseName.FLAPPING_LINK})


class _Draw:
    """A job that is being drawn: its shape, and the places that are taken."""

    __slots__ = ("_taken", "job", "rng", "severity")

    def __init__(self, rng: np.random.Generator, job: Scenario, severity: float) -> None:
        self.rng = rng
        self.job = job
        self.severity = severity
        self._taken: set[tuple[int, int]] = set()

    @property
    def compute_s(self) -> float:
        """Forward and backward of one microbatch on one stage."""
        return self.job.durations.forward_s + self.job.durations.backward_s

    @property
    def step_s(self) -> float:
        """Estimate of the healthy step time."""
        durations = self.job.durations
        pipeline = (self.job.microbatches + self.job.pp - 1) * self.compute_s
        return pipeline + durations.all_gather_s + durations.reduce_scatter_s

    @property
    def extra_s(self) -> float:
        """What the cause shall cost in each step, on average."""
        return self.severity * self.step_s

    @property
    def extra_ratio(self) -> float:
        """The same, as a share of what one worker computes in a step."""
        return self.extra_s / (self.job.microbatches * self.compute_s)

    def place(self) -> tuple[int, int]:
        """A worker that no other cause has."""
        while True:
            dp, stage = self.rng.integers([self.job.dp, self.job.pp]).tolist()
            if (dp, stage) not in self._taken:
                self._taken.add((dp, stage))
                return dp, stage

    def on_host_of(self, dp: int, stage: int) -> list[tuple[int, int]]:
        """All workers on the host of one, which comes first."""
        layout, machines = self.job.layout, self.job.machines
        host = machines.host(layout.rank(dp, stage))
        workers = [(rank, place) for rank in range(layout.dp) for place in range(layout.pp)]
        others = [worker for worker in workers if machines.host(layout.rank(*worker)) == host]
        return sorted(others, key=lambda worker: worker != (dp, stage))

    def onset(self) -> int:
        """A step in the second or third quarter of the window."""
        steps = self.job.steps
        return self.job.first_step + int(self.rng.integers(steps // 4, 3 * steps // 4))

    def some_steps(self, share: float) -> tuple[int, ...]:
        """About this share of the steps, at random."""
        number = max(1, round(share * self.job.steps))
        drawn = self.rng.choice(self.job.steps, number, replace=False)
        return tuple(sorted((self.job.first_step + drawn).tolist()))

    def bursts(self) -> tuple[int, ...]:
        """Bursts of 1 to 3 steps, about one in 12 steps."""
        steps: set[int] = set()
        for begin in self.some_steps(1 / 12):
            steps.update(range(begin, begin + int(self.rng.integers(1, 4))))
        return tuple(sorted(steps & set(self.job.step_numbers)))


def random_scenario(
    seed: int,
    *,
    causes: Sequence[CauseName] | None = None,
    severity: float | None = None,
    max_ops: int = 2_000_000,
) -> Scenario:
    """A job of random shape with these causes, or with none, one or two that are drawn.

    Parameters
    ----------
    severity
        Share of the healthy step time that each cause costs, about; drawn if not given.
    max_ops
        Fewer steps and microbatches are drawn where there would be more ops.

    Raises
    ------
    ConfigError
        A severity or number of ops that is out of range, or the same cause twice.
    """
    check_range("max_ops", max_ops, 1_000_000, 200_000_000)
    rng = np.random.default_rng([seed, 1 << 16])
    names = _drawn_causes(rng) if causes is None else tuple(causes)
    if len(set(names)) < len(names):
        raise ConfigError(f"expected different causes, found {', '.join(names)}: leave one out")
    low, high = np.log(_SEVERITIES)
    drawn = float(np.exp(rng.uniform(low, high)))
    draw = _Draw(rng, _job(rng, seed, names, max_ops), drawn if severity is None else severity)
    check_range("severity", draw.severity, 0.001, 10.0)
    made = tuple(_MAKERS[name](draw) for name in names)
    return replace(draw.job, causes=made, name=_name(seed, names))


def _drawn_causes(rng: np.random.Generator) -> tuple[CauseName, ...]:
    chance = rng.random()
    if chance < _NO_CAUSE:
        return ()
    number = 2 if chance < _NO_CAUSE + _TWO_CAUSES else 1
    choice = [name for name in CauseName if number == 1 or name not in _ALONE]
    return tuple(choice[place] for place in rng.choice(len(choice), number, replace=False))


def _name(seed: int, names: Sequence[CauseName]) -> str:
    return f"random-{seed}-{'-'.join(names) or 'healthy'}"


# --- the job --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    dp: int
    pp: int
    microbatches: int
    steps: int


def _job(rng: np.random.Generator, seed: int, names: Sequence[CauseName], max_ops: int) -> Scenario:
    shape = _shape(rng, names, max_ops)
    chosen = [kind for kind in Evidence if rng.random() < 0.5]  # noqa: PLR2004  # even odds
    ranks_per_host = 1 if _LINKS & set(names) else int(rng.choice([1, 2, 4, 8]))
    return Scenario(
        dp=shape.dp,
        pp=shape.pp,
        ep=shape.dp if CauseName.MOE_LOAD in names else 1,
        microbatches=shape.microbatches,
        steps=shape.steps,
        first_step=int(rng.integers(2) * rng.integers(1, 100_000)),
        seed=seed,
        durations=_durations(rng, shape),
        evidence=frozenset(chosen),
        machines=Machines(ranks_per_host=ranks_per_host),
    )


def _shape(rng: np.random.Generator, names: Sequence[CauseName], max_ops: int) -> _Shape:
    low, high = np.log(_WORKERS)
    workers = float(np.exp(rng.uniform(low, high)))
    fewest = 2 if CauseName.STAGE_PARTITION in names else 1
    stages = [pp for pp in _STAGES if fewest <= pp <= workers / 2]
    pp = int(rng.choice(stages))
    dp = max(2, round(workers / pp))
    microbatches = max(4, pp * int(rng.choice([1, 2, 4])))
    steps = int(rng.integers(_STEPS[0], _STEPS[1], endpoint=True))
    return _fitted(_Shape(dp, pp, microbatches, steps), max_ops)


def _fitted(shape: _Shape, max_ops: int) -> _Shape:
    """Fewer microbatches, then fewer steps, until there are few enough ops."""
    workers = shape.dp * shape.pp
    microbatches = shape.microbatches
    fewest = max(4, shape.pp)
    while microbatches // 2 >= fewest and workers * (7 * microbatches + 9) * 30 > max_ops:
        microbatches //= 2
    most = max_ops // (workers * (7 * microbatches + 9))
    return replace(shape, microbatches=microbatches, steps=max(_STEPS[0], min(shape.steps, most)))


def _durations(rng: np.random.Generator, shape: _Shape) -> Durations:
    """Communication takes some percent of the step, as in jobs that are laid out well."""
    forward_s = float(np.exp(rng.uniform(np.log(0.04), np.log(0.25))))
    backward_s = forward_s * rng.uniform(1.8, 2.2)
    pipeline_s = (shape.microbatches + shape.pp - 1) * (forward_s + backward_s)
    return Durations(
        forward_s=forward_s,
        backward_s=backward_s,
        all_gather_s=pipeline_s * rng.uniform(0.005, 0.03),
        reduce_scatter_s=pipeline_s * rng.uniform(0.01, 0.06),
        p2p_s=forward_s * rng.uniform(0.005, 0.03),
        embedding_s=forward_s * rng.uniform(0.02, 0.1),
        clip_s=forward_s * rng.uniform(0.02, 0.1),
        optimizer_s=pipeline_s * rng.uniform(0.002, 0.01),
    )


# --- causes ---------------------------------------------------------------------------------


def _slow_gpu(draw: _Draw) -> Cause:
    onset = draw.rng.random() < 0.5  # noqa: PLR2004  # even odds
    if not onset:
        return make.slow_gpu(*draw.place(), 1 + draw.extra_ratio)
    first = draw.onset()
    share = 1 - (first - draw.job.first_step) / draw.job.steps
    factor = 1 + draw.extra_ratio / share
    return make.slow_gpu(*draw.place(), factor, first=first, onset=True)


def _thermal(draw: _Draw) -> Cause:
    dp, stage = draw.place()
    first, length = max(1, round(0.2 * draw.job.steps)), round(0.4 * draw.job.steps)
    mean = 1 - (first + length / 2) / draw.job.steps
    ramp = ThermalRamp(
        stage, dp, draw.extra_ratio / mean, draw.job.first_step + first, max(1, length)
    )
    return make.thermal(dp, stage, ramp)


def _slow_forward(draw: _Draw) -> Cause:
    return make.slow_half(*draw.place(), forward_s=draw.extra_s / draw.job.microbatches)


def _slow_backward(draw: _Draw) -> Cause:
    return make.slow_half(*draw.place(), backward_s=draw.extra_s / draw.job.microbatches)


def _host_contention(draw: _Draw) -> Cause:
    dp, stage = draw.place()
    workers = draw.on_host_of(dp, stage)
    steps = draw.some_steps(draw.rng.uniform(0.2, 0.5))
    # Two computes per microbatch are launched late, and one of them takes half a delay longer.
    per_delay = 2.5 * draw.job.microbatches * len(steps) / draw.job.steps
    delay_s = draw.extra_s / per_delay
    return make.contention(workers, delay_s, delay_s / 2, steps)


def _gc(draw: _Draw) -> Cause:
    every = int(draw.rng.integers(5, 25))
    per_step = draw.job.dp * draw.job.pp / every
    pause_s = draw.extra_s / min(1.0, per_step)
    growth = draw.rng.random() < 0.3  # noqa: PLR2004  # some heaps grow
    if not growth:
        return make.gc(GcPauses(every, pause_s, first=draw.job.first_step))
    growth_s = 1.6 * pause_s / draw.job.steps
    return make.gc(GcPauses(every, 0.2 * pause_s, growth_s, draw.job.first_step))


def _dataloader(draw: _Draw) -> Cause:
    every = int(draw.rng.choice([2, 4, 8]))
    gap_s = draw.extra_s * every
    if draw.rng.random() < 0.3:  # noqa: PLR2004  # sometimes it is the storage
        return make.loader(gap_s, every, draw.job.first_step)
    dp, _ = draw.place()
    return make.loader(gap_s, every, draw.job.first_step, dp)


def _sequence_length(draw: _Draw) -> Cause:
    slope = float(np.clip(draw.severity / _EXCESS_PER_SLOPE, 0.05, 10.0))
    durations = draw.job.durations
    base = 1 + slope * _MEAN_Q
    draw.job = replace(
        draw.job,
        durations=replace(
            durations,
            forward_s=durations.forward_s / base,
            backward_s=durations.backward_s / base,
        ),
    )
    return make.sequence_length(PackedSequences(slope, slope))


def _moe_load(draw: _Draw) -> Cause:
    stage = int(draw.rng.integers(draw.job.pp))
    tokens = min(1 + draw.extra_ratio / _EXPERT_SHARE, float(draw.job.dp))
    ranks = draw.rng.permutation(draw.job.dp)[:4]
    run = max(3, draw.job.steps // 4)
    first = draw.job.first_step
    load = MoeLoad(stage, tuple(ranks.tolist()), run, tokens, _EXPERT_SHARE, first)
    return make.moe_load(load)


def _stage_partition(draw: _Draw) -> Cause:
    stage = draw.job.pp - 1  # the one with the loss
    microbatches, pp = draw.job.microbatches, draw.job.pp
    # Spread evenly, the same work would take a part of the step, too.
    felt = max(microbatches - (microbatches + pp - 1) / pp, 1.0) / microbatches
    extra = draw.extra_ratio / felt
    return make.stage_partition(stage, 1 + 1.6 * extra, 1 + 0.7 * extra)


def _slow_link(draw: _Draw) -> Cause:
    durations = draw.job.durations
    when = When(first=draw.onset()) if draw.rng.random() < 0.5 else When()  # noqa: PLR2004
    share = 1.0 if not when.first else 1 - (when.first - draw.job.first_step) / draw.job.steps
    dp, stage = draw.place()
    if draw.job.pp == 1 or draw.rng.random() < 0.5:  # noqa: PLR2004  # even odds
        factor = 1 + draw.extra_s / share / durations.reduce_scatter_s
        return make.slow_group(stage, factor, when)
    slowed_s = durations.reduce_scatter_s + draw.job.microbatches * durations.p2p_s
    return make.slow_link(dp, stage, 1 + draw.extra_s / share / slowed_s, when)


def _flapping_link(draw: _Draw) -> Cause:
    steps = draw.bursts()
    extra_s = draw.extra_s * draw.job.steps / len(steps)
    return make.flapping_link(*draw.place(), extra_s, 40.0, steps)


def _checkpoint(draw: _Draw) -> Cause:
    every = max(3, draw.job.steps // int(draw.rng.integers(3, 6)))
    return make.checkpoint(draw.extra_s * every, every, draw.job.first_step)


def _job_wide(draw: _Draw) -> Cause:
    first = draw.onset()
    after = draw.severity / (1 - (first - draw.job.first_step) / draw.job.steps)
    verdict = Verdict.JOB_WIDE if after >= _JOB_WIDE_SHARE else Verdict.NONE
    if draw.rng.random() < 0.5:  # noqa: PLR2004  # even odds
        return make.job_wide(compute=1 + after, first=first, verdict=verdict)
    durations = draw.job.durations
    slowed_s = durations.reduce_scatter_s + draw.job.microbatches * durations.p2p_s
    factor = 1 + after * draw.step_s / slowed_s
    return make.job_wide(communication=factor, first=first, verdict=verdict)


def _warmup(draw: _Draw) -> Cause:
    steps = int(draw.rng.integers(1, 3))
    more = draw.severity * draw.job.steps / steps
    return make.warmup(Warmup(draw.job.first_step, steps, 1 + 1.5 * more, 1 + 0.75 * more, 2.0))


def _hang(draw: _Draw) -> Cause:
    forward = int(draw.rng.integers(draw.job.microbatches))
    return make.hang(*draw.place(), draw.job.step_numbers[-1], forward)


def _clock(draw: _Draw) -> Cause:
    size_s = float(np.exp(draw.rng.uniform(np.log(0.001), np.log(0.2))))
    offset_s = size_s * float(draw.rng.choice([-1, 1]))
    drift = float(draw.rng.choice([0.0, draw.rng.uniform(-5e-5, 5e-5)]))
    return make.clock(draw.on_host_of(*draw.place()), offset_s, drift)


def _lost_data(draw: _Draw) -> Cause:
    if draw.rng.random() < 0.5:  # noqa: PLR2004  # even odds
        per_step = draw.job.dp * draw.job.pp * 6 * draw.job.microbatches
        return make.lost_rows(float(draw.rng.uniform(0.1, 3.0)) / per_step)
    return make.lost_worker(*draw.place(), draw.some_steps(0.2))


_MAKERS: Final[dict[CauseName, Callable[[_Draw], Cause]]] = {
    CauseName.SLOW_GPU: _slow_gpu,
    CauseName.THERMAL: _thermal,
    CauseName.SLOW_FORWARD: _slow_forward,
    CauseName.SLOW_BACKWARD: _slow_backward,
    CauseName.HOST_CONTENTION: _host_contention,
    CauseName.GC: _gc,
    CauseName.DATALOADER: _dataloader,
    CauseName.SEQUENCE_LENGTH: _sequence_length,
    CauseName.MOE_LOAD: _moe_load,
    CauseName.STAGE_PARTITION: _stage_partition,
    CauseName.SLOW_LINK: _slow_link,
    CauseName.FLAPPING_LINK: _flapping_link,
    CauseName.CHECKPOINT: _checkpoint,
    CauseName.WARMUP: _warmup,
    CauseName.JOB_WIDE: _job_wide,
    CauseName.HANG: _hang,
    CauseName.CLOCK: _clock,
    CauseName.LOST_DATA: _lost_data,
}
