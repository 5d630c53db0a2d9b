"""moe_load: one rank of an expert-parallel group is loaded for a while, then another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, Floats
from smon.diagnose.side import expert_tokens
from smon.diagnose.thresholds import EXPERT_RATIO, EXPERT_RUN
from smon.diagnose.workers import slowness
from smon.report import Candidate, Where
from smon.simulate.cube import Changes

#: In so many of the steps somebody is loaded, and in at most so many more than one.
_BUSY = 0.5
_SEVERAL = 0.2
#: What is loaded in so many of the steps does not take turns.
_ALWAYS = 0.8
#: From this correlation on, token counts explain the times.
_TOKENS_EXPLAIN = 0.8


def find(evidence: Evidence) -> list[Draft]:
    """A stage in which the slow worker changes slowly."""
    effects = [slowness(evidence, op).effect for op in COMPUTE]
    with np.errstate(invalid="ignore"):
        hot = (effects[0] > EXPERT_RATIO) & (effects[1] > EXPERT_RATIO)
    return [
        _draft(evidence, stage, hot[:, :, stage], effects)
        for stage in range(hot.shape[2])
        if _rotates_slowly(hot[:, :, stage])
    ]


def _rotates_slowly(hot: NDArray[np.bool_]) -> bool:
    """One worker at a time, at least two in all, each for a run of steps."""
    busy = hot.any(axis=1)
    if busy.mean() < _BUSY or (hot.sum(axis=1) > 1).mean() > _SEVERAL:
        return False
    if hot.mean(axis=0).max() >= _ALWAYS:
        return False
    runs = _runs(np.argmax(hot, axis=1)[busy])
    # A moment of one worker is no turn, and must not hide another one that is always slow.
    takers = {worker for worker, length in runs if length >= EXPERT_RUN}
    return len(takers) > 1 and float(np.median([length for _, length in runs])) >= EXPERT_RUN


def _runs(workers: NDArray[np.intp]) -> list[tuple[int, int]]:
    """(worker, length) of each run of equal values."""
    edges = np.flatnonzero(np.diff(workers)) + 1
    parts = np.split(workers, edges)
    return [(int(part[0]), len(part)) for part in parts if len(part)]


def _draft(evidence: Evidence, stage: int, hot: NDArray[np.bool_], effects: list[Floats]) -> Draft:
    runs = _runs(np.argmax(hot, axis=1)[hot.any(axis=1)])
    period = int(np.median([length for _, length in runs]))
    correlation = _token_correlation(evidence, stage, effects[0][:, :, stage])
    known = correlation is not None and correlation > _TOKENS_EXPLAIN
    size = float(np.expm1(np.nanmedian(effects[0][:, :, stage][hot])))
    tokens = (
        f"forward time correlates {correlation:.2f} with the tokens per expert rank"
        if correlation is not None
        else "no token counts per expert: they would make it sure"
    )
    return Draft(
        verdict="imbalance",
        cause="moe_load",
        scope="ep_group",
        phase="compute",
        persistence=Persistence(Kind.ROTATING, float(hot.any(axis=1).mean()), period=period),
        where=Where(stage=stage),
        optypes=tuple(op.label for op in COMPUTE),
        changes=_undone(evidence, stage, hot, effects),
        confidence=0.9 if known else 0.5,
        evidence=(
            f"one worker of stage {stage} at a time is {size:.0%} slower, another one after every "
            f"{period} steps: not hardware",
            tokens,
        ),
        candidates=()
        if known
        else (
            Candidate("moe_load", Where(stage=stage), "tokens per expert"),
            Candidate("unknown", Where(stage=stage), "what the job assigns to ranks in turn"),
        ),
        next=(
            "raise the load-balancing loss, or set an expert capacity factor",
            "Megatron-LM: --moe-router-load-balancing-type, --moe-aux-loss-coeff",
        ),
    )


def _token_correlation(evidence: Evidence, stage: int, effect: Floats) -> float | None:
    ranks = [evidence.layout.rank(dp, stage) for dp in range(effect.shape[1])]
    tokens = expert_tokens(evidence.context, evidence.steps, ranks)
    if tokens is None:
        return None
    both = ~(np.isnan(tokens) | np.isnan(effect))
    if both.sum() < EXPERT_RUN or tokens[both].std() == 0:
        return None
    return float(np.corrcoef(tokens[both], effect[both])[0, 1])


def _undone(
    evidence: Evidence, stage: int, hot: NDArray[np.bool_], effects: list[Floats]
) -> Changes:
    """The same work spread over the group: each loaded worker gives to the others."""
    work = {}
    for op, effect in zip(COMPUTE, effects, strict=True):
        cube = evidence.work(op).copy()
        load = np.where(hot, np.exp(effect[:, :, stage]), 1.0)
        cube[:, :, stage] *= (load.mean(axis=1, keepdims=True) / load)[:, :, None]
        work[op] = cube
    return Changes(work)
