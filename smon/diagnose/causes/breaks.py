"""planned_pause and warm-up: time that nobody lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind, Persistence, vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence, spread
from smon.diagnose.thresholds import PAUSE_NS, PAUSE_SCORE
from smon.trace.context import EventKind

#: Pauses after every other step are no period, but a slow job.
_MIN_PERIOD = 3

#: Events of the whole job that are pauses.
_PAUSES = (EventKind.CHECKPOINT, EventKind.LOGGING, EventKind.EVALUATION)


def find(evidence: Evidence) -> list[Draft]:
    """Gaps between steps in which every rank is idle."""
    gaps = evidence.gaps_ns
    known = gaps[~np.isnan(gaps)]
    if len(known) == 0:
        return _from_events(evidence)
    usual = float(np.median(known))
    with np.errstate(invalid="ignore"):
        long = gaps > usual + max(PAUSE_SCORE * spread(known), PAUSE_NS)
    if not long.any():
        return []
    persistence = _persistence(evidence, long)
    size = float(np.mean(gaps[long])) - usual
    extra = size * persistence.share
    kinds = sorted({event.kind for event in evidence.context.events if event.kind != "gc"})
    return [
        Draft(
            verdict="planned_pause",
            cause="checkpoint",
            scope="job",
            phase="between steps",
            persistence=persistence,
            confidence=0.9 if kinds else 0.7,
            evidence=(
                f"{int(long.sum())} gaps of {np.median(gaps[long]) / 1e9:.1f} s between steps, "
                "all ranks idle",
                f"the job says: {', '.join(kinds)}"
                if kinds
                else "no framework events: they would say whether it is a checkpoint",
            ),
            next=("asynchronous checkpoints, or fewer of them",),
            extra_excess_ns=extra,
            between_steps=True,
        )
    ]


def _from_events(evidence: Evidence) -> list[Draft]:
    """Pauses that the job itself reports, where the trace has no time between steps."""
    steps = evidence.steps
    inside = [
        event
        for event in evidence.context.events
        if event.rank is None and event.kind in _PAUSES and steps[0] <= event.step <= steps[-1]
    ]
    if not inside:
        return []
    total = sum(event.duration_s for event in inside) * 1e9
    active = np.isin(steps, [event.step for event in inside]).astype(float)
    kinds = ", ".join(sorted({str(event.kind) for event in inside}))
    return [
        Draft(
            verdict="planned_pause",
            cause="checkpoint",
            scope="job",
            phase="between steps",
            persistence=vote(active, 0.5, steps) or Persistence(Kind.ONE_OFF, 0.0),
            confidence=0.9,
            evidence=(f"the job reports {len(inside)} pauses ({kinds}) of all ranks",),
            next=("asynchronous checkpoints, or fewer of them",),
            extra_excess_ns=total / len(steps),
            between_steps=True,
        )
    ]


def _persistence(evidence: Evidence, long: NDArray[np.bool_]) -> Persistence:
    steps = evidence.steps
    period = _period(steps, long, ~np.isnan(evidence.gaps_ns))
    if period is not None:
        # The pause after the last step is not seen, but due.
        due = (steps - steps[np.argmax(long)]) % period == 0
        return Persistence(Kind.PERIODIC, float(due.mean()), period=period)
    found = vote(long.astype(float), 0.5, evidence.steps)
    return found or Persistence(Kind.ONE_OFF, 0.0)


def _period(
    steps: NDArray[np.int64], long: NDArray[np.bool_], known: NDArray[np.bool_]
) -> int | None:
    """Distance between pauses, if there is one wherever it says, and the window holds two."""
    at = steps[long]
    distances = np.unique(np.diff(at))
    if len(distances) != 1 or distances[0] < _MIN_PERIOD:
        return None
    period = int(distances[0])
    due = known & ((steps - at[0]) % period == 0)
    return period if bool((due == long).all()) and np.ptp(steps) >= 2 * period else None
