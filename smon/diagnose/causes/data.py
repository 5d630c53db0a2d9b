"""sequence_length: microbatches of uneven length, so that another replica is late in every step."""

from __future__ import annotations

import numpy as np

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, B, Evidence, F, Floats, nanmedian, spread
from smon.diagnose.side import sum_len2
from smon.diagnose.thresholds import DATA_CORRELATION, DATA_SPREAD, DATA_SPREAD_MIN, STAGES_AGREE
from smon.diagnose.workers import log_work
from smon.simulate.cube import Changes

#: A replica this much above the mean of its step holds the others up.
_UNEVEN_STEP = 1.02
#: Fewer microbatches correlate by chance.
_MIN_OPS = 8
#: Beyond so many robust standard deviations values are pulled in.
_OUTLIER = 3.0
#: Without other stages to ask, the spread must be so many times larger.
_ALONE = 2.0


def find(evidence: Evidence) -> list[Draft]:
    """Forward and backward of the same microbatch long together, everywhere and at random."""
    logs = {op: _centred(log_work(evidence, op)) for op in COMPUTE}
    if any(part.size == 0 for part in logs.values()) or logs[F].shape != logs[B].shape:
        return []
    forward, backward = (_of_replica(logs[op]).reshape(-1) for op in COMPUTE)
    spreads = spread(forward), spread(backward)
    if np.isnan(spreads).any() or max(spreads) < _least_spread(evidence.window.stages):
        return []
    alone = evidence.window.stages == 1
    correlation = _correlation(forward, backward)
    if correlation < DATA_CORRELATION or (not alone and _stages_agree(logs[F]) < STAGES_AGREE):
        return []
    share = _uneven_steps(evidence)
    return [
        Draft(
            verdict="imbalance",
            cause="sequence_length",
            scope="job",
            phase="compute",
            persistence=Persistence(Kind.ROTATING, share),
            optypes=tuple(op.label for op in COMPUTE),
            changes=even_data(evidence),
            confidence=0.9 if evidence.window.stages > 1 else 0.75,
            evidence=(
                f"forward and backward of the same microbatch correlate {correlation:.3f}, and "
                f"spread by {spreads[0]:.0%} and {spreads[1]:.0%}",
                *_stages(evidence),
                *_lengths(evidence),
            ),
            next=(
                "balance microbatches over DP ranks by the sum of squared lengths: smon plan "
                "shows what it buys",
                "sort or pack sequences by length before they are dealt out",
            ),
        )
    ]


def _of_replica(logs: Floats) -> Floats:
    """(steps, dp_ranks, positions) mean over the stages: the data is the same, the noise is not."""
    known = ~np.isnan(logs)
    count = known.sum(axis=2)
    mean: Floats = np.full(count.shape, np.nan)
    np.divide(np.where(known, logs, 0.0).sum(axis=2), count, out=mean, where=count > 0)
    return mean


def _least_spread(stages: int) -> float:
    if stages == 1:
        return _ALONE * DATA_SPREAD
    return max(DATA_SPREAD / float(np.sqrt(stages)), DATA_SPREAD_MIN)


def _centred(logs: Floats) -> Floats:
    """Minus the median of each worker and of each step.

    Neither a slow worker nor a step in which the whole job is slow must look like long data.
    """
    if logs.size == 0:
        return logs
    by_worker = logs - nanmedian(logs, (0, 3))[None, :, :, None]
    return by_worker - nanmedian(by_worker, (1, 2, 3))[:, None, None, None]


def _correlation(one: Floats, other: Floats) -> float:
    """Correlation with outliers pulled in: a few slow workers must not decide it; 0 if unknown."""
    both = ~(np.isnan(one) | np.isnan(other))
    if both.sum() < _MIN_OPS:
        return 0.0
    first, second = (_pulled_in(values[both]) for values in (one, other))
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _pulled_in(values: Floats) -> Floats:
    width = _OUTLIER * spread(values)
    return np.clip(values, np.median(values) - width, np.median(values) + width)


def _stages_agree(logs: Floats) -> float:
    """Correlation of the same microbatches on one half of the stages and on the other."""
    halves = (_of_replica(logs[:, :, first::2]) for first in (0, 1))
    one, other = (half.reshape(-1) for half in halves)
    return _correlation(one, other)


def _uneven_steps(evidence: Evidence) -> float:
    """Share of the steps in which one replica has noticeably more to do than the mean."""
    total = sum(np.nansum(evidence.work(op), axis=(2, 3)) for op in COMPUTE)
    there = total > 0
    mean = np.where(there, total, 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return float(np.mean(np.max(total, axis=1) > _UNEVEN_STEP * mean))


def _stages(evidence: Evidence) -> tuple[str, ...]:
    if evidence.window.stages == 1:
        return ()
    agree = _stages_agree(_centred(log_work(evidence, F)))
    return (f"stages agree on which microbatches are long: {agree:.2f}",)


def _lengths(evidence: Evidence) -> tuple[str, ...]:
    lengths = sum_len2(evidence.context, evidence.steps, evidence.window.dp_ranks)
    cube = evidence.work(F)[:, :, 0]
    if lengths is None or lengths.shape[2] < cube.shape[2]:
        return ("no sequence lengths: tokens and Σlen² per microbatch would make it sure",)
    lengths = lengths[:, :, : cube.shape[2]]
    both = ~(np.isnan(lengths) | np.isnan(cube))
    if not both.any():
        return ("no sequence lengths: tokens and Σlen² per microbatch would make it sure",)
    correlation = _correlation(lengths, cube)
    return (f"forward time correlates {correlation:.2f} with Σlen²",)


def even_data(evidence: Evidence) -> Changes:
    """The same total work of each step and stage, spread evenly over replicas and microbatches."""
    work = {}
    for op in COMPUTE:
        cube = evidence.work(op)
        known = ~np.isnan(cube)
        count = np.maximum(known.sum(axis=(1, 3), keepdims=True), 1)
        mean = np.where(known, cube, 0.0).sum(axis=(1, 3), keepdims=True) / count
        work[op] = np.where(known, mean, np.nan)
    return Changes(work)
