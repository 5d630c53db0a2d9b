from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smon.attribute.ledger import (
    MIN_STEPS,
    Factor,
    LaunchDelays,
    LedgerPart,
    ledger,
    ledger_note,
    shapley,
    steps_used,
)
from smon.attribute.slowdown import StepTimes, simulate_all
from smon.ops import STREAM_COMPUTE, OpType
from smon.prepare import Prepared, prepare
from smon.synth.faults.base import Draft, Fault
from smon.synth.faults.data import MoeLoad
from smon.synth.faults.network import SlowCollective, SlowP2P
from smon.synth.scenario import Scenario, generate
from smon.synth.timing import Noise, SlowCompute
from smon.topology import Layout
from smon.trace.meta import Job
from smon.trace.table import OpTable
from tests.builders import (
    Floats,
    Lane,
    Op,
    changed,
    public_job,
    reference_steps,
    table_of,
    without,
)

QUIET = Noise(compute_ratio=0.0, communication_ratio=0.0)
BOTH = list(LaunchDelays)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A window with its step times, and how its ledger is made."""

    prepared: Prepared
    times: StepTimes

    def parts(self, **options: Any) -> tuple[LedgerPart, ...]:  # noqa: ANN401  # of `ledger`
        """The ledger."""
        one = self.prepared
        return ledger(one.window, one.ideal, one.engine, self.times, **options)

    def excess(self, **options: Any) -> dict[Factor, float]:  # noqa: ANN401  # of `ledger`
        """Excess of each factor, ns."""
        return {part.factor: part.excess_ns for part in self.parts(**options)}

    def shares(self, **options: Any) -> dict[Factor, float]:  # noqa: ANN401  # of `ledger`
        """Share of each factor."""
        return {part.factor: part.share for part in self.parts(**options)}

    @property
    def lost_ns(self) -> float:
        """What the ledger has to add up to."""
        return float(self.times.replayed.mean() - self.times.ideal.mean())


def case_of(table: OpTable, job: Job) -> Case:
    """A table, analysed."""
    prepared = prepare(table, job)
    times = simulate_all(prepared.window, prepared.ideal, prepared.engine, lambda *_: None)
    return Case(prepared, times)


def job(**fields: Any) -> Case:  # noqa: ANN401  # of Scenario
    """A job of 4 × 2 workers without noise, unless told otherwise."""
    given = {"dp": 4, "pp": 2, "steps": 6, "microbatches": 6, "noise": QUIET, **fields}
    made = generate(Scenario(**given))
    return case_of(made.table, made.job)


def by_hand(*ops: Op, dp: int = 1) -> Case:
    """Hand-written steps of one stage."""
    return case_of(table_of(ops), Job("by hand", Layout(dp=dp, pp=1)))


def adds_up(case: Case, **options: Any) -> bool:  # noqa: ANN401  # of `ledger`
    """Whether the excesses give the lost time, to 1e-9 of the step time."""
    total = sum(case.excess(**options).values())
    return total == pytest.approx(case.lost_ns, rel=1e-9, abs=1e-9 * case.times.ideal.mean())


# --- the value ---------------------------------------------------------------------------------


def by_permutations(values: Sequence[float], count: int) -> list[float]:
    """The definition: mean of what a player adds, over all orders of arrival."""
    orders = list(permutations(range(count)))
    result = [0.0] * count
    for order in orders:
        present = 0
        for player in order:
            result[player] += values[present | 1 << player] - values[present]
            present |= 1 << player
    return [total / len(orders) for total in result]


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_value_is_the_mean_over_all_orders(count: int, seed: int) -> None:
    """Shapley's definition."""
    values = np.random.default_rng(seed).standard_normal(1 << count)
    assert shapley(values) == pytest.approx(by_permutations(values.tolist(), count), abs=1e-12)


def test_factors_that_do_the_same_get_the_same_and_one_that_does_nothing_gets_nothing() -> None:
    """Symmetry and null player: the value is that of the pair (0, 2); 1 does nothing."""
    values = np.array([float(mask & 0b101 == 0b101) for mask in range(8)])
    assert shapley(values).tolist() == [0.5, 0.0, 0.5]


def test_values_add_up_to_everything_on() -> None:
    """Efficiency, for six factors."""
    values = np.random.default_rng(0).random(64)
    assert shapley(values).sum() == pytest.approx(values[-1] - values[0], abs=1e-14)


# --- against a slow and simple copy of the method --------------------------------------------


