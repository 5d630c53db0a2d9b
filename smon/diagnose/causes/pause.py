"""gc: host pauses inside single forwards, on another worker each time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import (
    RAMP_CORRELATION,
    Kind,
    Persistence,
    rank_correlation,
    vote,
)
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import B, Evidence, F, Floats, nanmedian
from smon.diagnose.place import places, workers_of
from smon.diagnose.side import counter
from smon.diagnose.thresholds import PAUSE_BACKWARD, PAUSE_FORWARD, RETRY_SHARE, STALL_NS
from smon.report import Candidate, Where
from smon.simulate.cube import Changes

#: From so many workers on, pauses are a habit of the job, not of a machine.
_MANY_WORKERS = 3
#: More of the forwards than this are no exceptions.
_TOO_MANY = 0.1
#: A median of fewer ops is no reference; the whole window is then.
_FEW_OPS = 4
#: And from so many steps on, a position has a median of its own.
_FEW_STEPS = 4
_MEMORY = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "a smaller microbatch, or more activation checkpointing: memory is nearly full",
)
#: So many pauses show a trend.
_GROWTH_PAUSES = 8


def find(evidence: Evidence) -> list[Draft]:
    """Forwards far longer than their peers whose backward is not."""
    forward, backward = evidence.work(F), evidence.work(B)
    if forward.size == 0 or forward.shape != backward.shape:
        return []
    expected = _expected(forward)
    with np.errstate(invalid="ignore", divide="ignore"):
        long = forward / expected - 1.0
        other = backward / _expected(backward) - 1.0
        hit = (long > PAUSE_FORWARD) & (other < PAUSE_BACKWARD) & (forward - expected > STALL_NS)
    if not hit.any() or hit.mean() > _TOO_MANY:
        return []
    extra = np.where(hit, forward - expected, 0.0)
    changed = forward.copy()
    changed[hit] = expected[hit]
    return [_draft(evidence, hit, extra, Changes({F: changed}))]


def _expected(cube: Floats) -> Floats:
    """What an op should take: its worker's typical op of this step, or of this position if longer.

    Of interleaved schedules the chunk with the loss is longer than the others in every step.
    """
    typical = nanmedian(cube, 3)
    if cube.shape[3] < _FEW_OPS:
        typical = nanmedian(cube, (0, 3))[None]
    expected = np.broadcast_to(typical[..., None], cube.shape)
    return np.fmax(expected, nanmedian(cube, 0)[None]) if len(cube) >= _FEW_STEPS else expected


def _draft(evidence: Evidence, hit: NDArray[np.bool_], extra: Floats, changes: Changes) -> Draft:
    workers = workers_of(np.any(hit, axis=(0, 3)))
    per_step = hit.any(axis=(1, 2, 3))
    share = float(per_step.mean())
    pauses = extra[hit] / 1e6
    events = _recorded_events(evidence)
    retried = _retried(evidence, hit)
    many = len(workers) >= _MANY_WORKERS
    persistence = vote(per_step.astype(float), 0.5, evidence.steps)
    if many or persistence is None:
        persistence = Persistence(Kind.ROTATING, share, period=_typical_period(evidence, hit))
    where = Where() if many else places(evidence, workers)
    scope = "rank" if len(workers) == 1 else "node" if where.node else "job"
    return Draft(
        verdict="host_stall",
        cause="allocator" if retried else "gc",
        scope=scope,
        phase="forward compute",
        persistence=persistence,
        where=where,
        optypes=(F.label,),
        changes=changes,
        confidence=0.95 if events else 0.8 if many else 0.6,
        evidence=(
            f"{int(hit.sum())} forwards are {np.median(pauses):.0f} ms longer than their peers, "
            f"their backwards are not; on {len(workers)} workers",
            *_growth(hit, extra),
            "the memory allocator retried in the same steps"
            if retried
            else f"{events} collections recorded"
            if events
            else "no gc events: gc.callbacks in the trainer would make it sure",
        ),
        candidates=()
        if events or many or retried
        else (
            Candidate("gc", where, "gc events"),
            Candidate("host_contention", where, "CPU load of the host"),
        ),
        next=_MEMORY
        if retried
        else (
            "collect on all ranks in the same step: gc.disable(), then gc.collect() every N steps",
            "Megatron-LM: --manual-gc --manual-gc-interval 100; torchtitan: training.gc_freq",
        ),
    )


def _retried(evidence: Evidence, hit: NDArray[np.bool_]) -> bool:
    """Whether the allocator retried on the workers and in the steps of the pauses."""
    places = np.argwhere(np.any(hit, axis=3)).tolist()
    by_worker: dict[tuple[int, int], list[int]] = {}
    for step, dp, stage in places:
        by_worker.setdefault((dp, stage), []).append(step)
    retries = 0
    for (dp, stage), steps in by_worker.items():
        rank = evidence.layout.rank(dp, stage)
        readings = counter(evidence.context, "alloc_retries", rank, evidence.steps)
        retries += int(np.count_nonzero(np.nan_to_num(readings[steps]) > 0))
    return retries >= RETRY_SHARE * len(places)


def _recorded_events(evidence: Evidence) -> int:
    return sum(event.kind == "gc" for event in evidence.context.events)


def _typical_period(evidence: Evidence, hit: NDArray[np.bool_]) -> int | None:
    """Median distance between pauses of one worker, in steps."""
    by_worker = hit.any(axis=3).reshape(len(hit), -1)
    gaps = [np.diff(evidence.steps[column]) for column in by_worker.T]
    known = np.concatenate([*gaps, np.empty(0)])
    return int(np.median(known)) if len(known) else None


def _growth(hit: NDArray[np.bool_], extra: Floats) -> tuple[str, ...]:
    step = np.nonzero(hit)[0].astype(float)
    size = extra[hit]
    if len(size) < _GROWTH_PAUSES or rank_correlation(size, step) < RAMP_CORRELATION:
        return ()
    third = len(size) // 3
    first, last = np.median(size[:third]) / 1e6, np.median(size[-third:]) / 1e6
    return (f"pauses grow from {first:.0f} to {last:.0f} ms over the window: the heap grows",)
