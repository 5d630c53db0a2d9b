"""Step times of a job over its steps; below them what was found, paused, missing.

Flow: `dashboards.web.views.time` → **here** → the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dashboards.web.figures.common import MARGIN, Figure, axis, layout
from smon.store.queries.history import StepPoint

#: Height of a lane: words above, bar below.
_LANE_PX: Final = 28
_PLOT_PX: Final = 210
_BETWEEN_PX: Final = 14
#: So few steps have marks of their own: a trace may hold runs of steps with nothing between.
_WITH_MARKS: Final = 120
#: A bar that begins beyond this part of the axis has its words to the left of its end.
_LATE: Final = 0.6


class LaneKind(StrEnum):
    """What a bar below the step times is about."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"
    PLANNED = "planned"
    MISSING = "missing"


#: Colour of each; the words beside the bar say the same.
_COLOURS: Final = {
    LaneKind.CRITICAL: "var(--culprit)",
    LaneKind.WARNING: "var(--warn)",
    LaneKind.INFO: "var(--ink-2)",
    LaneKind.PLANNED: "var(--good)",
    LaneKind.MISSING: "var(--ink-2)",
}

_CROSS: Final = {"color": "var(--ink-2)", "width": 2}

#: Drawn with gaps, so that no meaning is in the colour alone.
_DASHED: Final = frozenset({LaneKind.PLANNED, LaneKind.MISSING})