def mixed_work(case: Case, on: set[Factor]) -> list[Floats]:
    """Per structure, (N, L) durations with these factors on; means are taken op by op."""
    window, by_optype = case.prepared.window, case.prepared.ideal.by_optype
    works = []
    for part in window.parts:
        structure = part.graph.structure
        work = np.empty_like(part.work)
        for op in range(len(work)):
            optype, stage = structure.optype[op], structure.stage[op]
            ideal = by_optype[optype]
            if optype not in STREAM_COMPUTE:
                work[op] = part.work[op] if Factor.COMMUNICATION in on else ideal
                continue
            for lane in range(part.lanes):
                dp, step = part.dp[lane], part.step[lane]
                mine = [
                    (other.dp[k], other.step[k], other.work[i, k])
                    for other in window.parts
                    for i in other.graph.structure.of(stage, OpType(optype))
                    for k in range(other.lanes)
                ]
                means = [
                    np.mean([time for rank, _, time in mine if rank == one])
                    for one in sorted({rank for rank, _, _ in mine})
                ]
                of_stage = np.median(means)
                of_worker = np.mean([time for rank, _, time in mine if rank == dp])
                of_step = np.mean([time for rank, at, time in mine if (rank, at) == (dp, step)])
                value = ideal
                value *= of_stage / ideal if Factor.STAGE in on else 1.0
                value *= of_worker / of_stage if Factor.WORKER in on else 1.0
                value *= of_step / of_worker if Factor.STEP in on else 1.0
                value *= part.work[op, lane] / of_step if Factor.MICROBATCH in on else 1.0
                work[op, lane] = value
        works.append(work)
    return works


def step_time(case: Case, on: set[Factor]) -> float:
    """Mean step time by the reference simulator."""
    window = case.prepared.window
    lanes = [
        Lane(
            part.graph,
            int(part.step[lane]),
            work[:, lane].tolist(),
            (part.delay[:, lane] * (Factor.LAUNCH_DELAY in on)).tolist(),
        )
        for part, work in zip(window.parts, mixed_work(case, on), strict=True)
        for lane in range(part.lanes)
    ]
    return float(np.mean(reference_steps(lanes, len(window.steps))))


def test_the_ledger_is_what_the_definition_says_on_a_tiny_job() -> None:
    """All 64 simulations one op at a time, and all orders; structures and DP sizes differ."""
    tiny = job(
        dp=2,
        steps=3,
        microbatches=2,
        step_microbatches={1: 3},
        step_dp={2: 1},
        noise=Noise(compute_ratio=0.3, communication_ratio=0.3, launch_delay_s=0.01),
    )
    assert len(tiny.prepared.window.parts) == 2
    factors = list(Factor)
    values = [
        step_time(tiny, {factors[i] for i in range(6) if mask >> i & 1}) for mask in range(64)
    ]
    together = list(tiny.excess(delays=LaunchDelays.SHAPLEY).values())
    assert together == pytest.approx(by_permutations(values, 6), abs=1e-3)
    last = list(tiny.excess().values())
    expected = [*by_permutations(values[:32], 5), values[63] - values[31]]
    assert last == pytest.approx(expected, abs=1e-3)


# --- where faults land -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LongChunk(Fault):
    """One model chunk of one stage takes longer on all replicas."""

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        rows = draft.rows(1, *STREAM_COMPUTE)
        draft.work[rows[draft.plan.chunk[rows] == 1]] *= 1.5


@dataclass(frozen=True, slots=True)
class UnevenMicrobatches(Fault):
    """Microbatches are long and short by turns, the sum is the same everywhere."""

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        rows = draft.rows(None, *STREAM_COMPUTE)
        draft.work[rows] *= np.where(draft.plan.microbatch[rows] % 2, 0.5, 1.5)[:, None, None]


@pytest.mark.parametrize(
    "factor, fields",
    [
        (Factor.WORKER, {"faults": (SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5),)}),
        (Factor.STAGE, {"faults": (SlowCompute(stage=1, forward=1.5, backward=1.5),)}),
        (Factor.STAGE, {"faults": (LongChunk(),), "schedule": "interleaved", "vpp": 2}),
        (Factor.STEP, {"faults": (MoeLoad(stage=1, ranks=(0, 1, 2, 3), run=1),), "steps": 8}),
        (Factor.MICROBATCH, {"faults": (UnevenMicrobatches(),)}),
        (Factor.COMMUNICATION, {"faults": (SlowP2P(stage=1, dp=1, factor=40.0),)}),
        (Factor.COMMUNICATION, {"faults": (SlowCollective(stage=1, factor=3.0),)}),
        (Factor.LAUNCH_DELAY, {"noise": replace(QUIET, launch_delay_s=0.005)}),
    ],
)
@pytest.mark.parametrize("delays", BOTH)
def test_a_fault_lands_in_its_factor(
    factor: Factor, fields: dict[str, Any], delays: LaunchDelays
) -> None:
    """The largest share, and most of what is lost, is that of the injected fault."""
    shares = job(**fields).shares(delays=delays)
    assert max(shares, key=shares.__getitem__) == factor
    assert shares[factor] > 0.6


