"""Faults of compute: slow devices, extra work, heat, whole jobs that change, first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import COMPUTE, OP_TYPES, STREAM_COMPUTE
from smon.synth.faults.base import ALWAYS, Draft, Extent, Fault, When, check_range
from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT

if TYPE_CHECKING:
    from smon.synth.evidence import Witness

_COMMUNICATION: Final = tuple(op for op in OP_TYPES if op not in COMPUTE)


@dataclass(frozen=True, slots=True)
class SlowCompute(Fault):
    """The compute of a worker, or of a whole stage, takes `forward` and `backward` times.

    A whole stage is an imbalance: its even form spreads the same work over all stages.

    Attributes
    ----------
    stage
        Pipeline stage.
    dp
        Data-parallel rank; None: every rank of the stage.
    forward, backward
        Factors on the durations; a weight-gradient compute counts as backward.
    from_step, until_step
        First and last step with the fault; None is open.
    """

    stage: int
    dp: int | None = None
    forward: float = 1.0
    backward: float = 1.0
    from_step: int = 0
    until_step: int | None = None

    def __post_init__(self) -> None:
        check_range("forward", self.forward, 0.01, 1000.0)
        check_range("backward", self.backward, 0.01, 1000.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return When(self.from_step, self.until_step).mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = When(self.from_step, self.until_step).mask(draft.steps)
        for optype in STREAM_COMPUTE:
            factor = self.forward if optype is FORWARD else self.backward
            draft.work[draft.cells(draft.rows(self.stage, optype), hit, self.dp)] *= factor

    def evenly(self, job: Extent) -> tuple[Fault, ...]:
        """See `Fault.evenly`."""
        if self.dp is not None:
            return ()
        mean = replace(
            self,
            forward=1 + (self.forward - 1) / job.pp,
            backward=1 + (self.backward - 1) / job.pp,
        )
        return tuple(replace(mean, stage=stage) for stage in range(job.pp))


@dataclass(frozen=True, slots=True)
class ExtraCompute(Fault):
    """Each forward and backward of a worker does extra work, of some seconds.

    Attributes
    ----------
    forward_s, backward_s
        Seconds more per op; a weight-gradient compute stays as it is.
    """

    stage: int
    dp: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    when: When = ALWAYS

    adds = True

    def __post_init__(self) -> None:
        check_range("forward_s", self.forward_s, 0.0, 3600.0)
        check_range("backward_s", self.backward_s, 0.0, 3600.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = self.when.mask(draft.steps)
        for optype, extra_s in ((FORWARD, self.forward_s), (BACKWARD, self.backward_s)):
            draft.work[draft.cells(draft.rows(self.stage, optype), hit, self.dp)] += extra_s * 1e9


@dataclass(frozen=True, slots=True)
class ThermalRamp(Fault):
    """A device gets hot and slow: compute × ``1 + rise · clip((step − first)/length, 0, 1)``.

    Attributes
    ----------
    heat_c
        How much hotter it is at the end of the ramp.
    flag_after
        Steps from `first` on until it reports that it throttles.
    """

    stage: int
    dp: int
    rise: float = 0.6
    first: int = 10
    length: int = 30
    heat_c: float = 17.0
    flag_after: int = 4

    def __post_init__(self) -> None:
        check_range("rise", self.rise, 0.0, 100.0)
        check_range("length", self.length, 1, 1 << 32)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return job.steps > self.first

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        cells = draft.cells(
            draft.rows(self.stage, *STREAM_COMPUTE), np.ones(len(draft.steps), bool), self.dp
        )
        draft.work[cells] *= 1 + self.rise * self._ramp(draft.steps)[:, None]

    def _ramp(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.clip((steps - self.first) / self.length, 0.0, 1.0)

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        ramp = self._ramp(witness.steps)
        witness.gauge("gpu_clock_mhz", self.dp, self.stage)[:] /= 1 + self.rise * ramp
        witness.gauge("gpu_temperature_c", self.dp, self.stage)[:] += self.heat_c * ramp
        flagged = witness.steps >= self.first + self.flag_after
        witness.gauge("gpu_throttle_thermal", self.dp, self.stage)[flagged] = 1.0


@dataclass(frozen=True, slots=True)
class JobWide(Fault):
    """All ranks alike change: compute and communication by a factor each."""

    compute: float = 1.0
    communication: float = 1.0
    when: When = ALWAYS

    def __post_init__(self) -> None:
        check_range("compute", self.compute, 0.01, 1000.0)
        check_range("communication", self.communication, 0.01, 1000.0)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = self.when.mask(draft.steps)
        for optypes, factor in (
            (tuple(COMPUTE), self.compute),
            (_COMMUNICATION, self.communication),
        ):
            if factor != 1:
                draft.work[draft.cells(draft.rows(None, *optypes), hit, None)] *= factor


@dataclass(frozen=True, slots=True)
class Warmup(Fault):
    """The first step, or steps, of the job take longer: compilation, communicators, caches.

    Attributes
    ----------
    first, steps
        First step of the job, and how many are slow.
    forward, backward, communication
        Factors.
    """

    first: int = 0
    steps: int = 1
    forward: float = 6.0
    backward: float = 2.0
    communication: float = 3.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "communication"):
            check_range(name, getattr(self, name), 0.01, 1000.0)
        check_range("steps", self.steps, 1, 1 << 32)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self._when().mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = self._when().mask(draft.steps)
        for optypes, factor in (
            ((FORWARD,), self.forward),
            ((BACKWARD, WEIGHT), self.backward),
            (_COMMUNICATION, self.communication),
        ):
            draft.work[draft.cells(draft.rows(None, *optypes), hit, None)] *= factor

    def _when(self) -> When:
        return When(self.first, self.first + self.steps - 1)
