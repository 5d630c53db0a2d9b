from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smon.analysis import Options, analyze
from smon.errors import CycleError, NothingUsableError, SimulationError, TopologyError
from smon.graph.build import Graph
from smon.graph.program import compile_programs
from smon.ops import OpType
from smon.prepare import _leave_out_cycles, prepare
from smon.report import JobReport
from smon.simulate.whatif import Recorded
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.timing import Durations, Noise, SlowCompute
from smon.topology import Layout
from smon.trace.meta import Job
from smon.trace.table import OpTable
from tests.builders import Op, bare_structure, changed, known, rows_where, synthetic_job, table_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
QUIET = Noise(compute_ratio=0.0, communication_ratio=0.0)


def _scenarios(schedule: str, noise: Noise) -> list[Scenario]:
    """All of dp, pp, overlap and no-ops, in small."""
    interleaved = schedule == "interleaved"
    return [
        Scenario(
            schedule=schedule,
            dp=dp,
            pp=pp,
            vpp=2 if interleaved else 1,
            microbatches=4,
            steps=2,
            overlap=overlap,
            record_noops=noops,
            noise=noise,
            seed=5,
        )
        for dp, pp, overlap, noops in product((1, 3), (1, 2, 4), (False, True), (False, True))
        if (pp > 1 or not interleaved) and (interleaved or not noops)
    ]


