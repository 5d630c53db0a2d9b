"""When something was slow: a vote per step, never a mean over the window.

A mean cannot tell a worker that is always 5 % late from one that was 50 % late for a tenth of the
time; the vote can, and it says since when.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

#: Active in at least this share of steps: persistent.
PERSISTENT_SHARE = 0.8
#: After its onset something must be active in at least this share of steps, before in at most 1 −
#: this share.
ONSET_SHARE = 0.9
#: A trend needs this many steps, and this rank correlation with time.
RAMP_STEPS = 8
RAMP_CORRELATION = 0.8
#: A trend must at least grow by this factor between its first and its last third.
RAMP_GROWTH = 1.5
#: It has risen when it first comes to this part of its end, after so many steps at least.
RAMP_TOP = 0.9
RAMP_RISE = 4
#: A period needs this many occurrences.
PERIODIC_EVENTS = 3
#: An onset needs so many steps after it.
ONSET_STEPS = 5
#: So many steps in a row, once, are one event.
BURST_STEPS = 3


class Kind(StrEnum):
    """How something is spread over the steps of a window."""

    PERSISTENT = "persistent"
    ONSET = "onset"
    RAMP = "ramp"
    INTERMITTENT = "intermittent"
    PERIODIC = "periodic"
    ROTATING = "rotating"
    ONE_OFF = "one_off"


@dataclass(frozen=True, slots=True)
class Persistence:
    """Spread of something over the steps of a window.

    Attributes
    ----------
    kind
        See `Kind`.
    share
        Share of the steps in which it was active.
    onset_step
        Step number of its start, if it started within the window.
    period
        Steps from one occurrence to the next, if that is regular.
    """

    kind: Kind
    share: float
    onset_step: int | None = None
    period: int | None = None


def vote(  # noqa: PLR0911  # one return per kind
    effect: NDArray[np.float64], threshold: float, steps: NDArray[np.int64]
) -> Persistence | None:
    """Classify a series of per-step effects.

    Parameters
    ----------
    effect
        (steps,) size of the effect in each step; steps with NaN have no vote.
    threshold
        Above it, a step votes for the effect.
    steps
        (steps,) step numbers.

    Returns
    -------
    Persistence or None
        None if no step votes.
    """
    known = ~np.isnan(effect)
    effect, steps = effect[known], steps[known]
    active = effect > threshold
    if not active.any():
        return None
    share = float(active.mean())
    onset = _onset(active)
    onset_step = int(steps[onset]) if onset else None
    if _is_ramp(effect, active, onset):
        return Persistence(Kind.RAMP, share, int(steps[onset]) if onset else onset_step)
    if onset:
        return Persistence(Kind.ONSET, share, onset_step)
    if share >= PERSISTENT_SHARE:
        return Persistence(Kind.PERSISTENT, share)
    period = regular_period(steps[active])
    if period is not None:
        return Persistence(Kind.PERIODIC, share, period=period)
    if _one_burst(active):
        return Persistence(Kind.ONE_OFF, share, int(steps[np.argmax(active)]))
    return Persistence(Kind.INTERMITTENT, share)


def _onset(active: NDArray[np.bool_]) -> int:
    """Index of the step since which it is active, 0 if there is none after the first."""
    count = len(active)
    later = np.cumsum(active[::-1])[::-1] / np.arange(count, 0, -1)
    before = np.concatenate([[0.0], np.cumsum(active)[:-1] / np.arange(1, count)])
    fits = active & (later >= ONSET_SHARE) & (before <= 1.0 - ONSET_SHARE)
    # On the side that lasts, or every end of a window looks like an onset.
    fits[max(count - ONSET_STEPS, 0) :] = False
    fits[0] = False
    return int(np.argmax(fits)) if fits.any() else 0


def _is_ramp(effect: NDArray[np.float64], active: NDArray[np.bool_], onset: int) -> bool:
    series = effect[onset:]
    if len(series) < RAMP_STEPS or active[onset:].mean() < PERSISTENT_SHARE:
        return False
    third = len(series) // 3
    first, last = float(np.median(series[:third])), float(np.median(series[-third:]))
    if last < RAMP_GROWTH * max(first, 1e-12):
        return False
    # A plateau at the end does not speak against a ramp.
    rise = series[: int(np.argmax(series >= RAMP_TOP * last)) + 1]
    rising = len(rise) >= RAMP_RISE
    return rising and rank_correlation(rise, np.arange(len(rise), dtype=float)) >= RAMP_CORRELATION


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's correlation; equal values share their mean rank. 0 if all of one are equal."""
    if len(one) < PERIODIC_EVENTS:
        return 0.0
    first, second = _mean_ranks(one), _mean_ranks(other)
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2.0)[inverse]
    return ranks


def regular_period(steps: NDArray[np.int64]) -> int | None:
    """Distance between occurrences if it is the same between all of them, and not 1."""
    if len(steps) < PERIODIC_EVENTS:
        return None
    gaps = np.unique(np.diff(steps))
    return int(gaps[0]) if len(gaps) == 1 and gaps[0] > 1 else None


def _one_burst(active: NDArray[np.bool_]) -> bool:
    """At most three steps in a row, once."""
    first, last = int(np.argmax(active)), len(active) - int(np.argmax(active[::-1]))
    return last - first <= BURST_STEPS and int(active.sum()) == last - first
