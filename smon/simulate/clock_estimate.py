"""What of the offsets and drifts is beyond doubt, and which ends are evidence of them.

Flow: `smon.simulate.clock_evidence`, `smon.simulate.clock_fit` → **here** →
`smon.simulate.clock`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.simulate.clock_axis import Clocks, Floats, Indices
from smon.simulate.clock_evidence import Ends, labels, medians
from smon.simulate.clock_fit import ROUGHLY_SETTLED_NS, Fit, centred, fit_clocks, unbiased

#: Offsets below this are left alone, however sure they are: in the public traces the ends of one
#: group agree within 18 to 115 µs (1.4826 MAD), and no finding is that small.
MIN_OFFSET_NS = 50_000.0

#: Delays within one step are not independent: with fewer steps than this, offsets below the second
#: stay. A single step of AR shows 0.7 ms that all steps together do not have.
FEW_STEPS = 4
FEW_STEPS_NS = 2_000_000.0

#: Offsets up to so many times the residual are left alone: transfers have that error bar anyway.
#: Healthy workers differ by up to 1.0 (AR), 2.5 (SE), 0.8 (ST), 1.0 (gloo) times the residual.
RESIDUALS = 5.0

#: Drifts are told apart from the slow wandering of disciplined clocks, which moves those of SE by
#: 5 residuals within two hours, i.e. 0.09 ppm.
DRIFT_RESIDUALS = 12.0

#: Offsets and drifts up to so many of their own standard errors are left alone. It counts in very
#: short windows only.
STANDARD_ERRORS = 5.0

#: Ops of one type are left out where their ends, after the fit, spread so many times wider than
#: those of the median type: they are recorded by the host. In AR the clip ends spread 10 ms where
#: all others spread 0.3 ms.
SPREADS = 4.0
_SPREAD_QUANTILE = 0.98
_MIN_SPREAD_NS = 200_000.0

#: A drift is looked for in windows of so many steps.
_MIN_DRIFT_STEPS = 5

#: Standard deviation of a normal distribution over its median absolute deviation.
_SIGMA_PER_MAD = 1.4826


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What is known of each clock, (clocks,) ns, and which part of it will be taken off."""

    offset: Floats
    drift: Floats
    applied_offset: Floats
    applied_drift: Floats
    residual_ns: float | None
    residual_p99_ns: float | None
    worst_ns: float | None
    left_out: tuple[OpType, ...]

    @property
    def corrects(self) -> bool:
        """Whether anything will be taken off."""
        return bool(self.applied_offset.any() or self.applied_drift.any())


def estimate_clocks(
    ends: Ends, clocks: Clocks, component: Indices, stages: int, steps: int
) -> Estimate:
    """Offsets and drifts of all clocks, and which of them are beyond doubt."""
    if not len(ends):
        return _unknown(clocks)
    ends, fit, left_out = _fit_of_devices(ends, clocks.count, drifts=steps >= _MIN_DRIFT_STEPS)
    offset = _from_median(fit.values[0], component)
    drift = _from_median(fit.values[1] if len(fit.values) > 1 else _zero(clocks), component)
    spread = _spread(fit.residual)
    number = np.maximum(np.bincount(ends.clock, minlength=clocks.count), 1)
    # From one end of a pipeline to the other, the errors of its links add up.
    error = spread * np.sqrt(stages / number)
    # Of times spread evenly over -1 … 1, the variance is a third.
    drifts = _doubtless(drift, DRIFT_RESIDUALS * spread, error * np.sqrt(3.0))
    applied_drift = np.where(drifts, drift, 0.0)
    residual = _remaining(ends, fit, drift - applied_drift)
    # A clock that drifts is put right at all times, also if it happens to be right in the middle.
    noise = max(RESIDUALS * _spread(residual), 0.0 if steps >= FEW_STEPS else FEW_STEPS_NS)
    moves = drifts | _doubtless(offset, noise, error)
    return Estimate(
        offset=offset,
        drift=drift,
        applied_offset=np.where(moves, offset, 0.0),
        applied_drift=applied_drift,
        residual_ns=_spread(residual),
        residual_p99_ns=float(np.quantile(np.abs(residual), 0.99)),
        worst_ns=_worst_clock(ends, residual, clocks.count),
        left_out=left_out,
    )


