"""A fully sharded job: parameters are gathered one layer ahead, gradients scattered behind.

Gathers and scatters run on streams of their own while layers are computed, so most collectives
overlap with compute and with each other. The true cost of a slow rank is known: the same random
draws without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smon.trace.events import Collective, Phase, RankEvents
from tests.collectives.builders import Met, Ran, rank_of

Floats = NDArray[np.float64]


@dataclass
class Fsdp:
    """A job; times in ms. `slow` is (rank, factor) on all its computes."""

    ranks: int = 4
    layers: int = 6
    steps: int = 6
    forward: float = 8.0
    backward: float = 16.0
    gather: float = 3.0
    scatter: float = 5.0
    optimizer: float = 4.0
    slow: tuple[int, float] | None = None
    noise: float = 0.01
    seed: int = 0
    events: list[list[Met | Ran]] = field(init=False)
    spans: list[list[tuple[int, float, float]]] = field(init=False)
    step_ms: float = field(init=False)

    def __post_init__(self) -> None:
        self.events = [[] for _ in range(self.ranks)]
        self.spans = [[] for _ in range(self.ranks)]
        self._chance = np.random.default_rng(self.seed)
        self._computed = np.zeros(self.ranks)
        self._gathered = self._scattered = 0.0
        ends = [self._step(step) for step in range(self.steps)]
        self.step_ms = float(np.diff(ends).mean())

    def traced(self) -> list[RankEvents]:
        """Its ranks."""
        return [
            rank_of(rank, self.events[rank], world=self.ranks, steps=self.spans[rank])
            for rank in range(self.ranks)
        ]

    def _step(self, step: int) -> float:
        begin = self._computed.copy()
        layers = [(Phase.FORWARD, self.forward)] * self.layers
        layers += [(Phase.BACKWARD, self.backward)] * self.layers
        ready = self._meet(step, Collective.ALL_GATHER, self._computed)
        for index, (phase, ms) in enumerate(layers):
            start = np.maximum(self._computed, ready)
            if index + 1 < len(layers):
                ready = self._meet(step, Collective.ALL_GATHER, start)
            self._compute(step, phase, ms, start)
            if phase is Phase.BACKWARD:
                self._meet(step, Collective.REDUCE_SCATTER, self._computed)
        start = np.maximum(self._computed, self._scattered)
        self._compute(step, Phase.OPTIMIZER, self.optimizer, start)
        for rank, span in enumerate(self.spans):
            span.append((step, begin[rank], self._computed[rank] - begin[rank]))
        return self._scattered

    def _meet(self, step: int, kind: Collective, ready: Floats) -> float:
        """On the stream of its kind; the end, which is the same for all."""
        gathers = kind is Collective.ALL_GATHER
        starts = np.maximum(ready, self._gathered if gathers else self._scattered)
        end = float(starts.max()) + (self.gather if gathers else self.scatter)
        for rank, start in enumerate(starts.tolist()):
            self.events[rank].append(Met(start, end - start, step, kind, size=1_000))
        if gathers:
            self._gathered = end
        else:
            self._scattered = end
        return end

    def _compute(self, step: int, phase: Phase, ms: float, start: Floats) -> None:
        length = ms * (1.0 + self.noise * self._chance.standard_normal(self.ranks))
        if self.slow is not None:
            length[self.slow[0]] *= self.slow[1]
        for rank in range(self.ranks):
            self.events[rank].append(Ran(float(start[rank]), float(length[rank]), step, phase))
        self._computed = start + length
