"""Workers that are slow for longer than a moment, and how their slowness lasts.

Flow: `smon.diagnose.workers` → **here** → `smon.diagnose.causes.device`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import PERSISTENT_SHARE, Kind, Persistence, vote
from smon.diagnose.evidence import B, Evidence, F, Floats
from smon.diagnose.place import workers_of
from smon.diagnose.thresholds import (
    DEVICE_LASTING_RATIO,
    DEVICE_LASTING_SCORE,
    DEVICE_LEANING_SHARE,
    DEVICE_NOISY_RATIO,
    DEVICE_NOISY_STEPS,
    DEVICE_RATIO,
    DEVICE_SCORE,
    DEVICE_SOME_RATIO,
    DEVICE_SOME_STEPS,
    MIN_NOISE,
    SAME_RATIO,
)
from smon.diagnose.workers import Slowness
from smon.ops import OpType
from smon.report import MIN_STEPS

#: Standard error of a median over that of a mean.
_MEDIAN_ERROR = 1.2533
#: A lasting excess can be so many of its standard errors below what it really is.
_ERRORS = 2.0
#: A step so many times the noise below the typical one is a step in which the device is well.
_WELL = 3.0

_LASTING = (Kind.PERSISTENT, Kind.ONSET, Kind.RAMP)
#: It comes and goes.
SOMETIMES = (Kind.PERIODIC, Kind.INTERMITTENT)


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A worker that is slower than its peers.

    Attributes
    ----------
    ratio
        Excess of forward and of backward, while it is there.
    score
        Standard errors from its peers.
    active
        (steps,) steps in which it is there.
    """

    dp: int
    stage: int
    persistence: Persistence
    ratio: Mapping[OpType, float]
    score: float
    active: NDArray[np.bool_]

    @property
    def worker(self) -> tuple[int, int]:
        """(dp, stage)."""
        return self.dp, self.stage

    @property
    def is_well_again(self) -> bool:
        """Whether it was slow once, for some steps, and is not any more."""
        runs = int(np.count_nonzero(np.diff(self.active.astype(np.int8)) > 0) + self.active[0])
        once = self.persistence.kind is Kind.INTERMITTENT and runs == 1
        return once and not self.active[-1]

    @property
    def alike(self) -> bool:
        """Whether forward and backward are slow alike, as on a slow device or with long data."""
        return alike(self.ratio[F], self.ratio[B])


def alike(one: float, other: float) -> bool:
    """Whether two excesses are one and the same, as far as one can see."""
    smaller, larger = sorted((one, other))
    return larger - smaller <= SAME_RATIO or smaller > larger / 2


def combined(evidence: Evidence, kinds: Mapping[OpType, Slowness]) -> tuple[Floats, float]:
    """(steps, dp, stages) relative excess of forward and backward together, and its noise."""
    total = np.zeros_like(kinds[F].effect)
    weight, noise = 0.0, 0.0
    for op, kind in kinds.items():
        share = float(np.nansum(evidence.typical(op, (0, 1, 3))))
        if np.isnan(kind.effect).all() or np.isnan(share):
            continue
        total = total + share * np.expm1(kind.effect)
        noise += (share * kind.noise) ** 2
        weight += share
    if not weight:
        return np.full_like(kinds[F].effect, np.nan), np.nan
    return total / weight, float(np.sqrt(noise) / weight)


def suspects_of(
    effect: Floats, noise: float, kinds: Mapping[OpType, Slowness], steps: NDArray[np.int64]
) -> list[Suspect]:
    """Suspects, slowest first; nobody where a few noisy steps are all there is.

    Parameters
    ----------
    effect, noise
        As `combined` gives them.
    """
    if len(steps) < DEVICE_NOISY_STEPS and noise > DEVICE_NOISY_RATIO:
        return []
    with np.errstate(invalid="ignore"):
        voters = np.any(effect > DEVICE_RATIO, axis=0).sum(axis=0)
    found = []
    for dp, stage in workers_of(_possible(effect)):
        series = effect[:, dp, stage]
        persistence = _lasting(series, noise, steps, alone=int(voters[stage]) == 1)
        active = series > DEVICE_RATIO / 2
        score = _score(series[active], noise)
        if persistence is None or score < DEVICE_LASTING_SCORE or active.sum() < MIN_STEPS:
            continue
        ratio = {
            op: float(np.expm1(np.nanmedian(kind.effect[active, dp, stage])))
            for op, kind in kinds.items()
        }
        suspect = Suspect(dp, stage, persistence, ratio, score, active)
        # What stretches only forwards now and then is the host.
        if suspect.alike or persistence.kind not in SOMETIMES:
            found.append(suspect)
    return sorted(found, key=lambda suspect: -max(suspect.ratio.values()))


def _error(noise: float, steps: int) -> float:
    """Standard error of the median effect over so many steps."""
    return _MEDIAN_ERROR * max(noise, MIN_NOISE) / float(np.sqrt(max(steps, 1)))


def _score(effects: Floats, noise: float) -> float:
    """Standard errors of the median effect."""
    if len(effects) == 0:
        return 0.0
    return float(np.median(effects)) / _error(noise, len(effects))


def _lasting(
    series: Floats, noise: float, steps: NDArray[np.int64], *, alone: bool
) -> Persistence | None:
    """How a worker's slowness lasts; None if it does not.

    Parameters
    ----------
    alone
        No other worker of the stage is ever slow: then it may come and go, and is still no data.
    """
    persistence = vote(series, DEVICE_RATIO, steps)
    slow = series[series > DEVICE_RATIO]
    if persistence is None or _score(slow, noise) < DEVICE_SCORE:
        return _among_noise(series, noise)
    often = len(slow) >= DEVICE_SOME_STEPS and float(np.median(slow)) >= DEVICE_SOME_RATIO
    if persistence.kind in _LASTING or (alone and often and persistence.kind in SOMETIMES):
        return persistence
    return _among_noise(series, noise)


def _among_noise(series: Floats, noise: float) -> Persistence | None:
    """Among noise a single step proves nothing, but most steps lean the way of a lasting effect."""
    known = series[~np.isnan(series)]
    typical = float(np.median(known)) if len(known) else 0.0
    # Few steps know an excess less well: what looks like more than the least may be the least.
    least = max(DEVICE_LASTING_RATIO, DEVICE_RATIO - _ERRORS * _error(noise, len(known)))
    if typical < least or _score(known, noise) < DEVICE_LASTING_SCORE:
        return None
    well = float(np.mean(known < typical - _WELL * max(noise, MIN_NOISE)))
    share = float(np.mean(known > 0.0))
    if well > 1.0 - PERSISTENT_SHARE or share < DEVICE_LEANING_SHARE:
        return None
    return Persistence(Kind.PERSISTENT, share)


def _possible(effect: Floats) -> NDArray[np.bool_]:
    """Workers above the threshold in enough steps: the rest need no closer look."""
    with np.errstate(invalid="ignore"):
        votes = (effect > DEVICE_RATIO / 2).sum(axis=0)
    enough = max(1, min(len(effect) // 4, DEVICE_SOME_STEPS))
    possible: NDArray[np.bool_] = votes >= enough
    return possible
