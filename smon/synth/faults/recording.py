"""Faults of the recording: wrong clocks, lost data; and ops that never end, which lose theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.synth.faults.base import (
    ALWAYS,
    NEVER_NS,
    Draft,
    Extent,
    Fault,
    Stream,
    When,
    check_range,
    generator,
)
from smon.synth.schedule import FORWARD


@dataclass(frozen=True, slots=True)
class ClockError(Fault):
    """The clock of a worker's host is wrong; of several, where `dp` or `stage` is None.

    Attributes
    ----------
    offset_s
        By which it is ahead at the start of the window.
    drift
        Seconds that it gains per second.
    """

    dp: int | None
    stage: int | None
    offset_s: float
    drift: float = 0.0

    takes_time = False

    def __post_init__(self) -> None:
        check_range("offset_s", self.offset_s, -3600.0, 3600.0)
        check_range("drift", self.drift, -0.01, 0.01)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def clock(self) -> tuple[float, float]:
        """See `Fault.clock`."""
        return self.offset_s, self.drift


@dataclass(frozen=True, slots=True)
class Hang(Fault):
    """One forward of a worker never ends in a step, which should be the last.

    A profiler records ops when they end, so that op is missing, and so is every op that waits for
    it, directly or not: the worker's own later ones, those of its pipeline, and at the end of the
    step the collectives of all ranks. Everything that could end is there.

    Attributes
    ----------
    step
        Step in which it happens.
    forward
        Number of the forward that does not end.
    """

    stage: int
    dp: int
    step: int
    forward: int = 0

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return When(steps=(self.step,)).mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        forwards = draft.plan.rows(self.stage, FORWARD)
        row = forwards[min(self.forward, len(forwards) - 1)]
        cells = draft.cells(np.array([row], np.intp), draft.steps == self.step, self.dp)
        draft.work[cells] = NEVER_NS


@dataclass(frozen=True, slots=True)
class LostRows(Fault):
    """The profiler loses ops at random.

    Attributes
    ----------
    share
        Share of ops.
    """

    share: float
    when: When = ALWAYS

    takes_time = False

    def __post_init__(self) -> None:
        check_range("share", self.share, 0.0, 1.0)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        for place in np.flatnonzero(self.when.mask(draft.steps)).tolist():
            drawn = generator(draft.seed, Stream.LOSS, int(draft.steps[place]))
            draft.lost[:, place] |= drawn.random(draft.lost[:, place].shape) < self.share


@dataclass(frozen=True, slots=True)
class LostWorker(Fault):
    """Nothing of a worker arrives for some steps: its agent is away."""

    stage: int
    dp: int
    when: When = ALWAYS

    takes_time = False

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        rows = np.flatnonzero(draft.plan.stage == self.stage)
        draft.lost[draft.cells(rows, self.when.mask(draft.steps), self.dp)] = True
