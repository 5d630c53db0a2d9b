from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from smon.analysis import analyze
from smon.ops import OpType
from smon.synth.scenario import Scenario, generate
from smon.trace.grid import Grid, joined, make_grid
from smon.trace.table import OpTable, concat
from tests.builders import REAL_NOISE, Op, changed, rows_where, table_of, without


def _slot(grid: Grid, stage: int, optype: OpType, seq: int = 0) -> int:
    (kind,) = np.flatnonzero((grid.kind_stage == stage) & (grid.kind_optype == optype))
    return int(grid.kind_offset[kind]) + seq


def test_ops_stand_by_stage_type_and_number_and_lanes_by_step_and_replica() -> None:
    """Slots × lanes, with -1 and NaN where there is no row."""
    ops = [
        Op("F", 0, 0, 4, step=7),
        Op("F", 0, 4, 9, step=7),
        Op("F", 0, 0, 3, step=9, dp=1),
        Op("B", 1, 5, 6, step=7),
    ]
    grid = make_grid(table_of(ops))
    assert grid.steps.tolist() == [7, 9]
    assert list(zip(grid.lane_step.tolist(), grid.lane_dp.tolist(), strict=True)) == [
        (0, 0),
        (1, 1),
    ]
    forward = _slot(grid, 0, OpType.FORWARD_COMPUTE)
    assert grid.start[forward].tolist() == [0.0, 0.0]
    assert grid.end[forward].tolist() == [4e6, 3e6]
    assert grid.end[forward + 1, 0] == 9e6
    assert grid.row[forward + 1, 1] == -1
    assert np.isnan(grid.start[forward + 1, 1])
    assert grid.end[_slot(grid, 1, OpType.BACKWARD_COMPUTE), 0] == 6e6


def test_absolute_times_count_from_the_first_op_of_each_step() -> None:
    """Unix time: the earliest start of a step, over all its workers, is 0."""
    made = generate(Scenario(dp=2, pp=2, steps=3))
    relative = generate(Scenario(dp=2, pp=2, steps=3, step_relative=True))
    one, other = make_grid(made.table), make_grid(relative.table)
    assert np.array_equal(one.start, other.start)
    assert np.array_equal(one.end, other.end)


def test_ranks_of_one_worker_become_the_op_that_spans_them() -> None:
    """TP 2: earliest start, latest end; neither rank is a duplicate."""
    ops = [Op("F", 0, 1, 4, rank=0), Op("F", 0, 0, 3, rank=1), Op("F", 0, 2, 3, rank=2)]
    grid = make_grid(table_of(ops))
    assert grid.start.tolist() == [[0.0]]
    assert grid.end.tolist() == [[4e6]]
    assert (grid.duplicates, grid.conflicts, grid.out_of_range) == (0, 0, 0)