def test_relabelling_dp_ranks_changes_nothing() -> None:
    """No DP rank is special."""
    made = generate(
        Scenario(dp=4, pp=2, noise=Noise(0.1, 0.1, 0.001), faults=(SlowCompute(1, 2, 1.5, 1.5),))
    )
    other = changed(made.table, dp=np.array([2, 0, 3, 1], made.table.dp.dtype)[made.table.dp])
    before, after = (case_of(table, made.job).excess() for table in (made.table, other))
    assert list(after.values()) == pytest.approx(list(before.values()), rel=1e-9, abs=1.0)


# --- it adds up --------------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small jobs of any schedule, elastic, with and without delays."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    interleaved = schedule == "interleaved"
    pp = draw(st.integers(2, 3) if interleaved else st.integers(1, 3))
    dp, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = pp if interleaved else 1
    numbers = st.integers(0, steps - 1)
    return Scenario(
        schedule=schedule,
        dp=dp,
        pp=pp,
        vpp=2 if interleaved else 1,
        steps=steps,
        microbatches=unit * draw(st.integers(1, 2)),
        overlap=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        step_microbatches=draw(st.dictionaries(numbers, st.just(3 * unit), max_size=1)),
        step_dp=draw(st.dictionaries(numbers, st.integers(1, dp), max_size=1)),
        noise=Noise(
            compute_ratio=draw(st.sampled_from([0.0, 0.3])),
            communication_ratio=draw(st.sampled_from([0.0, 0.3])),
            launch_delay_s=draw(st.sampled_from([0.0, 0.01])),
        ),
    )


@settings(max_examples=40)
@given(scenarios(), st.sampled_from(BOTH))
def test_the_parts_add_up_to_recorded_minus_ideal(scenario: Scenario, delays: LaunchDelays) -> None:
    """Whatever the job: to 1e-9 of the step time."""
    made = generate(scenario)
    assert adds_up(case_of(made.table, made.job), delays=delays)


@pytest.mark.parametrize("delays", BOTH)
@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_the_parts_add_up_on_the_public_traces(
    traces: Path, name: str, delays: LaunchDelays
) -> None:
    """Excesses and shares, to 1e-9."""
    case = public_case(traces, name)
    assert sum(case.excess(delays=delays).values()) == pytest.approx(case.lost_ns, rel=1e-9)
    assert sum(case.shares(delays=delays).values()) == pytest.approx(1.0, rel=1e-9)


def public_case(traces: Path, name: str) -> Case:
    """AR, SE or ST."""
    return case_of(*public_job(traces, name))


