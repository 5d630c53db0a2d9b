from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smon.plan.lanes import alone_ns
from smon.plan.replicas import backup_workers, sync_less_often
from smon.plan.tail import forecast
from smon.synth.faults import PackedSequences, SlowCompute
from tests.builders import public_job
from tests.plan.jobs import elastic, evidence_of, made, step_ns

SLOW = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)


def test_the_slowest_replica_alone_takes_the_whole_step(traces: Path) -> None:
    """Replicas meet at the start and the end: the maximum of solo times is the step time."""
    for name in ("AR", "SE", "ST"):
        evidence = evidence_of(*public_job(traces, name))
        alone = alone_ns(evidence.window)
        assert np.allclose(np.nanmax(alone, axis=1), evidence.times.simulated, rtol=2e-3)


def test_backup_workers_leave_the_slow_one_behind() -> None:
    """One slow replica of eight dropped: healthy steps with 7/8 of the samples."""
    evidence = made(dp=8, faults=(SLOW,))
    (fix,) = backup_workers(evidence, alone_ns(evidence.window))
    assert fix.step_time_ns * 7 / 8 == pytest.approx(step_ns(dp=7), rel=0.01)
    assert fix.changes_optimisation
    assert "1 of 8 replicas" in fix.assumptions[0]


def test_backup_workers_wait_for_the_k_th_slowest(traces: Path) -> None:
    """SE: the step time is the (D − k)-th of the solo step times, per sample."""
    evidence = evidence_of(*public_job(traces, "SE"))
    alone = alone_ns(evidence.window)
    ordered = np.sort(alone, axis=1)
    for count, fix in enumerate(backup_workers(evidence, alone), start=1):
        expected = ordered[:, -1 - count].mean() * 32 / (32 - count)
        assert fix.step_time_ns == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_no_backups_for_few_replicas(dp: int) -> None:
    """With fewer than four replicas too much of each batch would be lost."""
    evidence = made(dp=dp)
    assert backup_workers(evidence, alone_ns(evidence.window)) == []


def test_slow_turns_even_out_between_synchronisations() -> None:
    """Two replicas slow in turn: synchronising every second step hides half of it."""
    turns = tuple(
        SlowCompute(
            stage=0, dp=step % 2, forward=1.5, backward=1.5, from_step=step, until_step=step
        )
        for step in range(12)
    )
    evidence = made(dp=2, pp=1, faults=turns)
    two, *_ = sync_less_often(evidence, alone_ns(evidence.window))
    healthy, slow = step_ns(dp=2, pp=1), step_ns(dp=2, pp=1, faults=turns)
    assert two.step_time_ns == pytest.approx((healthy + slow) / 2, rel=0.01)
    assert two.changes_optimisation


def test_a_lasting_straggler_does_not_even_out() -> None:
    """The same replica slow in every step: nothing is gained."""
    evidence = made(faults=(SLOW,))
    assert all(
        fix.speedup == pytest.approx(1.0, abs=0.003)
        for fix in sync_less_often(evidence, alone_ns(evidence.window))
    )


def test_too_few_steps_to_see_drift() -> None:
    """Every k steps needs 2 k steps to be seen; one replica never drifts."""
    evidence = made(steps=5)
    assert [fix.detail for fix in sync_less_often(evidence, alone_ns(evidence.window))] == [
        "synchronise gradients every 2 steps"
    ]
    alone = made(dp=1)
    assert sync_less_often(alone, alone_ns(alone.window)) == []


@pytest.mark.parametrize("growth", [1, 2, 4])
def test_larger_jobs_wait_for_longer_tails(growth: int) -> None:
    """Uneven data on 16 replicas forecasts 32 and 64 replicas within 3 %, inside the interval."""
    fields = {"pp": 2, "steps": 40, "faults": (PackedSequences(),)}
    evidence = made(dp=16, **fields)
    points = {point.dp: point for point in forecast(evidence).points}
    truth = step_ns(dp=16 * growth, **fields)
    point = points[16 * growth]
    assert point.step_time_ns == pytest.approx(truth, rel=0.03)
    assert point.low_ns * 0.98 <= truth <= point.high_ns * 1.02


def test_a_forecast_grows_with_the_number_of_replicas(traces: Path) -> None:
    """Half, once, twice … sixteen times; more replicas are never faster."""
    result = forecast(evidence_of(*public_job(traces, "SE")))
    sizes, expected, low, high = result.series()
    assert sizes == [16, 32, 64, 128, 256, 512]
    assert expected == sorted(expected)
    assert all(a <= b <= c for a, b, c in zip(low, expected, high, strict=True))
    assert result.points[1].step_time_ns == pytest.approx(result.now_ns, rel=0.02)


def test_one_bad_machine_is_not_multiplied() -> None:
    """A suspect is left out, and said to be: the forecast is that of healthy replicas."""
    result = forecast(made(dp=8, faults=(SLOW,)), suspects=[(2, 1)])
    assert result.left_out == (2,)
    assert "left out: DP 2" in result.assumptions[0]
    assert result.points[1].step_time_ns == pytest.approx(step_ns(dp=8), rel=0.01)
    assert result.points[-1].beyond_data


@pytest.mark.parametrize("dp", [1, 2])
def test_one_replica_shows_no_scatter(dp: int) -> None:
    """A single replica, or one beside a suspect, forecasts nothing."""
    result = forecast(made(dp=dp), suspects=[(1, 0)] if dp == 2 else [])
    assert result.points == ()
    assert result.series() == ([], [], [], [])


def test_replicas_that_come_and_go() -> None:
    """Elastic steps count as far as they are there; where one replica is left, none can go."""
    dropped = np.zeros((12, 8), bool)
    dropped[2, 1:] = True
    dropped[3, :3] = True
    evidence = elastic(made(dp=8, faults=(PackedSequences(),)), dropped)
    alone = alone_ns(evidence.window)
    assert np.array_equal(np.isnan(alone), dropped)
    assert forecast(evidence).points[1].step_time_ns == pytest.approx(
        step_ns(dp=8, faults=(PackedSequences(),)), rel=0.05
    )
    assert sync_less_often(evidence, alone) == []
    assert backup_workers(evidence, alone) == []


def test_backups_where_some_replicas_are_absent() -> None:
    """The slowest of those that are there is left behind."""
    dropped = np.zeros((12, 8), bool)
    dropped[3, :3] = True
    evidence = elastic(made(dp=8, faults=(SLOW,)), dropped)
    (fix,) = backup_workers(evidence, alone_ns(evidence.window))
    used = (11 * 7 / 8 + 4 / 5) / 12
    assert fix.step_time_ns * used == pytest.approx(step_ns(dp=7), rel=0.01)
