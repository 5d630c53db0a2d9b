"""Sparklines: slowdown over the latest steps, as points of an SVG that needs no script.

Flow: `smon.store.queries.recent` → **here** → `dashboards.web.views.fleet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.web.text import times
from smon.store.queries.jobs import SLOW
from smon.store.queries.recent import Recent

WIDTH: Final = 96
HEIGHT: Final = 24
_EDGE: Final = 3

#: The scale reaches at least so far, so that noise of a healthy job looks flat.
_LEAST_TOP: Final = 1.25


@dataclass(frozen=True, slots=True)
class Spark:
    """One sparkline.

    Attributes
    ----------
    lines
        ``points`` of polylines: one for each run of steps without a gap.
    end
        Where the last known step stands.
    limit
        Height of the threshold of a slow job.
    words
        The same as text.
    values
        (step, slowdown) that are drawn.
    """

    lines: tuple[str, ...]
    end: tuple[float, float]
    limit: float
    slow: bool
    words: str
    values: Recent


def spark(recent: Recent) -> Spark | None:
    """The sparkline of the latest steps; None if the slowdown of none is known."""
    known = [value for _, value in recent if value is not None]
    if not known:
        return None
    top = max(_LEAST_TOP, *known)
    bottom = min(1.0, *known)
    across = (WIDTH - 2 * _EDGE) / max(len(recent) - 1, 1)

    def height(value: float) -> float:
        return round(HEIGHT - _EDGE - (value - bottom) / (top - bottom) * (HEIGHT - 2 * _EDGE), 1)

    places = [
        None if value is None else (round(_EDGE + number * across, 1), height(value))
        for number, (_, value) in enumerate(recent)
    ]
    return Spark(
        lines=tuple(_joined(run) for run in _runs(places)),
        end=next(place for place in reversed(places) if place is not None),
        limit=height(SLOW),
        slow=known[-1] >= SLOW,
        words=_words(recent, known),
        values=recent,
    )


def _runs(
    places: Sequence[tuple[float, float] | None],
) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for place in places:
        if place is not None:
            runs[-1].append(place)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _joined(run: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in run)


def _words(recent: Recent, known: Sequence[float]) -> str:
    return (
        f"slowdown in steps {recent[0][0]} to {recent[-1][0]}: last {times(known[-1])}, "
        f"lowest {times(min(known))}, highest {times(max(known))}"
    )
