"""Coordinates of findings in the job's own terms."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.evidence import Evidence
from smon.report import Where

_MAX_RANKS = 1024


def node_of(evidence: Evidence, dp: int, stage: int) -> str | None:
    """Host of a worker, if the context says so."""
    return evidence.context.hosts.get(evidence.layout.rank(dp, stage))


def workers_of(mask: NDArray[np.bool_] | np.bool_) -> list[tuple[int, int]]:
    """(dp, stage) where a (dp_ranks, stages) mask is True."""
    return [(dp, stage) for dp, stage in np.argwhere(mask).tolist()]


def place(evidence: Evidence, dp: int, stage: int, tp: int | None = None) -> Where:
    """Where one worker is, or one of its TP ranks."""
    rank = evidence.layout.rank(dp, stage, tp or 0)
    return Where(
        rank=rank,
        dp=dp,
        stage=stage,
        tp=tp,
        node=evidence.context.hosts.get(rank),
        gpu_uuid=evidence.context.gpus.get(rank),
    )


def places(evidence: Evidence, workers: Iterable[tuple[int, int]]) -> Where:
    """Where several workers are: what they have in common, and their ranks."""
    members = list(workers)
    if len(members) == 1:
        return place(evidence, *members[0])
    dps, stages = {dp for dp, _ in members}, {stage for _, stage in members}
    nodes = {node_of(evidence, dp, stage) for dp, stage in members}
    return Where(
        dp=dps.pop() if len(dps) == 1 else None,
        stage=stages.pop() if len(stages) == 1 else None,
        node=nodes.pop() if len(nodes) == 1 else None,
        ranks=tuple(evidence.layout.rank(dp, stage) for dp, stage in members[:_MAX_RANKS]),
    )
