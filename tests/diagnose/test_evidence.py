"""Peers, medians and spreads against brute force; what undoes a finding, alone and together."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from smon.analysis import study
from smon.attribute.peers import peers
from smon.diagnose.evidence import (
    B,
    Evidence,
    F,
    Floats,
    nanmedian,
    nanquantile,
    spread,
)
from smon.diagnose.found import combined, own_changes
from smon.ops import OpType
from smon.prepare import prepare
from smon.simulate.cube import Changes
from tests.builders import synthetic_job

_VALUES = arrays(
    np.float64,
    array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6),
    elements=st.one_of(
        st.floats(-1e9, 1e9), st.integers(0, 3).map(float), st.just(np.nan), st.just(np.nan)
    ),
)


def _known(values: Floats) -> list[float]:
    return [value for value in values.tolist() if not np.isnan(value)]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


@given(_VALUES, st.data())
def test_peers_are_the_median_of_all_others(values: Floats, data: st.DataObject) -> None:
    """Its own value left out, ties and NaN or not; NaN for nobody, and without any other."""
    axis = data.draw(st.integers(0, values.ndim - 1))
    found = np.moveaxis(peers(values, axis), axis, 0)
    lines = np.moveaxis(values, axis, 0)
    assert found.shape == lines.shape
    for index in np.ndindex(lines.shape):
        line = lines[(slice(None), *index[1:])]
        others = _known(np.delete(line, index[0]))
        expected = float("nan") if np.isnan(lines[index]) else _median(others)
        np.testing.assert_allclose(found[index], expected, rtol=1e-12)


def test_peers_leave_what_they_are_given() -> None:
    """Nothing is changed in place."""
    values = np.array([[3.0, np.nan], [1.0, 2.0], [2.0, 5.0]])
    before = values.copy()
    peers(values, 0)
    np.testing.assert_array_equal(values, before)


def test_one_wild_value_is_nobodys_usual() -> None:
    """Of four workers, one a thousand times slower: the others' peers stay as they are."""
    np.testing.assert_array_equal(peers(np.array([1.0, 1.0, 1.0, 1e3]), 0), np.ones(4))


@given(_VALUES, st.data())
def test_nanmedian_is_the_median_of_what_is_known(values: Floats, data: st.DataObject) -> None:
    """Over one axis or several; NaN, and no warning, where nothing is."""
    axes = data.draw(
        st.lists(st.integers(0, values.ndim - 1), min_size=1, max_size=values.ndim, unique=True)
    )
    found = nanmedian(values, axes[0] if len(axes) == 1 else tuple(axes))
    rest = [axis for axis in range(values.ndim) if axis not in axes]
    moved = np.moveaxis(values, rest, range(len(rest)))
    shape = moved.shape[: len(rest)]
    assert found.shape == shape
    for index in np.ndindex(shape):
        expected = _median(_known(moved[index].reshape(-1)))
        np.testing.assert_allclose(found[index], expected, rtol=1e-12)


