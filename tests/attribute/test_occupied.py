"""What workers do in a step: never more than the step takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.analysis import study
from smon.attribute.occupied import compute_and_wait, covered
from smon.prepare import prepare
from smon.synth import causes
from smon.synth.scenario import generate
from smon.synth.spec import Scenario

_PLACES = st.integers(0, 30)


@given(st.lists(st.tuples(_PLACES, _PLACES), max_size=8))
def test_a_union_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    """As counted moment by moment; an interval that ends before it begins has none."""
    moments = {moment for first, last in intervals for moment in range(first, last)}
    start, end = np.array(intervals, float).reshape(-1, 2).T[:, :, None]
    assert covered(start, end).tolist() == [len(moments)]


def test_lanes_are_counted_apart() -> None:
    """Each lane has an order of its own."""
    start = np.array([[0.0, 5.0], [2.0, 0.0]])
    end = np.array([[3.0, 9.0], [4.0, 1.0]])
    assert covered(start, end).tolist() == [4.0, 5.0]


@pytest.mark.parametrize("slow", [False, True])
def test_nobody_computes_and_waits_longer_than_the_step(*, slow: bool) -> None:
    """Also where receives are posted early and wait behind a compute, many at a time."""
    found = (causes.slow_gpu(1, 1, 2.0),) if slow else ()
    made = generate(Scenario(dp=4, pp=4, steps=6, causes=found))
    window = prepare(made.table, made.job).window
    compute, wait = compute_and_wait(window)
    assert (wait >= 0).all()
    assert (compute + wait <= window.recorded()).all()
    if slow:
        step = window.recorded().mean()
        # All others wait for it as long as it computes more than they do.
        assert wait[0, 1].mean() > 0.3 * step
        assert wait[1, 1].mean() < 0.5 * wait[0, 1].mean()


def test_the_victims_of_a_finding_wait_no_longer_than_they_can() -> None:
    """The typical one: less than the step, less what it computes."""
    made = generate(Scenario(dp=4, pp=4, steps=12, causes=(causes.slow_gpu(1, 1, 2.0),)))
    studied = study(prepare(made.table, made.job))
    victims = studied.diagnosis.findings[0].victims
    compute, _ = compute_and_wait(studied.prepared.window)
    step = studied.times.recorded.mean()
    assert victims is not None
    assert victims.wait_s is not None
    assert 0.2 * step < victims.wait_s * 1e9 < step - np.median(compute.mean(axis=2))