@dataclass(frozen=True, slots=True)
class Lane:
    """A bar from its first to its last step, with words."""

    kind: LaneKind
    first: int
    last: int
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn over the steps.

    Attributes
    ----------
    points
        Of the attempt that the page is about.
    earlier
        Of attempts before it.
    starts
        (number, first step) of each attempt after the first.
    span
        First and last step of the axis; None: as the points say.
    """

    points: Sequence[StepPoint]
    earlier: Sequence[Sequence[StepPoint]] = ()
    starts: Sequence[tuple[int, int]] = ()
    lanes: Sequence[Lane] = ()
    span: tuple[int, int] | None = None


def step_time_figure(chart: Chart) -> Figure:
    """Recorded over ideal step time with the gap shaded, and a lane for each bar below."""
    scale, unit = _unit([*chart.points, *(point for part in chart.earlier for point in part)])
    lanes = chart.lanes
    height = _PLOT_PX + MARGIN["t"] + MARGIN["b"] + _lower_px(lanes)
    lower = _LANE_PX * len(lanes) / (height - MARGIN["t"] - MARGIN["b"])
    bottom = _lower_px(lanes) / (height - MARGIN["t"] - MARGIN["b"])
    x_axis = axis("step", anchor="y2" if lanes else "y")
    first, last = _shown(chart)
    x_axis.update(fixedrange=False, tickformat="d", range=[first - 0.5, last + 0.5])
    drawn = layout(
        dragmode="zoom",
        xaxis=x_axis,
        yaxis=axis(f"step time, {unit}", domain=[bottom, 1.0], rangemode="tozero"),
        height=height,
        shapes=[_start(step) for _, step in chart.starts],
        annotations=[
            *(_start_words(number, step) for number, step in chart.starts),
            *(_lane_words(number, lane, _shown(chart)) for number, lane in enumerate(lanes)),
        ],
    )
    if lanes:
        drawn["yaxis2"] = axis(
            "",
            domain=[0.0, lower],
            range=[len(lanes) - 0.5, -0.5],
            showticklabels=False,
            showgrid=False,
        )
    bars = [_bar(number, lane) for number, lane in enumerate(lanes)]
    return {"data": [*_lines(chart, scale, unit), *bars], "layout": drawn}


def _lower_px(lanes: Sequence[Lane]) -> int:
    return _LANE_PX * len(lanes) + _BETWEEN_PX if lanes else 0


def _shown(chart: Chart) -> tuple[int, int]:
    """First and last step of the axis."""
    if chart.span is not None:
        return chart.span
    steps = [point.step for part in (*chart.earlier, chart.points) for point in part]
    return min(steps, default=0), max(steps, default=0)


def _lines(chart: Chart, scale: float, unit: str) -> list[dict[str, Any]]:
    steps = [point.step for point in chart.points]
    hover = f"%{{y:.4~g}} {unit}"
    out = [point for point in chart.points if point.skipped]
    return [
        *(_earlier(part, scale) for part in chart.earlier),
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ideal",
            "x": steps,
            "y": [_scaled(point.ideal_s, scale) for point in chart.points],
            "line": {"color": "var(--ideal)", "width": 1.5, "dash": "dot"},
            "hovertemplate": hover,
        },
        {
            "type": "scatter",
            "mode": "lines+markers" if len(steps) <= _WITH_MARKS else "lines",
            "marker": {"size": 4},
            "name": "recorded",
            "x": steps,
            "y": [_scaled(point.recorded_s, scale) for point in chart.points],
            "line": {"color": "var(--ink)", "width": 1.5},
            "fill": "tonexty",
            "fillcolor": "var(--gap)",
            "hovertemplate": hover,
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "left out",
            "x": [point.step for point in out],
            "y": [0.0] * len(out),
            "text": [_plain(point.skipped or "") for point in out],
            "marker": {"symbol": "x-thin", "size": 8, "line": _CROSS},
            "hovertemplate": "left out: %{text}<extra></extra>",
        },
    ]


def _earlier(points: Sequence[StepPoint], scale: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "earlier attempt",
        "x": [point.step for point in points],
        "y": [_scaled(point.recorded_s, scale) for point in points],
        "line": {"color": "var(--ink-2)", "width": 1},
        "opacity": 0.6,
        "hoverinfo": "skip",
    }


def _unit(points: Sequence[StepPoint]) -> tuple[float, str]:
    longest = max((point.recorded_s or 0.0 for point in points), default=0.0)
    return (1e3, "ms") if longest < 1.0 else (1.0, "s")


def _scaled(seconds: float | None, scale: float) -> float | None:
    return None if seconds is None else round(seconds * scale, 6)


def _bar(number: int, lane: Lane) -> dict[str, Any]:
    line = {"color": _COLOURS[lane.kind], "width": 7}
    if lane.kind in _DASHED:
        line["dash"] = "4px,3px"
    return {
        "type": "scatter",
        "mode": "lines+markers" if lane.first == lane.last else "lines",
        "name": lane.words,
        "x": [lane.first, lane.last],
        "y": [number + 0.25, number + 0.25],
        "yaxis": "y2",
        "line": line,
        "marker": {"color": _COLOURS[lane.kind], "size": 7, "symbol": "square"},
        "hoverinfo": "skip",
    }


def _lane_words(number: int, lane: Lane, shown: tuple[int, int]) -> dict[str, Any]:
    """The words above a bar, where there is room for them."""
    first, last = max(lane.first, shown[0]), min(lane.last, shown[1])
    late = first > shown[0] + _LATE * (shown[1] - shown[0])
    return {
        "x": last if late else first,
        "y": number - 0.15,
        "yref": "y2",
        "text": _plain(lane.words),
        "showarrow": False,
        "xanchor": "right" if late else "left",
        "font": {"size": 11, "color": "var(--ink-2)"},
    }


def _plain(words: str) -> str:
    """Words as plotly shows them literally: it reads a few HTML elements and entities."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _start(step: int) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": step,
        "x1": step,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--ink-2)", "width": 1, "dash": "dash"},
    }


def _start_words(number: int, step: int) -> dict[str, Any]:
    return {
        "x": step,
        "y": 1,
        "yref": "paper",
        "yanchor": "top",
        "xanchor": "left",
        "text": f" attempt {number}",
        "showarrow": False,
        "font": {"size": 11, "color": "var(--ink-2)"},
    }
