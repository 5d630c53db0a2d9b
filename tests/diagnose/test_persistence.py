"""When something was slow: the vote per step, against `docs/causes.md` section 1.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from smon.attribute.persistence import (
    ONSET_STEPS,
    PERSISTENT_SHARE,
    Kind,
    Persistence,
    rank_correlation,
    regular_period,
    vote,
)

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

#: Above it a step votes.
LIMIT = 0.5


def _steps(count: int, first: int = 100) -> Steps:
    return np.arange(first, first + count)


def _vote(effect: Sequence[float] | Floats, first: int = 100) -> Persistence | None:
    """The vote over consecutive steps from `first` on."""
    series = np.array(effect, float)
    return vote(series, LIMIT, _steps(len(series), first))


def _pattern(text: str) -> Persistence | None:
    """As `_vote`, of a text: ``x`` is there, ``.`` is not, ``?`` is unknown."""
    return _vote([{"x": 1.0, ".": 0.0, "?": np.nan}[letter] for letter in text])


# --- each kind --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, kind, share, onset, period",
    [
        ("x" * 20, Kind.PERSISTENT, 1.0, None, None),
        ("xxxx." * 4, Kind.PERSISTENT, 0.8, None, None),
        ("." * 8 + "x" * 12, Kind.ONSET, 0.6, 108, None),
        ("." * 8 + "x" * 10 + ".x", Kind.ONSET, 0.55, 108, None),
        ("...x" * 5, Kind.PERIODIC, 0.25, None, 4),
        ("x.......x.......x...", Kind.PERIODIC, 0.15, None, 8),
        ("." * 9 + "x" + "." * 10, Kind.ONE_OFF, 0.05, 109, None),
        ("." * 9 + "xxx" + "." * 8, Kind.ONE_OFF, 0.15, 109, None),
        ("." * 9 + "xxxx" + "." * 7, Kind.INTERMITTENT, 0.2, None, None),
        ("....xx......xx......", Kind.INTERMITTENT, 0.2, None, None),
        ("..x....x.x.......x..", Kind.INTERMITTENT, 0.2, None, None),
        ("xxxxxxxx............", Kind.INTERMITTENT, 0.4, None, None),
    ],
)
def test_each_pattern_has_its_kind(
    text: str, kind: Kind, share: float, onset: int | None, period: int | None
) -> None:
    """Persistent, onset, periodic, one burst, two bursts, irregular, over before the end."""
    found = _pattern(text)
    assert found is not None
    assert found.share == pytest.approx(share)
    assert replace(found, share=share) == Persistence(kind, share, onset, period)


def test_what_is_never_there_has_no_kind() -> None:
    """Neither without votes, nor without any known step, nor without steps."""
    assert _pattern("." * 20) is None
    assert _pattern("?" * 20) is None
    assert _pattern("") is None


def test_a_step_at_the_threshold_does_not_vote() -> None:
    """Above, not at."""
    assert _vote([LIMIT] * 20) is None
    assert _vote([np.nextafter(LIMIT, 1)] * 20) is not None


def test_one_step_alone_is_persistent_as_far_as_one_can_see() -> None:
    """All of the one step there is."""
    assert _pattern("x") == Persistence(Kind.PERSISTENT, 1.0)
    assert _pattern("??x??") == Persistence(Kind.PERSISTENT, 1.0)


@pytest.mark.parametrize("after", range(1, 9))
def test_an_onset_needs_steps_after_it(after: int) -> None:
    """Every end of a window looks like a beginning: with fewer than five or so it is a burst."""
    found = _pattern("." * 20 + "x" * after)
    assert found is not None
    if after > ONSET_STEPS:
        assert (found.kind, found.onset_step) == (Kind.ONSET, 120)
    else:
        assert found.kind is (Kind.ONE_OFF if after <= 3 else Kind.INTERMITTENT)


def test_a_single_early_vote_does_not_hide_an_onset() -> None:
    """It may be there in a tenth of the steps before."""
    assert _pattern(".x" + "." * 18 + "x" * 20) == Persistence(Kind.ONSET, 21 / 40, 120)


def test_what_is_there_from_the_second_step_on_began_there() -> None:
    """One step without it is enough to say that it began."""
    assert _pattern("." + "x" * 19) == Persistence(Kind.ONSET, 0.95, 101)


def test_every_other_step_is_a_period_and_every_step_is_none() -> None:
    """A period is more than one step."""
    assert _pattern(".x" * 10) == Persistence(Kind.PERIODIC, 0.5, period=2)
    found = _pattern("x" * 20)
    assert found is not None
    assert found.period is None


def test_a_period_counts_step_numbers_and_not_steps() -> None:
    """Of a window that was sampled the numbers count."""
    steps = np.array([0, 7, 10, 13, 20, 30, 33, 39])
    effect = np.isin(steps, [10, 20, 30]).astype(float)
    found = vote(effect, LIMIT, steps)
    assert found == Persistence(Kind.PERIODIC, 3 / 8, period=10)


# --- ramps ------------------------------------------------------------------------------------


def _noise(count: int, size: float = 0.01, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, size, count)


def test_what_grows_is_a_ramp() -> None:
    """From below the threshold to three times of it."""
    found = _vote(np.linspace(0, 1.5, 30) + _noise(30))
    assert found is not None
    assert found.kind is Kind.RAMP
    assert found.onset_step is not None
    assert 109 <= found.onset_step <= 111
    assert found.share == pytest.approx(2 / 3, abs=0.05)


def test_a_ramp_that_was_there_before_the_window_has_no_onset() -> None:
    """It grows, but nobody saw it begin."""
    found = _vote(np.linspace(1, 3, 30) + _noise(30))
    assert found is not None
    assert (found.kind, found.onset_step, found.share) == (Kind.RAMP, None, 1.0)


def test_a_plateau_at_the_end_does_not_speak_against_a_ramp() -> None:
    """A device gets hot, and stays hot."""
    rise = np.linspace(0, 1.5, 30)
    found = _vote(np.concatenate([np.zeros(10), rise, np.full(20, 1.5)]) + _noise(60))
    assert found is not None
    assert found.kind is Kind.RAMP


def test_a_jump_is_no_ramp() -> None:
    """At once at its height: an onset."""
    found = _vote(np.concatenate([np.zeros(10), np.full(20, 1.5)]) + _noise(30))
    assert found is not None
    assert (found.kind, found.onset_step) == (Kind.ONSET, 110)


def test_what_grows_by_less_than_half_is_persistent() -> None:
    """A last third of 1.5 times the first makes a ramp."""
    found = _vote(np.linspace(1.0, 1.3, 30) + _noise(30))
    assert found is not None
    assert found.kind is Kind.PERSISTENT


def test_what_shrinks_is_no_ramp() -> None:
    """It is there all the time."""
    found = _vote(np.linspace(3, 1, 30) + _noise(30))
    assert found is not None
    assert found.kind is Kind.PERSISTENT


def test_a_ramp_needs_steps() -> None:
    """Seven steps show no trend, eight do."""
    for count, kind in ((7, Kind.PERSISTENT), (8, Kind.RAMP)):
        found = _vote(np.linspace(1, 4, count))
        assert found is not None
        assert found.kind is kind


@pytest.mark.parametrize("seed", range(50))
def test_noise_is_no_trend(seed: int) -> None:
    """Independent draws above the threshold are persistent, however wild they are."""
    found = _vote(1.0 + np.random.default_rng(seed).exponential(2.0, 40))
    assert found == Persistence(Kind.PERSISTENT, 1.0)


@pytest.mark.parametrize("seed", range(50))
def test_noise_around_the_threshold_has_no_onset_and_no_trend(seed: int) -> None:
    """Votes at random come and go."""
    found = _vote(np.random.default_rng(seed).normal(LIMIT, 1.0, 40))
    assert found is not None
    assert found.kind is Kind.INTERMITTENT


def test_a_step_between_two_constant_levels_is_no_ramp() -> None:
    """Ten steps of 1, then ten of 2: it did not grow, it changed (Spearman's ρ of the rise 0.5)."""
    found = _vote([1.0] * 10 + [2.0] * 10)
    assert found is not None
    assert found.kind is Kind.PERSISTENT


def test_what_is_there_or_not_cannot_grow() -> None:
    """Many causes vote with 0 and 1 (links, pauses, late data): of these nothing is a ramp."""
    found = _pattern("...x...xxx" + "x" * 20)
    assert found is not None
    assert found.kind is not Kind.RAMP


# --- rules that hold for every series ---------------------------------------------------------

_SERIES = arrays(
    np.float64,
    st.integers(1, 40),
    elements=st.one_of(st.floats(-2, 4, width=32), st.sampled_from([0.0, 1.0, np.nan])),
)


@given(_SERIES)
def test_share_is_that_of_the_known_steps_above_the_threshold(effect: Floats) -> None:
    """And without any there is no answer."""
    found = _vote(effect)
    known = [value for value in effect.tolist() if not np.isnan(value)]
    votes = sum(value > LIMIT for value in known)
    assert (found is None) == (votes == 0)
    if found is not None:
        assert found.share == pytest.approx(votes / len(known))


@given(_SERIES)
def test_steps_without_a_value_have_no_vote(effect: Floats) -> None:
    """They might as well not be in the window."""
    steps = _steps(len(effect))
    known = ~np.isnan(effect)
    assert vote(effect, LIMIT, steps) == vote(effect[known], LIMIT, steps[known])


@given(_SERIES, st.integers(0, 10**6))
def test_the_number_of_the_first_step_does_not_matter(effect: Floats, first: int) -> None:
    """Only the onset moves with it."""
    one, other = _vote(effect, 0), _vote(effect, first)
    if one is None or other is None:
        assert one is other
        return
    assert (one.kind, one.share, one.period) == (other.kind, other.share, other.period)
    moved = None if one.onset_step is None else one.onset_step + first
    assert other.onset_step == moved


@given(_SERIES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_unit_does_not_matter(effect: Floats, unit: float) -> None:
    """Seconds or milliseconds: the same answer."""
    steps = _steps(len(effect))
    assert vote(effect * unit, LIMIT * unit, steps) == vote(effect, LIMIT, steps)


@given(_SERIES)
def test_an_onset_is_a_step_that_votes_with_enough_steps_after_it(effect: Floats) -> None:
    """Neither the first nor one of the last known steps; of a burst it is its first step."""
    found = _vote(effect)
    if found is None or found.onset_step is None:
        return
    known = ~np.isnan(effect)
    steps, values = _steps(len(effect))[known].tolist(), effect[known]
    at = steps.index(found.onset_step)
    assert values[at] > LIMIT
    if found.kind is Kind.ONE_OFF:
        assert not (values[:at] > LIMIT).any()
    else:
        assert 0 < at < len(steps) - ONSET_STEPS
        assert (values[at:] > LIMIT).mean() >= 0.9 or found.kind is Kind.RAMP
        assert (values[:at] > LIMIT).mean() <= 0.1 + 1e-12


@given(_SERIES)
def test_the_kind_agrees_with_the_share(effect: Floats) -> None:
    """What is always there is persistent, began or grows; what is rare is none of these."""
    found = _vote(effect)
    if found is None:
        return
    lasting = found.kind in {Kind.PERSISTENT, Kind.ONSET, Kind.RAMP}
    assert lasting or found.share < PERSISTENT_SHARE
    if found.kind is Kind.PERSISTENT:
        assert found.share >= PERSISTENT_SHARE
    assert (found.period is not None) == (found.kind is Kind.PERIODIC)


# --- periods ----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 1000), st.integers(3, 30))
def test_equal_distances_are_a_period(first: int, period: int, count: int) -> None:
    """From three occurrences on."""
    assert regular_period(first + period * np.arange(count)) == period


@given(st.integers(2, 1000), st.integers(3, 30), st.data())
def test_one_occurrence_that_is_off_leaves_no_period(
    period: int, count: int, data: st.DataObject
) -> None:
    """All distances must be equal."""
    steps = period * np.arange(count)
    steps[data.draw(st.integers(1, count - 1)) :] += 1
    expected = None if len(set(np.diff(steps).tolist())) > 1 else period + 1
    assert regular_period(steps) == expected


@pytest.mark.parametrize("steps", [[], [3], [3, 8], [3, 4, 5, 6]])
def test_too_few_or_adjacent_occurrences_have_no_period(steps: list[int]) -> None:
    """Two are a distance, and every step is no period."""
    assert regular_period(np.array(steps, np.int64)) is None


# --- correlation ------------------------------------------------------------------------------

_DISTINCT = st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=30, unique=True)


@given(_DISTINCT, st.randoms(use_true_random=False))
def test_rank_correlation_is_spearmans_for_distinct_values(
    values: list[int], random: object
) -> None:
    """1 − 6 Σ d² / n (n² − 1), d the differences of the ranks."""
    other = values[:]
    random.shuffle(other)  # type: ignore[attr-defined]
    ranks = [[sorted(side).index(value) for value in side] for side in (values, other)]
    count = len(values)
    distance = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    expected = 1 - 6 * distance / (count * (count**2 - 1))
    found = rank_correlation(np.array(values, float), np.array(other, float))
    assert found == pytest.approx(expected, abs=1e-9)


@given(_DISTINCT)
def test_rank_correlation_knows_order_only(values: list[int]) -> None:
    """Of a series with any growing function of it 1, with its negative −1."""
    series = np.array(values, float)
    assert rank_correlation(series, np.cbrt(series)) == pytest.approx(1.0)
    assert rank_correlation(series, -series) == pytest.approx(-1.0)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_values_do_not_correlate(count: int) -> None:
    """Any two do, so it says nothing."""
    assert rank_correlation(np.arange(float(count)), np.arange(float(count))) == 0.0
