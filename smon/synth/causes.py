"""Causes ready to use: the faults of each, and the name, place and pattern of the right answer.

Flow: **here** → `smon.synth.catalogue` (named scenarios) and `smon.synth.sample` (random ones).
"""

from __future__ import annotations

from collections.abc import Sequence

from smon.ops import OpType
from smon.synth.faults import (
    ALWAYS,
    ClockError,
    ExtraCompute,
    Fault,
    GcPauses,
    Hang,
    HostContention,
    JobWide,
    LoaderGap,
    LostRows,
    LostWorker,
    MoeLoad,
    PackedSequences,
    SlowCollective,
    SlowCompute,
    SlowP2P,
    StepPause,
    ThermalRamp,
    Warmup,
    When,
)
from smon.synth.truth import Cause, CauseName, Pattern, Scope, Verdict


def slow_gpu(dp: int, stage: int, factor: float, *, first: int = 0, onset: bool = False) -> Cause:
    """Forward and backward of one worker take `factor` times as long; `onset`: from `first` on."""
    return Cause(
        Verdict.STRAGGLER,
        CauseName.SLOW_GPU,
        Scope.RANK,
        Pattern.ONSET if onset else Pattern.PERSISTENT,
        (SlowCompute(stage, dp, factor, factor, from_step=first),),
        dp=dp,
        stage=stage,
    )


def thermal(dp: int, stage: int, ramp: ThermalRamp) -> Cause:
    """A device of one worker gets hot."""
    return Cause(
        Verdict.STRAGGLER,
        CauseName.THERMAL,
        Scope.RANK,
        Pattern.RAMP,
        (ramp,),
        dp=dp,
        stage=stage,
    )


def slow_half(dp: int, stage: int, *, forward_s: float = 0.0, backward_s: float = 0.0) -> Cause:
    """Extra work in the forwards of one worker only, or in its backwards only."""
    return Cause(
        Verdict.STRAGGLER,
        CauseName.SLOW_FORWARD if forward_s else CauseName.SLOW_BACKWARD,
        Scope.RANK,
        Pattern.PERSISTENT,
        (ExtraCompute(stage, dp, forward_s, backward_s),),
        dp=dp,
        stage=stage,
    )


def gc(pauses: GcPauses) -> Cause:
    """Every worker's interpreter collects garbage when it likes."""
    return Cause(
        Verdict.HOST_STALL,
        CauseName.GC,
        Scope.JOB,
        Pattern.ROTATING,
        (pauses,),
        period=pauses.every,
        grows=pauses.growth_s > 0,
    )


def loader(
    gap_s: float, every: int, first: int = 0, dp: int | None = None, stage: int = 0
) -> Cause:
    """Every so many steps the data comes late, for one worker, or for a whole stage."""
    fault = LoaderGap(gap_s, stage, dp, When(first=first, every=every, phase=every - 1))
    return Cause(
        Verdict.HOST_STALL,
        CauseName.DATALOADER,
        Scope.JOB if dp is None else Scope.RANK,
        Pattern.PERIODIC if every > 1 else Pattern.PERSISTENT,
        (fault,),
        dp=dp,
        stage=None if dp is None else stage,
        period=every,
    )


def contention(
    workers: Sequence[tuple[int, int]], delay_s: float, forward_s: float, steps: Sequence[int]
) -> Cause:
    """The processors of one node are taken away in some steps."""
    dp, stage = workers[0]
    fault = HostContention(tuple(workers), delay_s, forward_s, When(steps=tuple(steps)))
    return Cause(
        Verdict.HOST_STALL,
        CauseName.HOST_CONTENTION,
        Scope.NODE,
        Pattern.INTERMITTENT,
        (fault,),
        dp=dp,
        stage=stage,
    )


def sequence_length(packing: PackedSequences) -> Cause:
    """Microbatches have unequal lengths."""
    return Cause(
        Verdict.IMBALANCE,
        CauseName.SEQUENCE_LENGTH,
        Scope.JOB,
        Pattern.ROTATING,
        (packing,),
    )


def moe_load(load: MoeLoad) -> Cause:
    """The experts of one rank at a time get too many tokens."""
    return Cause(
        Verdict.IMBALANCE,
        CauseName.MOE_LOAD,
        Scope.EP_GROUP,
        Pattern.ROTATING,
        (load,),
        stage=load.stage,
        period=load.run,
    )


def stage_partition(stage: int, forward: float, backward: float) -> Cause:
    """One stage has more work than the others."""
    return Cause(
        Verdict.IMBALANCE,
        CauseName.STAGE_PARTITION,
        Scope.STAGE,
        Pattern.PERSISTENT,
        (SlowCompute(stage, None, forward, backward),),
        stage=stage,
        details={"forward_ratio": forward, "backward_ratio": backward},
    )


