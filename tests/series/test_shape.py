from __future__ import annotations

import numpy as np
import pytest

from smon.series.shape import Span, bursts_of, levels_of, warm_up


def noisy(*levels: tuple[int, float], seed: int = 1, noise: float = 0.01) -> np.ndarray:
    """Values around these levels: (how many, seconds)."""
    chance = np.random.default_rng(seed)
    typical = np.concatenate([np.full(count, seconds) for count, seconds in levels])
    return typical * (1 + noise * chance.standard_normal(len(typical)))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_high_values_at_the_start_are_warm_up(first: int) -> None:
    """As many as follow each other."""
    seconds = noisy((200, 1.0))
    seconds[:first] = 10.0
    seconds[50] = 10.0
    assert warm_up(seconds) == first


def test_at_most_a_tenth_is_warm_up() -> None:
    """A job that gets faster in the middle did not warm up until then."""
    assert warm_up(noisy((90, 2.0), (110, 1.0))) == 20


def test_scattered_slow_values_are_no_burst() -> None:
    """However they fall: 200 series with every tenth value slow."""
    chance = np.random.default_rng(7)
    assert not any(bursts_of(chance.random(2_000) < 0.1) for _ in range(200))


def test_a_burst_among_scattered_slow_values_is_found() -> None:
    """Its ends are those of the dense stretch."""
    chance = np.random.default_rng(3)
    slow = chance.random(5_000) < 0.05
    slow[2_000:2_100] = True
    (burst,) = bursts_of(slow)
    assert abs(burst.first - 2_000) <= 20
    assert abs(burst.end - 2_100) <= 20


def test_two_bursts_are_two() -> None:
    """In the order of the steps."""
    slow = np.zeros(2_000, bool)
    slow[300:340] = slow[1_500:1_530] = True
    assert bursts_of(slow) == [Span(300, 340), Span(1_500, 1_530)]


@pytest.mark.parametrize("slow", [np.zeros(0, bool), np.zeros(50, bool), np.ones(50, bool)])
def test_no_values_none_slow_and_all_slow_are_no_burst(slow: np.ndarray) -> None:
    """A series that is slow throughout has another level, not a burst."""
    assert bursts_of(slow) == []


@pytest.mark.parametrize("ratio", [0.8, 1.1, 1.5])
def test_a_change_of_level_is_found_where_it_is(ratio: float) -> None:
    """Up or down."""
    levels = levels_of(noisy((400, 2.0), (300, 2.0 * ratio)))
    assert [level.end for level in levels] == [pytest.approx(400, abs=3), 700]


@pytest.mark.parametrize("count", [1, 19, 40, 1_000])
def test_noise_has_one_level(count: int) -> None:
    """Short and long series, 20 of each."""
    for seed in range(20):
        assert levels_of(noisy((count, 1.0), seed=seed, noise=0.05)) == [Span(0, count)]


def test_there_and_back_are_three_levels() -> None:
    """Each with its ends."""
    levels = levels_of(noisy((300, 1.0), (200, 1.3), (300, 1.0)))
    assert [level.end for level in levels] == [
        pytest.approx(300, abs=3),
        pytest.approx(500, abs=3),
        800,
    ]
