"""Which worker was the slowest in each step: always the same one, or another each time.

Flow: a stored report, or `smon.store.queries.matrix` → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dashboards.web.figures.rotation import Mark, rotation_figure
from dashboards.web.text import percent, times
from dashboards.web.views.common import script_json
from dashboards.web.views.time import Range

#: Workers with a line of their own; all others share one.
_LINES: Final = 6
#: More steps than this are too many marks: the newest are shown.
MAX_MARKS: Final = 1500
#: From this part of the steps on, it is the same worker.
_SAME: Final = 0.6
_BELOW: Final = 1.005


class RotationKind(StrEnum):
    """Who is the slowest: always the same worker, another each time, or nobody by much."""

    SAME = "same worker"
    TURNS = "rotating"
    NOBODY = "nobody stands out"


@dataclass(frozen=True, slots=True)
class RotationView:
    """The strip, its sentence, and how often each worker was the slowest.

    Attributes
    ----------
    kind
        Whether it is the same worker in most steps, or workers take turns, or nobody stands out.
    counts
        (rank, DP rank, stage, steps), most frequent first.
    left_out
        Steps before the newest `MAX_MARKS`.
    """

    figure: str
    words: str
    kind: RotationKind
    steps: int
    counts: tuple[tuple[int, int, int, int], ...]
    workers: int
    left_out: int


def rotation_view(marks: Sequence[Mark], chosen: Range) -> RotationView | None:
    """The strip over the chosen steps; None without any."""
    within = [mark for mark in marks if chosen.holds(mark.step, mark.step)]
    if not within:
        return None
    counted = Counter((mark.rank, mark.dp, mark.stage) for mark in within)
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    counts = tuple((*place, steps) for place, steps in ordered)
    shown = within[-MAX_MARKS:]
    lines = [place[0] for place in counts[:_LINES]]
    kind = _kind(within, counts[0][3])
    same = kind is RotationKind.SAME
    return RotationView(
        figure=script_json(rotation_figure(shown, lines, same=same)),
        words=_words(within, counts, kind),
        kind=kind,
        steps=len(within),
        counts=counts[:_LINES],
        workers=len(counts),
        left_out=len(within) - len(shown),
    )


def marks_of(document: Mapping[str, Any]) -> list[Mark] | None:
    """The slowest worker of each step, as the report says; None if it does not."""
    steps = document["per_step"]
    if not any("worst" in step for step in steps):
        return None
    return [
        Mark(step["step"], worst["rank"], worst["dp"], worst["stage"], worst["slowdown"])
        for step in steps
        if (worst := step.get("worst")) is not None
    ]


def _kind(marks: Sequence[Mark], often: int) -> RotationKind:
    if max(mark.slowdown for mark in marks) < _BELOW:
        return RotationKind.NOBODY
    return RotationKind.SAME if often >= _SAME * len(marks) else RotationKind.TURNS


def _words(
    marks: Sequence[Mark], counts: Sequence[tuple[int, int, int, int]], kind: RotationKind
) -> str:
    total = len(marks)
    rank, _, _, often = counts[0]
    if kind is RotationKind.NOBODY:
        worst = max(mark.slowdown for mark in marks)
        return f"In none of {total} steps does any worker stand out: at most {times(worst)}."
    of = f"in {often:,} of {total:,} steps ({percent(often / total)})"
    if kind is RotationKind.SAME:
        return f"Rank {rank} was the slowest {of}."
    return (
        f"{len(counts):,} workers take turns; the most frequent, rank {rank}, was the slowest {of}."
    )
