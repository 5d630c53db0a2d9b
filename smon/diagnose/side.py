"""Side evidence, laid out like the window: counters, sequence lengths and expert tokens by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.thresholds import COUNTER_ALIKE
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


@dataclass(frozen=True, slots=True)
class Shown:
    """A counter that evidence may show: its name, and words and unit for people."""

    name: str
    label: str
    unit: str


def range_of(evidence: _HasContext, shown: Shown, rank: int) -> str | None:
    """A sentence on a counter: its range here, and what it typically is elsewhere; None if unknown.

    Counters are evidence only against their peers: throttling flags and link errors occur on
    healthy machines.
    """
    here, elsewhere = _readings(evidence, shown.name, rank)
    if len(here) == 0:
        return None
    one = here.min() == here.max()
    values = f"{here.min():.4g}" if one else f"{here[0]:.4g} → {here[-1]:.4g}"
    peers = f", elsewhere {np.median(elsewhere):.4g}" if len(elsewhere) else ""
    return f"{shown.label} {values}{_unit(shown)}{peers}"


def beside_peers(evidence: _HasContext, counters: Sequence[Shown], rank: int) -> tuple[str, ...]:
    """A sentence on each counter that is not as elsewhere, and one on all those that are."""
    apart: list[str] = []
    alike: list[str] = []
    for shown in counters:
        here, elsewhere = _readings(evidence, shown.name, rank)
        sentence = range_of(evidence, shown, rank)
        if sentence is None:
            continue
        if len(elsewhere) and _alike(here, float(np.median(elsewhere))):
            alike.append(f"{shown.label} {np.median(here):.4g}{_unit(shown)}")
        else:
            apart.append(sentence)
    return (*apart, f"as elsewhere: {', '.join(alike)}") if alike else tuple(apart)


def _readings(evidence: _HasContext, name: str, rank: int) -> tuple[Floats, Floats]:
    """Readings of a rank in order, and those of all others."""
    here = counter(evidence.context, name, rank, evidence.steps)
    counters = evidence.context.counters
    return here[~np.isnan(here)], counters.value[(counters.name == name) & (counters.rank != rank)]


def _alike(here: Floats, elsewhere: float) -> bool:
    return bool(np.all(np.abs(here - elsewhere) <= COUNTER_ALIKE * abs(elsewhere)))


def _unit(shown: Shown) -> str:
    return f" {shown.unit}" if shown.unit else ""


def more_than_peers(evidence: _HasContext, name: str, rank: int) -> bool:
    """Whether the mean of a counter is above 0 on a rank, and above that of most other ranks."""
    counters = evidence.context.counters
    named = counters.name == name
    ranks, values = counters.rank[named], counters.value[named]
    if not np.any(ranks == rank):
        return False
    own = float(values[ranks == rank].mean())
    others, places = np.unique(ranks[ranks != rank], return_inverse=True)
    means = np.bincount(places, values[ranks != rank]) / np.maximum(np.bincount(places), 1)
    return own > max(float(np.median(means)) if len(others) else 0.0, 0.0)


def change_against_peers(evidence: _HasContext, name: str, rank: int) -> float:
    """Last third over first third of the readings of a rank, over the same of all others.

    1 where it is not known. Hosts are read at different times, so periods are compared, not steps.
    """
    counters = evidence.context.counters
    named = counters.name == name
    mine = named & (counters.rank == rank)
    steps = np.sort(counters.step[mine])
    third = len(steps) // 3
    if third == 0:
        return 1.0
    early, late = counters.step <= steps[third - 1], counters.step >= steps[-third]
    own = _ratio(counters.value[mine & late], counters.value[mine & early])
    others = named & ~mine
    usual = _ratio(counters.value[others & late], counters.value[others & early])
    return own / usual


def _ratio(late: Floats, early: Floats) -> float:
    """Of medians; 1 where one is missing or 0."""
    if len(late) == 0 or len(early) == 0:
        return 1.0
    before, after = float(np.median(early)), float(np.median(late))
    return after / before if before > 0 and after > 0 else 1.0


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
