from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smon.errors import ConfigError
from smon.ops import STREAM_COMPUTE, OpType
from smon.synth.scenario import Scenario, generate
from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT
from smon.synth.timing import Durations, Noise, SlowCompute
from smon.topology import Layout
from smon.trace.table import OpTable
from tests.synth.builders import QUIET, ends_ns, pick, quiet


def _equal(left: OpTable, right: OpTable) -> bool:
    return all(np.array_equal(values, right.columns[name]) for name, values in left.columns.items())


def test_the_same_seed_gives_the_same_table_and_another_seed_another() -> None:
    """All randomness comes from the seed."""
    scenario = Scenario(noise=Noise(launch_delay_s=0.001))
    once, again = generate(scenario), generate(scenario)
    assert _equal(once.table, again.table)
    assert not _equal(once.table, generate(replace(scenario, seed=1)).table)


def test_a_fault_multiplies_its_worker_and_leaves_all_other_draws() -> None:
    """Faulty and fault-free runs share their draws: only the slow worker's compute differs."""
    scenario = Scenario(first_step=10)
    slow = SlowCompute(stage=2, dp=1, forward=1.5, backward=1.25, from_step=12)
    healthy = pick(generate(scenario).table, *STREAM_COMPUTE)
    faulty = pick(generate(replace(scenario, faults=(slow,))).table, *STREAM_COMPUTE)
    factor = np.ones(len(healthy))
    hit = (healthy.stage == 2) & (healthy.dp == 1) & (healthy.step >= 12)
    factor[hit & (healthy.optype == FORWARD)] = 1.5
    factor[hit & (healthy.optype == BACKWARD)] = 1.25
    assert np.abs(faulty.duration_ns - healthy.duration_ns * factor).max() <= 2


def test_a_fault_without_a_rank_slows_the_stage_on_every_replica() -> None:
    """The weight-gradient half of a split backward is slowed with it."""
    slow = SlowCompute(stage=1, backward=3.0)
    table = quiet(schedule="zero-bubble", dp=2, pp=2, faults=(slow,)).table
    for kind, factor in ((FORWARD, 1), (BACKWARD, 3), (WEIGHT, 3)):
        assert set(pick(table, kind, stage=1).duration_ns.tolist()) == {10_000_000 * factor}
        assert set(pick(table, kind, stage=0).duration_ns.tolist()) == {10_000_000}


def test_noise_has_the_spread_that_was_asked_for() -> None:
    """Compute varies per op, by 1 % unless told otherwise; communication per group."""
    table = generate(Scenario(dp=16, microbatches=32)).table
    compute = pick(table, FORWARD).duration_ns / 60e6
    assert compute.std() == pytest.approx(0.01, rel=0.05)
    assert compute.mean() == pytest.approx(1.0, abs=0.001)


def test_noise_never_makes_an_op_free() -> None:
    """A factor below the floor is raised to it."""
    table = generate(Scenario(noise=Noise(1.0, 1.0))).table
    assert pick(table, FORWARD, BACKWARD).duration_ns.min() == 3_000_000


def test_a_step_does_not_depend_on_which_other_steps_are_generated() -> None:
    """Each step draws on its own, whatever its shape's company."""
    window = generate(Scenario(steps=4, step_relative=True, step_microbatches={1: 4})).table
    alone = generate(Scenario(steps=1, first_step=2, step_relative=True)).table
    assert _equal(window.between(2, 2), alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "gpipe", "dp": 1, "pp": 1, "microbatches": 1, "steps": 1},
        {"dp": 3, "pp": 5, "microbatches": 2},
        {"schedule": "interleaved", "pp": 3, "vpp": 3, "microbatches": 6},
        {"schedule": "zero-bubble", "pp": 6, "microbatches": 3},
    ],
)
def test_every_worker_computes_every_microbatch_in_every_step(fields: dict[str, Any]) -> None:
    """Forward ops: steps × dp × stages × chunks × microbatches; all columns filled in."""
    scenario = Scenario(**fields)
    made = generate(scenario)
    workers = scenario.steps * scenario.dp * scenario.pp
    forwards = pick(made.table, FORWARD)
    assert len(forwards) == workers * scenario.vpp * scenario.microbatches
    assert len(pick(made.table, OpType.OPTIMIZER)) == workers
    expected = forwards.chunk * scenario.pp + forwards.stage
    assert np.array_equal(forwards.global_chunk, expected)
    assert len(made.step_seconds) == scenario.steps
    assert made.table.dropped == ()


def test_columns_that_do_not_apply_hold_minus_one() -> None:
    """Messages have no chunk and no microbatch, collectives of a chunk have no microbatch."""
    table = generate(Scenario(dp=2)).table
    messages = pick(table, OpType.FORWARD_SEND)
    assert set(messages.chunk.tolist()) == set(messages.microbatch.tolist()) == {-1}
    gathers = pick(table, OpType.PARAMS_ALL_GATHER)
    assert set(gathers.chunk.tolist()) == {0}
    assert set(gathers.global_chunk.tolist()) == set(gathers.microbatch.tolist()) == {-1}


def test_ranks_are_megatrons_with_tensor_parallel_stride() -> None:
    """Worker (dp, stage) stands for its first tensor-parallel rank."""
    made = generate(Scenario(dp=4, pp=2, tp=8, steps=1))
    assert made.job.layout == Layout(dp=4, pp=2, tp=8)
    assert np.array_equal(made.table.rank, 8 * (made.table.dp + 4 * made.table.stage))


