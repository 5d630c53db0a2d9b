"""Faults of the network: slow collectives of a stage, slow messages of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smon.ops import DP_COLLECTIVES, OpType
from smon.synth.faults.base import ALWAYS, Draft, Extent, Fault, When, check_range

if TYPE_CHECKING:
    from smon.synth.evidence import Witness

#: NIC errors per step that a host with a faulty link counts.
_NIC_ERRORS = 400.0


@dataclass(frozen=True, slots=True)
class SlowCollective(Fault):
    """Collectives over the data-parallel ranks of a stage transfer slowly, for all members.

    Attributes
    ----------
    optypes
        Which ones, of those over the data-parallel group of a stage.
    factor, extra_s
        The transfer takes ``factor`` times as long, and ``extra_s`` more.
    """

    stage: int
    factor: float = 1.0
    extra_s: float = 0.0
    optypes: tuple[OpType, ...] = tuple(sorted(DP_COLLECTIVES))
    when: When = ALWAYS

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 0.01, 1e6)
        check_range("extra_s", self.extra_s, 0.0, 3600.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((None, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = self.when.mask(draft.steps)
        cells = draft.cells(draft.rows(self.stage, *self.optypes), hit, None)
        draft.work[cells] = draft.work[cells] * self.factor + self.extra_s * 1e9


@dataclass(frozen=True, slots=True)
class SlowP2P(Fault):
    """All messages that a worker sends or receives transfer slowly."""

    stage: int
    dp: int
    factor: float = 1.0
    extra_s: float = 0.0
    when: When = ALWAYS

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 0.01, 1e6)
        check_range("extra_s", self.extra_s, 0.0, 3600.0)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return ((self.dp, self.stage),)

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return self.when.mask(job.steps)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        pp = draft.plan.shape.pp
        sends = (
            (self.stage, OpType.FORWARD_SEND),
            (self.stage, OpType.BACKWARD_SEND),
            ((self.stage - 1) % pp, OpType.FORWARD_SEND),
            ((self.stage + 1) % pp, OpType.BACKWARD_SEND),
        )
        rows = np.unique(np.concatenate([draft.rows(stage, optype) for stage, optype in sends]))
        cells = draft.cells(rows, self.when.mask(draft.steps), self.dp)
        draft.work[cells] = draft.work[cells] * self.factor + self.extra_s * 1e9

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        errors = witness.gauge("nic_errors", self.dp, self.stage)
        errors[self.when.mask(witness.steps)] += _NIC_ERRORS
