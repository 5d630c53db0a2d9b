"""The named scenarios of ``docs/causes.md``: C01 to C14, and healthy jobs, named N-….

Flow: `smon.synth.causes` → **here** → `smon.synth.presets`. Each worker is a node of its own unless
stated. Durations that are not given are the defaults of `smon.synth.timing.Durations`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from smon.synth import causes
from smon.synth.evidence import Evidence, Machines
from smon.synth.faults import GcPauses, MoeLoad, PackedSequences, ThermalRamp
from smon.synth.schedule import Schedule
from smon.synth.spec import Scenario
from smon.synth.timing import Durations, Noise
from smon.synth.truth import Verdict


@dataclass(frozen=True, slots=True)
class Preset:
    """A scenario with a line of description."""

    summary: str
    scenario: Scenario


#: Each worker has a host of its own, and the hosts are recorded.
_OWN_HOSTS: Final = Machines(ranks_per_host=1)

_C02: Final = Scenario(
    dp=16,
    pp=1,
    microbatches=4,
    steps=60,
    durations=Durations(forward_s=0.120, backward_s=0.240),
    causes=(causes.thermal(9, 0, ThermalRamp(stage=0, dp=9)),),
    evidence=frozenset({Evidence.COUNTERS}),
)

_C03: Final = Scenario(dp=16, pp=4, microbatches=16, steps=48, causes=(causes.gc(GcPauses()),))

_C04: Final = Scenario(
    dp=16,
    pp=2,
    microbatches=8,
    steps=40,
    durations=Durations(forward_s=0.120, backward_s=0.240),
    causes=(causes.sequence_length(PackedSequences(forward=1.25, backward=1.25)),),
    evidence=frozenset({Evidence.LENGTHS}),
)

_C07: Final = Scenario(
    dp=8,
    pp=4,
    microbatches=16,
    steps=30,
    durations=Durations(all_gather_s=0.200, reduce_scatter_s=0.400, p2p_s=0.003),
)

_C09: Final = Scenario(
    dp=4, pp=4, microbatches=16, steps=60, causes=(causes.checkpoint(6.0, every=20),)
)

_C10: Final = Scenario(
    dp=8,
    pp=4,
    microbatches=16,
    steps=40,
    durations=Durations(all_gather_s=0.300, reduce_scatter_s=0.600, p2p_s=0.004),
)

_C13: Final = Scenario(
    dp=8,
    pp=4,
    ep=8,
    microbatches=16,
    steps=36,
    causes=(causes.moe_load(MoeLoad(stage=2, ranks=(6, 1, 4))),),
    evidence=frozenset({Evidence.EXPERTS}),
)

_STRAGGLERS: Final = {
    "C01": Preset(
        "GPU of rank 43 computes 1.058 times as long",
        Scenario(
            dp=8,
            pp=12,
            microbatches=32,
            steps=6,
            durations=Durations(
                forward_s=0.250,
                backward_s=0.500,
                all_gather_s=0.100,
                reduce_scatter_s=0.300,
                p2p_s=0.002,
            ),
            causes=(causes.slow_gpu(3, 5, 1.058),),
        ),
    ),
    "C02": Preset("GPU of rank 9 gets hot and slow, with counters", _C02),
    "C02-no-counters": Preset(
        "GPU of rank 9 gets slow over 30 steps", replace(_C02, evidence=frozenset())
    ),
    "C12": Preset(
        "backward of rank 1 takes 200 ms more",
        Scenario(
            dp=4,
            pp=1,
            microbatches=1,
            steps=50,
            durations=Durations(
                forward_s=0.0456,
                backward_s=0.093,
                all_gather_s=0.004,
                reduce_scatter_s=0.012,
                optimizer_s=0.010,
            ),
            causes=(causes.slow_half(1, 0, backward_s=0.2),),
        ),
    ),
}

_HOSTS: Final = {
    "C03": Preset("every worker collects garbage when it likes", _C03),
    "C03-events": Preset(
        "the same, and the agents report the collections",
        replace(_C03, evidence=frozenset({Evidence.EVENTS})),
    ),
    "C08": Preset(
        "the data loader of rank 2 is late every 8th step",
        Scenario(
            dp=8,
            pp=2,
            microbatches=8,
            steps=64,
            durations=Durations(forward_s=0.080, backward_s=0.160),
            causes=(causes.loader(1.3, every=8, dp=2),),
            machines=_OWN_HOSTS,
        ),
    ),
    "C14": Preset(
        "garbage collection takes longer and longer",
        replace(
            _C03,
            steps=96,
            causes=(causes.gc(GcPauses(every=12, pause_s=0.050, growth_s=0.5 / 95)),),
        ),
    ),
}

_IMBALANCES: Final = {
    "C04": Preset("sequences of unequal length, with lengths", _C04),
    "C04-no-lengths": Preset("sequences of unequal length", replace(_C04, evidence=frozenset())),
    "C05": Preset(
        "the last stage has the loss and too many layers",
        Scenario(
            microbatches=16,
            steps=20,
            durations=Durations(forward_s=0.068, backward_s=0.146),
            causes=(causes.stage_partition(3, 1.96, 1.35),),
        ),
    ),
    "C13": Preset("experts of one rank at a time get too many tokens, with counts", _C13),
    "C13-no-counts": Preset(
        "experts of one rank at a time get too many tokens", replace(_C13, evidence=frozenset())
    ),
}

_LINKS: Final = {
    "C06": Preset(
        "the link of the node of worker (5,2) comes and goes",
        Scenario(
            dp=8,
            pp=4,
            microbatches=16,
            steps=40,
            causes=(causes.flapping_link(5, 2, 2.4, 40.0, (7, 8, 21, 22, 34, 35)),),
            machines=_OWN_HOSTS,
        ),
    ),
    "C07a": Preset(
        "collectives of stage 1 take twice as long",
        replace(_C07, causes=(causes.slow_group(1, 2.0),)),
    ),
    "C07b": Preset(
        "collectives and messages of the node of worker (6,1) take twice as long",
        replace(_C07, causes=(causes.slow_link(6, 1, 2.0),), machines=_OWN_HOSTS),
    ),
}

_WHOLE_JOBS: Final = {
    "C09": Preset("a checkpoint of 6 s every 20 steps", _C09),
    "C09-events": Preset(
        "the same, and the agents report the checkpoints",
        replace(_C09, evidence=frozenset({Evidence.EVENTS})),
    ),
    "C10": Preset(
        "all communication takes 1.3 times as long from step 20 on",
        replace(
            _C10,
            causes=(causes.job_wide(communication=1.30, first=20, verdict=Verdict.JOB_WIDE),),
        ),
    ),
    "C10b": Preset(
        "all compute takes 1.02 times as long from step 20 on: too little to report",
        replace(_C10, causes=(causes.job_wide(compute=1.02, first=20, verdict=Verdict.NONE),)),
    ),
    "C11": Preset(
        "nothing is slow, but clocks are wrong by 200 ms and 0.4 ms",
        Scenario(
            microbatches=16,
            steps=20,
            causes=(
                causes.clock([(1, 2)], 0.200),
                *(causes.clock([(3, stage)], -0.0004) for stage in range(4)),
            ),
            machines=_OWN_HOSTS,
        ),
    ),
}

_HEALTHY: Final = {
    "N-small": Preset("a healthy job of 4 workers", Scenario(dp=2, pp=2, steps=20)),
    "N-one-stage": Preset(
        "a healthy job without pipeline", Scenario(dp=16, pp=1, microbatches=4, steps=40)
    ),
    "N-one-replica": Preset(
        "a healthy job of one replica", Scenario(dp=1, pp=8, microbatches=16, steps=20)
    ),
    "N-wide": Preset(
        "a healthy job of 64 replicas", Scenario(dp=64, pp=2, microbatches=8, steps=10)
    ),
    "N-deep": Preset("a healthy job of 16 stages", Scenario(dp=4, pp=16, microbatches=32, steps=6)),
    "N-interleaved": Preset(
        "a healthy job with two model chunks per stage",
        Scenario(schedule=Schedule.INTERLEAVED, dp=4, pp=4, vpp=2, microbatches=16, steps=20),
    ),
    "N-overlap": Preset(
        "a healthy job that reduces gradients during the backward",
        Scenario(dp=8, pp=4, microbatches=16, steps=20, overlap=True),
    ),
    "N-launch": Preset(
        "a healthy job with launch delays of 0.2 ms",
        Scenario(dp=8, pp=4, microbatches=16, steps=20, noise=Noise(launch_delay_s=0.0002)),
    ),
    "N-counters": Preset(
        "a healthy job with hosts and counters",
        Scenario(
            dp=8,
            pp=4,
            microbatches=16,
            steps=20,
            evidence=frozenset({Evidence.COUNTERS}),
            machines=Machines(ranks_per_host=8),
        ),
    ),
    "N-5-steps": Preset(
        "a healthy job, 5 steps of it", Scenario(dp=8, pp=4, microbatches=16, steps=5)
    ),
    "N-1-step": Preset(
        "a healthy job, one step of it", Scenario(dp=8, pp=4, microbatches=16, steps=1)
    ),
}

CATALOGUE: Final = (
    dict(sorted((_STRAGGLERS | _HOSTS | _IMBALANCES | _LINKS | _WHOLE_JOBS).items())) | _HEALTHY
)
