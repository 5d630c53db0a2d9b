"""Side evidence, laid out like the window: counters, sequence lengths and expert tokens by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smon.trace.context import Context

Floats = NDArray[np.float64]


def counter(context: Context, name: str, rank: int, steps: NDArray[np.int64]) -> Floats:
    """(steps,) readings of one counter of one rank, NaN where there are none."""
    readings = np.full(len(steps), np.nan)
    counters = context.counters
    mine = (counters.rank == rank) & (counters.name == name)
    index, known = _positions(counters.step[mine], steps)
    readings[index] = counters.value[mine][known]
    return readings


def _positions(
    values: NDArray[np.int64], steps: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Where values stand among ascending steps, and which do."""
    index = np.minimum(np.searchsorted(steps, values), len(steps) - 1)
    known = steps[index] == values
    return index[known], known


def sum_len2(context: Context, steps: NDArray[np.int64], dp_ranks: int) -> Floats | None:
    """(steps, dp_ranks, microbatches) Σlen², NaN where unknown; None without any."""
    known = context.microbatches
    if len(known) == 0:
        return None
    inside = known.dp < dp_ranks
    cube = np.full((len(steps), dp_ranks, int(known.microbatch.max()) + 1), np.nan)
    index, present = _positions(known.step[inside], steps)
    dp, microbatch = known.dp[inside][present], known.microbatch[inside][present]
    cube[index, dp, microbatch] = known.sum_len2[inside][present]
    return cube


def expert_tokens(
    context: Context, steps: NDArray[np.int64], ranks: Sequence[int]
) -> Floats | None:
    """(steps, ranks) tokens of each of these ranks, NaN where unknown; None without any."""
    known = context.expert_tokens
    if len(known) == 0:
        return None
    table = np.full((len(steps), len(ranks)), np.nan)
    for column, rank in enumerate(ranks):
        mine = known.rank == rank
        index, present = _positions(known.step[mine], steps)
        table[index, column] = known.tokens[mine][present]
    return table