def _times(made: Synthetic) -> tuple[list[float], list[float], list[float]]:
    """Recorded, replayed and simulated step times, ns."""
    prepared = prepare(made.table, made.job)
    engine, window = prepared.engine, prepared.window
    assert prepared.coverage_ratio == 1.0
    assert not prepared.skipped
    return (
        window.recorded().tolist(),
        engine.run(Recorded(window), delays=Recorded(window)).step_ns[0].tolist(),
        engine.run(Recorded(window)).step_ns[0].tolist(),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_the_replay_gives_every_recorded_step_exactly(
    schedule: str, delay_s: float, ratio: float
) -> None:
    """Original durations and launch delays reproduce the trace: the graph is right."""
    for scenario in _scenarios(schedule, Noise(ratio, ratio, delay_s)):
        made = generate(scenario)
        recorded, replayed, _ = _times(made)
        assert replayed == recorded, scenario
        assert [time / 1e9 for time in recorded] == made.step_seconds.tolist(), scenario


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_without_launch_delays_the_simulated_step_is_the_recorded_one(
    schedule: str, ratio: float
) -> None:
    """T equals the recorded time exactly, noise or not: synthetic jobs follow rule 5 as well.

    Recorded no-ops cost up to 3e-6: nothing waits for one in the job, but in the chain of its
    type (rule 2) the next send does, for the microsecond that it lasts.
    """
    for scenario in _scenarios(schedule, Noise(ratio, ratio)):
        recorded, _, simulated = _times(generate(scenario))
        tolerance = 5e-6 if scenario.record_noops else 0.0
        assert simulated == pytest.approx(recorded, rel=tolerance, abs=0.0), scenario


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_of_other_lengths_and_fewer_replicas_are_replayed_exactly(schedule: str) -> None:
    """Several microbatch counts and elastic data parallelism in one window."""
    interleaved = schedule == "interleaved"
    scenario = Scenario(
        schedule=schedule,
        dp=3,
        pp=2,
        vpp=2 if interleaved else 1,
        microbatches=4,
        steps=9,
        step_microbatches={1: 2, 2: 8, 5: 8},
        step_dp={3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1},
        noise=Noise(0.1, 0.1, 0.001),
    )
    made = generate(scenario)
    prepared = prepare(made.table, made.job)
    window = prepared.window
    replayed = prepared.engine.run(Recorded(window), delays=Recorded(window)).step_ns[0]
    assert len(window.steps) == 9
    assert replayed.tolist() == window.recorded().tolist()
    assert (window.recorded() / 1e9).tolist() == made.step_seconds.tolist()
    assert sum(np.count_nonzero(part.step == 7) for part in window.parts) == 1


# --- properties -------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> tuple[OpTable, Job]:
    """Small noisy jobs."""
    schedule = draw(st.sampled_from(SCHEDULES))
    scenario = Scenario(
        schedule=schedule,
        dp=draw(st.integers(1, 3)),
        pp=2,
        vpp=2 if schedule == "interleaved" else 1,
        microbatches=4,
        steps=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
        overlap=draw(st.booleans()),
        noise=Noise(0.1, 0.1, 0.001),
    )
    made = generate(scenario)
    return made.table, made.job


@settings(max_examples=25)
@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(job: tuple[OpTable, Job], random: object) -> None:
    """A shuffled table gives the same report, to the last bit."""
    table, which = job
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    shuffled = table.take(rng.permutation(len(table)))
    assert analyze(shuffled, which).to_json() == analyze(table, which).to_json()


@settings(max_examples=20)
@given(jobs(), st.integers(2, 50))
def test_a_slower_clock_leaves_the_slowdowns(job: tuple[OpTable, Job], factor: int) -> None:
    """All times × k: step times × k, S and everything else that has no unit stays."""
    table, which = job
    begin = int(table.start_ns.min())
    scaled = changed(
        table,
        start_ns=(table.start_ns - begin) * factor,
        duration_ns=table.duration_ns * factor,
    )
    one, other = analyze(table, which), analyze(scaled, which)
    assert other.slowdown.paper == pytest.approx(one.slowdown.paper, rel=1e-12)
    assert other.by_optype == pytest.approx(one.by_optype, rel=1e-12)
    assert _workers(other) == pytest.approx(_workers(one), rel=1e-12)
    assert other.step_time.ideal_s == pytest.approx(
        known(one.step_time.ideal_s) * factor, rel=1e-12
    )


@settings(max_examples=20)
@given(jobs(), st.randoms(use_true_random=False))
def test_relabelled_replicas_permute_the_answer(job: tuple[OpTable, Job], random: object) -> None:
    """DP ranks by other names: S stays, S per DP rank and worker go with the names."""
    table, which = job
    names = list(range(which.layout.dp))
    random.shuffle(names)  # type: ignore[attr-defined]
    one = analyze(table, which)
    other = analyze(changed(table, dp=np.array(names)[table.dp]), which)
    assert other.slowdown.paper == pytest.approx(one.slowdown.paper, rel=1e-12)
    assert other.by_stage == pytest.approx(one.by_stage, rel=1e-12)
    renamed = {str(names[int(dp)]): value for dp, value in one.by_dp_rank.items()}
    assert other.by_dp_rank == pytest.approx(renamed, rel=1e-12)
    workers = {(names[dp], stage): value for (dp, stage), value in _workers(one).items()}
    assert _workers(other) == pytest.approx(workers, rel=1e-12)


def _workers(report: JobReport) -> dict[tuple[int, int], float | None]:
    return {(worker.dp, worker.stage): worker.slowdown for worker in report.workers}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_job_without_any_variation_has_a_slowdown_of_one(schedule: str) -> None:
    """All ops of a type take the same: S, all S_t and S_w are 1, nothing is wasted."""
    interleaved = schedule == "interleaved"
    made = generate(
        Scenario(schedule=schedule, dp=3, pp=2, vpp=2 if interleaved else 1, noise=QUIET)
    )
    report = analyze(made.table, made.job)
    assert report.slowdown.paper == pytest.approx(1.0, rel=1e-9)
    assert report.slowdown.launch == pytest.approx(1.0, rel=1e-9)
    assert report.waste_ratio == pytest.approx(0.0, abs=1e-9)
    values = [*report.by_optype.values(), *report.by_stage.values(), *report.by_dp_rank.values()]
    values += [value for value in _workers(report).values() if value is not None]
    assert values == pytest.approx([1.0] * len(values), rel=1e-9)
    assert len(report.workers) == 6


def test_the_slow_worker_of_a_synthetic_job_stands_out() -> None:
    """Exact S_w is largest for the worker at fault, and fixing it explains the slowdown."""
    table, job = synthetic_job(steps=4)
    report = analyze(table, job, Options(repair=((2, 1),)))
    worst = max(report.workers, key=lambda worker: worker.slowdown or 0.0)
    assert (worst.dp, worst.stage, worst.rank) == (2, 1, job.layout.rank(2, 1))
    assert report.worker_share is not None
    assert report.worker_share > 0.8
    healthy = known(analyze(*synthetic_job(steps=4, faults=())).step_time.simulated_s)
    assert report.slowdown.repaired == pytest.approx(
        known(report.step_time.simulated_s) / healthy, rel=0.01
    )


def test_repairing_a_worker_that_does_not_exist_is_refused() -> None:
    """`repair` names workers of the job."""
    table, job = synthetic_job(steps=2)
    with pytest.raises(SimulationError, match="no worker at DP rank 4"):
        analyze(table, job, Options(repair=((4, 0),)))


# --- broken steps -----------------------------------------------------------------------------


def _with_cycle(table: OpTable, *steps: int) -> OpTable:
    """The first backward of stage 0 starts with the step: it would need what it precedes."""
    start = table.start_ns.copy()
    for step in steps:
        for optype in (OpType.BACKWARD_COMPUTE, OpType.BACKWARD_RECV):
            start[rows_where(table, optype, step=step, dp=0, stage=0, seq=0)] = 0
    return changed(table, start_ns=start)


def test_a_step_with_a_cycle_is_left_out_with_its_reason() -> None:
    """The other steps are analysed as if it were not there."""
    made = generate(Scenario(dp=2, pp=2, steps=4, step_relative=True))
    report = analyze(_with_cycle(made.table, 1), made.job)
    (skipped,) = report.window.skipped
    assert skipped.step == 1
    assert "wait for each other" in skipped.reason
    assert "backward-compute 0 of stage 0" in skipped.reason
    assert [part.step for part in report.per_step] == [0, 2, 3]
    rest = analyze(made.table.take(made.table.step != 1), made.job)
    assert report.slowdown == rest.slowdown


def test_a_job_of_which_every_step_has_a_cycle_is_refused_with_the_reasons() -> None:
    """Nothing is reported that is not known."""
    made = generate(Scenario(dp=2, pp=2, steps=2, step_relative=True))
    with pytest.raises(NothingUsableError, match="none of 2 steps") as caught:
        analyze(_with_cycle(made.table, 0, 1), made.job)
    assert [step for step, _ in caught.value.skipped] == [0, 1]


def _forward_and_optimizer(step: int, span: float) -> list[Op]:
    return [Op("F", 0, 0, span, step=step), Op("OPT", 0, span, 2 * span, step=step)]


def test_steps_without_time_are_left_out_with_their_reason() -> None:
    """A step of which every op takes nothing has no slowdown: not infinite, not silent."""
    job = Job("x", Layout(dp=1, pp=1))
    ops = [op for step, span in enumerate((1, 0, 2)) for op in _forward_and_optimizer(step, span)]
    report = analyze(table_of(ops), job)
    (skipped,) = report.window.skipped
    assert (skipped.step, skipped.reason) == (1, "its ops take no time")
    assert report.slowdown == analyze(table_of([op for op in ops if op.step != 1]), job).slowdown
    with pytest.raises(NothingUsableError, match="its ops take no time"):
        analyze(table_of(_forward_and_optimizer(0, 0)), job)


def _meets(*keys: int) -> Graph:
    """A chain of DP collectives with these keys."""
    count = len(keys)
    return Graph(
        structure=bare_structure(np.full(count, OpType.GRADS_REDUCE_SCATTER)),
        before=np.arange(count - 1),
        after=np.arange(1, count),
        group=np.arange(count),
        sync={op: (OpType.GRADS_REDUCE_SCATTER, 0, key) for op, key in enumerate(keys)},
    )


def test_collectives_that_contradict_each_other_cost_the_rarer_structure_only() -> None:
    """Replicas that meet in contradicting orders would wait for ever: the first one stays."""
    with pytest.raises(CycleError, match="in different orders"):
        compile_programs([_meets(0, 1), _meets(1, 0)])
    graphs: list[Graph | None] = [_meets(0, 1), _meets(1, 0), None, _meets(0, 1, 2)]
    broken: dict[int, str] = {}
    _leave_out_cycles(graphs, broken)
    assert [graph is not None for graph in graphs] == [True, False, False, True]
    assert list(broken) == [1]
    assert "in different orders" in broken[1]


def test_workers_outside_the_layout_are_refused() -> None:
    """A table and a layout that do not fit are an error that names both."""
    table, job = synthetic_job(steps=1)
    with pytest.raises(TopologyError, match="DP rank 3, but layout dp3-pp4 allows 0 to 2"):
        analyze(table, Job("x", Layout(dp=3, pp=4)))
    with pytest.raises(TopologyError, match="stage 3"):
        analyze(table, Job("x", Layout(dp=4, pp=3)))
    assert job.layout == Layout(dp=4, pp=4)


def test_a_report_is_json_with_the_fields_of_the_contract() -> None:
    """Schema smon.report/1, no NaN, the price as given."""
    table, job = synthetic_job(steps=2, durations=Durations(gc_s=0.0))
    report = analyze(table, job, Options(notes=("from the reader",), price_per_gpu_hour=2.0))
    plain = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert plain["schema"] == "smon.report/1"
    assert plain["quality"]["notes"][0] == "from the reader"
    assert plain["cost"]["gpu_hours_per_day"] == pytest.approx(known(report.waste_ratio) * 16 * 24)
    assert plain["cost"]["cost_per_day"] == pytest.approx(known(report.waste_ratio) * 16 * 24 * 2.0)
    assert plain["window"]["steps"] == plain["window"]["steps_used"] == 2


def test_progress_comes_to_its_end() -> None:
    """Progress counts up to the total that it announces."""
    table, job = synthetic_job(steps=2, faults=(SlowCompute(stage=0),))
    seen: list[tuple[str, int, int]] = []
    analyze(table, job, Options(progress=lambda *call: seen.append(call)))
    done = [count for _, count, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]
    assert len({total for _, _, total in seen}) == 1


def test_fixes_of_a_large_window_come_from_some_steps() -> None:
    """As those of all steps, within what their noise allows, and said so."""
    slow = SlowCompute(stage=1, dp=2, forward=1.3, backward=1.3)
    made = generate(Scenario(dp=4, pp=4, microbatches=8, steps=24, faults=(slow,), seed=3))
    whole = analyze(made.table, made.job)
    some = analyze(made.table, made.job, Options(max_plan_ops=len(made.table) // 3))
    names = [fix.fix for fix in whole.fixes]
    assert "replace_workers" in names
    assert [fix.fix for fix in some.fixes] == names
    for one, other in zip(whole.fixes, some.fixes, strict=True):
        assert other.speedup == pytest.approx(one.speedup, rel=0.01)
    note = "what fixes buy was worked out on 8 of 24 steps, evenly spread"
    assert note in some.quality.notes
    assert note not in whole.quality.notes
    assert [finding.where for finding in some.findings] == [f.where for f in whole.findings]