def _tensor_parallel(table: OpTable, ranks: int, seed: int) -> OpTable:
    """Every row on several ranks; the first has the recorded times, the others lie within."""
    rng = np.random.default_rng(seed)
    parts = [table]
    for rank in range(1, ranks):
        late = (rng.random(len(table)) * 0.3 * table.duration_ns).astype(np.int64)
        early = (rng.random(len(table)) * 0.3 * table.duration_ns).astype(np.int64)
        parts.append(
            changed(
                table,
                rank=table.rank + rank,
                start_ns=table.start_ns + late,
                duration_ns=table.duration_ns - late - early,
            )
        )
    return concat(parts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_per_worker_give_the_report_of_their_spans(ranks: int) -> None:
    """In any order of rows, and with some rows of some ranks lost."""
    made = generate(Scenario(dp=2, pp=2, tp=4, steps=3, noise=REAL_NOISE))
    truth = analyze(made.table, made.job)
    table = _tensor_parallel(made.table, ranks, seed=3)
    rng = np.random.default_rng(4)
    lost = (rng.random(len(table)) < 0.1) & (np.arange(len(table)) >= len(made.table))
    for one in (table, table.take(rng.permutation(len(table))), without(table, lost)):
        report = analyze(one, made.job)
        assert report.slowdown == truth.slowdown
        assert report.window.coverage_ratio == 1.0
        assert not any("left out" in note for note in report.quality.notes)


def test_a_repeated_rank_of_several_is_a_duplicate() -> None:
    """The same op of the same rank twice: counted, and it widens nothing."""
    ops = [Op("F", 0, 0, 3, rank=0), Op("F", 0, 1, 4, rank=1)]
    table = table_of(ops)
    grid = make_grid(concat([table, table.take(np.array([0]))]))
    assert (grid.duplicates, grid.conflicts) == (1, 0)
    assert grid.end.tolist() == [[4e6]]


def test_the_same_op_with_other_times_is_a_conflict_and_the_first_stays() -> None:
    """One rank, two times: rows keep their order."""
    first = table_of([Op("F", 0, 0, 3, rank=0)])
    second = table_of([Op("F", 0, 1, 9, rank=0)])
    grid = make_grid(concat([first, second]))
    assert (grid.duplicates, grid.conflicts) == (0, 1)
    assert grid.end.tolist() == [[3e6]]


@pytest.mark.parametrize("seq", [40, 10_000, 2**31 - 1])
def test_absurd_sequence_numbers_are_left_out_before_they_cost_memory(seq: int) -> None:
    """Above twice the ops of the fullest lane, with some room: garbage."""
    made = generate(Scenario(dp=2, pp=2, steps=3))
    whole = make_grid(made.table)
    numbers = made.table.seq.copy()
    row = np.flatnonzero(rows_where(made.table, OpType.FORWARD_COMPUTE))[5]
    numbers[row] = seq
    grid = make_grid(changed(made.table, seq=numbers))
    assert grid.out_of_range == 1
    assert grid.row.shape == whole.row.shape


def test_sequence_numbers_may_have_gaps() -> None:
    """Half of the ops of a type lost: the numbers left are plausible."""
    made = generate(Scenario(dp=1, pp=1, steps=1, microbatches=60))
    lost = rows_where(made.table, OpType.FORWARD_COMPUTE) & (made.table.seq % 2 == 0)
    grid = make_grid(without(made.table, lost))
    assert grid.out_of_range == 0
    assert np.count_nonzero(grid.row < 0) == 30


# --- grids put together -------------------------------------------------------------------------


def _by_step(table: OpTable) -> list[OpTable]:
    return [table.between(step, step) for step in np.unique(table.step).tolist()]


@pytest.mark.parametrize("step_relative", [False, True])
def test_grids_of_steps_put_together_are_the_grid_of_all(*, step_relative: bool) -> None:
    """Field by field, also with lost rows, repeated ones, and ranks in any order."""
    made = generate(
        Scenario(dp=3, pp=2, steps=4, noise=REAL_NOISE, step_relative=step_relative)
    ).table
    rng = np.random.default_rng(6)
    lost = (rng.random(len(made)) < 0.05) & rows_where(made, OpType.FORWARD_COMPUTE)
    lost &= (made.seq > 0) & (made.seq < made.seq.max())
    steps = [step.take(rng.permutation(len(step))) for step in _by_step(without(made, lost))]
    steps[2] = concat([steps[2], steps[2].take(np.arange(3))])
    table = concat(steps)
    whole, found = make_grid(table), joined([make_grid(step) for step in steps], table)
    assert found is not None
    assert whole.duplicates == 3
    for field in fields(Grid):
        if field.name != "table":
            np.testing.assert_array_equal(
                getattr(found, field.name), getattr(whole, field.name), field.name
            )


def test_grids_of_steps_that_differ_are_not_put_together() -> None:
    """Another number of microbatches, or a sequence number that is garbage."""
    made = generate(Scenario(dp=2, pp=2, steps=2, step_microbatches={1: 5})).table
    assert joined([make_grid(step) for step in _by_step(made)], made) is None
    made = generate(Scenario(dp=2, pp=2, steps=2)).table
    seq = made.seq.copy()
    seq[0] = 10_000
    damaged = changed(made, seq=seq)
    assert joined([make_grid(step) for step in _by_step(damaged)], damaged) is None


def test_an_empty_table_has_no_lanes_and_no_slots() -> None:
    """Nothing in, nothing out, and no error."""
    grid = make_grid(table_of([]))
    assert grid.lanes == 0
    assert grid.row.shape == (0, 0)
