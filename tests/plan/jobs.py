"""Jobs for the planner, and their fixed twins."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smon.attribute.slowdown import simulate_all
from smon.diagnose.evidence import Evidence
from smon.plan.lanes import without
from smon.prepare import prepare
from smon.simulate.cube import Changes
from smon.simulate.engine import Engine
from smon.simulate.ideal import measure_ideal
from smon.synth.faults import PackedSequences
from smon.synth.faults.base import Draft
from smon.synth.scenario import Scenario, generate
from smon.trace.context import Context
from smon.trace.meta import Job
from smon.trace.table import OpTable


def evidence_of(table: OpTable, job: Job) -> Evidence:
    """A window as the planner gets it: nothing explained."""
    prepared = prepare(table, job)
    times = simulate_all(prepared.window, prepared.ideal, prepared.engine, lambda _done, _of: None)
    return Evidence(
        window=prepared.window,
        engine=prepared.engine,
        times=times,
        layout=job.layout,
        context=Context(),
        gaps_ns=prepared.gaps_ns,
        explained=Changes(),
    )


def made(**fields: Any) -> Evidence:  # noqa: ANN401  # of Scenario
    """Evidence of a synthetic job of 4 × 4 workers with 12 steps, unless told otherwise."""
    job = generate(Scenario(**{"dp": 4, "pp": 4, "steps": 12, **fields}))
    return evidence_of(job.table, job.job)


def elastic(evidence: Evidence, dropped: NDArray[np.bool_]) -> Evidence:
    """The same job where some replicas are absent in some steps; (steps, dp_ranks)."""
    window = without(evidence.window, dropped)
    ideal = measure_ideal(window.parts)
    engine = Engine(window, ideal)
    times = simulate_all(window, ideal, engine, lambda _done, _of: None)
    return replace(evidence, window=window, engine=engine, times=times)


def step_ns(**fields: Any) -> float:  # noqa: ANN401  # of Scenario
    """True mean step time of such a job."""
    job = generate(Scenario(**{"dp": 4, "pp": 4, "steps": 12, **fields}))
    return float(job.step_seconds.mean()) * 1e9


@dataclass(frozen=True, slots=True)
class Dealt(PackedSequences):
    """The same sequences, dealt longest first to the rank that has the least."""

    def _squares(self, draft: Draft) -> NDArray[np.float64]:
        squares = super(Dealt, self)._squares(draft)
        ranks, count = squares.shape[1:]
        slope = (self.forward + 2 * self.backward) / 3 / self.tokens**2
        for step in squares:
            loads = [(0.0, rank) for rank in range(ranks)]
            dealt: list[list[float]] = [[] for _ in range(ranks)]
            for value in sorted(step.reshape(-1).tolist(), reverse=True):
                load, rank = heapq.heappop(loads)
                dealt[rank].append(value)
                if len(dealt[rank]) < count:
                    heapq.heappush(loads, (load + 1 + slope * value, rank))
            step[:] = dealt
        return squares


@dataclass(frozen=True, slots=True)
class LongestFirst(PackedSequences):
    """The same sequences on the same ranks, each rank's longest microbatch first."""

    def _squares(self, draft: Draft) -> NDArray[np.float64]:
        squares = super(LongestFirst, self)._squares(draft)
        return -np.sort(-squares, axis=2)
