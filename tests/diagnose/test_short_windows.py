"""Few steps, and much noise: nobody is named for what they have in common by chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smon.analysis import analyze
from smon.diagnose.workers import _noise
from smon.synth.faults import SlowCompute
from smon.synth.spec import Scenario
from tests.builders import public_job
from tests.diagnose.jobs import UnevenData, UnlikeDevices, named, report_of


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 20])
def test_the_noise_of_few_steps_is_that_of_many(steps: int) -> None:
    """A third of the distances from the median of three steps are 0; differences are not."""
    draws = np.random.default_rng(0).normal(0, 0.02, (steps, 64, 8))
    assert _noise(draws) == pytest.approx(0.02, rel=0.15)


def test_lasting_slowness_is_no_noise() -> None:
    """Neither of a worker that is always slow, nor of one that has become so."""
    effect = np.random.default_rng(0).normal(0, 0.01, (20, 8, 4))
    effect[:, 1, 1] += 0.5
    effect[12:, 2, 2] += 0.5
    assert _noise(effect) == pytest.approx(0.01, rel=0.15)


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_no_short_window_of_se_names_a_device(traces: Path, steps: int) -> None:
    """All of its GPUs are well: 13 of 14 windows of three steps used to name some of them."""
    table, job = public_job(traces, "SE")
    numbers = np.unique(table.step)
    for first in range(0, len(numbers) - steps + 1, steps):
        window = table.between(int(numbers[first]), int(numbers[first + steps - 1]))
        assert not named(analyze(window, job))


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_slow_worker_of_ar_is_found_in_a_short_window(traces: Path, steps: int) -> None:
    """Its noise is small, and so are few steps enough."""
    table, job = public_job(traces, "AR")
    numbers = np.unique(table.step)
    assert named(analyze(table.between(int(numbers[0]), int(numbers[steps - 1])), job)) == {(0, 0)}


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
@pytest.mark.parametrize("dp, microbatches", [(8, 1), (16, 2)])
def test_uneven_data_in_few_steps_names_nobody(steps: int, dp: int, microbatches: int) -> None:
    """Without a pipeline nothing takes the data out."""
    for seed in range(4):
        job = Scenario(
            dp=dp,
            pp=1,
            microbatches=microbatches,
            steps=steps,
            seed=seed,
            faults=(UnevenData(0.3, seed),),
        )
        assert not named(report_of(job))


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_slow_device_in_few_quiet_steps_is_found(steps: int) -> None:
    """3 % among even data."""
    slow = SlowCompute(1, 2, 1.03, 1.03)
    job = Scenario(dp=8, pp=4, microbatches=8, steps=steps, faults=(slow,))
    assert named(report_of(job)) == {(2, 1)}


@pytest.mark.parametrize("seed, dp, pp", [(1, 16, 4), (1, 32, 4), (1, 64, 2)])
def test_healthy_devices_that_differ_by_two_percent_are_not_named(
    seed: int, dp: int, pp: int
) -> None:
    """Twelve steps do not know 1.02 from 1.025, and these three used to be named."""
    job = Scenario(dp=dp, pp=pp, microbatches=4, steps=12, seed=seed, faults=(UnlikeDevices(seed),))
    assert not named(report_of(job))
