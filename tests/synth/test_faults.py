from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from smon.errors import ConfigError
from smon.ops import COMPUTE, OP_TYPES, P2P, STREAM_COMPUTE, OpType
from smon.synth.faults import (
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
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.schedule import BACKWARD, FORWARD
from smon.trace.table import OpTable
from tests.synth.builders import ends_ns, pick, quiet

AG, RS = OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER
COMMUNICATION = tuple(op for op in OP_TYPES if op not in COMPUTE)

ALL = (
    SlowCompute(1, 1, 1.5, 1.5),
    ExtraCompute(1, 1, 0.1, 0.1),
    ThermalRamp(1, 1, first=0, length=2),
    JobWide(1.1, 1.1),
    Warmup(),
    GcPauses(every=2),
    LoaderGap(0.1),
    HostContention(((1, 1),)),
    StepPause(1.0),
    SlowCollective(1, 2.0),
    SlowP2P(1, 1, 2.0),
    PackedSequences(),
    MoeLoad(1, (1,)),
    ClockError(1, 1, 0.1),
    Hang(1, 1, 3),
    LostRows(0.1),
    LostWorker(1, 1),
)

#: Those that leave the computes of other workers alone.
OF_SOME_WORKERS = [
    fault
    for fault in ALL
    if not isinstance(fault, JobWide | Warmup | GcPauses | PackedSequences | MoeLoad)
]


def made(*faults: Fault, **fields: Any) -> Synthetic:  # noqa: ANN401  # of Scenario
    """A quiet job of two replicas and two stages with these faults, 4 steps unless told."""
    given = {"dp": 2, "pp": 2, "microbatches": 4, "steps": 4, **fields}
    return quiet(faults=faults, **given)


def ratio(faulty: OpTable, healthy: OpTable) -> NDArray[np.float64]:
    """Durations over those of the healthy twin, op by op."""
    quotient: NDArray[np.float64] = faulty.duration_ns / np.maximum(healthy.duration_ns, 1)
    return quotient


def late_ms(table: OpTable, healthy: OpTable, optype: OpType, **where: int) -> list[float]:
    """By how many ms ops start later than those of the healthy twin."""
    starts = [pick(each, optype, **where).start_ns for each in (table, healthy)]
    late: list[float] = ((starts[0] - starts[1]) / 1e6).tolist()
    return late


@pytest.mark.parametrize(
    "when, steps",
    [
        (When(), [10, 11, 12, 13, 14, 15]),
        (When(first=12), [12, 13, 14, 15]),
        (When(last=12), [10, 11, 12]),
        (When(first=11, every=2), [11, 13, 15]),
        (When(first=10, every=3, phase=2), [12, 15]),
        (When(steps=(9, 11, 15)), [11, 15]),
        (When(first=12, steps=(9, 11, 15)), [15]),
    ],
)
def test_a_fault_can_be_limited_to_some_steps(when: When, steps: list[int]) -> None:
    """From, until, every n-th, or a list; what is given holds together."""
    numbers = np.arange(10, 16)
    assert numbers[when.mask(numbers)].tolist() == steps


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"schedule": "interleaved", "vpp": 2, "record_noops": True},
        {"schedule": "zero-bubble"},
        {"pp": 2, "step_dp": {1: 1}, "step_microbatches": {2: 2}, "first_step": 0},
        {"overlap": True},
    ],
)
def test_every_fault_works_with_every_kind_of_job(fault: Fault, fields: dict[str, Any]) -> None:
    """Nothing is dropped, no time is negative, and the same seed gives the same table."""
    scenario = Scenario(**{"dp": 2, "pp": 2, "faults": (fault,), **fields})
    once, again = generate(scenario), generate(scenario)
    assert once.table.dropped == ()
    assert np.all(once.table.duration_ns >= 0)
    for name, values in once.table.columns.items():
        assert np.array_equal(values, again.table.columns[name])
    assert np.isfinite(once.step_seconds).all()


