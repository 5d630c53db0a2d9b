"""Readings of one job until it is known which step they belong to; then one document per step.

Flow: readings → **here**, with `ingest_agents.sources.counters.steps` → side evidence for
`ingest_agents.sources.counters.source`. The mean of gauges over a step; counts per step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingest_agents.sources.counters.catalogue import ALL, Kind
from ingest_agents.sources.counters.reading import Values
from ingest_agents.sources.counters.steps import Steps

#: Readings that wait for their step: an hour of a job that has stopped, and more.
_MAX_WAITING: Final = 1024

#: Digits of a value: more say nothing, and take space.
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of some ranks at one time.

    Attributes
    ----------
    what
        Was read: counts go on from the reading before of the same.
    ns
        Unix time.
    by_rank
        Empty: this one only says from where differences count.
    """

    what: str
    ns: int
    by_rank: Mapping[int, Values]


@dataclass(frozen=True, slots=True)
class StepValues:
    """All that is known of one step: columns of side evidence."""

    step: int
    columns: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["step"])


_Key = tuple[int, str]


class Ledger:
    """What was read while a job ran.

    Attributes
    ----------
    unplaced
        Readings that belong to no step: before the first, or too long without one.
    """

    def __init__(self) -> None:
        self.unplaced = 0
        self._waiting: deque[Reading] = deque()
        self._gauges: dict[int, dict[_Key, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._facts: dict[int, dict[_Key, float]] = defaultdict(dict)
        self._counts: dict[int, dict[_Key, float]] = defaultdict(lambda: defaultdict(float))
        self._between: dict[_Key, float] = defaultdict(float)
        self._counted_from: dict[_Key, int] = {}
        self._said: dict[_Key, float] = {}
        self._before: dict[str, int] = {}

    def add(self, reading: Reading) -> None:
        """Take a reading in."""
        self._waiting.append(reading)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self.unplaced += 1

    def settle(self, steps: Steps, *, closing: bool = False) -> Iterator[StepValues]:
        """Steps that are over, and what was read in them.

        Parameters
        ----------
        closing
            The job is over: no step goes on.
        """
        while self._waiting:
            reading = self._waiting[0]
            if (first := steps.first_after(reading.ns)) is not None:
                self.unplaced += 1
                self._before[reading.what] = first - 1
            elif (step := steps.place(reading.ns)) is not None:
                self._place(reading, step, inside=steps.inside(step, reading.ns))
            else:
                break
            self._waiting.popleft()
        for step in sorted({*self._gauges, *self._facts, *self._counts}):
            if not (closing or steps.is_over(step)):
                break
            yield self._of_step(step)

    def give_up(self) -> None:
        """What still waits will find no step."""
        self.unplaced += len(self._waiting)
        self._waiting.clear()

    def _place(self, reading: Reading, step: int, *, inside: bool) -> None:
        for rank, values in reading.by_rank.items():
            for name, value in values.items():
                key, kind = (rank, name), ALL[name].kind
                if kind is Kind.COUNT:
                    self._counted_from.setdefault(key, self._before.get(reading.what, step - 1))
                    self._between[key] += value
                    if inside:
                        self._counts[step][key] += self._between.pop(key)
                elif not inside:
                    # Between two steps, e.g. during a checkpoint, a GPU idles: that says nothing.
                    continue
                elif kind is Kind.GAUGE:
                    self._gauges[step][key].append(value)
                elif self._said.get(key) != value:
                    self._said[key] = self._facts[step][key] = value
        self._before[reading.what] = step

    def _of_step(self, step: int) -> StepValues:
        values: dict[_Key, float] = {
            key: sum(parts) / len(parts) for key, parts in self._gauges.pop(step, {}).items()
        }
        values |= self._facts.pop(step, {})
        for key, count in self._counts.pop(step, {}).items():
            values[key] = count / max(step - self._counted_from[key], 1)
            self._counted_from[key] = step
        keys = sorted(values)
        return StepValues(
            step,
            {
                "step": [step] * len(keys),
                "rank": [rank for rank, _ in keys],
                "name": [name for _, name in keys],
                "value": [float(f"{values[key]:.{_DIGITS}g}") for key in keys],
            },
        )