def _quantile(values: list[float], share: float) -> float:
    """Linear between the neighbours in order."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@given(_VALUES, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.data())
def test_nanquantile_is_the_quantile_of_what_is_known(
    values: Floats, share: float, data: st.DataObject
) -> None:
    """NaN, and no warning, where nothing is."""
    axis = data.draw(st.integers(0, values.ndim - 1))
    found = nanquantile(values, share, axis)
    lines = np.moveaxis(values, axis, -1)
    assert found.shape == lines.shape[:-1]
    for index in np.ndindex(found.shape):
        expected = _quantile(_known(lines[index]), share)
        np.testing.assert_allclose(found[index], expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("shape, axis, left", [((0, 3), 0, (3,)), ((2, 0), 1, (2,))])
def test_of_nothing_nothing_is_known(shape: tuple[int, ...], axis: int, left: object) -> None:
    """Types that do not occur have empty cubes: NaN of the right shape."""
    for found in (nanmedian(np.empty(shape), axis), nanquantile(np.empty(shape), 0.25, axis)):
        assert found.shape == left
        assert np.isnan(found).all()


@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(-1e6, 1e6) | st.just(np.nan)))
def test_spread_is_that_of_a_normal_distribution_by_its_median(values: Floats) -> None:
    """1.4826 times the median distance from the median; NaN of nothing."""
    known = _known(values)
    middle = _median(known)
    expected = 1.4826 * _median([abs(value - middle) for value in known])
    np.testing.assert_allclose(spread(values), expected, rtol=1e-12, atol=1e-9)


def test_spread_of_normal_draws_is_their_standard_deviation() -> None:
    """Within 3 % of 10,000 draws, and 3 % of wild ones hardly move it."""
    draws = np.random.default_rng(0).normal(5, 2, 10_000)
    assert spread(draws) == pytest.approx(2, rel=0.03)
    draws[:300] = 1e9
    assert spread(draws) == pytest.approx(2, rel=0.06)


# --- what undoes a finding --------------------------------------------------------------------


@cache
def _evidence() -> Evidence:
    """A job of 2 × 2 workers with a slow one."""
    table, job = synthetic_job(dp=2, pp=2, microbatches=4, steps=3, faults=())
    return study(prepare(table, job)).evidence


def _scaled(evidence: Evidence, optype: OpType, factors: Floats) -> Floats:
    """Durations as they are explained so far, times one factor per DP rank and stage."""
    return evidence.work(optype) * factors[None, :, :, None]


_FACTORS = arrays(np.float64, (2, 2), elements=st.floats(0.2, 1.0))


@given(_FACTORS)
def test_what_is_found_first_is_undone_as_it_is(factors: Floats) -> None:
    """Nothing was explained before: its own changes are its changes."""
    evidence = _evidence()
    changes = Changes({F: _scaled(evidence, F, factors)})
    own = own_changes(evidence, Changes(), changes)
    assert set(own.work) == {F}
    np.testing.assert_allclose(own.work[F], changes.work[F], rtol=1e-12)


@given(_FACTORS, _FACTORS)
def test_what_is_found_second_is_undone_without_the_first(one: Floats, other: Floats) -> None:
    """It saw a job with the first undone; its own part is its factor on what was recorded."""
    evidence = _evidence()
    before = Changes({F: _scaled(evidence, F, one)})
    later = replace(evidence, explained=before)
    changes = Changes({F: _scaled(later, F, other), B: _scaled(later, B, other)})
    own = own_changes(later, before, changes)
    for optype in (F, B):
        expected = _scaled(evidence, optype, other)
        np.testing.assert_allclose(own.work[optype], expected, rtol=1e-12)


@given(_FACTORS, _FACTORS)
def test_two_findings_together_undo_what_the_second_saw(one: Floats, other: Floats) -> None:
    """Factors multiply, in any order: both own parts make the durations of the second draft."""
    evidence = _evidence()
    before = Changes({F: _scaled(evidence, F, one)})
    later = replace(evidence, explained=before)
    changes = Changes({F: _scaled(later, F, other)})
    own = [before, own_changes(later, before, changes)]
    for parts in (own, own[::-1]):
        np.testing.assert_allclose(combined(evidence, parts).work[F], changes.work[F], rtol=1e-12)


def test_nothing_is_undone_by_nothing() -> None:
    """No findings change no op and cost nothing; one finding is itself."""
    evidence = _evidence()
    nothing = combined(evidence, [])
    assert not nothing.work
    assert not nothing.stall
    np.testing.assert_array_equal(evidence.cost_ns(nothing), np.zeros(3))
    only = Changes({F: evidence.work(F) * 0.5})
    assert combined(evidence, [only]).work[F] is only.work[F]


def test_changes_to_other_ops_do_not_touch_each_other() -> None:
    """Each op type keeps what its own finding does."""
    evidence = _evidence()
    parts = [Changes({F: evidence.work(F) * 0.5}), Changes({B: evidence.work(B) * 0.9})]
    both = combined(evidence, parts)
    np.testing.assert_array_equal(both.work[F], parts[0].work[F])
    np.testing.assert_array_equal(both.work[B], parts[1].work[B])


def test_durations_that_are_no_durations_stay() -> None:
    """Zero and negative transfer times are noise: no factor can be made of them."""
    evidence = _evidence()
    recorded = evidence.recorded_work(F)
    before = recorded.copy()
    before[0, 0, 0, 0], before[0, 0, 0, 1] = 0.0, -5.0
    changed = before * 0.5
    changed[0, 0, 0, 2] = -1.0
    own = own_changes(evidence, Changes({F: before}), Changes({F: changed}))
    np.testing.assert_array_equal(own.work[F][0, 0, 0, :3], recorded[0, 0, 0, :3])
    np.testing.assert_allclose(own.work[F][0, 0, 0, 3], recorded[0, 0, 0, 3] / 2)


def test_ops_that_a_step_does_not_have_stay_unknown() -> None:
    """NaN is no op, before and after."""
    evidence = _evidence()
    holes = evidence.recorded_work(F).copy()
    holes[1, 1] = np.nan
    own = own_changes(evidence, Changes({F: holes}), Changes({F: holes * 0.5}))
    np.testing.assert_array_equal(own.work[F][1, 1], evidence.recorded_work(F)[1, 1])
    assert not np.isnan(own.work[F]).any()


def test_stalls_of_two_findings_do_not_add_up() -> None:
    """Both may have seen the same wait: the longer one counts."""
    evidence = _evidence()
    shape = evidence.recorded_work(F).shape
    one, other = np.zeros(shape), np.zeros(shape)
    one[0, 0, 0, 0], other[0, 0, 0, 0], other[1, 1, 1, 1] = 5e6, 3e6, 2e6
    parts = [Changes(stall={F: one}), Changes(stall={F: other})]
    stall = combined(evidence, parts).stall[F]
    assert (stall[0, 0, 0, 0], stall[1, 1, 1, 1], stall.sum()) == (5e6, 2e6, 7e6)


def test_what_is_explained_is_what_later_causes_see() -> None:
    """Durations are those of the explanation, launch delays are without the stalls."""
    evidence = _evidence()
    half = Changes({F: evidence.work(F) * 0.5}, {F: np.full(evidence.work(F).shape, 1e6)})
    later = replace(evidence, explained=half)
    np.testing.assert_array_equal(later.work(F), half.work[F])
    np.testing.assert_array_equal(later.recorded_work(F), evidence.recorded_work(F))
    np.testing.assert_array_equal(later.work(B), evidence.work(B))
    np.testing.assert_allclose(later.delay(F), evidence.delay(F) - 1e6)
    np.testing.assert_array_equal(later.delay(B), evidence.delay(B))


@settings(max_examples=20)
@given(_FACTORS)
def test_shorter_ops_never_cost_a_step(factors: Floats) -> None:
    """The gain of undoing slow work is not negative, in any step."""
    evidence = _evidence()
    gain = evidence.cost_ns(Changes({F: _scaled(evidence, F, factors)}))
    assert (gain >= -1e-3).all()
    assert gain.mean() <= evidence.times.simulated.mean()