@pytest.mark.parametrize("fault", OF_SOME_WORKERS, ids=lambda fault: type(fault).__name__)
def test_a_fault_leaves_all_draws_of_the_healthy_job(fault: Fault) -> None:
    """Another worker's computes take as long, to the nanosecond, as without the fault."""
    healthy, faulty = (
        generate(Scenario(dp=2, pp=2, faults=faults)).table for faults in ((), (fault,))
    )
    tables = [pick(table, *STREAM_COMPUTE, dp=0, stage=0) for table in (healthy, faulty)]
    keys = [
        {(s, o, q): d for s, o, q, d in zip(t.step, t.optype, t.seq, t.duration_ns, strict=True)}
        for t in tables
    ]
    assert keys[1].items() <= keys[0].items()


def test_extra_compute_adds_the_same_seconds_to_every_op() -> None:
    """Only to the type it names, on its worker, in its steps."""
    fault = ExtraCompute(1, 0, backward_s=0.2, when=When(first=2))
    quotients = made(fault).table.duration_ns - made().table.duration_ns
    longer = pick(made(fault).table.take(quotients == 200_000_000), BACKWARD)
    assert (len(longer), set(longer.step.tolist())) == (8, {2, 3})
    assert (set(longer.dp.tolist()), set(longer.stage.tolist())) == ({0}, {1})


def test_a_hot_device_slows_down_step_by_step() -> None:
    """1 + rise · clip((step − first)/length, 0, 1), forward and backward."""
    faulty = made(ThermalRamp(1, 0, rise=0.6, first=1, length=4), steps=8).table
    quotient = ratio(faulty, made(steps=8).table)
    hit = (faulty.dp == 0) & (faulty.stage == 1) & np.isin(faulty.optype, list(STREAM_COMPUTE))
    expected = 1 + 0.6 * np.clip((faulty.step[hit] - 1) / 4, 0, 1)
    assert quotient[hit] == pytest.approx(expected)


def test_a_change_of_the_whole_job_touches_all_ranks_alike() -> None:
    """All transfers, and the computes by another factor."""
    fault = JobWide(compute=2.0, communication=3.0, when=When(first=2))
    faulty, healthy = made(fault, dp=1, pp=1).table, made(dp=1, pp=1).table
    quotient = ratio(faulty, healthy)
    early = faulty.step < 2
    computes = np.isin(faulty.optype, [FORWARD, BACKWARD, OpType.OPTIMIZER])
    others = np.isin(faulty.optype, COMMUNICATION)
    assert np.all(quotient[early & (computes | others)] == 1)
    assert np.all(quotient[~early & computes] == 2)
    assert np.all(quotient[~early & others] == 3)


def test_only_the_first_steps_of_a_job_warm_up() -> None:
    """Two of them here; from the third on the job is its healthy twin."""
    faulty, healthy = made(Warmup(steps=2)), made()
    assert np.all(faulty.step_seconds[:2] > 2 * healthy.step_seconds[:2])
    assert faulty.step_seconds[2:].tolist() == healthy.step_seconds[2:].tolist()


def test_every_worker_pauses_once_in_its_period_inside_one_forward() -> None:
    """350 ms more in one forward per worker and 3 steps; phases and forwards differ."""
    fault = GcPauses(every=3, pause_s=0.35)
    faulty = made(fault, steps=9, dp=4).table
    more = faulty.duration_ns - made(steps=9, dp=4).table.duration_ns
    paused = faulty.take((more == 350_000_000) & (faulty.optype == FORWARD))
    assert len(paused) == 8 * 3
    for dp in range(4):
        for stage in range(2):
            steps = paused.step[(paused.dp == dp) & (paused.stage == stage)]
            assert np.diff(np.sort(steps)).tolist() == [3, 3]
    assert len(np.unique(paused.step % 3)) > 1
    assert len(np.unique(paused.microbatch)) > 1


def test_pauses_grow_with_the_heap() -> None:
    """By the same time from step to step."""
    fault = GcPauses(every=1, pause_s=0.1, growth_s=0.01, first=2)
    faulty, healthy = (made(*faults, dp=1, pp=1) for faults in ((fault,), ()))
    excess = np.rint((faulty.step_seconds - healthy.step_seconds) * 1e9)
    assert excess.tolist() == [0, 0, 100e6, 110e6]


def test_a_late_data_loader_delays_the_first_forward_only() -> None:
    """On one worker, every other step; all later ops of its replica follow."""
    fault = LoaderGap(0.5, stage=0, dp=1, when=When(every=2, phase=1))
    faulty, healthy = made(fault).table, made().table
    assert late_ms(faulty, healthy, FORWARD, dp=1, stage=0, seq=0) == [0, 500, 0, 500]
    assert late_ms(faulty, healthy, FORWARD, dp=0, stage=0, seq=0) == [0, 0, 0, 0]
    same = pick(faulty, FORWARD).duration_ns == pick(healthy, FORWARD).duration_ns
    assert np.all(same)


