"""Side evidence, laid out like the window: counters, sequence lengths and expert tokens by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smon.trace.context import Context

Floats = NDArray[np.float64]


class _HasContext(Protocol):
    """What has side evidence for some steps."""

    @property
    def context(self) -> Context:
        """The side evidence."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """(steps,) step numbers."""


def counter(context: Context, name: str, rank: int, steps: NDArray[np.int64]) -> Floats:
    """(steps,) readings of one counter of one rank, NaN where there are none."""
    readings = np.full(len(steps), np.nan)
    counters = context.counters
    mine = (counters.rank == rank) & (counters.name == name)
    index, known = _positions(counters.step[mine], steps)
    readings[index] = counters.value[mine][known]
    return readings


def range_of(evidence: _HasContext, name: str, rank: int, label: str, unit: str) -> str | None:
    """A sentence on a counter: its range here, and what it typically is elsewhere; None if unknown.

    Counters are evidence only against their peers: throttling flags and link errors occur on
    healthy machines.
    """
    here = counter(evidence.context, name, rank, evidence.steps)
    here = here[~np.isnan(here)]
    if len(here) == 0:
        return None
    counters = evidence.context.counters
    others = counters.value[(counters.name == name) & (counters.rank != rank)]
    shown = f"{here.min():.4g}" if here.min() == here.max() else f"{here[0]:.4g} → {here[-1]:.4g}"
    peers = f", elsewhere {np.median(others):.4g}" if len(others) else ""
    return f"{label} {shown}{' ' if unit else ''}{unit}{peers}"


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
