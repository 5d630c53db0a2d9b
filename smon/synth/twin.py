"""What each cause costs: the same job again, without it, and with it alone.

Flow: `smon.synth.run` → **here** → `smon.synth.truth.Truth`. All runs share their draws, so that a
difference of means is the fault's and not the noise's.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from smon.synth.faults.base import Fault
from smon.synth.run import Run, run_job
from smon.synth.spec import Scenario
from smon.synth.truth import Truth, truth_of


def true_answer(scenario: Scenario, run: Run) -> Truth:
    """The truth about a scenario; `run` is it with all its faults."""
    periods = _Periods(scenario, run)
    everything = frozenset(range(len(scenario.causes)))
    answers = []
    for number, cause in enumerate(scenario.causes):
        excess_s = periods.mean_s({number}) - periods.mean_s(())
        gain_s = periods.actual_s - periods.mean_s(everything - {number}, extra=True)
        answers.append(
            cause.answer(scenario.extent, scenario.layout, scenario.machines, excess_s, gain_s)
        )
    stated = not scenario.faults
    return truth_of(answers, periods.mean_s(()), periods.actual_s, stated=stated)


class _Periods:
    """Mean step times with some of the causes only; each is run once."""

    __slots__ = ("_ended", "_known", "_scenario", "actual_s")

    def __init__(self, scenario: Scenario, run: Run) -> None:
        self._scenario = scenario
        self._ended = run.ended
        self._known: dict[tuple[Fault, ...], float] = {}
        self.actual_s = self._mean(run.period_s)
        self._known[self._timed(range(len(scenario.causes)), extra=True)] = self.actual_s

    def mean_s(self, causes: Collection[int], *, extra: bool = False) -> float:
        """Mean over the steps that end in the job as it is.

        Parameters
        ----------
        causes
            Numbers of the causes that stay; of the others, their even form does.
        extra
            The faults without a cause stay, too.
        """
        faults = self._timed(causes, extra=extra)
        if faults not in self._known:
            self._known[faults] = self._mean(run_job(self._scenario, faults).period_s)
        return self._known[faults]

    def _mean(self, period_s: NDArray[np.float64]) -> float:
        """0 if no step ends."""
        ended = period_s[self._ended & np.isfinite(period_s)]
        return float(ended.mean()) if len(ended) else 0.0

    def _timed(self, causes: Collection[int], *, extra: bool) -> tuple[Fault, ...]:
        """The faults that stay, without those that change no step time."""
        groups = [
            (cause.faults, number in causes) for number, cause in enumerate(self._scenario.causes)
        ]
        groups.append((self._scenario.faults, extra))
        extent = self._scenario.extent
        faults: list[Fault] = []
        for group, stays in groups:
            for fault in group:
                faults.extend((fault,) if stays else fault.evenly(extent))
        return tuple(fault for fault in faults if fault.takes_time)
