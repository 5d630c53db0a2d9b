from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from smon.attribute.slowdown import simulate_all, slowdown
from smon.graph.build import build_graph
from smon.graph.fill import Filled, fill_missing
from smon.graph.program import compile_programs
from smon.graph.structure import group_lanes
from smon.ops import COMPUTE, DP_SYNCED, OpType
from smon.simulate.clock import Alignment, align
from smon.simulate.engine import Engine
from smon.simulate.ideal import measure_ideal
from smon.simulate.window import make_window
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.topology import Layout
from smon.trace.grid import make_grid
from smon.trace.load import load
from smon.trace.quality import assess
from smon.trace.table import OpTable

Floats = NDArray[np.float64]

MS = 1e6


@dataclass(frozen=True)
class Job:
    """A table arranged as lanes, and what `align` wants to know beside them."""

    lanes: list[Filled]
    layout: Layout
    steps: NDArray[np.int64]
    step_start_ns: NDArray[np.int64] | None

    def align(self, **options: NDArray[np.intp] | bool) -> Alignment:
        """Align the clocks."""
        return align(
            self.lanes,
            self.layout.pp,
            self.layout.dp,
            self.steps,
            step_start_ns=self.step_start_ns,
            **options,  # type: ignore[arg-type]  # one of two options
        )


def job_of(table: OpTable, layout: Layout) -> Job:
    """The usable lanes of a table."""
    grid = make_grid(table)
    groups = group_lanes(grid, assess(grid, layout), layout)
    used = np.unique(np.concatenate([grid.lane_step[group.lanes] for group in groups]))
    number = np.searchsorted(used, grid.lane_step)
    programs = compile_programs([build_graph(group.structure) for group in groups])
    lanes = [
        fill_missing(group, program, number[group.lanes], grid.lane_dp[group.lanes])
        for group, program in zip(groups, programs, strict=True)
    ]
    begin = None
    if not table.step_relative:
        begin = np.array([table.start_ns[table.step == step].min() for step in grid.steps[used]])
    return Job(lanes, layout, grid.steps[used], begin)


def shifted(
    table: OpTable, layout: Layout, offset_ns: Floats, drift_ppm: Floats | float = 0.0
) -> OpTable:
    """The table as clocks would have it that are off by so much at the start of the window."""
    offset = offset_ns[table.dp, table.stage]
    rate = np.broadcast_to(drift_ppm, offset_ns.shape)[table.dp, table.stage] / 1e6
    first = int(table.start_ns.min())
    start = table.start_ns - first
    end = start + table.duration_ns
    moved = [np.rint(time + offset + rate * time).astype(np.int64) for time in (start, end)]
    return replace(table, start_ns=moved[0] + first, duration_ns=moved[1] - moved[0])


def one_worker(layout: Layout, dp: int, stage: int, offset_ns: float) -> Floats:
    """0 for all workers but one."""
    offset = np.zeros((layout.dp, layout.pp))
    offset[dp, stage] = offset_ns
    return offset


def error_ns(found: Floats, truth: Floats) -> float:
    """Largest error, apart from what all clocks share."""
    error = found - truth
    return float(np.nanmax(np.abs(error - np.nanmedian(error))))


def slowdown_of(lanes: Sequence[Filled], job: Job) -> tuple[float, str]:
    """S, and the op type with the largest S_t."""
    window = make_window(job.steps, job.layout.pp, job.layout.dp, lanes)
    ideal = measure_ideal(window.parts)
    times = simulate_all(window, ideal, Engine(window, ideal), lambda _done, _total: None)
    by_optype = {name: float(slowdown(part, times.ideal)) for name, part in times.by_optype.items()}
    return float(slowdown(times.simulated, times.ideal)), max(by_optype, key=by_optype.__getitem__)


def public(traces: Path, name: str) -> tuple[OpTable, Layout]:
    """A public trace."""
    trace = load([traces / "straggler-analysis" / f"trace-{name}.parquet"])
    return trace.table, trace.job.layout


