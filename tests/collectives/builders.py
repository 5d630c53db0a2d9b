"""Ranks with a few collectives each, written down by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smon.trace.events import (
    Collective,
    Kind,
    Phase,
    ProcessGroup,
    RankEvents,
    StepSpan,
    event_columns,
)

MS = 1_000_000
AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


@dataclass(frozen=True)
class Met:
    """A collective of one rank: times in ms since the begin of the job on its own clock."""

    start: float
    duration: float
    step: int = 0
    kind: Collective = AR
    group: int = -1
    seq: int = -1
    size: int = -1


@dataclass(frozen=True)
class Ran:
    """A kernel of one rank, likewise."""

    start: float
    duration: float
    step: int = 0
    phase: Phase | None = None


def rank_of(
    number: int,
    events: Sequence[Met | Ran],
    groups: Sequence[ProcessGroup] = (),
    *,
    world: int = 0,
    steps: Sequence[tuple[int, float, float]] = (),
    **more: Any,  # noqa: ANN401
) -> RankEvents:
    """A rank; `steps` are (number, start, duration) in ms. Its clock starts anywhere."""
    origin = 10**18 + number * 7_000 * MS
    met = [event for event in events if isinstance(event, Met)]
    columns: dict[str, Any] = event_columns(
        {
            "start_ns": np.array([origin + round(e.start * MS) for e in events], np.int64),
            "duration_ns": np.array([round(e.duration * MS) for e in events], np.int64),
            "step": np.array([e.step for e in events], np.int64),
            "lane": np.array([isinstance(e, Met) for e in events], np.int32),
            "kind": np.array(
                [Kind.COLLECTIVE if isinstance(e, Met) else Kind.COMPUTE for e in events]
            ),
            "collective": np.array([e.kind if isinstance(e, Met) else -1 for e in events]),
            "phase": np.array(
                [e.phase if isinstance(e, Ran) and e.phase is not None else -1 for e in events]
            ),
            "group": np.array([e.group if isinstance(e, Met) else -1 for e in events]),
            "seq": np.array([e.seq if isinstance(e, Met) else -1 for e in events]),
            "size_bytes": np.array([e.size if isinstance(e, Met) else -1 for e in events]),
        },
        Counter(),
    )
    return RankEvents(
        rank=number,
        world_size=world,
        **columns,
        groups=tuple(groups),
        steps=tuple(
            StepSpan(step, origin + round(start * MS), round(duration * MS))
            for step, start, duration in steps
        ),
        on_gpu=len(met) < len(events),
        **more,
    )


def job_of(
    work: Sequence[Sequence[float]], transfer: float = 2.0, *, bulk: int = 1
) -> list[RankEvents]:
    """Ranks that work and then reduce, step by step.

    Parameters
    ----------
    work
        Per step and rank, ms until it arrives at the all-reduce of the step.
    bulk
        Collectives per step; all but the first follow at once.
    """
    ranks = len(work[0])
    events: list[list[Met]] = [[] for _ in range(ranks)]
    spans: list[list[tuple[int, float, float]]] = [[] for _ in range(ranks)]
    now = 0.0
    for step, row in enumerate(work):
        begin = now
        arrivals = [now + ms for ms in row]
        for _ in range(bulk):
            end = max(arrivals) + transfer
            for rank, start in enumerate(arrivals):
                events[rank].append(Met(start, end - start, step))
            arrivals, now = [end] * ranks, end
        for rank in range(ranks):
            spans[rank].append((step, begin, now - begin))
    return [rank_of(rank, events[rank], world=ranks, steps=spans[rank]) for rank in range(ranks)]
