"""stage_partition: a stage with more work than the others, on every replica alike."""

from __future__ import annotations

import numpy as np

from smon.attribute.persistence import Persistence, vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, B, Evidence, F, Floats, nanmedian, spread
from smon.diagnose.thresholds import STAGE_RATIO, STAGE_SPREAD
from smon.diagnose.workers import log_work
from smon.ops import OpType
from smon.report import Candidate, Where
from smon.simulate.cube import Changes


def find(evidence: Evidence) -> list[Draft]:
    """The stage that is longest against the mean of all, if it is long enough."""
    work = {op: evidence.work(op) for op in COMPUTE}
    if evidence.window.stages == 1 or any(cube.shape[3] == 0 for cube in work.values()):
        return []
    typical = {op: evidence.typical(op, (0, 1, 3)) for op in COMPUTE}
    total = typical[F] + typical[B]
    if np.isnan(total).any():
        return []
    stage = int(np.argmax(total))
    others = float(np.median(np.delete(total, stage)))
    if total[stage] <= others * (1 + STAGE_RATIO):
        return []
    ratios = _ratios(evidence, stage)
    persistence = vote(nanmedian(ratios, 1) - 1.0, STAGE_RATIO / 2, evidence.steps)
    if persistence is None:
        return []
    replicas = nanmedian(ratios, 0)
    alike = spread(np.log(replicas)) < STAGE_SPREAD and len(replicas) > 1
    if len(replicas) > 1 and not (alike and float(np.min(replicas)) > 1 + STAGE_RATIO / 2):
        return []
    return [_draft(evidence, stage, typical, persistence=persistence, alone=not alike)]


def _ratios(evidence: Evidence, stage: int) -> Floats:
    """(steps, dp_ranks) compute of the stage over the typical other stage, same microbatches."""
    parts = []
    for op in COMPUTE:
        logs = log_work(evidence, op)
        others = nanmedian(np.delete(logs, stage, axis=2), 2)
        parts.append(nanmedian(logs[:, :, stage] - others, 2))
    weights = [float(np.nansum(evidence.typical(op, (0, 1, 3)))) for op in COMPUTE]
    mean = (parts[0] * weights[0] + parts[1] * weights[1]) / sum(weights)
    ratios: Floats = np.exp(mean)
    return ratios


def _draft(
    evidence: Evidence,
    stage: int,
    typical: dict[OpType, Floats],
    *,
    persistence: Persistence,
    alone: bool,
) -> Draft:
    ratio = {
        op: float(times[stage] / np.median(np.delete(times, stage)))
        for op, times in typical.items()
    }
    candidates: tuple[Candidate, ...] = ()
    if alone:
        rank = evidence.layout.rank(0, stage)
        candidates = (
            Candidate("stage_partition", Where(stage=stage), "a second DP rank"),
            Candidate(
                "slow_gpu",
                Where(rank=rank, dp=0, stage=stage),
                "swap the device, or compare the layers per stage",
            ),
        )
    return Draft(
        verdict="imbalance",
        cause="stage_partition",
        scope="stage",
        phase="compute",
        persistence=persistence,
        where=Where(stage=stage),
        optypes=tuple(op.label for op in COMPUTE),
        changes=even_stages(evidence),
        confidence=0.6 if alone else 0.9,
        evidence=(
            f"stage {stage}: forward {ratio[F]:.2f} ×, backward {ratio[B]:.2f} × the other stages, "
            "on every DP rank",
            "a loss layer makes forward 1.9–2.1 × and backward 1.35–1.4 ×"
            if stage == evidence.window.stages - 1 and ratio[F] > ratio[B] * 1.15
            else "forward and backward are long alike: too many layers",
        ),
        candidates=candidates,
        next=(
            f"move layers off stage {stage}: smon plan shows how many and what it buys",
            "Megatron-LM: --decoder-last-pipeline-num-layers, or --pipeline-model-parallel-layout",
        ),
    )


def even_stages(evidence: Evidence) -> Changes:
    """The same total work, spread evenly over the stages."""
    work = {}
    for op in COMPUTE:
        stages = evidence.typical(op, (0, 1, 3))
        work[op] = evidence.work(op) * (float(np.mean(stages)) / stages)[None, None, :, None]
    return Changes(work)