def test_a_late_storage_delays_all_ranks() -> None:
    """Without a rank, the first forward of all; without a stage, of all stages."""
    faulty, healthy = made(LoaderGap(0.5, None)).table, made().table
    assert late_ms(faulty, healthy, FORWARD, stage=0, seq=0) == [500] * 8
    assert late_ms(faulty, healthy, FORWARD, stage=1, seq=0) == [1000] * 8


def test_contention_delays_launches_of_its_node_and_lengthens_forwards() -> None:
    """Exponential, with the given means; backwards take as long as ever."""
    workers = ((0, 0), (0, 1))
    fault = HostContention(workers, delay_s=0.02, forward_s=0.01, when=When(steps=(1, 2)))
    sizes: dict[str, Any] = {"microbatches": 200}
    faulty, healthy = made(fault, **sizes).table, made(**sizes).table
    more = (faulty.duration_ns - healthy.duration_ns) / 1e6
    hit = (faulty.dp == 0) & np.isin(faulty.step, [1, 2])
    forward, backward = faulty.optype == FORWARD, faulty.optype == BACKWARD
    assert more[hit & forward].mean() == pytest.approx(10, rel=0.1)
    assert np.all(more[(forward & ~hit) | backward] == 0)
    ops = pick(faulty.take(hit), FORWARD, stage=0, step=1)
    gaps = (ops.start_ns[1:2] - ends_ns(ops)[0:1]) / 1e6
    assert 0 < gaps[0] < 200
    slower = made(fault, **sizes).step_seconds - made(**sizes).step_seconds
    assert slower[[0, 3]].tolist() == [0, 0]
    assert slower[[1, 2]] == pytest.approx(1.25 * (400 * 0.02 + 200 * 0.01), rel=0.1)  # two wait


def test_a_pause_of_the_whole_job_lies_between_steps() -> None:
    """Steps take as long as ever; the next one starts later."""
    fault = StepPause(6.0, When(every=2, phase=1))
    job = made(fault, step_relative=False, gap_s=0.25)
    assert job.step_seconds.tolist() == made().step_seconds.tolist()
    starts = [job.table.between(step, step).start_ns.min() for step in range(4)]
    ends = [ends_ns(job.table.between(step, step)).max() for step in range(4)]
    gaps = [(start - end) / 1e9 for start, end in zip(starts[1:], ends, strict=False)]
    assert gaps == [0.25, 6.25, 0.25]
    assert job.truth.faulty_step_s - job.truth.healthy_step_s == pytest.approx(3.0)


def test_slow_collectives_are_slow_for_all_members() -> None:
    """Those of one stage, of the types that are named: by a factor, and by seconds."""
    fault = SlowCollective(1, factor=2.0, extra_s=0.1, optypes=(RS,))
    faulty, healthy = made(fault, steps=1).table, made(steps=1).table
    rows = pick(faulty, RS, stage=1)
    latest = rows.start_ns.max()
    assert (ends_ns(rows) - latest).tolist() == [112_000_000] * 2
    assert (pick(faulty, AG).duration_ns == pick(healthy, AG).duration_ns).all()
    others = [pick(table, RS, stage=0).duration_ns.tolist() for table in (faulty, healthy)]
    assert others[0] == others[1]


@pytest.mark.parametrize("fields", [{"pp": 4}, {"schedule": "interleaved", "pp": 4, "vpp": 2}])
def test_messages_of_a_worker_are_slow_both_ways(fields: dict[str, Any]) -> None:
    """Transfers to and from it, not between others: end minus the later of both starts."""
    table = made(SlowP2P(1, 0, 40.0), steps=1, microbatches=4, **fields).table
    ends = ends_ns(table)
    for dp in (0, 1):
        messages = np.isin(table.optype, list(P2P)) & (table.dp == dp)
        for end in np.unique(ends[messages]).tolist():
            pair = messages & (ends == end)
            if np.count_nonzero(pair) != 2:
                continue  # two pairs may end in one nanosecond
            transfer_ms = (end - table.start_ns[pair].max()) / 1e6
            assert transfer_ms == (40 if dp == 0 and 1 in table.stage[pair] else 1)


