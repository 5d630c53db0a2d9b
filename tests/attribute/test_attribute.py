from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.attribute.interval import bootstrap_interval
from smon.attribute.shares import slowest_workers
from smon.attribute.slowdown import slowdown


def test_the_slowdown_is_a_ratio_of_means_not_a_mean_of_ratios() -> None:
    """Eq. 1 over steps of different length."""
    assert slowdown(np.array([2.0, 6.0]), np.array([1.0, 5.0])) == pytest.approx(8 / 6)


def test_steps_in_which_a_replica_is_absent_count_for_neither_side() -> None:
    """NaN is left out of times and ideal; a replica that is never there has no slowdown."""
    times = np.array([[4.0, np.nan], [np.nan, np.nan]])
    values = slowdown(times, np.array([2.0, 100.0]))
    assert values[0] == 2.0
    assert np.isnan(values[1])


def test_one_step_has_no_interval() -> None:
    """Nothing to resample."""
    assert bootstrap_interval(np.array([2.0]), np.array([1.0])) is None


def test_equal_steps_have_an_interval_of_no_width() -> None:
    """No variation between steps."""
    interval = bootstrap_interval(np.full(9, 3.0), np.full(9, 2.0))
    assert interval == pytest.approx((1.5, 1.5), rel=1e-12)


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=30))
def test_the_interval_holds_nothing_that_no_step_shows(times: list[float]) -> None:
    """Between the fastest and the slowest step, the same for the same input."""
    simulated, ideal = np.array(times), np.ones(len(times))
    interval = bootstrap_interval(simulated, ideal)
    assert interval is not None
    low, high = interval
    assert simulated.min() * (1 - 1e-9) <= low <= high <= simulated.max() * (1 + 1e-9)
    assert bootstrap_interval(simulated, ideal) == interval


def test_the_interval_is_as_wide_as_that_of_a_normal_mean() -> None:
    """1000 normal steps: 95 % lie within 1.96 standard errors of the mean."""
    simulated = 2.0 + 0.1 * np.random.default_rng(0).standard_normal(1000)
    low, high = bootstrap_interval(simulated, np.ones(1000)) or (0.0, 0.0)
    half = 1.96 * simulated.std() / np.sqrt(1000)
    assert (low, high) == pytest.approx(
        (simulated.mean() - half, simulated.mean() + half), abs=5e-4
    )


@pytest.mark.parametrize("workers, count", [(1, 1), (33, 1), (34, 2), (64, 2), (100, 3), (101, 4)])
def test_three_percent_of_the_workers_are_rounded_up(workers: int, count: int) -> None:
    """Eq. 5."""
    assert len(slowest_workers(np.arange(workers, dtype=float)[:, None])) == count


def test_of_equally_slow_workers_the_lower_rank_comes_first() -> None:
    """Rank = dp + DP × stage; absent workers are nobody."""
    slowness = np.array([[np.nan, 2.0], [1.5, 2.0], [2.0, 1.0]])
    assert slowest_workers(slowness) == [(2, 0)]
    many = np.ones((20, 3))
    assert slowest_workers(many) == [(0, 0), (1, 0)]
