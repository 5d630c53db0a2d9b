"""Faults of the host: garbage collection, data loading, contention, planned pauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smon.ops import STREAM_COMPUTE
from smon.synth.faults.base import (
    ALWAYS,
    Draft,
    Extent,
    Fault,
    Stream,
    When,
    check_range,
    generator,
)
from smon.synth.schedule import FORWARD
from smon.trace.context import EventKind

if TYPE_CHECKING:
    from smon.synth.evidence import Witness


@dataclass(frozen=True, slots=True)
class GcPauses(Fault):
    """Each worker's interpreter pauses once every few steps, inside one of its forwards.

    Workers start at random phases, and the forward is a random one of the step.

    Attributes
    ----------
    every
        Steps between two pauses of one worker.
    pause_s
        Length of a pause; of those in step `first`, if they grow.
    growth_s
        Growth of the pause from one step to the next: the heap grows.
    first
        First step with pauses.
    """

    every: int = 24
    pause_s: float = 0.35
    growth_s: float = 0.0
    first: int = 0

    adds = True

    def __post_init__(self) -> None:
        check_range("every", self.every, 1, 1 << 32)
        check_range("pause_s", self.pause_s, 0.0, 3600.0)
        check_range("growth_s", self.growth_s, 0.0, 3600.0)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        phases = self._phases(job.seed, job.dp, job.pp)
        paused: NDArray[np.bool_] = np.logical_or.reduce(self._due(job.steps, phases), axis=(1, 2))
        return paused

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        for step, dp, row, pause_s in self._pauses(draft):
            draft.work[row, step, dp] += pause_s * 1e9

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        for step, dp, row, pause_s in self._pauses(witness.draft):
            witness.event_inside(EventKind.GC, step, dp, row, pause_s)

    def _pauses(self, draft: Draft) -> list[tuple[int, int, int, float]]:
        """(place of the step, dp, row of the forward, seconds) of every pause."""
        plan = draft.plan
        due = self._due(draft.steps, self._phases(draft.seed, plan.shape.dp, plan.shape.pp))
        forwards = [plan.rows(stage, FORWARD) for stage in range(plan.shape.pp)]
        pauses = []
        for step, dp, stage in np.argwhere(due).tolist():
            number = int(draft.steps[step])
            drawn = generator(draft.seed, Stream.GC_PLACE, number)
            place = drawn.random((plan.shape.dp, plan.shape.pp))[dp, stage]
            row = forwards[stage][int(place * len(forwards[stage]))]
            pause_s = self.pause_s + self.growth_s * (number - self.first)
            pauses.append((step, dp, row, pause_s))
        return pauses

    def _phases(self, seed: int, dp: int, pp: int) -> NDArray[np.int64]:
        return generator(seed, Stream.GC_PHASE).integers(self.every, size=(dp, pp))

    def _due(self, steps: NDArray[np.int64], phases: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a worker pauses in a step; shape ``(steps, dp, pp)``."""
        since = (steps - self.first)[:, None, None]
        due: NDArray[np.bool_] = np.equal(since % self.every, phases)
        due &= since >= 0
        return due


@dataclass(frozen=True, slots=True)
class LoaderGap(Fault):
    """The first forward of a step waits for its data.

    Attributes
    ----------
    stage, dp
        Who waits; None: all ranks.
    gap_s
        How long.
    """

    gap_s: float
    stage: int | None = 0
    dp: int | None = None
    when: When = ALWAYS

    adds = True

    def __post_init__(self) -> None:
        check_range("gap_s", self.gap_s, 0.0, 3600.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        stages = range(draft.plan.shape.pp) if self.stage is None else (self.stage,)
        rows = np.array([draft.plan.row(stage, FORWARD) for stage in stages], np.intp)
        hit = self.when.mask(draft.steps)
        draft.delays[draft.cells(rows, hit, self.dp)] += round(self.gap_s * 1e9)


@dataclass(frozen=True, slots=True)
class HostContention(Fault):
    """Another process takes the host's processors: every launch of the node's workers is late.

    Attributes
    ----------
    workers
        (dp, stage) of the workers of the node.
    delay_s
        Mean of the exponential delay before each compute.
    forward_s
        Mean of the exponential time that forwards take longer, being bound by launches.
    """

    workers: tuple[tuple[int, int], ...]
    delay_s: float = 0.005
    forward_s: float = 0.0
    when: When = ALWAYS

    adds = True

    def __post_init__(self) -> None:
        check_range("delay_s", self.delay_s, 0.0, 3600.0)
        check_range("forward_s", self.forward_s, 0.0, 3600.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return self.workers

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        for place in np.flatnonzero(self.when.mask(draft.steps)).tolist():
            drawn = generator(draft.seed, Stream.CONTENTION, int(draft.steps[place]))
            late, longer = drawn.standard_exponential((2, *draft.work[:, place].shape)) * 1e9
            for dp, stage in self.workers:
                ranks = draft.ranks(dp)
                computes = np.ix_(draft.rows(stage, *STREAM_COMPUTE), ranks)
                forwards = np.ix_(draft.rows(stage, FORWARD), ranks)
                draft.delays[:, place][computes] += np.rint(late[computes] * self.delay_s).astype(
                    np.int64
                )
                draft.work[:, place][forwards] += longer[forwards] * self.forward_s

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        hit = self.when.mask(witness.steps)
        for dp, stage in self.workers:
            witness.gauge("host_cpu_ratio", dp, stage)[hit] = 0.98


@dataclass(frozen=True, slots=True)
class StepPause(Fault):
    """The whole job stands still after some steps: a checkpoint, an evaluation.

    Attributes
    ----------
    after
        Steps after which it does.
    """

    seconds: float
    after: When = ALWAYS
    kind: EventKind = EventKind.CHECKPOINT

    adds = True

    def __post_init__(self) -> None:
        check_range("seconds", self.seconds, 0.0, 1e6)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.after.mask(job.steps)

    def standstill_s(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Fault.standstill_s`."""
        return np.where(self.after.mask(steps), self.seconds, 0.0)

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        for place in np.flatnonzero(self.after.mask(witness.steps)).tolist():
            witness.event_after(self.kind, place, self.seconds)
