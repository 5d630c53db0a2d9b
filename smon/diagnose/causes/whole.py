"""job_wide: from some step on the whole job is slower, all ranks alike. Nobody is named."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, Floats, nanmedian, spread
from smon.diagnose.thresholds import JOB_WIDE_RATIO
from smon.ops import OP_TYPES, OpType
from smon.simulate.cube import Changes

#: A level needs so many steps on either side of the change.
_SIDE = 5
#: The change must exceed the scatter around both levels so many times.
_SCORE = 8.0
#: What every group and worker of a kind shares; more difference than this is not job-wide.
_UNEVEN = 0.5


def find(evidence: Evidence) -> list[Draft]:
    """The largest lasting change of the step time, if all workers or groups changed alike."""
    times = evidence.times.replayed
    change = _change_point(times)
    if change is None:
        return []
    onset, ratio = change
    kinds = _changed_kinds(evidence, onset)
    if not kinds:
        return []
    labels = tuple(op.label for op in kinds)
    compute = all(op in COMPUTE for op in kinds)
    return [
        Draft(
            verdict="job_wide",
            cause="job_wide",
            scope="job",
            phase="compute" if compute else "communication",
            persistence=Persistence(
                Kind.ONSET,
                float(np.mean(np.arange(len(times)) >= onset)),
                int(evidence.steps[onset]),
            ),
            optypes=labels,
            changes=_as_before(evidence, kinds, onset),
            confidence=0.8,
            evidence=(
                f"since step {evidence.steps[onset]} every step is {ratio - 1:.1%} longer, "
                f"{', '.join(labels)} on all ranks alike: no rank stands out",
            ),
            next=(
                "what changed at that step: software, other jobs on the network, power or cooling",
            ),
        )
    ]


def _change_point(times: Floats) -> tuple[int, float] | None:
    """(index, ratio of the medians) of the split with the smallest scatter around both medians."""
    best, onset = np.inf, 0
    for index in range(_SIDE, len(times) - _SIDE + 1):
        cost = _scatter(times[:index]) + _scatter(times[index:])
        if cost < best:
            best, onset = cost, index
    if not onset:
        return None
    before, after = times[:onset], times[onset:]
    ratio = float(np.median(after) / np.median(before))
    noise = max(spread(before), spread(after), 1.0)
    score = (np.median(after) - np.median(before)) / noise
    if ratio < 1 + JOB_WIDE_RATIO or score < _SCORE:
        return None
    return onset, ratio


def _scatter(times: Floats) -> float:
    return float(np.abs(times - np.median(times)).sum())


def _levels(cube: Floats, onset: int) -> Floats:
    """(dp_ranks, stages) log ratio of the typical duration after to that before."""
    typical = nanmedian(cube, 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels: Floats = np.log(nanmedian(typical[onset:], 0) / nanmedian(typical[:onset], 0))
    return levels


def _changed_kinds(evidence: Evidence, onset: int) -> list[OpType]:
    """Op types that changed by more than the threshold in every place."""
    found = []
    for op in OP_TYPES:
        cube = evidence.work(op)
        if cube.size == 0:
            continue
        levels = _levels(cube, onset)
        known = levels[np.isfinite(levels)]
        if len(known) and float(np.median(known)) > JOB_WIDE_RATIO and _alike(known):
            found.append(op)
    return found


def _alike(levels: NDArray[np.float64]) -> bool:
    middle = float(np.median(levels))
    low, high = np.quantile(levels, [0.05, 0.95])
    return bool(low > _UNEVEN * middle and high < middle / _UNEVEN)


def _as_before(evidence: Evidence, kinds: list[OpType], onset: int) -> Changes:
    work = {}
    for op in kinds:
        cube = evidence.work(op).copy()
        scale = np.exp(-np.nan_to_num(_levels(cube, onset)))
        cube[onset:] *= scale[None, :, :, None]
        work[op] = cube
    return Changes(work)
