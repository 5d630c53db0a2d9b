"""What each worker does in a step: it computes, or it waits for its peers and does nothing else.

Flow: `smon.simulate.window` → **here** → `smon.diagnose` (what victims wait), `smon.worker.matrix`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.ops import STREAM_COMPUTE
from smon.simulate.window import Part, Window

Floats = NDArray[np.float64]


def compute_and_wait(window: Window) -> tuple[Floats, Floats]:
    """(dp_ranks, stages, steps) ns that each worker computes, and that it only waits for peers.

    Receives are posted early and wait side by side, many of them behind a compute: what counts is
    the time in which at least one op of communication waits and nothing is computed. So the two
    never take longer together than the step. NaN where the worker is absent.
    """
    shape = (window.dp_ranks, window.stages, len(window.steps))
    compute, wait = np.full(shape, np.nan), np.full(shape, np.nan)
    for part in window.parts:
        for stage in range(window.stages):
            computes, waits = _of_stage(part, stage)
            computing = covered(*computes)
            compute[part.dp, stage, part.step] = computing
            both = (np.concatenate(pair) for pair in zip(computes, waits, strict=True))
            wait[part.dp, stage, part.step] = covered(*both) - computing
    return compute, wait


def covered(start: Floats, end: Floats) -> Floats:
    """(lanes,) length of the union of intervals, (intervals, lanes) each; an end may lie before."""
    if len(start) == 0:
        return np.zeros(start.shape[1])
    # Sorted by themselves, the next start lies behind an end just where all that has begun is over.
    # Along memory, since sorting such rows is several times as fast.
    begun = np.sort(np.ascontiguousarray(start.T), axis=1)
    ended = np.sort(np.maximum(start, end).T, axis=1)
    gaps = np.maximum(begun[:, 1:] - ended[:, :-1], 0.0).sum(axis=1)
    return np.asarray(ended[:, -1] - begun[:, 0] - gaps)


def _of_stage(part: Part, stage: int) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Starts and ends of what one stage computes, and of what it waits for peers."""
    structure = part.graph.structure
    mine = structure.stage == stage
    computes = np.flatnonzero(mine & np.isin(structure.optype, [int(op) for op in STREAM_COMPUTE]))
    grouped = np.flatnonzero(mine & (part.graph.group >= 0))
    return (
        (part.start[computes], part.end[computes]),
        (part.start[grouped], part.end[grouped] - part.work[grouped]),
    )
