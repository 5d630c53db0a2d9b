"""Step times of a whole job, as logs have them: no rank, no op.

Flow: `smon.trace.formats.step_times`, `smon.trace.formats.megatron_log` → **here** →
`smon.series`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.topology import Layout
from smon.trace.schema import MAX_DURATION_NS

_MAX_SECONDS: Final = MAX_DURATION_NS / 1e9
_MAX_STEP: Final = 2**53

NO_VALUE: Final = "step whose time is nan, None or no number"
NOT_POSSIBLE: Final = "step time of zero, below zero, or above seven days"
TWICE: Final = "step that is there twice, as after a restart: the later value counts"


@dataclass(frozen=True, slots=True)
class Section:
    """What the log says of one part of the step, one value per report.

    Attributes
    ----------
    low_s, high_s
        Lowest and highest over ranks; the same where the log has one value.
    """

    name: str
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """Step times of a job.

    Attributes
    ----------
    steps, seconds
        Ascending steps, and what the log says of each; shapes (points,).
    layout
        As the log gives it, if it does.
    statements
        What a tool of the trainer says of ranks, in the log's own terms.
    dropped
        (reason, values) of what was left out.
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    sections: tuple[Section, ...] = ()
    layout: Layout | None = None
    statements: tuple[str, ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, first: int | None, last: int | None) -> StepSeries:
        """The same series with these steps only, both ends included."""
        keep = np.ones(len(self), bool)
        if first is not None:
            keep &= self.steps >= first
        if last is not None:
            keep &= self.steps <= last
        return StepSeries(
            self.steps[keep],
            self.seconds[keep],
            self.sections,
            self.layout,
            self.statements,
            self.dropped,
            self.notes,
        )


def number_of(value: object) -> float | None:
    """A number, also as text and with a decimal comma; None for anything else, and for nan."""
    if isinstance(value, str) and len(value) < 32:  # noqa: PLR2004  # longer is no number
        text = value.strip()
        if text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        try:
            value = float(text)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if np.isfinite(number) else None


def usable(
    values: Iterable[tuple[int, object]], dropped: Counter[str]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps and seconds of (step, value) pairs, by step; what is no time is counted."""
    found: dict[int, float] = {}
    for step, value in values:
        seconds = number_of(value)
        if seconds is None or not 0 <= step < _MAX_STEP:
            dropped[NO_VALUE] += 1
        elif not 0 < seconds <= _MAX_SECONDS:
            dropped[NOT_POSSIBLE] += 1
        else:
            dropped[TWICE] += step in found
            found[step] = seconds
    steps = np.array(sorted(found), np.int64)
    return steps, np.array([found[step] for step in steps.tolist()], np.float64)
