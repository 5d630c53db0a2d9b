"""The slowest worker of each step, one line for each of the most frequent.

Flow: `dashboards.web.views.rotation` → **here** → the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.web.figures.common import MARGIN, Figure, axis, layout

_LINE_PX: Final = 26
_OTHERS: Final = "others"
_LEAST_PX: Final = 60


@dataclass(frozen=True, slots=True)
class Mark:
    """The slowest worker of a step, and its exact S_w there."""

    step: int
    rank: int
    dp: int
    stage: int
    slowdown: float


def rotation_figure(marks: Sequence[Mark], ranks: Sequence[int], *, same: bool) -> Figure:
    """A mark for each step, in the line of its worker; `ranks` have a line of their own.

    If it is the `same` worker most of the time, its marks have the colour of a culprit.
    """
    names = {rank: f"rank {rank}" for rank in ranks}
    lines = [*names.values()]
    if any(mark.rank not in names for mark in marks):
        lines.append(_OTHERS)
    culprit = ranks[0] if same and ranks else None
    height = max(_LINE_PX * len(lines), _LEAST_PX) + MARGIN["t"] + MARGIN["b"]
    return {
        "data": [
            _trace([mark for mark in marks if mark.rank == culprit], names, "var(--culprit)"),
            _trace([mark for mark in marks if mark.rank != culprit], names, "var(--ink-2)"),
        ],
        "layout": layout(
            hovermode="closest",
            height=height,
            xaxis=axis("step", showgrid=False, tickformat="d"),
            yaxis=axis(
                "",
                type="category",
                categoryorder="array",
                categoryarray=lines[::-1],
                range=[-0.6, len(lines) - 0.4],
                automargin=True,
                tickfont={"family": "monospace", "size": 12},
            ),
        ),
    }


def _trace(marks: Sequence[Mark], names: dict[int, str], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [mark.step for mark in marks],
        "y": [names.get(mark.rank, _OTHERS) for mark in marks],
        "customdata": [[mark.rank, mark.dp, mark.stage, round(mark.slowdown, 4)] for mark in marks],
        "marker": {"symbol": "square", "size": 8, "color": colour},
        "hovertemplate": (
            "step %{x}<br>rank %{customdata[0]}, DP rank %{customdata[1]}, stage "
            "%{customdata[2]}<br>S_w %{customdata[3]:.3f} ×<extra></extra>"
        ),
    }
