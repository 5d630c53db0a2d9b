from __future__ import annotations

import numpy as np
import pytest

from smon.simulate.clock_evidence import Ends
from smon.simulate.clock_fit import Fit, fit_clocks


def _ends(clock: list[int], end: list[float], time: float | None, size: int) -> Ends:
    """Groups of so many ends each; at one time, or spread over the window."""
    count = len(clock)
    return Ends(
        clock=np.array(clock),
        group=np.repeat(np.arange(count // size), size),
        kind=np.zeros(count, np.intp),
        receives=np.arange(count) % 2 == 1,
        end=np.array(end, float),
        time=np.linspace(-1, 1, count) if time is None else np.full(count, time),
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("time", [0.25, None])
@pytest.mark.parametrize("exponent", [6, 12, 18])
def test_wild_times_give_finite_clocks(size: int, time: float | None, exponent: int) -> None:
    """Of damaged traces; at one moment nothing tells a drift from an offset."""
    rng = np.random.default_rng(exponent)
    for _ in range(50):
        groups, clocks = int(rng.integers(2, 30)), int(rng.integers(size, 6))
        clock = [int(one) for _ in range(groups) for one in rng.permutation(clocks)[:size]]
        end = rng.normal(0, 1, len(clock)) * 10.0 ** rng.integers(3, exponent + 1, len(clock))
        ends = _ends(clock, end.tolist(), time, size)
        with np.errstate(all="raise"):
            fit = fit_clocks(ends, Fit.unknown(ends, clocks, drifts=True))
        assert np.isfinite(fit.values).all()


def test_an_offset_is_found_although_nothing_is_known_of_a_drift() -> None:
    """All ends are of one moment: what the clocks differ by then is certain."""
    ends = _ends([0, 1] * 20, [0.0, 1e6] * 20, 0.25, 2)
    fit = fit_clocks(ends, Fit.unknown(ends, 2, drifts=True))
    off = fit.values[0] + fit.values[1] * 0.25
    assert abs(off[1] - off[0]) == pytest.approx(1e6, rel=1e-6)
    assert np.abs(fit.residual).max() < 1
