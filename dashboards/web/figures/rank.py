"""One worker over its steps, counters below its durations, all on one axis of steps.

Flow: `smon.store.queries.rank` → **here** → `dashboards.web.views.rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.web.figures.common import Figure, axis, layout

#: Heights in pixels: of a panel of durations, of a counter, of the gap with a panel's title.
_TALL: Final = 120
_LOW: Final = 78
_GAP: Final = 26
_MARGIN: Final = {"l": 56, "r": 12, "t": 30, "b": 40}


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity over the steps; sequences as long as `steps`, None where it is not known.

    Attributes
    ----------
    title
        What it is, with its unit.
    peers
        What it is compared with; empty if with nothing.
    """

    title: str
    unit: str
    steps: Sequence[int]
    values: Sequence[float | None]
    peers: Sequence[float | None] = ()
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class Onset:
    """A step at which something began, and what."""

    step: int
    words: str


def rank_figure(panels: Sequence[Panel], onsets: Sequence[Onset], *, culprit: bool) -> Figure:
    """Panels from top to bottom over one axis of steps; dotted: what peers do."""
    heights = [_LOW if panel.is_counter else _TALL for panel in panels]
    inner = sum(heights) + _GAP * (len(panels) - 1)
    colour = "var(--culprit)" if culprit else "var(--ink)"
    data: list[dict[str, Any]] = []
    drawn = layout(
        margin=_MARGIN,
        height=inner + _MARGIN["t"] + _MARGIN["b"],
        hoversubplots="axis",
        xaxis=axis("step", anchor=f"y{len(panels)}" if len(panels) > 1 else "y", tickformat="d"),
        annotations=[],
        shapes=[],
    )
    top = float(inner)
    for number, (panel, height) in enumerate(zip(panels, heights, strict=True), 1):
        name = "" if number == 1 else str(number)
        domain = [max((top - height) / inner, 0.0), top / inner]
        drawn[f"yaxis{name}"] = axis("", domain=domain, nticks=4, automargin=False)
        drawn["annotations"].append(_title(panel.title, domain[1]))
        data += _traces(panel, f"y{name}", colour)
        top -= height + _GAP
    drawn["shapes"] = [_line(one) for one in onsets]
    return {"data": data, "layout": drawn}


def _traces(panel: Panel, yaxis: str, colour: str) -> list[dict[str, Any]]:
    mode = "lines" if len(panel.steps) > 1 else "markers"
    shared = {"type": "scatter", "mode": mode, "x": list(panel.steps), "yaxis": yaxis}
    traces: list[dict[str, Any]] = []
    if any(value is not None for value in panel.peers):
        traces.append(
            {
                **shared,
                "name": "median of its peers",
                "y": list(panel.peers),
                "line": {"color": "var(--ideal)", "width": 1.5, "dash": "dot"},
                "hovertemplate": f"peers %{{y:.4g}} {panel.unit}<extra></extra>",
            }
        )
    traces.append(
        {
            **shared,
            "name": "this rank",
            "y": list(panel.values),
            "line": {"color": colour, "width": 1.5, "shape": "linear"},
            "hovertemplate": f"%{{y:.4g}} {panel.unit}<extra>{panel.title}</extra>",
        }
    )
    return traces


def _title(words: str, top: float) -> dict[str, Any]:
    return {
        "text": words,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "var(--ink)", "size": 12},
    }


def _line(one: Onset) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": one.step,
        "x1": one.step,
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--warn)", "width": 1, "dash": "dash"},
        "label": {
            "text": one.words,
            "textangle": 0,
            "textposition": "end",
            "xanchor": "left",
            "yanchor": "top",
            "font": {"color": "var(--warn)", "size": 11},
        },
    }