def same(one: Sequence[Filled], other: Sequence[Filled]) -> bool:
    """Whether these are the very same lanes."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def c11() -> Synthetic:
    """The job of scenario C11, on good clocks."""
    return generate(Scenario(dp=4, pp=4, microbatches=16, steps=20))


C11_OFFSET = one_worker(Layout(4, 4), 1, 2, 200 * MS)
C11_OFFSET[3] = -0.4 * MS


def without(table: OpTable, share: float, seed: int = 0) -> OpTable:
    """The table with this share of its rows lost."""
    return table.take(np.random.default_rng(seed).random(len(table)) >= share)


# --- good clocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_the_clocks_of_the_public_traces_are_good_enough(traces: Path, name: str) -> None:
    """What is not beyond doubt is not touched: the lanes come back as they are."""
    job = job_of(*public(traces, name))
    found = job.align()
    assert same(found.lanes, job.lanes)
    assert not found.corrected
    assert found.aligned
    assert found.linked.all()
    assert found.residual_ns is not None
    assert found.residual_ns < 0.15 * MS


def test_the_clip_of_ar_is_recorded_by_the_host(traces: Path) -> None:
    """Its ends spread 10 ms where all others spread 0.3 ms: it is no evidence."""
    assert job_of(*public(traces, "AR")).align().left_out == (OpType.OPTIMIZER_CLIP_MAIN_GRAD,)


@pytest.mark.parametrize("fault", ["healthy", "gc_pause_rank1", "long_last_stage", "slow_rank3"])
def test_processes_of_one_machine_have_one_clock(traces: Path, fault: str) -> None:
    """Ends that gloo makes differ by 1.7 ms (p99) are no reason to move anything."""
    trace = load([traces / "torch-gloo-2pp2dp" / fault / "trace.parquet"])
    job = job_of(trace.table, trace.job.layout)
    found = job.align()
    assert same(found.lanes, job.lanes)
    assert found.aligned


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(),
        Scenario(step_relative=True, steps=20),
        Scenario(dp=1),
        Scenario(pp=1),
        Scenario(dp=1, pp=1),
        Scenario(schedule="interleaved", vpp=2, record_noops=True),
        Scenario(schedule="zero-bubble"),
        Scenario(overlap=True, steps=1),
        Scenario(steps=6, step_dp={2: 3}, step_microbatches={4: 6}),
    ],
    ids=str,
)
def test_perfect_clocks_are_left_alone(scenario: Scenario) -> None:
    """Lanes, and every number in them, are the same as before."""
    synthetic = generate(scenario)
    job = job_of(synthetic.table, scenario.layout)
    found = job.align()
    assert same(found.lanes, job.lanes)
    assert found.aligned
    assert found.linked.all()
    assert found.drift_ppm is None
    assert np.abs(found.offset_ns).max() < 100


# --- offsets --------------------------------------------------------------------------------

#: The clocks of the public traces really are off by that much: measured 0.136, 0.292, 0.015 ms.
REAL_MS = {"AR": 0.14, "SE": 0.30, "ST": 0.02}


@pytest.mark.parametrize("offset_ms", [1, 5, 20, 200, -200])
@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_an_offset_put_into_one_worker_comes_back(traces: Path, name: str, offset_ms: int) -> None:
    """Beside what was there before, to a microsecond; the answer is what it was."""
    table, layout = public(traces, name)
    clean = job_of(table, layout)
    rng = np.random.default_rng(abs(offset_ms))
    dp, stage = int(rng.integers(layout.dp)), int(rng.integers(layout.pp))
    truth = one_worker(layout, dp, stage, offset_ms * MS)
    job = job_of(shifted(table, layout, truth), layout)
    found = job.align()
    assert error_ns(found.offset_ns, truth) < REAL_MS[name] * MS
    assert error_ns(found.offset_ns - clean.align().offset_ns, truth) < 1_000
    assert np.argwhere(found.correction_ns).tolist() == [[dp, stage]]
    before, after = slowdown_of(clean.lanes, clean), slowdown_of(found.lanes, job)
    assert after[0] == pytest.approx(before[0], abs=0.002)
    assert after[1] == before[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_offsets_of_all_workers_come_back(traces: Path, name: str, seed: int) -> None:
    """Normal, 20 ms."""
    table, layout = public(traces, name)
    clean = job_of(table, layout)
    truth = np.random.default_rng(seed).normal(0, 20 * MS, (layout.dp, layout.pp))
    job = job_of(shifted(table, layout, truth), layout)
    found = job.align()
    assert error_ns(found.offset_ns, truth) < REAL_MS[name] * MS
    before, after = slowdown_of(clean.lanes, clean), slowdown_of(found.lanes, job)
    assert after[0] == pytest.approx(before[0], abs=0.002)
    assert after[1] == before[1]


def test_a_host_of_bad_time_and_a_replica_a_little_off_are_told_exactly() -> None:
    """Scenario C11: +200 ms on host (1, 2), -0.4 ms on all of replica 3."""
    synthetic = c11()
    layout = synthetic.job.layout
    clean = job_of(synthetic.table, layout)
    job = job_of(shifted(synthetic.table, layout, C11_OFFSET), layout)
    assert slowdown_of(job.lanes, job)[0] > 1.2
    found = job.align()
    np.testing.assert_allclose(found.offset_ns, C11_OFFSET, atol=0.001 * MS)
    assert ((found.correction_ns != 0) == (C11_OFFSET != 0)).all()
    assert found.aligned
    for aligned, true in zip(found.lanes, clean.lanes, strict=True):
        np.testing.assert_allclose(aligned.start, true.start, atol=1_000)
        np.testing.assert_allclose(aligned.end, true.end, atol=1_000)
    truth = slowdown_of(clean.lanes, clean)[0]
    assert slowdown_of(found.lanes, job)[0] == pytest.approx(truth, abs=1e-5)


def test_nothing_is_changed_in_place() -> None:
    """The lanes that were given are as they were."""
    synthetic = c11()
    job = job_of(shifted(synthetic.table, synthetic.job.layout, C11_OFFSET), synthetic.job.layout)
    before = [(lane.start.copy(), lane.end.copy()) for lane in job.lanes]
    assert job.align().corrected
    for (start, end), lane in zip(before, job.lanes, strict=True):
        np.testing.assert_array_equal(lane.start, start)
        np.testing.assert_array_equal(lane.end, end)


@pytest.mark.parametrize("offset_ms", [200, -200])
def test_the_step_starts_with_its_earliest_op_again(offset_ms: int) -> None:
    """A host 200 ms behind makes every step begin 200 ms early, until its clock is put right."""
    synthetic = c11()
    layout = synthetic.job.layout
    offset = one_worker(layout, 1, 2, offset_ms * MS)
    job = job_of(shifted(synthetic.table, layout, offset), layout)
    for lane in job.align().lanes:
        assert (lane.start.min(axis=0) >= 0).all()
        assert np.isclose(lane.start.min(axis=0), 0, atol=1_000).any()
    early = min(lane.start.min() for lane in job.align(rebase=False).lanes)
    assert early == pytest.approx(max(-offset_ms, 0) * MS, abs=1_000)


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_lost_rows_are_no_evidence(share: float) -> None:
    """Ops that were filled in are not compared, and are filled in again on the right clock."""
    synthetic = c11()
    layout = synthetic.job.layout
    few = without(synthetic.table, share)
    clean, job = (job_of(t, layout) for t in (few, shifted(few, layout, C11_OFFSET)))
    found = job.align()
    np.testing.assert_allclose(found.offset_ns, C11_OFFSET, atol=0.01 * MS)
    truth = slowdown_of(clean.align().lanes, clean)[0]
    assert slowdown_of(found.lanes, job)[0] == pytest.approx(truth, abs=0.002)


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_offsets_come_back_although_rows_are_lost(traces: Path, share: float) -> None:
    """As above, on a real trace; measured 0.14 ms at either share."""
    table, layout = public(traces, "AR")
    truth = one_worker(layout, 2, 1, 20 * MS)
    found = job_of(without(shifted(table, layout, truth), share), layout).align()
    assert error_ns(found.offset_ns, truth) < 0.3 * MS
    assert np.argwhere(found.correction_ns).tolist() == [[2, 1]]


def test_wild_ends_do_not_move_the_clocks() -> None:
    """2 % of ends off by up to 10 s."""
    synthetic = c11()
    layout = synthetic.job.layout
    table = shifted(synthetic.table, layout, C11_OFFSET)
    rng = np.random.default_rng(0)
    wild = (rng.random(len(table)) < 0.02) & np.isin(table.optype, [5, 6, 7, 8])
    duration = np.where(wild, rng.integers(0, 10**10, len(table)), table.duration_ns)
    found = job_of(replace(table, duration_ns=duration), layout).align()
    np.testing.assert_allclose(found.offset_ns, C11_OFFSET, atol=0.05 * MS)


def test_a_receive_that_always_ends_later_is_no_clock() -> None:
    """The lag is the same in both directions, and then it does not tell of clocks."""
    synthetic = generate(Scenario(dp=2, pp=4, steps=6))
    receives = np.isin(synthetic.table.optype, [OpType.FORWARD_RECV, OpType.BACKWARD_RECV])
    duration = synthetic.table.duration_ns + receives * np.int64(3 * MS)
    table = replace(synthetic.table, duration_ns=duration)
    found = job_of(table, synthetic.job.layout).align()
    assert not found.corrected
    assert found.residual_ns == pytest.approx(0, abs=1_000)


def test_workers_of_one_host_share_its_clock() -> None:
    """Two workers per host: four unknowns, and both workers are moved."""
    synthetic = generate(Scenario(dp=2, pp=4, steps=6))
    layout = synthetic.job.layout
    hosts = np.array([[0, 0, 1, 1], [2, 2, 3, 3]])
    truth = np.where(hosts == 3, 30 * MS, 0.0)
    job = job_of(shifted(synthetic.table, layout, truth), layout)
    found = job.align(hosts=hosts)
    np.testing.assert_allclose(found.offset_ns, truth, atol=1_000)
    assert found.aligned


@pytest.mark.parametrize("dp, pp", [(1, 4), (4, 1), (1, 2)])
def test_jobs_of_one_dimension_are_put_right(dp: int, pp: int) -> None:
    """Pairs alone or collectives alone suffice."""
    synthetic = generate(Scenario(dp=dp, pp=pp, steps=6))
    layout = synthetic.job.layout
    truth = one_worker(layout, dp - 1, pp - 1, 40 * MS)
    found = job_of(shifted(synthetic.table, layout, truth), layout).align()
    assert error_ns(found.offset_ns, truth) < 1_000
    assert found.corrected
    assert found.aligned


# --- what cannot be known -------------------------------------------------------------------


def test_replicas_without_a_common_op_cannot_be_compared() -> None:
    """DP 4, PP 1, no collective in the trace: nobody knows, and nothing is claimed."""
    synthetic = generate(Scenario(dp=4, pp=1, steps=6))
    table = synthetic.table.take(~np.isin(synthetic.table.optype, list(DP_SYNCED)))
    job = job_of(table, synthetic.job.layout)
    found = job.align()
    assert not found.linked.any()
    assert not found.aligned
    assert found.residual_ns is None
    assert np.isnan(found.offset_ns).all()
    assert same(found.lanes, job.lanes)


def test_pipelines_that_nothing_links_are_told_apart() -> None:
    """Each replica is put right for itself; that they agree with each other is not claimed."""
    synthetic = generate(Scenario(dp=2, pp=4, steps=6))
    layout = synthetic.job.layout
    table = synthetic.table.take(~np.isin(synthetic.table.optype, list(DP_SYNCED)))
    truth = one_worker(layout, 1, 2, 20 * MS)
    found = job_of(shifted(table, layout, truth), layout).align()
    np.testing.assert_array_equal(found.component, [[0] * 4, [1] * 4])
    np.testing.assert_array_equal(found.linked, [[True] * 4, [False] * 4])
    assert not found.aligned
    np.testing.assert_allclose(found.offset_ns, truth, atol=1_000)


def test_a_single_worker_has_nothing_to_be_compared_with() -> None:
    """It agrees with itself."""
    scenario = Scenario(dp=1, pp=1)
    found = job_of(generate(scenario).table, scenario.layout).align()
    assert found.linked.all()
    assert found.aligned
    assert found.residual_ns is None


def test_ends_that_scatter_are_no_alignment() -> None:
    """A residual above 5 ms: times of different workers cannot be compared."""
    synthetic = generate(Scenario(dp=2, pp=2, steps=6))
    late = np.random.default_rng(0).exponential(30 * MS, len(synthetic.table)).astype(np.int64)
    meets = ~np.isin(synthetic.table.optype, list(COMPUTE))
    duration = synthetic.table.duration_ns + late * meets
    table = replace(synthetic.table, duration_ns=duration)
    found = job_of(table, synthetic.job.layout).align()
    assert not found.aligned


def test_one_short_step_proves_little() -> None:
    """A few ends that scatter by 0.1 ms do not show an offset, over any number of jobs."""
    layout = Layout(1, 8)
    table = generate(Scenario(dp=1, pp=8, microbatches=2, steps=1)).table
    for seed in range(20):
        jitter = np.random.default_rng(seed).normal(0, 0.1 * MS, len(table)).astype(np.int64)
        noisy = replace(table, duration_ns=np.maximum(table.duration_ns + jitter, 0))
        assert not job_of(noisy, layout).align().corrected


# --- drift ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ppm", [50.0, -50.0])
def test_a_drifting_clock_is_put_right_at_all_times(ppm: float) -> None:
    """50 ppm over four minutes, 11 ms: all times are right within 0.3 ms (measured 2 µs)."""
    synthetic = generate(Scenario(dp=4, pp=4, microbatches=16, steps=60))
    layout = synthetic.job.layout
    drift = one_worker(layout, 1, 2, ppm)
    offset = one_worker(layout, 2, 0, 5 * MS)
    clean = job_of(synthetic.table, layout)
    job = job_of(shifted(synthetic.table, layout, offset, drift), layout)
    found = job.align()
    assert found.drift_ppm is not None
    np.testing.assert_allclose(found.drift_ppm, drift, atol=0.01)
    for aligned, true in zip(found.lanes, clean.lanes, strict=True):
        np.testing.assert_allclose(aligned.start, true.start, atol=0.005 * MS)
        np.testing.assert_allclose(aligned.end, true.end, atol=0.005 * MS)


def test_drifts_of_all_clocks_are_put_right_without_absolute_time() -> None:
    """Steps that restart at 0 are taken to follow each other."""
    synthetic = generate(Scenario(dp=4, pp=2, microbatches=16, steps=60))
    layout = synthetic.job.layout
    drift = np.random.default_rng(0).normal(0, 50, (4, 2))
    table = shifted(synthetic.table, layout, np.zeros((4, 2)), drift)
    job = replace(job_of(table, layout), step_start_ns=None)
    found = job.align()
    assert found.drift_ppm is not None
    assert error_ns(found.drift_ppm, drift) < 2
    clean = job_of(synthetic.table, layout)
    assert slowdown_of(found.lanes, job)[0] == pytest.approx(
        slowdown_of(clean.lanes, clean)[0], abs=0.002
    )


# --- properties -----------------------------------------------------------------------------

SMALL = generate(Scenario(dp=2, pp=2, microbatches=4, steps=5))


@settings(max_examples=25)
@given(
    constant_ms=st.integers(-(10**6), 10**6),
    offsets_ms=st.lists(st.floats(-100, 100), min_size=4, max_size=4),
)
def test_what_all_clocks_share_changes_nothing(constant_ms: int, offsets_ms: list[float]) -> None:
    """A constant on all workers: the same offsets, the same times."""
    layout = SMALL.job.layout
    offset = np.array(offsets_ms).reshape(2, 2) * MS
    one, other = (
        job_of(shifted(SMALL.table, layout, offset + shared * MS), layout).align()
        for shared in (0, constant_ms)
    )
    np.testing.assert_allclose(one.offset_ns, other.offset_ns, atol=10)
    for here, there in zip(one.lanes, other.lanes, strict=True):
        np.testing.assert_allclose(here.start, there.start, atol=10)


@settings(max_examples=25)
@given(offsets_ms=st.lists(st.floats(-500, 500), min_size=4, max_size=4))
def test_any_offsets_come_back(offsets_ms: list[float]) -> None:
    """Relative to each other, as exactly as the ends coincide."""
    layout = SMALL.job.layout
    offset = np.array(offsets_ms).reshape(2, 2) * MS
    found = job_of(shifted(SMALL.table, layout, offset), layout).align()
    assert error_ns(found.offset_ns, offset) < 1_000


def test_alignment_is_deterministic() -> None:
    """The same lanes give the same numbers."""
    synthetic = c11()
    job = job_of(shifted(synthetic.table, synthetic.job.layout, C11_OFFSET), synthetic.job.layout)
    np.testing.assert_array_equal(job.align().offset_ns, job.align().offset_ns)
