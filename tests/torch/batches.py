"""Packed batches of uneven length, the same on every rank; and how to deal them evenly."""

from __future__ import annotations

import random
from dataclasses import dataclass

TOKENS = 8192

#: A compute takes so much however long its sequences are (linear layers); the rest is attention.
_FLAT = 0.4
#: Σlen² of the typical microbatch.
_TYPICAL = 0.35 * TOKENS**2


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that fill it to the last token.

    Attributes
    ----------
    lengths
        Of its sequences; they add up to `TOKENS`.
    """

    lengths: tuple[int, ...]

    @property
    def sum_len2(self) -> float:
        """Sum of the squared lengths: what attention has to do."""
        return float(sum(length**2 for length in self.lengths))

    @property
    def weight(self) -> float:
        """How long its computes take; 1: as even ones do."""
        return _FLAT + (1 - _FLAT) * self.sum_len2 / _TYPICAL


def packed(step: int, dp: int, microbatches: int) -> list[list[Microbatch]]:
    """Of each DP rank, the microbatches of a step, as the loader comes upon them."""
    chance = random.Random(step)  # noqa: S311  # the same for every rank
    return [[_fill(chance) for _ in range(microbatches)] for _ in range(dp)]


def _fill(chance: random.Random) -> Microbatch:
    lengths: list[int] = []
    while (left := TOKENS - sum(lengths)) > 0:
        lengths.append(min(left, max(256, int(chance.lognormvariate(7.3, 1.0)))))
    return Microbatch(tuple(lengths))


def balanced(dealt: list[list[Microbatch]], order: str) -> list[list[Microbatch]]:
    """The same microbatches, the longest first to the rank with the least to do.

    Parameters
    ----------
    order
        In which a rank runs its own: ``longest``, ``shortest``, or as they come.
    """
    places = len(dealt[0])
    numbered = list(enumerate(each for rank in dealt for each in rank))
    taken: list[list[tuple[int, Microbatch]]] = [[] for _ in dealt]
    for each in sorted(numbered, key=lambda pair: -pair[1].weight):
        free = [rank for rank in taken if len(rank) < places]
        min(free, key=lambda rank: sum(one.weight for _, one in rank)).append(each)
    sign = {"longest": -1, "shortest": 1}.get(order, 0)
    return [
        [one for _, one in sorted(rank, key=lambda pair: (sign * pair[1].weight, pair[0]))]
        for rank in taken
    ]
