from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smon.attribute.slowdown import StepTimes
from smon.attribute.standout import standout_notes

STEPS = np.arange(100, 140)


def times(slow: dict[int, float], by: str = "optimizer") -> StepTimes:
    """Forty steps of 1 s, some longer, by one op type."""
    simulated = np.ones(len(STEPS))
    for index, factor in slow.items():
        simulated[index] = factor
    ideal = np.ones(len(STEPS))
    kinds = {"forward-compute": ideal.copy(), "optimizer": ideal.copy(), by: simulated}
    empty = np.empty((0, len(STEPS)))
    return StepTimes(simulated, simulated, simulated, ideal, kinds, empty, empty, empty[None])


def test_a_step_that_stands_out_is_named_with_its_op_type() -> None:
    """Too rare to be a finding, but worth a sentence."""
    notes = standout_notes(times({3: 1.3, 17: 1.1}), STEPS)
    assert notes == ["steps 103, 117: 20% above the typical step, mostly by optimizer"]


def test_a_single_step_is_called_a_step() -> None:
    """Words follow the number."""
    assert standout_notes(times({0: 1.25}), STEPS)[0].startswith("step 100: 25% above")


@pytest.mark.parametrize("slow", [{}, {5: 1.04}, dict.fromkeys(range(8), 1.3)])
def test_small_or_frequent_differences_are_not_noted(slow: dict[int, float]) -> None:
    """Below 5 %, or in a fifth of the steps, nothing stands out."""
    assert standout_notes(times(slow), STEPS) == []


def test_a_noisy_job_has_no_outliers_but_those_beyond_its_noise() -> None:
    """Six robust standard deviations at least."""
    noisy = times({3: 1.2})
    scatter = 1.0 + 0.05 * np.random.default_rng(0).standard_normal(len(STEPS))
    noisy = replace(noisy, simulated=noisy.simulated * scatter)
    assert standout_notes(noisy, STEPS) == []


def test_a_few_steps_have_no_typical_one() -> None:
    """Of seven steps none is called an outlier."""
    few = times({3: 2.0})
    few = replace(few, simulated=few.simulated[:7], ideal=few.ideal[:7])
    assert standout_notes(few, STEPS[:7]) == []
