"""dataloader: a stall before the forward of the first microbatch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence, F, Floats, nanquantile
from smon.diagnose.place import places, workers_of
from smon.diagnose.thresholds import LOADER_PART, LOADER_SHARE, STALL_NS, STALL_SHARE
from smon.report import Where
from smon.simulate.cube import Changes


def find(evidence: Evidence) -> list[Draft]:
    """Launch delays of the first forward far above the usual ones of that worker."""
    delay = evidence.delay(F)
    if delay.size == 0:
        return []
    first = delay[..., 0]
    # The lower quartile: a stall in every other step is not usual.
    usual = np.minimum(nanquantile(first, 0.25, 0)[None], _of_replicas(first)[:, None])
    extra = first - usual
    floor = max(STALL_NS, STALL_SHARE * float(np.median(evidence.times.recorded)))
    with np.errstate(invalid="ignore"):
        hit = extra > floor
    hit &= _mostly_first(delay, hit, floor)[None]
    hit &= _late(np.where(hit, extra, 0.0))[None]
    if not hit.any():
        return []
    stall = np.zeros_like(delay)
    stall[..., 0] = np.where(hit, extra, 0.0)
    return [_draft(evidence, hit, extra, Changes(stall={F: stall}))]


def _of_replicas(first: Floats) -> Floats:
    """(steps, stages) the lower median over DP ranks: of two, the one that does not stall."""
    ordered = np.sort(first, axis=1)  # NaN last
    known = np.count_nonzero(~np.isnan(first), axis=1)
    middle = np.maximum(known - 1, 0) // 2
    lower: Floats = np.take_along_axis(ordered, middle[:, None], axis=1)[:, 0]
    return lower


def _mostly_first(delay: Floats, hit: NDArray[np.bool_], floor: float) -> NDArray[np.bool_]:
    """(dp_ranks, stages) workers whose stalls sit before their first microbatch."""
    stalls = np.where(np.nan_to_num(delay) > floor, np.nan_to_num(delay), 0.0)
    stalls = np.where(np.any(hit, axis=0)[None, :, :, None], stalls, 0.0)
    total, first = stalls.sum(axis=(0, 3)), stalls[..., 0].sum(axis=0)
    mostly: NDArray[np.bool_] = (total > 0) & (first >= LOADER_SHARE * total)
    return mostly


def _late(stall: Floats) -> NDArray[np.bool_]:
    """(dp_ranks, stages) workers that are late, against the worst of them."""
    total = stall.sum(axis=0)
    late: NDArray[np.bool_] = total >= LOADER_PART * total.max()
    return late


def _draft(evidence: Evidence, hit: NDArray[np.bool_], extra: Floats, changes: Changes) -> Draft:
    workers = workers_of(np.any(hit, axis=0))
    replicas = {dp for dp, _ in workers}
    everyone = len(replicas) > 1 and len(replicas) * 2 > evidence.window.dp_ranks
    where = Where() if everyone else places(evidence, workers)
    persistence = vote(hit.any(axis=(1, 2)).astype(float), 0.5, evidence.steps)
    nodes = where.node is not None and len(workers) > 1
    scope = "job" if everyone else "rank" if len(workers) == 1 else "node" if nodes else "dp_group"
    return Draft(
        verdict="host_stall",
        cause="dataloader",
        scope=scope,
        phase="before forward",
        persistence=persistence,  # type: ignore[arg-type]
        where=where,
        optypes=(F.label,),
        changes=changes,
        confidence=0.85,
        evidence=(
            f"{int(hit.sum())} times {np.median(extra[hit]) / 1e6:.0f} ms pass before the forward "
            "of microbatch 0, without traced work",
            "this gap holds more than four fifths of the launch delays of its workers",
        ),
        next=(
            "more loader workers or prefetch: DataLoader(num_workers=…, prefetch_factor=…)",
            "look at the storage that this host reads from",
        ),
    )
