"""Time over the whole window, and which clock tells it to each worker.

Flow: `smon.graph.fill` → **here** → `smon.simulate.clock_evidence`, `smon.simulate.clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.graph.fill import Filled

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class TimeAxis:
    """Time since the middle of the window: of step i, ``begin[i] + time in the step``, ns."""

    begin: Floats
    half_ns: float

    def of(self, time: Floats, step: Indices) -> Floats:
        """-1 at the start of the window, 1 at its end."""
        position: Floats = np.clip((time + self.begin[step]) / self.half_ns, -1.0, 1.0)
        return position


def time_axis(
    lanes: Sequence[Filled], steps: NDArray[np.int64], step_start_ns: NDArray[np.int64] | None
) -> TimeAxis:
    """The axis of a window; see `smon.simulate.clock.align`."""
    length = np.zeros(len(steps))
    for filled in lanes:
        np.maximum.at(length, filled.step, filled.end.max(axis=0, initial=0.0))
    # The median: one wild time must not stretch the axis.
    usual = float(np.median(length)) if len(length) else 0.0
    if step_start_ns is None:
        begin = (steps - steps[:1]).astype(np.float64) * usual
    else:
        begin = (step_start_ns - step_start_ns[:1]).astype(np.float64)
    half = max((float(begin.max(initial=0.0)) + usual) / 2, 1.0)
    return TimeAxis(begin - half, half)


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """Which clock each worker has.

    Attributes
    ----------
    of_worker
        (dp_ranks, stages) number of the clock.
    present
        (dp_ranks, stages) workers with ops.
    count
        Number of clocks.
    """

    of_worker: Indices
    present: NDArray[np.bool_]
    count: int

    @staticmethod
    def of(
        lanes: Sequence[Filled], shape: tuple[int, int], hosts: NDArray[np.intp] | None
    ) -> Clocks:
        """Clocks of workers, or of hosts; shape is (dp_ranks, stages)."""
        present = np.zeros(shape, bool)
        for filled in lanes:
            here = np.unique(filled.program.graph.structure.stage)
            present[np.ix_(np.unique(filled.dp), here)] = True
        given = np.arange(present.size) if hosts is None else np.asarray(hosts).reshape(-1)
        number = np.unique(given, return_inverse=True)[1].reshape(shape)
        return Clocks(number.astype(np.intp), present, int(number.max(initial=-1)) + 1)

    @property
    def used(self) -> NDArray[np.bool_]:
        """(count,) clocks of workers with ops."""
        used = np.zeros(self.count, bool)
        used[self.of_worker[self.present]] = True
        return used

    def spread(self, values: Floats) -> Floats:
        """(dp_ranks, stages) values of the workers' clocks, NaN for workers without ops."""
        return np.where(self.present, values[self.of_worker], np.nan)

    def numbers(self, values: Indices) -> Indices:
        """As `spread`, -1 for workers without ops."""
        return np.where(self.present, values[self.of_worker], -1)

    def nothing(self) -> NDArray[np.bool_]:
        """(dp_ranks, stages) False."""
        return np.zeros(self.present.shape, bool)
