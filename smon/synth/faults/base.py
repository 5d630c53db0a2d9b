"""What all faults share: which steps they touch, and the draft of a step that they change.

Flow: `smon.synth.timing` (draws) → **faults** → `smon.synth.model` (times). A fault never draws
from the generators of the healthy job: with and without it, all other draws are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import ConfigError
from smon.ops import OpType
from smon.synth.plan import Plan

if TYPE_CHECKING:
    from smon.synth.evidence import Witness

#: An op that never ends gets this many ns, and so does what waits for it; no step is that long.
NEVER_NS: Final = 1 << 58


class Stream(IntEnum):
    """What a generator draws for; the number is part of its seed."""

    WORK = 0
    DELAY = 1
    GC_PHASE = 2
    GC_PLACE = 3
    PACKING = 4
    CONTENTION = 5
    LOSS = 6
    COUNTERS = 7


def generator(seed: int, stream: Stream, step: int | None = None) -> np.random.Generator:
    """The generator of one purpose, for one step or for the whole job."""
    return np.random.default_rng([seed, stream] if step is None else [seed, step, stream])


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside `low` to `high`, and NaN.

    Raises
    ------
    ConfigError
        It is outside.
    """
    if not low <= value <= high:
        raise ConfigError(
            f"{name} must be from {low:g} to {high:g}, found {value!r}: give a value in this range"
        )


@dataclass(frozen=True, slots=True)
class When:
    """Steps that a fault touches.

    Attributes
    ----------
    first, last
        First and last step, both included; None is open.
    every, phase
        Of these, the steps ``first + phase + k · every``.
    steps
        If given, only these.
    """

    first: int = 0
    last: int | None = None
    every: int = 1
    phase: int = 0
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("every", self.every, 1, 1 << 32)
        check_range("phase", self.phase, 0, self.every - 1)

    def mask(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `steps` are touched; same shape."""
        hit: NDArray[np.bool_] = steps >= self.first
        hit &= (steps - self.first) % self.every == self.phase
        if self.last is not None:
            hit &= steps <= self.last
        if self.steps:
            hit &= np.isin(steps, self.steps)
        return hit


ALWAYS: Final = When()


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """The whole job, as far as a fault asks for it.

    Attributes
    ----------
    steps
        All step numbers, in order.
    dp, pp
        Sizes.
    """

    steps: NDArray[np.int64]
    dp: int
    pp: int
    seed: int


class Draft:
    """Steps of one shape before they run: what faults change.

    Attributes
    ----------
    work
        Durations of local ops and transfers of groups, ns; shape ``(rows, steps, dp)``. A pair of
        send and receive takes its transfer from the send, a collective the same one on all ranks.
    steps
        Step numbers; shape ``(steps,)``.
    """

    __slots__ = ("_delays", "_lost", "plan", "seed", "steps", "work")

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[int],
        seed: int,
        work: NDArray[np.float64],
        delays: NDArray[np.int64] | None,
    ) -> None:
        self.plan = plan
        self.steps = np.asarray(steps, np.int64)
        self.seed = seed
        self.work = work
        self._delays = delays
        self._lost: NDArray[np.bool_] | None = None

    @property
    def delays(self) -> NDArray[np.int64]:
        """Launch delays, ns, to be changed in place; same shape as `work`."""
        if self._delays is None:
            self._delays = np.zeros(self.work.shape, np.int64)
        return self._delays

    @property
    def delays_if_any(self) -> NDArray[np.int64] | None:
        """Launch delays; None as long as there are none."""
        return self._delays

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Ops that the profiler loses, to be changed in place; same shape as `work`."""
        if self._lost is None:
            self._lost = np.zeros(self.work.shape, bool)
        return self._lost

    @property
    def lost_if_any(self) -> NDArray[np.bool_] | None:
        """Lost ops; None as long as there are none."""
        return self._lost

    def rows(self, stage: int | None, *optypes: OpType) -> NDArray[np.intp]:
        """Rows of these types on one stage, or on all."""
        hit = np.isin(self.plan.optype, optypes)
        if stage is not None:
            hit &= self.plan.stage == stage
        return np.flatnonzero(hit)

    def ranks(self, dp: int | None) -> NDArray[np.intp]:
        """One data-parallel rank, or all; none if an elastic step is without it."""
        ranks = np.arange(self.plan.shape.dp)
        return ranks if dp is None else ranks[ranks == dp]

    def cells(
        self, rows: NDArray[np.intp], hit: NDArray[np.bool_], dp: int | None
    ) -> tuple[NDArray[np.intp], ...]:
        """Index of `rows`, of the steps in `hit`, of one rank or all, into `work`."""
        return np.ix_(rows, np.flatnonzero(hit), self.ranks(dp))


class Fault:
    """Something that goes wrong. The methods of this base do nothing: each fault has its own few.

    Attributes
    ----------
    takes_time
        False if only the recording suffers: steps take as long as without it.
    adds
        Ops get longer by seconds, not by a factor. Such faults come after all others, so that a
        slow GPU does not make a host pause longer.
    """

    __slots__ = ()

    takes_time: ClassVar[bool] = True
    adds: ClassVar[bool] = False

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """(dp, stage) that it names; None where it means all."""
        return ()

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """Steps that it touches; shape ``(steps,)``."""
        return np.ones(len(job.steps), bool)

    def apply(self, draft: Draft) -> None:
        """Change durations, transfers, launch delays, or what is lost, in place."""

    def standstill_s(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Time in which the whole job stands still after each step, s; shape ``(steps,)``."""
        return np.zeros(len(steps))

    def clock(self) -> tuple[float, float]:
        """Error of the clock of its place: offset in s, and drift in s per s."""
        return 0.0, 0.0

    def evenly(self, job: Extent) -> tuple[Fault, ...]:  # noqa: ARG002  # overridden where it matters
        """What is left of it in a healthy job: the same total work, spread evenly."""
        return ()

    def testify(self, witness: Witness) -> None:
        """Add what an agent on the hosts would have seen of it."""