def slow_group(stage: int, factor: float, when: When = ALWAYS) -> Cause:
    """All-gather and reduce-scatter of a stage are slow: any of its members may be the reason."""
    return Cause(
        Verdict.LINK,
        CauseName.SLOW_LINK,
        Scope.DP_GROUP,
        Pattern.PERSISTENT if when.first == 0 else Pattern.ONSET,
        (_collectives(stage, factor, when),),
        stage=stage,
    )


def slow_link(dp: int, stage: int, factor: float, when: When = ALWAYS) -> Cause:
    """All messages and collectives of one worker's node are slow."""
    return Cause(
        Verdict.LINK,
        CauseName.SLOW_LINK,
        Scope.NODE,
        Pattern.PERSISTENT if when.first == 0 else Pattern.ONSET,
        (_collectives(stage, factor, when), SlowP2P(stage, dp, factor, when=when)),
        dp=dp,
        stage=stage,
    )


def _collectives(stage: int, factor: float, when: When) -> Fault:
    optypes = (OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER)
    return SlowCollective(stage, factor, optypes=optypes, when=when)


def flapping_link(dp: int, stage: int, extra_s: float, p2p: float, steps: Sequence[int]) -> Cause:
    """The link of one worker's node comes and goes: in `steps` its reduce-scatter hangs a while."""
    when = When(steps=tuple(steps))
    faults = (
        SlowCollective(stage, extra_s=extra_s, optypes=(OpType.GRADS_REDUCE_SCATTER,), when=when),
        SlowP2P(stage, dp, p2p, when=when),
    )
    return Cause(
        Verdict.LINK,
        CauseName.FLAPPING_LINK,
        Scope.NODE,
        Pattern.INTERMITTENT,
        faults,
        dp=dp,
        stage=stage,
    )


def checkpoint(seconds: float, every: int, first: int = 0) -> Cause:
    """The job stands still after every so many steps."""
    return Cause(
        Verdict.PLANNED_PAUSE,
        CauseName.CHECKPOINT,
        Scope.JOB,
        Pattern.PERIODIC,
        (StepPause(seconds, When(first=first, every=every, phase=every - 1)),),
        period=every,
    )


def job_wide(
    *, compute: float = 1.0, communication: float = 1.0, first: int, verdict: Verdict
) -> Cause:
    """All ranks alike change from a step on; `verdict` is none if it is too little to tell."""
    return Cause(
        verdict,
        CauseName.JOB_WIDE,
        Scope.JOB,
        Pattern.ONSET,
        (JobWide(compute, communication, When(first=first)),),
    )


def warmup(slow_start: Warmup) -> Cause:
    """The first steps of the job are slow."""
    return Cause(Verdict.WARMUP, CauseName.WARMUP, Scope.JOB, Pattern.ONE_OFF, (slow_start,))


def hang(dp: int, stage: int, step: int, forward: int) -> Cause:
    """One forward of a worker never ends."""
    return Cause(
        Verdict.HANG,
        CauseName.HANG,
        Scope.RANK,
        Pattern.ONE_OFF,
        (Hang(stage, dp, step, forward),),
        dp=dp,
        stage=stage,
    )


def clock(workers: Sequence[tuple[int, int]], offset_s: float, drift: float = 0.0) -> Cause:
    """The clock of one host is wrong, which all its workers share."""
    dp, stage = workers[0]
    return Cause(
        Verdict.DATA_QUALITY,
        CauseName.CLOCK,
        Scope.NODE,
        Pattern.RAMP if drift else Pattern.PERSISTENT,
        tuple(ClockError(*worker, offset_s, drift) for worker in workers),
        dp=dp,
        stage=stage,
        details={"offset_s": offset_s, "drift": drift},
    )


def lost_rows(share: float) -> Cause:
    """The profiler loses ops at random."""
    return Cause(
        Verdict.DATA_QUALITY,
        CauseName.LOST_DATA,
        Scope.JOB,
        Pattern.PERSISTENT,
        (LostRows(share),),
        details={"share": share},
    )


def lost_worker(dp: int, stage: int, steps: Sequence[int]) -> Cause:
    """Nothing of one worker arrives for some steps."""
    return Cause(
        Verdict.DATA_QUALITY,
        CauseName.LOST_DATA,
        Scope.RANK,
        Pattern.INTERMITTENT,
        (LostWorker(stage, dp, When(steps=tuple(steps))),),
        dp=dp,
        stage=stage,
    )