def test_a_microbatch_costs_the_same_ratio_on_all_stages() -> None:
    """1 + slope · q, with the q that the context tells; 8,192 tokens each."""
    fault = PackedSequences(forward=1.0, backward=2.0)
    job = made(fault, evidence=frozenset({"lengths"}), steps=2)
    healthy, noted = made(steps=2).table, job.context.microbatches
    assert set(noted.tokens.tolist()) == {8192}
    q = dict(
        zip(
            zip(noted.step.tolist(), noted.dp.tolist(), noted.microbatch.tolist(), strict=True),
            (noted.sum_len2 / 8192**2).tolist(),
            strict=True,
        )
    )
    assert len(q) == 2 * 2 * 4
    assert all(0 < value <= 1 for value in q.values())
    for kind, slope in ((FORWARD, 1.0), (BACKWARD, 2.0)):
        ops, base = pick(job.table, kind), pick(healthy, kind)
        keys = zip(ops.step.tolist(), ops.dp.tolist(), ops.microbatch.tolist(), strict=True)
        expected = [1 + slope * q[key] for key in keys]
        assert ratio(ops, base) == pytest.approx(expected, rel=1e-6)


def test_sequences_spread_evenly_are_the_same_work() -> None:
    """The sum over the replicas of a step stays; every microbatch gets the mean."""
    fault = PackedSequences()
    uneven, even = (pick(made(each).table, FORWARD) for each in (fault, replace(fault, even=True)))
    for step in range(4):
        sums = [table.duration_ns[table.step == step].sum() for table in (uneven, even)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-6)
        assert np.ptp(even.duration_ns[even.step == step]) <= 1


def test_tokens_of_experts_move_but_do_not_grow() -> None:
    """1.9 × tokens on 40 % of the stage: 1.36 × compute; the other ranks get what is left."""
    fault = MoeLoad(stage=1, ranks=(3, 0), run=2)
    job = made(fault, dp=4, evidence=frozenset({"experts"}), steps=4)
    quotient = ratio(job.table, made(dp=4).table)
    on = np.isin(job.table.optype, list(STREAM_COMPUTE)) & (job.table.stage == 1)
    for steps, hot in (((0, 1), 3), ((2, 3), 0)):
        window = on & np.isin(job.table.step, steps)
        assert quotient[window & (job.table.dp == hot)] == pytest.approx(1.36)
        rest = 1 - 0.4 * 0.3
        assert quotient[window & (job.table.dp != hot)] == pytest.approx(rest)
    tokens = job.context.expert_tokens
    assert set(tokens.rank.tolist()) == {4, 5, 6, 7}
    first = tokens.tokens[tokens.step == 0]
    assert first[3] == pytest.approx(1.9 * first.mean(), rel=1e-4)


def test_a_wrong_clock_moves_what_is_recorded_and_nothing_else() -> None:
    """All times of one worker by its offset; steps are as long as they are."""
    faulty = made(ClockError(1, 0, 0.2), step_relative=False)
    healthy = made(step_relative=False)
    moved = faulty.table.start_ns - healthy.table.start_ns
    wrong = (faulty.table.dp == 1) & (faulty.table.stage == 0)
    assert set(moved[wrong].tolist()) == {200_000_000}
    assert set(moved[~wrong].tolist()) == {0}
    assert np.array_equal(faulty.table.duration_ns, healthy.table.duration_ns)
    assert faulty.step_seconds.tolist() == healthy.step_seconds.tolist()


def test_a_drifting_clock_gains_in_proportion_to_time() -> None:
    """1 ms per second, counted from the start of the window."""
    faulty = made(ClockError(None, 1, -0.004, drift=0.001), step_relative=False).table
    healthy = made(step_relative=False).table
    gained = (faulty.start_ns - healthy.start_ns) / 1e9
    since = (healthy.start_ns - healthy.start_ns.min()) / 1e9
    wrong = faulty.stage == 1
    assert gained[wrong] == pytest.approx(-0.004 + 0.001 * since[wrong], abs=2e-9)
    assert np.all(gained[~wrong] == 0)