def test_unix_times_put_steps_one_after_the_other_with_a_gap() -> None:
    """The next step starts `gap_s` after the last op of the one before."""
    scenario = Scenario(start_unix_s=1_000, gap_s=0.25, noise=Noise(launch_delay_s=0.001))
    made = generate(scenario)
    steps = [made.table.between(step, step) for step in scenario.step_numbers]
    first = np.array([step.start_ns.min() for step in steps])
    last = np.array([ends_ns(step).max() for step in steps])
    assert first[0] == 1_000 * 10**9
    assert np.all(first[1:] - last[:-1] == 250_000_000)
    assert np.array_equal((last - first) / 1e9, made.step_seconds)
    assert not made.table.step_relative


def test_step_relative_times_start_at_zero_in_every_step() -> None:
    """Also when the first op itself was launched late."""
    made = generate(Scenario(step_relative=True, noise=Noise(launch_delay_s=0.001)))
    assert made.table.step_relative
    assert [made.table.between(step, step).start_ns.min() for step in range(4)] == [0] * 4


def test_single_steps_can_have_other_numbers_of_microbatches() -> None:
    """Steps stay in order in the table, whatever their number of microbatches."""
    made = generate(Scenario(steps=4, step_microbatches={1: 4, 3: 12}))
    counts = [len(pick(made.table, FORWARD, step=step)) // 16 for step in range(4)]
    assert counts == [8, 4, 8, 12]
    assert np.all(np.diff(made.table.step) >= 0)
    assert np.argsort(made.step_seconds).tolist()[0] == 1
    assert np.argsort(made.step_seconds).tolist()[-1] == 3


def test_single_steps_can_have_fewer_replicas() -> None:
    """An elastic step has ranks 0 to its size; a fault of a missing rank is not felt."""
    slow = SlowCompute(stage=0, dp=3, forward=10.0)
    made = quiet(steps=3, dp=4, step_dp={1: 2, 2: 1}, faults=(slow,))
    ranks = [np.unique(made.table.between(step, step).dp).tolist() for step in range(3)]
    assert ranks == [[0, 1, 2, 3], [0, 1], [0]]
    assert made.step_seconds[1] < made.step_seconds[0]
    assert len(pick(made.table, OpType.PARAMS_ALL_GATHER, step=2)) == 0
    assert made.job.layout.dp == 4


def test_a_host_pause_at_the_end_of_the_step_can_be_given_a_duration() -> None:
    """`gc` stands between the last compute and the layernorm op."""
    table = quiet(Durations(gc_s=0.5), pp=1).table
    gc = pick(table, OpType.GC)
    assert gc.duration_ns.tolist() == [500_000_000]
    assert pick(table, OpType.LAYERNORM_GRADS_ALL_REDUCE).start_ns.tolist() == ends_ns(gc).tolist()


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"schedule": "dualpipe"}, "gpipe, 1f1b, interleaved, zero-bubble, found 'dualpipe'"),
        ({"dp": 0}, "dp must be a whole number from 1"),
        ({"pp": 2.0}, "pp must be a whole number"),
        ({"steps": True}, "found True"),
        ({"seed": -1}, "seed must be"),
        ({"gap_s": float("nan")}, "gap_s must be from 0"),
        ({"vpp": 2}, "use schedule interleaved, or vpp 1"),
        ({"schedule": "interleaved"}, "pp and vpp of at least 2, found pp 4 and vpp 1"),
        ({"schedule": "interleaved", "pp": 1, "vpp": 2}, "or use schedule 1f1b"),
        ({"schedule": "interleaved", "vpp": 2, "microbatches": 6}, "multiple of pp 4"),
        (
            {"schedule": "interleaved", "vpp": 2, "step_microbatches": {0: 9}},
            "found 9: round it",
        ),
        ({"record_noops": True}, "leave record_noops out"),
        ({"step_microbatches": {9: 4}}, "names step 9, expected steps 0 to 3"),
        ({"step_microbatches": {0: 0}}, "step_microbatches of step 0"),
        ({"step_dp": {0: 5}}, "step_dp of step 0 must be a whole number from 1 to 4, found 5"),
        ({"faults": (SlowCompute(stage=4),)}, "stage of a fault .* from 0 to 3, found 4"),
        ({"faults": (SlowCompute(stage=0, dp=7),)}, "dp of a fault .* from 0 to 3, found 7"),
        ({"dp": 1024, "pp": 64, "microbatches": 512}, "ops, expected at most 200,000,000"),
        ({"tp": 1 << 20, "dp": 1024, "microbatches": 1}, "dp × pp × tp must be"),
        ({"pp": 1 << 16}, "pp × vpp must be"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_what_to_do(
    fields: dict[str, Any], message: str
) -> None:
    """The message says what was expected and what was found."""
    with pytest.raises(ConfigError, match=message):
        Scenario(**fields)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_durations_noise_and_factors_outside_their_range_are_refused(value: float) -> None:
    """Negative, infinite and undefined values, by the name of the field."""
    with pytest.raises(ConfigError, match="forward_s must be"):
        Durations(forward_s=value)
    with pytest.raises(ConfigError, match="compute_ratio must be"):
        Noise(compute_ratio=value)
    with pytest.raises(ConfigError, match="backward must be"):
        SlowCompute(stage=0, backward=value)


def test_steps_too_long_for_a_trace_are_refused() -> None:
    """A trace holds no duration above 7 days; nothing may be dropped silently."""
    scenario = Scenario(
        pp=1,
        dp=1,
        steps=1,
        noise=QUIET,
        durations=Durations(forward_s=3600),
        faults=(SlowCompute(stage=0, forward=1000),),
    )
    with pytest.raises(ConfigError, match="use shorter durations"):
        generate(scenario)
