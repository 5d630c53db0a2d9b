"""Damaged data is normal: a report that says what was missing, or an error; never anything else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from smon.analysis import analyze
from smon.errors import NothingUsableError, SMonError
from smon.ops import OP_TYPES, P2P, OpType
from smon.report import JobReport
from smon.synth.scenario import Scenario, generate
from smon.topology import Layout
from smon.trace.meta import Job
from smon.trace.schema import COLUMNS, INVALID_NS
from smon.trace.table import OpTable, concat, make_table, seconds_to_ns
from tests.builders import (
    REAL_NOISE,
    changed,
    cut_last_step,
    known,
    public_job,
    rows_where,
    said,
    synthetic_job,
    without,
)

#: Real and made-up jobs; the latter need no public traces.
NAMES = ("AR", "SE", "ST", "1f1b", "interleaved")

F, B = OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE


@cache
def _job(traces: Path | None, name: str) -> tuple[OpTable, Job, JobReport]:
    if traces is not None:
        table, job = public_job(traces, name)
    elif name == "interleaved":
        table, job = synthetic_job(
            schedule=name, vpp=2, dp=3, overlap=True, step_microbatches={3: 4, 7: 16}
        )
    else:
        table, job = synthetic_job(schedule=name)
    return table, job, analyze(table, job)


@pytest.fixture(params=NAMES)
def whole(request: pytest.FixtureRequest) -> tuple[OpTable, Job, JobReport]:
    """A whole trace, its job, and its report: the truth."""
    return _whole(request, request.param)


def _whole(request: pytest.FixtureRequest, name: str) -> tuple[OpTable, Job, JobReport]:
    public = name in ("AR", "SE", "ST")
    return _job(request.getfixturevalue("traces") if public else None, name)


def _check_sound(report: JobReport) -> None:
    """A report of damaged data is JSON without NaN, and its main numbers are numbers."""
    report.to_json()
    main = [report.slowdown.paper, report.slowdown.launch, report.waste_ratio]
    main += [report.step_time.ideal_s, report.window.coverage_ratio]
    assert np.isfinite([known(value) for value in main]).all()
    assert 0.0 <= report.window.coverage_ratio <= 1.0
    assert report.window.steps_used + len(report.window.skipped) == report.window.steps


# --- rows lost at random ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ratio, tolerance", [(0.001, 0.003), (0.01, 0.01), (0.05, 0.03)])
def test_rows_lost_at_random_hardly_move_the_slowdown(
    whole: tuple[OpTable, Job, JobReport], ratio: float, tolerance: float, seed: int
) -> None:
    """S within 0.01 of the truth with 1 % of the rows lost, within 0.03 with 5 %."""
    table, job, truth = whole
    lost = np.random.default_rng(seed).random(len(table)) < ratio
    report = analyze(without(table, lost), job)
    _check_sound(report)
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=tolerance)
    # A lost last row of an odd step can be noticed by nothing at all.
    assert report.window.coverage_ratio == pytest.approx(1.0 - lost.mean(), abs=0.002)
    assert report.window.steps_used >= truth.window.steps - 1
    if lost.any():
        assert "missing and were filled in" in said(report)


@pytest.mark.parametrize("dp, pp, steps", [(2, 2, 1), (2, 2, 4), (1, 2, 3), (2, 1, 2)])
def test_no_single_row_of_a_small_window_is_lost_in_silence(dp: int, pp: int, steps: int) -> None:
    """Whichever row is lost: the step is kept, the op filled in, and the report says so."""
    made = generate(Scenario(dp=dp, pp=pp, steps=steps, microbatches=3, noise=REAL_NOISE))
    truth = analyze(made.table, made.job).slowdown.paper
    for row in np.flatnonzero(made.table.step == made.table.step.max()):
        lost = np.arange(len(made.table)) == row
        report = analyze(without(made.table, lost), made.job)
        what = OpType(int(made.table.optype[row])).label
        assert report.window.skipped == (), what
        assert report.window.coverage_ratio == pytest.approx(1.0 - lost.mean(), abs=1e-9), what
        assert "1 of" in said(report), what
        assert report.slowdown.paper == pytest.approx(truth, abs=0.02), what


# --- workers, replicas, steps that are missing -------------------------------------------------


def test_a_worker_that_is_missing_in_one_step_costs_that_step(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """The step is left out, with the worker named: without it, it would read as faster."""
    table, job, truth = whole
    step = int(table.step[len(table) // 2])
    report = analyze(without(table, rows_where(table, step=step, dp=0, stage=0)), job)
    _check_sound(report)
    assert [one.step for one in report.window.skipped] == [step]
    assert "DP rank 0 stage 0: no ops" in report.window.skipped[0].reason
    assert report.window.coverage_ratio < 1.0
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=0.03)


def test_a_replica_that_lacks_one_worker_everywhere_is_left_out(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """All steps are analysed without it, it has no numbers, and a note names it."""
    table, job, _ = whole
    report = analyze(without(table, rows_where(table, dp=1, stage=0)), job)
    _check_sound(report)
    assert report.window.skipped == ()
    assert report.window.steps_used == report.window.steps
    assert "DP rank 1 is left out" in said(report)
    assert "ops of stage 0 are missing" in said(report)
    assert "1" not in report.by_dp_rank
    assert {one.slowdown for one in report.workers if one.dp == 1} == {None}
    assert all(one.slowdown for one in report.workers if one.dp != 1)
    expected = 1.0 - np.mean(rows_where(table, dp=1, stage=0))
    # Where steps differ in length, what the replica should have had is the typical lane.
    assert report.window.coverage_ratio == pytest.approx(expected, abs=0.015)


def test_a_replica_that_is_missing_altogether_is_named(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """No row at all of a DP rank: a note, no numbers, and less coverage."""
    table, job, _ = whole
    report = analyze(without(table, rows_where(table, dp=1)), job)
    _check_sound(report)
    assert "DP rank 1 is left out" in said(report)
    assert "no ops of any stage" in said(report)
    assert "1" not in report.by_dp_rank
    expected = 1.0 - np.mean(rows_where(table, dp=1))
    assert report.window.coverage_ratio == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("steps", [2, 3, None])
def test_an_incomplete_last_step_is_never_read_as_a_short_one(
    whole: tuple[OpTable, Job, JobReport], share: float, steps: int | None
) -> None:
    """Cut off in time: left out as such, in windows of any length; the others stay as they are."""
    table, job, _ = whole
    if steps is not None:
        table = table.take(table.step <= np.unique(table.step)[steps - 1])
    last = int(table.step.max())
    report = analyze(cut_last_step(table, share), job)
    _check_sound(report)
    assert [(one.step, one.reason) for one in report.window.skipped] == [
        (last, "the step was cut off before its optimizer")
    ]
    assert report.slowdown == analyze(table.take(table.step != last), job).slowdown


def test_a_single_step_is_analysed_and_called_too_little(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """One step: numbers, no interval, and a verdict that says that it cannot show anything."""
    table, job, truth = whole
    first = truth.per_step[0]
    report = analyze(table.take(table.step == first.step), job)
    _check_sound(report)
    assert report.verdict == "insufficient_data"
    assert report.slowdown.ci95 is None
    # Clocks that are a few tenths of a ms apart may be put right in one step and not in many.
    assert report.step_time.simulated_s == pytest.approx(first.simulated_s, rel=1e-5)
    assert "one usable step" in said(report)


# --- rows that are wrong ------------------------------------------------------------------------


def test_repeated_rows_change_nothing_and_are_counted(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """Duplicates of single rows, and a batch that was sent twice."""
    table, job, truth = whole
    some = np.random.default_rng(1).choice(len(table), 50, replace=False)
    batch = table.take(table.step == table.step[0])
    report = analyze(concat([table, table.take(some), batch]), job)
    assert report.slowdown == truth.slowdown
    assert report.per_step == truth.per_step
    assert f"{50 + len(batch):,} rows left out: duplicate of another row" in said(report)


def test_ops_with_conflicting_times_keep_the_first_and_are_counted(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """The same op again with other times: the first is kept, in whatever order ranks come."""
    table, job, truth = whole
    some = np.random.default_rng(1).choice(len(table), 50, replace=False)
    again = table.take(some)
    report = analyze(concat([table, changed(again, duration_ns=again.duration_ns + 10**9)]), job)
    assert report.slowdown == truth.slowdown
    assert "50 rows left out: same op as another row, with other times" in said(report)


@pytest.mark.parametrize(
    "value, reason",
    [
        (np.nan, "duration is not a number"),
        (np.inf, "duration is not a number"),
        (-np.inf, "duration is not a number"),
        (-0.5, "negative duration"),
        (8 * 86_400.0, "duration above 7 days"),
        (236 * 365.25 * 86_400.0, "duration is not a number"),
    ],
)
def test_impossible_durations_are_dropped_counted_and_filled_in(
    whole: tuple[OpTable, Job, JobReport], value: float, reason: str
) -> None:
    """NaN, infinities, negative, 8-day and 236-year durations (these do not fit 2**62 ns)."""
    table, job, truth = whole
    some = np.random.default_rng(2).choice(len(table), len(table) // 200, replace=False)
    duration = table.duration_ns.copy()
    duration[some] = seconds_to_ns(np.array([value]))[0]
    report = analyze(changed(table, duration_ns=duration), job)
    _check_sound(report)
    assert f"{len(some):,} rows left out: {reason}" in said(report)
    assert "were filled in" in said(report)
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=0.01)


def test_starts_that_are_no_numbers_are_dropped_and_counted(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """The marker of an absent time in the start column."""
    table, job, truth = whole
    some = np.random.default_rng(3).choice(len(table), 20, replace=False)
    start = table.start_ns.copy()
    start[some] = INVALID_NS
    report = analyze(changed(table, start_ns=start), job)
    assert "20 rows left out: start is not a number" in said(report)
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=0.01)


def test_zero_durations_of_some_computes_are_taken_as_they_are(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """A zero is a number: the report is sound, and the replay still exact."""
    table, job, _ = whole
    some = np.flatnonzero(rows_where(table, F))
    some = np.random.default_rng(4).choice(some, len(some) // 100, replace=False)
    duration = table.duration_ns.copy()
    duration[some] = 0
    report = analyze(changed(table, duration_ns=duration), job)
    _check_sound(report)
    assert known(report.quality.simulation_error_ratio) < 1e-9


@pytest.mark.parametrize("seq", [40, 5_000, 2**31 - 1])
def test_an_absurd_sequence_number_costs_one_row(
    whole: tuple[OpTable, Job, JobReport], seq: int
) -> None:
    """Far above the number of ops of its kind: dropped, counted, filled; no memory for the rest."""
    table, job, truth = whole
    row = np.flatnonzero(rows_where(table, OpType.OPTIMIZER))[3]
    numbers = table.seq.copy()
    numbers[row] = seq
    report = analyze(changed(table, seq=numbers), job)
    _check_sound(report)
    assert "1 row left out: sequence number far above the number of ops" in said(report)
    assert report.window.skipped == ()
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=0.003)
    assert report.window.coverage_ratio > 0.99


def test_an_op_type_that_is_lost_throughout_one_step_is_noticed(
    whole: tuple[OpTable, Job, JobReport],
) -> None:
    """All backwards of one step: it is left out, or (with two replicas) filled; always said."""
    table, job, truth = whole
    step = int(table.step[0])
    report = analyze(without(table, rows_where(table, B, step=step)), job)
    _check_sound(report)
    filled = "were filled in" in said(report)
    assert [one.step for one in report.window.skipped] == ([] if filled else [step])
    assert report.slowdown.paper == pytest.approx(truth.slowdown.paper, abs=0.03)


# --- tables that are hardly traces ---------------------------------------------------------------


def test_a_table_without_rows_is_refused() -> None:
    """Nothing to analyse, said in one sentence."""
    table, job = synthetic_job(steps=1)
    with pytest.raises(NothingUsableError, match="none of 0 steps"):
        analyze(table.take(np.zeros(len(table), bool)), job)


@pytest.mark.parametrize("optype", OP_TYPES)
def test_a_single_op_gives_a_report_or_an_error(optype: OpType) -> None:
    """One row of any type, in a job of one worker."""
    columns = {column.name: np.zeros(1, column.dtype) for column in COLUMNS}
    columns["optype"][:] = optype
    columns["duration_ns"][:] = 10**6
    try:
        report = analyze(make_table(columns), Job("x", Layout(dp=1, pp=1)))
    except SMonError:
        return
    _check_sound(report)


def test_only_forward_computes_are_analysed_as_such() -> None:
    """Without communication each worker stands alone, and the step ends with its last op."""
    made = generate(Scenario(dp=2, pp=1, steps=3, noise=REAL_NOISE))
    report = analyze(made.table.take(rows_where(made.table, F)), made.job)
    _check_sound(report)
    assert set(report.by_optype) == {F.label}


def test_only_forward_computes_of_a_pipeline_are_refused() -> None:
    """The stages must have exchanged something: a graph without it would be a guess."""
    made = generate(Scenario(dp=2, pp=2, steps=3))
    with pytest.raises(NothingUsableError, match="forward-send ops for 8 forward-compute"):
        analyze(made.table.take(rows_where(made.table, F)), made.job)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_single_microbatch_is_enough(schedule: str, pp: int) -> None:
    """Warm-up, steady state and end of the pipeline are one."""
    made = generate(Scenario(schedule=schedule, dp=2, pp=pp, microbatches=1, noise=REAL_NOISE))
    report = analyze(made.table, made.job)
    assert report.window.skipped == ()
    assert report.quality.simulation_error_ratio == 0.0


def test_steps_of_wildly_different_length_are_all_analysed() -> None:
    """1 to 64 microbatches: as many structures, exact replay, nothing skipped or filled."""
    lengths = {step: 1 << step for step in range(7)}
    made = generate(Scenario(dp=2, pp=4, steps=7, step_microbatches=lengths, noise=REAL_NOISE))
    report = analyze(made.table, made.job)
    assert report.window.skipped == ()
    assert report.window.coverage_ratio == 1.0
    assert report.quality.simulation_error_ratio == 0.0
    assert "7 different structures" in said(report)


def test_the_longest_step_may_lose_its_last_op() -> None:
    """No other lane has an op with that number: it is filled in, nothing takes its place."""
    made = generate(Scenario(dp=1, pp=2, steps=5, microbatches=4, step_microbatches={2: 8}))
    for optype in (F, B, *sorted(P2P)):
        mine = rows_where(made.table, optype, step=2)
        mine &= made.table.seq == 7
        mine &= made.table.stage == made.table.stage[mine].min()
        report = analyze(without(made.table, mine), made.job)
        _check_sound(report)
        assert report.window.skipped == ()
        assert report.slowdown.paper == pytest.approx(1.0, abs=0.02)
        assert "1 of" in said(report)


# --- garbage ------------------------------------------------------------------------------------

SMALL = st.integers(-1, 4)
TIMES = st.one_of(st.integers(0, 5), st.integers(0, 10**10), st.sampled_from([2**61, -(2**61)]))


@st.composite
def garbage(draw: st.DrawFn) -> tuple[OpTable, Job]:
    """Any numbers in all columns, and any layout."""
    rows = draw(st.integers(0, 40))

    def column(values: st.SearchStrategy[int]) -> NDArray[np.int64]:
        drawn = draw(st.lists(values, min_size=rows, max_size=rows))
        return np.array(drawn, np.int64)

    types = st.sampled_from(draw(st.lists(st.integers(-1, 14), min_size=1, max_size=6)))
    columns = {column_.name: column(SMALL) for column_ in COLUMNS}
    columns["optype"] = column(types)
    columns["start_ns"], columns["duration_ns"] = column(TIMES), column(TIMES)
    layout = Layout(dp=draw(st.integers(1, 5)), pp=draw(st.integers(1, 5)))
    return make_table(columns, step_relative=draw(st.booleans())), Job("garbage", layout)


@settings(max_examples=200)
@given(garbage())
def test_garbage_gives_a_report_or_an_error_of_smon(made: tuple[OpTable, Job]) -> None:
    """Never another exception, a NaN, or a warning of numpy."""
    try:
        report = analyze(*made)
    except SMonError:
        return
    report.to_json()


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_a_job_with_many_kinds_of_damage_gives_a_report_or_an_error(seed: int) -> None:
    """Several columns of a good trace overwritten in random rows, rows lost and repeated."""
    rng = np.random.default_rng(seed)
    schedule = str(rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    interleaved = schedule == "interleaved"
    scenario = Scenario(
        schedule=schedule,
        dp=int(rng.integers(1, 4)),
        pp=2 if interleaved else int(rng.integers(1, 4)),
        vpp=2 if interleaved else 1,
        microbatches=4,
        steps=int(rng.integers(1, 5)),
        overlap=bool(rng.integers(2)),
        step_relative=bool(rng.integers(2)),
        step_microbatches={0: int(rng.choice([2, 4, 8]))},
    )
    made = generate(scenario)
    table = made.table
    for _ in range(int(rng.integers(1, 5))):
        table = _damaged(table, scenario, rng)
    try:
        report = analyze(table, made.job)
    except NothingUsableError:
        return
    _check_sound(report)


def _damaged(table: OpTable, scenario: Scenario, rng: np.random.Generator) -> OpTable:
    if not len(table):
        return table
    some = rng.choice(len(table), 1 + int(rng.integers(len(table))) // int(rng.integers(1, 100)))
    possible: dict[str, NDArray[np.int64]] = {
        "duration_ns": rng.choice([-1, 0, 10**9, 6 * 86_400 * 10**9], len(some)),
        "start_ns": rng.choice([0, 10**9, -(10**9), 2**61, -(2**61)], len(some)),
        "seq": rng.choice([0, 1, 7, 100, 2**31 - 1], len(some)),
        "optype": rng.integers(-1, len(OP_TYPES), len(some)),
        "stage": rng.integers(0, scenario.pp, len(some)),
        "dp": rng.integers(0, scenario.dp, len(some)),
        "chunk": rng.integers(-1, 3, len(some)),
        "global_chunk": rng.integers(-1, 6, len(some)),
        "step": rng.integers(0, scenario.steps + 1, len(some)),
    }
    kind = str(rng.choice([*possible, "lost", "repeated"]))
    if kind == "lost":
        return without(table, np.isin(np.arange(len(table)), some))
    if kind == "repeated":
        return table.take(np.concatenate([np.arange(len(table)), some]))
    values = table.columns[kind].copy()
    values[some] = possible[kind]
    return changed(table, **{kind: values})
