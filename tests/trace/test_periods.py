from __future__ import annotations

import numpy as np
import pytest

from smon.trace.periods import period_of


@pytest.mark.parametrize(
    "pattern, expected",
    [([1], 1), ([1, 2], 2), ([1, 1, 2], 3), ([1, 2, 1, 3], 4), (list(range(200)), 200)],
)
def test_a_pattern_that_repeats_is_found(pattern: list[int], expected: int) -> None:
    """The shortest one, wherever it begins."""
    codes = np.array(pattern * 9)
    assert period_of(codes) == expected
    assert period_of(codes[1:]) == expected


def test_a_few_others_do_not_matter() -> None:
    """Every tenth step averages a loss."""
    codes = np.array([1, 2, 3, 4] * 100)
    codes[::97] = 9
    codes[0] = 1
    assert period_of(codes) == 4


@pytest.mark.parametrize("codes", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 1, 2, 3]])
def test_what_does_not_repeat_three_times_is_no_pattern(codes: list[int]) -> None:
    """Twice may be chance."""
    assert period_of(np.array(codes, np.int64)) is None


def test_what_was_lost_does_not_shift_the_pattern() -> None:
    """-1 stands where a collective is missing."""
    codes = np.array([1, 2, 3] * 20)
    codes[[7, 8, 31]] = -1
    assert period_of(codes) == 3
