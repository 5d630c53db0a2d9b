from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from smon.ops import OpType
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.trace.grid import Grid, make_grid
from smon.trace.quality import MAX_FILLED_RATIO, Quality, assess
from smon.trace.table import OpTable
from tests.builders import cut_last_step, rows_where, without

F, RS = OpType.FORWARD_COMPUTE, OpType.GRADS_REDUCE_SCATTER


def _job(**fields: object) -> Synthetic:
    given: dict[str, object] = {"dp": 3, "pp": 2, "steps": 8, "microbatches": 4}
    return generate(Scenario(**{**given, **fields}))  # type: ignore[arg-type]


def _assessed(made: Synthetic, lost: NDArray[np.bool_]) -> tuple[Grid, Quality]:
    grid = make_grid(without(made.table, lost))
    return grid, assess(grid, made.job.layout)


def test_a_whole_job_is_expected_as_it_is() -> None:
    """Nothing missing, everything usable, nothing to say."""
    made = _job()
    grid, quality = _assessed(made, np.zeros(len(made.table), bool))
    assert quality.usable.all()
    assert (quality.coverage_ratio, quality.missing_ops) == (1.0, 0)
    assert (quality.skipped, quality.notes) == ((), ())
    assert quality.expected.sum() == len(made.table)
    assert (quality.expected == np.diff(grid.kind_offset)[:, None]).all()


@pytest.mark.parametrize("optype", [F, RS, OpType.OPTIMIZER, OpType.FORWARD_SEND])
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_op_lost_in_one_or_two_lanes_is_still_expected(optype: OpType, lanes: int) -> None:
    """Fewer lanes than make a structure: also the last op of its type, and the only one."""
    made = _job()
    mine = rows_where(made.table, optype, stage=0, dp=1)
    mine &= made.table.seq == made.table.seq[mine].max()
    mine &= made.table.step < lanes
    _, quality = _assessed(made, mine)
    assert mine.sum() == lanes
    assert quality.missing_ops == lanes
    assert quality.skipped == ()
    assert quality.coverage_ratio == pytest.approx(1 - lanes / len(made.table), abs=1e-12)


def test_what_a_replica_never_has_is_not_expected_of_it() -> None:
    """A count that a replica shows in every step is a structure of its own, not damage."""
    made = _job()
    never = rows_where(made.table, RS, dp=1, stage=1)
    _, quality = _assessed(made, never)
    assert quality.missing_ops == 0
    assert quality.usable.all()


@pytest.mark.parametrize("vpp", [1, 2])
def test_odd_steps_are_judged_by_their_own_length(vpp: int) -> None:
    """A step of twice the microbatches: its last op is missed as in any other step."""
    schedule = "interleaved" if vpp == 2 else "1f1b"
    made = _job(schedule=schedule, vpp=vpp, step_microbatches={3: 8})
    mine = rows_where(made.table, OpType.FORWARD_RECV, step=3, dp=0, stage=1)
    mine &= made.table.seq == made.table.seq[mine].max()
    _, quality = _assessed(made, mine)
    assert quality.missing_ops == 1
    assert quality.coverage_ratio == pytest.approx(1 - 1 / len(made.table), abs=1e-12)


def test_of_two_lanes_that_differ_the_fuller_is_right() -> None:
    """Ops get lost; they do not appear."""
    made = _job(dp=2, steps=1)
    lost = rows_where(made.table, RS, dp=1, stage=0)
    _, quality = _assessed(made, lost)
    assert quality.missing_ops == 1


def test_a_worker_that_lost_more_than_can_be_filled_costs_its_step() -> None:
    """Above `MAX_FILLED_RATIO` of its ops."""
    made = _job()
    mine = np.flatnonzero(rows_where(made.table, step=2, dp=1, stage=1))
    few = np.isin(np.arange(len(made.table)), mine[: int(MAX_FILLED_RATIO * len(mine))])
    many = np.isin(np.arange(len(made.table)), mine[: int(MAX_FILLED_RATIO * len(mine)) + 1])
    assert _assessed(made, few)[1].skipped == ()
    grid, quality = _assessed(made, many)
    ((step, reason),) = quality.skipped
    assert step == 2
    assert "DP rank 1 stage 1" in reason
    assert "of its ops are missing" in reason
    assert not quality.usable[grid.lane_step == 2].any()
    assert quality.usable[grid.lane_step != 2].all()


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_a_step_without_any_optimizer_was_cut_off(steps: int) -> None:
    """However large a share of a short window it is."""
    made = _job(steps=steps)
    grid = make_grid(cut_last_step(made.table, 0.7))
    assert assess(grid, made.job.layout).skipped == (
        (steps - 1, "the step was cut off before its optimizer"),
    )


def test_a_job_that_records_no_optimizer_at_all_is_not_cut_off() -> None:
    """Then steps end with their last op."""
    made = _job()
    _, quality = _assessed(made, rows_where(made.table, OpType.OPTIMIZER))
    assert quality.skipped == ()
    assert quality.coverage_ratio == 1.0


def _gone(table: OpTable, dp: int, steps: range) -> NDArray[np.bool_]:
    return rows_where(table, dp=dp) & np.isin(table.step, steps)


@pytest.mark.parametrize("absent, used", [(1, 7), (2, 6), (3, 8), (8, 8)])
def test_a_replica_that_is_gone_for_three_steps_left_the_job(absent: int, used: int) -> None:
    """For fewer its data got lost, and those steps are left out: they would read as faster."""
    made = _job()
    grid, quality = _assessed(made, _gone(made.table, 1, range(absent)))
    assert len(set(grid.lane_step[quality.usable].tolist())) == used
    assert len(quality.skipped) == 8 - used
    assert bool(quality.notes) == (used == 8)
    assert quality.coverage_ratio == pytest.approx(1 - absent / 24, abs=1e-9)
    for _, reason in quality.skipped:
        assert reason == "DP rank 1: no ops of any stage"


def test_if_every_step_misses_some_replica_the_others_are_analysed() -> None:
    """Rather than nothing; the note says what that means."""
    made = _job(steps=3)
    lost = np.zeros(len(made.table), bool)
    for step in range(3):
        lost |= rows_where(made.table, step=step, dp=step)
    grid, quality = _assessed(made, lost)
    assert quality.skipped == ()
    assert quality.usable.sum() == grid.lanes == 6
    assert any("every step misses some replica" in note for note in quality.notes)