def test_step_relative_times_of_wrong_clocks_start_at_zero() -> None:
    """A clock that is behind makes its own first op the start of the step."""
    table = made(ClockError(0, 0, -0.2)).table
    assert [table.between(step, step).start_ns.min() for step in range(4)] == [0] * 4
    gathers = pick(table, AG, dp=1, stage=0)
    assert gathers.start_ns.tolist() == [200_000_000] * 4


def test_a_hang_leaves_out_the_op_and_all_that_waits_for_it() -> None:
    """Worker (1,0) stops in forward 2: its replica stops, the other one waits at the end."""
    job = made(Hang(0, 1, step=3, forward=2))
    before, last = job.table.between(0, 2), job.table.between(3, 3)
    assert len(before) == len(made(steps=3).table)
    assert pick(last, FORWARD, dp=1, stage=0).seq.tolist() == [0, 1]
    assert pick(last, FORWARD, dp=1, stage=1).seq.tolist() == [0, 1]
    assert pick(last, BACKWARD, dp=1, stage=1).seq.tolist() == [0, 1]
    assert len(pick(last, BACKWARD, dp=0)) == 8
    assert len(pick(last, RS, OpType.OPTIMIZER_CLIP_MAIN_GRAD, OpType.OPTIMIZER)) == 0
    assert job.step_seconds[3] < 60
    assert job.truth.faulty_step_s == pytest.approx(job.step_seconds[:3].mean())


def test_ops_are_lost_at_random() -> None:
    """About the share that was asked for; numbers of the ops that are left stay."""
    lossy = made(LostRows(0.2, When(first=1)), microbatches=50).table
    whole = made(microbatches=50).table
    assert len(lossy.between(0, 0)) == len(whole.between(0, 0))
    kept = len(lossy.between(1, 3)) / len(whole.between(1, 3))
    assert kept == pytest.approx(0.8, abs=0.02)
    assert pick(lossy, FORWARD).seq.max() == 49


def test_a_worker_can_be_missing_for_some_steps() -> None:
    """All its ops, and no other."""
    table = made(LostWorker(1, 0, When(steps=(2,)))).table
    gone = (table.dp == 0) & (table.stage == 1)
    assert np.unique(table.step[gone]).tolist() == [0, 1, 3]
    assert np.unique(table.step[~gone]).tolist() == [0, 1, 2, 3]


def test_seconds_are_added_after_factors() -> None:
    """A slow GPU does not make a host pause longer, in whatever order they are named."""
    faults = (ExtraCompute(0, 0, forward_s=0.1), SlowCompute(0, 0, forward=2.0))
    for order in (faults, faults[::-1]):
        ops = pick(made(*order).table, FORWARD, dp=0, stage=0)
        assert set(ops.duration_ns.tolist()) == {120_000_000}


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda: When(every=0), "every must be"),
        (lambda: When(every=2, phase=2), "phase must be from 0 to 1"),
        (lambda: ExtraCompute(0, 0, forward_s=-1), "forward_s must be"),
        (lambda: ThermalRamp(0, 0, length=0), "length must be"),
        (lambda: JobWide(compute=0), "compute must be"),
        (lambda: Warmup(steps=0), "steps must be"),
        (lambda: GcPauses(every=0), "every must be"),
        (lambda: LoaderGap(float("nan")), "gap_s must be"),
        (lambda: HostContention((), -1.0), "delay_s must be"),
        (lambda: StepPause(-1.0), "seconds must be"),
        (lambda: SlowCollective(0, 0.0), "factor must be"),
        (lambda: SlowP2P(0, 0, extra_s=1e9), "extra_s must be"),
        (lambda: PackedSequences(tokens=1), "tokens must be"),
        (lambda: MoeLoad(0, ()), "number of hot ranks must be"),
        (lambda: MoeLoad(0, (0,), share=2.0), "share must be"),
        (lambda: ClockError(0, 0, 1e9), "offset_s must be"),
        (lambda: LostRows(1.5), "share must be"),
        (lambda: made(SlowP2P(2, 0)), "stage of a fault .* from 0 to 1, found 2"),
        (lambda: made(MoeLoad(0, (0, 5))), "dp of a fault .* from 0 to 1, found 5"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: Any, message: str) -> None:  # noqa: ANN401
    """Numbers out of range, and places that the job does not have."""
    with pytest.raises(ConfigError, match=message):
        fault()
