"""Figures of the pages: from what is stored to what plotly.js draws, as plain data.

Flow: `smon.store.queries` → **here** → `dashboards.web.views`. Pure functions. A colour such as
``var(--ink)`` stands for a variable of the style sheet, so that light and dark need one figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from smon.store.queries.findings import FindingRow
from smon.store.queries.history import StepPoint

Figure = dict[str, Any]

#: Wider heat maps show groups of DP ranks, each by its worst.
MAX_COLUMNS: Final = 64
#: Taller ones show groups of stages.
MAX_ROWS: Final = 64

#: The heat scale ends here at least, so that noise does not glow.
_LEAST_WORST: Final = 1.05

_MOST_TICKS: Final = 16

#: Findings that have a bar under the step times.
_MAX_BARS: Final = 8

#: Height of one of them.
_BAR_PX: Final = 16

_FONT: Final = {"color": "var(--ink-2)", "size": 12}
_MARGIN: Final = {"l": 56, "r": 12, "t": 8, "b": 40}


def _layout(**more: Any) -> dict[str, Any]:  # noqa: ANN401  # of plotly.js
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": _FONT,
        "margin": _MARGIN,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--card)", "font": {"color": "var(--ink)"}},
        "showlegend": False,
        **more,
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # of plotly.js
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--line)",
        "zeroline": False,
        "linecolor": "var(--line)",
        "fixedrange": True,
        **more,
    }


def step_time_figure(points: Sequence[StepPoint], findings: Sequence[FindingRow]) -> Figure:
    """Recorded over ideal step time with the gap shaded, findings as bars below."""
    scale, unit = _unit(points)
    steps = [point.step for point in points]
    recorded = [_scaled(point.recorded_s, scale) for point in points]
    ideal = [_scaled(point.ideal_s, scale) for point in points]
    bars = _bars(findings, steps)
    hover = f"%{{y:.4g}} {unit}"
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ideal",
            "x": steps,
            "y": ideal,
            "line": {"color": "var(--ideal)", "width": 1.5, "dash": "dot"},
            "hovertemplate": hover,
        },
        {
            "type": "scatter",
            "mode": "lines" if len(steps) > 1 else "lines+markers",
            "name": "recorded",
            "x": steps,
            "y": recorded,
            "line": {"color": "var(--ink)", "width": 1.5},
            "fill": "tonexty",
            "fillcolor": "var(--gap)",
            "hovertemplate": hover,
        },
        *bars,
    ]
    height = 300 + _BAR_PX * len(bars)
    lower = _BAR_PX * len(bars) / (height - _MARGIN["t"] - _MARGIN["b"])
    bottom = lower + 0.05 if bars else 0.0
    layout = _layout(
        xaxis=_axis("step", anchor="y2" if bars else "y"),
        yaxis=_axis(f"step time, {unit}", domain=[bottom, 1.0], rangemode="tozero"),
        height=height,
    )
    if bars:
        layout["yaxis2"] = _axis(
            "",
            domain=[0.0, lower],
            range=[-0.6, len(bars) - 0.4],
            showticklabels=False,
            showgrid=False,
        )
    return {"data": data, "layout": layout}


def _unit(points: Sequence[StepPoint]) -> tuple[float, str]:
    longest = max((point.recorded_s or 0.0 for point in points), default=0.0)
    return (1e3, "ms") if longest < 1.0 else (1.0, "s")


def _scaled(seconds: float | None, scale: float) -> float | None:
    return None if seconds is None else round(seconds * scale, 6)


def _bars(findings: Sequence[FindingRow], steps: Sequence[int]) -> list[dict[str, Any]]:
    if not steps:
        return []
    bars = []
    for number, finding in enumerate(findings[:_MAX_BARS]):
        first = finding.opened_step if finding.onset_step is None else finding.onset_step
        last = finding.last_step if finding.cleared_step is None else finding.cleared_step
        ends = [max(first, steps[0]), min(max(last, first), steps[-1])]
        critical = finding.severity == "critical"
        bars.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": finding.cause.replace("_", " "),
                "x": ends,
                "y": [number, number],
                "yaxis": "y2",
                "line": {"color": "var(--culprit)" if critical else "var(--warn)", "width": 8},
                "hovertemplate": f"{finding.severity}, steps {first}–{last}<extra></extra>",
            }
        )
    return bars


def heat_figure(report: Mapping[str, Any]) -> Figure:
    """Exact S_w, stages × DP ranks; of many, each cell is the worst of a group."""
    layout = report["job"]["layout"]
    columns, rows = _groups(layout["dp"], MAX_COLUMNS), _groups(layout["pp"], MAX_ROWS)
    cells: list[list[float | None]] = [[None] * columns[0] for _ in range(rows[0])]
    text = [[""] * columns[0] for _ in range(rows[0])]
    for worker in report["workers"]:
        value = worker["slowdown"]
        row, column = worker["stage"] // rows[1], worker["dp"] // columns[1]
        known = cells[row][column]
        if value is not None and (known is None or value > known):
            cells[row][column] = round(value, 5)
            text[row][column] = f"rank {worker['rank']}, DP rank {worker['dp']}"
    worst = max((value for row in cells for value in row if value is not None), default=1.0)
    height = min(max(22 * rows[0], 96), 560) + 70
    return {
        "data": [
            {
                "type": "heatmap",
                "z": cells,
                "text": text,
                "x": [column * columns[1] for column in range(columns[0])],
                "y": [row * rows[1] for row in range(rows[0])],
                "zmin": 1.0,
                "zmax": max(worst, _LEAST_WORST),
                "xgap": 1,
                "ygap": 1,
                "colorscale": [
                    [0, "var(--heat-0)"],
                    [0.5, "var(--heat-1)"],
                    [1, "var(--heat-2)"],
                ],
                "colorbar": {
                    "thickness": 8,
                    "outlinewidth": 0,
                    "tickformat": ".3f",
                    "title": {"text": "S_w", "side": "top"},
                },
                "hovertemplate": "%{text}, stage %{y}: %{z:.3f} ×<extra></extra>",
            }
        ],
        "layout": _layout(
            hovermode="closest",
            height=height,
            xaxis=_axis("DP rank", showgrid=False, **_ticks(columns)),
            yaxis=_axis("stage", showgrid=False, autorange="reversed", **_ticks(rows)),
        ),
    }


def _groups(size: int, most: int) -> tuple[int, int]:
    """Number of groups, and members of each."""
    members = -(-size // most)
    return -(-size // members), members


def _ticks(groups: tuple[int, int]) -> dict[str, Any]:
    """Ticks at whole groups, at most sixteen of them."""
    count, members = groups
    return {"tickmode": "linear", "tick0": 0, "dtick": members * -(-count // _MOST_TICKS)}