def _fit_of_devices(
    ends: Ends, count: int, *, drifts: bool
) -> tuple[Ends, Fit, tuple[OpType, ...]]:
    """The fit, the ends it rests on, and the types whose ends the host records."""
    start = Fit.unknown(ends, count, drifts=drifts)
    rough = fit_clocks(ends, start, settled_ns=ROUGHLY_SETTLED_NS)
    left_out = _recorded_by_host(ends, rough.residual, count)
    keep = ~np.isin(ends.kind, left_out)
    ends = ends.take(keep)
    return ends, fit_clocks(ends, rough.of(keep)), tuple(OpType(kind) for kind in left_out)


def _unknown(clocks: Clocks) -> Estimate:
    """Of a job in which no two clocks can be compared."""
    zero = _zero(clocks)
    alone = np.count_nonzero(clocks.used) == 1
    return Estimate(zero if alone else zero * np.nan, zero, zero, zero, None, None, None, ())


def _zero(clocks: Clocks) -> Floats:
    return np.zeros(clocks.count)


def _spread(residual: Floats) -> float:
    """Robust standard deviation."""
    return _SIGMA_PER_MAD * float(np.median(np.abs(residual)))


def _recorded_by_host(ends: Ends, residual: Floats, count: int) -> list[int]:
    """Op types whose ends spread much wider than those of others and that nobody depends on."""
    kinds = np.unique(ends.kind).tolist()
    spread = {
        kind: float(np.quantile(np.abs(residual[ends.kind == kind]), _SPREAD_QUANTILE))
        for kind in kinds
    }
    limit = max(SPREADS * float(np.median(list(spread.values()))), _MIN_SPREAD_NS)
    left_out: list[int] = []
    whole = labels(ends, count)
    for kind in sorted(kinds, key=lambda kind: -spread[kind]):
        if spread[kind] <= limit:
            break
        rest = ends.take(~np.isin(ends.kind, [*left_out, kind]))
        if np.array_equal(labels(rest, count), whole):
            left_out.append(kind)
    return left_out


def _from_median(values: Floats, component: Indices) -> Floats:
    """(clocks,) relative to the median clock of each component; NaN for clocks on their own."""
    relative = np.full(len(values), np.nan)
    size = np.bincount(component[component >= 0], minlength=1)
    linked = (component >= 0) & (size[component] > 1)
    middle = medians(values[linked], component[linked], len(size))
    relative[linked] = values[linked] - middle[component[linked]]
    if len(size) == 1 and size[0] == 1:
        relative[component == 0] = 0.0
    return relative


def _worst_clock(ends: Ends, residual: Floats, count: int) -> float:
    """Largest typical residual of one clock, ns: one bad clock among many hides in the overall one.

    As a standard deviation (1.4826 × median); each end shares its residual with its group.
    """
    order = np.lexsort((np.abs(residual), ends.clock))
    sizes = np.bincount(ends.clock, minlength=count)
    middle = (np.cumsum(sizes) - sizes + sizes // 2)[sizes > 0]
    return float(_SIGMA_PER_MAD * np.abs(residual)[order][middle].max(initial=0.0))


def _doubtless(shift: Floats, noise: float, error: Floats) -> NDArray[np.bool_]:
    """(clocks,) whether a shift can be neither chance nor noise; not where it is unknown."""
    doubt = np.maximum(max(MIN_OFFSET_NS, noise), STANDARD_ERRORS * error)
    sure: NDArray[np.bool_] = np.abs(shift) > doubt
    return sure


def _remaining(ends: Ends, fit: Fit, kept_drift: Floats) -> Floats:
    """(ends,) residual if this part of the drifts is not taken off."""
    if len(fit.values) == 1:
        return fit.residual
    kept = np.nan_to_num(kept_drift)[ends.clock] * ends.time
    return fit.residual + centred(ends, kept) * unbiased(ends)