#: Shares in % of T − T_ideal: launch delays are not in them.
PUBLIC = {
    "AR": (-12.2, 109.3, 0.2, 0.5, 2.2),
    "SE": (15.2, 3.1, 56.6, 25.0, 0.1),
    "ST": (89.5, 0.3, 1.0, 0.1, 9.2),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_traces_have_their_known_causes(traces: Path, name: str) -> None:
    """AR one worker, SE other sequence lengths in each step, ST a long stage; see `PUBLIC`."""
    excess = public_case(traces, name).excess()
    five = np.array([value for factor, value in excess.items() if factor != Factor.LAUNCH_DELAY])
    assert 100 * five / five.sum() == pytest.approx(PUBLIC[name], abs=0.2)


@pytest.mark.parametrize("name, launch", [("AR", 0.00675), ("SE", 0.00512), ("ST", 0.01922)])
def test_launch_delays_are_what_they_add_to_t(traces: Path, name: str, launch: float) -> None:
    """Excess over T = launch slowdown − 1, as published with the traces."""
    case = public_case(traces, name)
    delay = case.excess()[Factor.LAUNCH_DELAY]
    assert delay / case.times.simulated.mean() == pytest.approx(launch, abs=1e-5)


def test_launch_delays_as_a_factor_like_others_take_what_the_slow_worker_costs(
    traces: Path,
) -> None:
    """Why `LaunchDelays.LAST` is the default: receives that wait count as delayed."""
    shares = public_case(traces, "AR").shares(delays=LaunchDelays.SHAPLEY)
    assert shares[Factor.LAUNCH_DELAY] == pytest.approx(0.51, abs=0.01)
    assert shares[Factor.WORKER] == pytest.approx(0.58, abs=0.01)


# --- odd windows -------------------------------------------------------------------------------


def test_a_job_that_loses_nothing_has_no_shares() -> None:
    """Nothing to share out: 0, not noise divided by noise."""
    parts = job().parts()
    assert [part.factor for part in parts] == list(Factor)
    assert all(part.share == 0.0 for part in parts)
    assert all(abs(part.excess_ns) < 1.0 for part in parts)


def test_one_worker_one_step_and_nothing_but_computes() -> None:
    """No stage, worker or step can differ; what is left is between the microbatches."""
    case = by_hand(Op("F", 0, 0, 2), Op("F", 0, 2, 6), Op("B", 0, 6, 9), Op("B", 0, 9, 10))
    assert adds_up(case)
    assert list(case.excess().values()) == pytest.approx([0.0] * 6, abs=1e-3)


def test_steps_without_computes_are_communication() -> None:
    """Optimizers alone: two ranks of 1 and 3 ms, mean 2, one waits for the other."""
    case = by_hand(Op("OPT", 0, 0, 1), Op("OPT", 0, 0, 3, dp=1), dp=2)
    assert case.excess()[Factor.COMMUNICATION] == pytest.approx(1e6)
    assert adds_up(case)


def test_computes_that_take_no_time_divide_nothing() -> None:
    """A type, a worker and a step of zeros: no warnings, and all on is still as recorded."""
    ops = [
        op
        for step in range(2)
        for dp in range(3)
        for op in (
            Op("F", 0, 0, 3 if dp == 2 and step else 0, dp=dp, step=step),
            Op("B", 0, 3, 3, dp=dp, step=step),
            Op("OPT", 0, 3, 4, dp=dp, step=step),
        )
    ]
    assert adds_up(by_hand(*ops, dp=3))


def test_damaged_traces_add_up() -> None:
    """Ops that were filled in are simulated like all others."""
    made = generate(Scenario(dp=4, pp=2, steps=6, noise=Noise(0.1, 0.1, 0.001)))
    lost = np.random.default_rng(0).random(len(made.table)) < 0.02
    case = case_of(without(made.table, lost), made.job)
    assert any((part.row < 0).any() for part in case.prepared.window.parts)
    assert adds_up(case)


# --- large windows -----------------------------------------------------------------------------


def long_job() -> Case:
    """Twelve steps; in one of them there is one microbatch more."""
    slow = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)
    return job(steps=12, noise=Noise(), faults=(slow,), step_microbatches={5: 7})


def used_of(case: Case, steps: float) -> list[int]:
    """The steps simulated with a budget for so many."""
    used = steps_used(case.prepared.window, case.times, max_ops=budget(case, steps))
    return [int(step) for step in used]


def budget(case: Case, steps: float) -> int:
    """The number of ops in so many steps."""
    window = case.prepared.window
    ops = sum(part.work.size for part in window.parts)
    return int(ops * steps / len(window.steps))


def test_small_windows_are_simulated_whole() -> None:
    """No note then."""
    case = long_job()
    assert used_of(case, 12) == list(range(12))
    assert ledger_note(case.prepared.window, case.times) is None


def test_large_windows_are_sampled_from_the_fastest_to_the_slowest_step() -> None:
    """As many steps as the budget holds, evenly by what they lose, and not fewer than four."""
    case = long_job()
    rank = np.argsort(np.argsort(case.times.replayed - case.times.ideal, kind="stable"))
    assert sorted(rank[used_of(case, 6.5)].tolist()) == [1, 3, 5, 7, 9, 11]
    assert sorted(rank[used_of(case, 0.1)].tolist()) == [1, 4, 7, 10]
    note = ledger_note(case.prepared.window, case.times, max_ops=1)
    assert note is not None
    assert note.startswith(f"the ledger was simulated on {MIN_STEPS} of 12 steps")


@pytest.mark.parametrize("delays", BOTH)
def test_a_sample_adds_up_to_all_steps_and_says_the_same(delays: LaunchDelays) -> None:
    """The total is exact; the split of a steady fault is that of all steps within two points."""
    case = long_job()
    options: dict[str, Any] = {"delays": delays, "max_ops": budget(case, 4.5)}
    assert adds_up(case, **options)
    assert case.shares(**options) == pytest.approx(case.shares(delays=delays), abs=0.02)


@pytest.mark.parametrize("steps", [4, 5, 8])
def test_a_sample_may_miss_a_structure(steps: int) -> None:
    """A structure that occurs in no sampled step is left out of the simulation."""
    case = long_job()
    assert len(case.prepared.window.parts) == 2
    assert adds_up(case, max_ops=budget(case, steps + 0.5))
