"""Lanes of a run, and which of them meet in DP-synchronised collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Which lanes meet: those of one (real or virtual) step, whatever their structure.

    Attributes
    ----------
    positions
        Per structure, (L,) place of each of its lanes in a buffer that holds the lanes of all
        structures, those of one step side by side.
    first
        (steps,) first place of each step.
    step
        Per structure, (L,) step of each lane.
    """

    positions: tuple[NDArray[np.intp], ...]
    first: NDArray[np.intp]
    step: tuple[NDArray[np.intp], ...]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.first)

    def latest(self, parts: Sequence[NDArray[np.float64] | None]) -> NDArray[np.float64]:
        """(…, steps) maximum over the lanes of each step.

        Parameters
        ----------
        parts
            Per structure (…, L) values; None if the structure does not take part.
        """
        known = [part for part in parts if part is not None]
        shape = np.broadcast_shapes(*(part.shape[:-1] for part in known))
        if len(parts) == 1 and self._regular():
            by_step = known[0].reshape(*shape, self.steps, -1)
            regular: NDArray[np.float64] = by_step.max(axis=-1)
            return regular
        total = sum(len(positions) for positions in self.positions)
        buffer = np.full((*shape, total), -np.inf)
        for positions, part in zip(self.positions, parts, strict=True):
            if part is not None:
                buffer[..., positions] = part
        result: NDArray[np.float64] = np.maximum.reduceat(buffer, self.first, axis=-1)
        return result

    def _regular(self) -> bool:
        """Whether lanes stand in order and every step has the same number."""
        total = len(self.positions[0])
        return (
            total % max(self.steps, 1) == 0
            and bool((self.first == np.arange(self.steps) * (total // max(self.steps, 1))).all())
            and bool((self.positions[0] == np.arange(total)).all())
        )


def meeting(steps: Sequence[NDArray[np.intp]], count: int) -> Meeting:
    """Lanes meet where their step numbers (0 … count − 1, each with a lane) are equal."""
    sizes = [len(part) for part in steps]
    flat = np.concatenate([*steps, np.empty(0, np.intp)])
    order = np.argsort(flat, kind="stable")
    place = np.empty(len(flat), np.intp)
    place[order] = np.arange(len(flat))
    first = np.searchsorted(flat[order], np.arange(count)).astype(np.intp)
    split = np.cumsum(sizes)[:-1]
    return Meeting(tuple(np.split(place, split)), first, tuple(steps))
