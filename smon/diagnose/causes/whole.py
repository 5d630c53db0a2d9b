"""job_wide: from some step on the whole job is slower, all ranks alike. Nobody is named."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, Floats, nanmedian, spread
from smon.diagnose.thresholds import JOB_WIDE_OP_RATIO, JOB_WIDE_RATIO
from smon.ops import COMPUTE as COMPUTE_TYPES
from smon.ops import OP_TYPES, OpType
from smon.simulate.cube import Changes

#: A level needs so many steps on either side of the change.
_SIDE = 3
#: The change must exceed the scatter around both levels so many times, in standard errors.
_SCORE = 6.0
#: What every group and worker of a kind shares; more difference than this is not job-wide.
_UNEVEN = 0.5
#: A single group can be slow for itself; so many kinds of them, all at once, cannot.
_KINDS = 3


def find(evidence: Evidence) -> list[Draft]:
    """The largest lasting change of compute or of communication, if all places changed alike."""
    computes = tuple(COMPUTE)
    others = tuple(op for op in OP_TYPES if op not in COMPUTE_TYPES)
    drafts = [_draft(evidence, kinds) for kinds in (computes, others)]
    return [draft for draft in drafts if draft is not None]


def _draft(evidence: Evidence, candidates: tuple[OpType, ...]) -> Draft | None:
    """A finding if these kinds of ops changed, and the step with them."""
    levels = {op: _by_place(evidence.work(op)) for op in candidates}
    levels = {op: level for op, level in levels.items() if level.size and _known(level)}
    if not levels:
        return None
    onset = _change_point(_typical(levels))
    if onset is None:
        return None
    kinds = [op for op, level in levels.items() if _changed(level, onset)]
    if not kinds or not (set(kinds) == set(levels) or len(kinds) >= _KINDS):
        return None
    changes = _as_before(evidence, kinds, onset)
    cost = evidence.cost_ns(changes)[onset:]
    before = evidence.times.simulated[onset:] - cost
    ratio = float(np.mean(cost) / np.mean(before))
    if ratio < JOB_WIDE_RATIO:
        return None
    labels = tuple(op.label for op in kinds)
    since = int(evidence.steps[onset])
    share = 1.0 - onset / len(evidence.steps)
    return Draft(
        verdict="job_wide",
        cause="job_wide",
        scope="job",
        phase="compute" if kinds[0] in COMPUTE else "communication",
        persistence=Persistence(Kind.ONSET, share, since),
        optypes=labels,
        changes=changes,
        confidence=0.8,
        evidence=(
            f"since step {since} every step is {ratio:.1%} longer: {', '.join(labels)}, on all "
            "ranks alike; no rank stands out",
        ),
        next=("what changed at that step: software, other jobs on the network, power or cooling",),
    )


def _by_place(cube: Floats) -> Floats:
    """(steps, places) log durations against the typical one of their place."""
    if cube.size == 0:
        return np.empty((len(cube), 0))
    typical = nanmedian(cube, 3).reshape(len(cube), -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(typical / nanmedian(typical, 0)[None])
    logs[~np.isfinite(logs)] = np.nan
    return logs


def _known(level: Floats) -> bool:
    return bool((~np.isnan(level)).any(axis=1).all())


def _typical(levels: dict[OpType, Floats]) -> Floats:
    """(steps,) typical log duration over all kinds and places: a few slow ones do not move it."""
    return nanmedian(np.stack([nanmedian(level, 1) for level in levels.values()], axis=1), 1)


def _change_point(series: Floats) -> int | None:
    """Split with the least scatter around both medians, if the levels differ for sure."""
    costs = {
        index: _scatter(series[:index]) + _scatter(series[index:])
        for index in range(_SIDE, len(series) - _SIDE + 1)
    }
    if not costs:
        return None
    onset = min(costs, key=lambda index: costs[index])
    before, after = series[:onset], series[onset:]
    rise = float(np.median(after) - np.median(before))
    noise = max(spread(before), spread(after), 1e-4)
    score = rise / noise * np.sqrt(min(len(before), len(after)))
    return onset if rise > JOB_WIDE_OP_RATIO and score > _SCORE else None


def _scatter(series: Floats) -> float:
    return float(np.abs(series - np.median(series)).sum())


def _rise(level: Floats, onset: int) -> Floats:
    """(places,) log ratio of the typical duration after to that before."""
    return nanmedian(level[onset:], 0) - nanmedian(level[:onset], 0)


def _changed(level: Floats, onset: int) -> bool:
    """Whether a kind rose in every place alike."""
    rises = _rise(level, onset)
    rises = rises[~np.isnan(rises)]
    middle = float(np.median(rises)) if len(rises) else 0.0
    return middle > JOB_WIDE_OP_RATIO and _alike(rises, middle)


def _alike(rises: NDArray[np.float64], middle: float) -> bool:
    low, high = np.quantile(rises, [0.1, 0.9])
    return bool(low > _UNEVEN * middle and high < middle / _UNEVEN)


def _as_before(evidence: Evidence, kinds: list[OpType], onset: int) -> Changes:
    work = {}
    for op in kinds:
        cube = evidence.work(op).copy()
        rise = np.nan_to_num(_rise(_by_place(cube), onset)).reshape(cube.shape[1:3])
        cube[onset:] *= np.exp(-rise)[None, :, :, None]
        work[op] = cube
    return Changes(work)
