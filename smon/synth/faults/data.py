"""Faults of the data: sequences of unequal length, experts with unequal load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import STREAM_COMPUTE
from smon.synth.faults.base import Draft, Extent, Fault, Stream, check_range, generator
from smon.synth.schedule import FORWARD

if TYPE_CHECKING:
    from smon.synth.evidence import Witness

#: Sequences drawn for one microbatch at a time: 8,192 tokens rarely need as many.
_DRAWN: Final = 32

#: Tokens that one expert-parallel rank gets per step if all get the same.
_EXPERT_TOKENS: Final = 65_536


@dataclass(frozen=True, slots=True)
class PackedSequences(Fault):
    """Microbatches of a fixed number of tokens, packed from sequences of unequal length.

    Attention costs the square of a length, so a compute takes ``1 + slope · q`` times its duration,
    ``q = Σ length² / tokens²``; q is the same on all stages of (step, dp, microbatch).

    Attributes
    ----------
    forward, backward
        Slopes.
    tokens
        Per microbatch; no sequence is longer.
    log_mean, log_sigma
        Of the log-normal lengths.
    even
        All microbatches of a step get the mean of its q: the same total work, spread evenly.
    """

    forward: float = 1.25
    backward: float = 1.25
    tokens: int = 8192
    log_mean: float = 6.5
    log_sigma: float = 1.4
    even: bool = False

    def __post_init__(self) -> None:
        check_range("forward", self.forward, 0.0, 1000.0)
        check_range("backward", self.backward, 0.0, 1000.0)
        check_range("tokens", self.tokens, 2, 1 << 24)
        check_range("log_mean", self.log_mean, 0.0, 16.0)
        check_range("log_sigma", self.log_sigma, 0.0, 4.0)

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        q = self._squares(draft) / self.tokens**2
        if self.even:
            q[:] = q.mean(axis=(1, 2), keepdims=True)
        for optype in STREAM_COMPUTE:
            slope = self.forward if optype is FORWARD else self.backward
            rows = draft.rows(None, optype)
            load = q[:, :, draft.plan.microbatch[rows]]
            draft.work[rows] *= 1 + slope * load.transpose(2, 0, 1)

    def evenly(self, job: Extent) -> tuple[Fault, ...]:  # noqa: ARG002  # the same for any job
        """See `Fault.evenly`."""
        return (replace(self, even=True),)

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        witness.lengths(self.tokens, self._squares(witness.draft))

    def _squares(self, draft: Draft) -> NDArray[np.float64]:
        """Sum of squared lengths; shape ``(steps, dp, microbatches)``."""
        shape = draft.plan.shape
        squares = np.empty((len(draft.steps), shape.dp, shape.microbatches))
        for place, step in enumerate(draft.steps.tolist()):
            drawn = generator(draft.seed, Stream.PACKING, step)
            squares[place] = self._pack(drawn, (shape.dp, shape.microbatches))
        return squares

    def _pack(self, drawn: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float64]:
        """Fill every microbatch to the brim: the last sequence is cut where it is full."""
        filled, squares = np.zeros(size), np.zeros(size)
        while filled.min() < self.tokens:
            lengths = np.ceil(drawn.lognormal(self.log_mean, self.log_sigma, (*size, _DRAWN)))
            ends = np.minimum(filled[..., None] + np.cumsum(lengths, axis=-1), self.tokens)
            used = np.diff(ends, axis=-1, prepend=filled[..., None])
            squares += (used**2).sum(axis=-1)
            filled = ends[..., -1]
        return squares


@dataclass(frozen=True, slots=True)
class MoeLoad(Fault):
    """On one stage, the experts of one data-parallel rank at a time get too many tokens.

    All others get what is left: the number of tokens stays the same.

    Attributes
    ----------
    ranks
        Data-parallel ranks that are hot, one after the other.
    run
        Steps for which one is.
    tokens
        Its tokens, as a multiple of the mean.
    share
        Share of the stage's compute that grows with the tokens.
    first
        Step in which the first of `ranks` begins; before that the load is even.
    """

    stage: int
    ranks: tuple[int, ...]
    run: int = 12
    tokens: float = 1.9
    share: float = 0.4
    first: int = 0

    def __post_init__(self) -> None:
        check_range("run", self.run, 1, 1 << 32)
        check_range("tokens", self.tokens, 0.0, 1000.0)
        check_range("share", self.share, 0.0, 1.0)
        check_range("number of hot ranks", len(self.ranks), 1, 1 << 32)

    def places(self) -> Sequence[tuple[int | None, int | None]]:
        """See `Fault.places`."""
        return [(dp, self.stage) for dp in self.ranks]

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """See `Fault.active`."""
        return job.steps >= self.first

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        factor = 1 + self.share * (self._load(draft) - 1)
        draft.work[draft.rows(self.stage, *STREAM_COMPUTE)] *= factor

    def testify(self, witness: Witness) -> None:
        """See `Fault.testify`."""
        witness.expert_tokens(self.stage, self._load(witness.draft) * _EXPERT_TOKENS)

    def _load(self, draft: Draft) -> NDArray[np.float64]:
        """Tokens of each rank as a multiple of the mean; shape ``(steps, dp)``."""
        dp = draft.plan.shape.dp
        hot = np.array(self.ranks)[(draft.steps - self.first) // self.run % len(self.ranks)]
        most = min(self.tokens, float(dp))
        rest = (dp - most) / max(dp - 1, 1)
        load = np.where(np.arange(dp) == hot[:, None], most, rest)
        load[(draft.steps < self.first) | (hot >= dp)] = 1.0
        return load
