"""Workers by DP rank and stage: slowdown, computing or waiting, the culprits outlined.

Flow: `dashboards.web.views.where` → **here** → the page, and its step slider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dashboards.web.figures.common import Figure, axis, layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Wider heat maps show groups of DP ranks, each by its worst.
MAX_COLUMNS: Final = 64
#: Taller ones show groups of stages.
MAX_ROWS: Final = 64

#: The heat scale is at least so long, as a part of where it begins, so that noise does not glow.
_LEAST_SPAN: Final = 0.05

_MOST_TICKS: Final = 16
_ROW_PX: Final = 22
_LEAST_PX: Final = 96
_MOST_PX: Final = 560
_AROUND_PX: Final = 74
_MILLI: Final = 1e3
_VICTIM: Final = {"color": "var(--victim)", "width": 1.5}
_CULPRIT: Final = {"color": "var(--culprit)", "width": 3}
#: More cells than this have one frame around all of them.
_MOST_FRAMES: Final = 256


@dataclass(frozen=True, slots=True)
class Scale:
    """What is shown, and how.

    Attributes
    ----------
    title
        Of the colour bar.
    begin
        Where the scale begins; None: at the least value.
    hue
        Family of colours: ``heat``, or ``wait`` of those who only wait.
    in_seconds
        Whether values are times, shown in ms below one second.
    """

    title: str
    begin: float | None
    hue: str
    in_seconds: bool


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """One number for each worker, and which workers are marked.

    Attributes
    ----------
    values
        (stages, dp_ranks); NaN where there is none.
    ranks
        Global rank of each.
    culprits, victims
        (dp, stage) of the workers with an outline.
    first
        DP rank of the first column, of an opened group.
    """

    values: Floats
    ranks: Ints
    culprits: frozenset[tuple[int, int]] = frozenset()
    victims: frozenset[tuple[int, int]] = frozenset()
    first: int = 0


def members_of(size: int, most: int = MAX_COLUMNS) -> int:
    """How many share one of at most so many cells."""
    return max(-(-size // most), 1)


def heat_figure(grid: Grid, scale: Scale) -> Figure:
    """Stages × DP ranks; of many, each cell is the worst of a group, and says which that is."""
    stages, columns = grid.values.shape
    wide, high = members_of(columns), members_of(stages, MAX_ROWS)
    cells, at = _worst(grid.values, high, wide)
    shown = cells * _MILLI if _in_ms(cells, scale) else cells
    low, top = _ends(shown, scale)
    unit = ("ms" if _in_ms(cells, scale) else "s") if scale.in_seconds else "×"
    x = [grid.first + column * wide for column in range(cells.shape[1])]
    y = [row * high for row in range(cells.shape[0])]
    height = min(max(_ROW_PX * len(y), _LEAST_PX), _MOST_PX) + _AROUND_PX
    return {
        "data": [
            {
                "type": "heatmap",
                "z": _plain(shown),
                "x": x,
                "y": y,
                "customdata": _places(grid, at),
                "zmin": low,
                "zmax": top,
                "xgap": 1,
                "ygap": 1,
                "hoverongaps": False,
                "colorscale": [[part / 2, f"var(--{scale.hue}-{part})"] for part in range(3)],
                "colorbar": {
                    "thickness": 8,
                    "outlinewidth": 0,
                    "tickformat": ".3~g" if scale.in_seconds else ".3f",
                    "title": {"text": f"{scale.title}, {unit}", "side": "right"},
                },
                "hovertemplate": (
                    "rank %{customdata[0]}<br>DP rank %{customdata[1]}, stage %{customdata[2]}"
                    f"<br>{scale.title} %{{z:.4~g}} {unit}<extra></extra>"
                ),
            }
        ],
        "layout": layout(
            hovermode="closest",
            height=height,
            xaxis=axis("DP rank", showgrid=False, **_ticks(len(x), wide, grid.first)),
            yaxis=axis("stage", showgrid=False, autorange="reversed", **_ticks(len(y), high, 0)),
            shapes=[
                *_outlines(grid, wide, high, grid.victims - grid.culprits, _VICTIM),
                *_outlines(grid, wide, high, grid.culprits, _CULPRIT),
            ],
        ),
    }


def _worst(values: Floats, high: int, wide: int) -> tuple[Floats, tuple[Ints, Ints]]:
    """Highest value of each group of cells, and (row, column) of it in `values`."""
    rows, columns = -(-values.shape[0] // high), -(-values.shape[1] // wide)
    padded = np.full((rows * high, columns * wide), -np.inf)
    padded[: values.shape[0], : values.shape[1]] = np.where(np.isnan(values), -np.inf, values)
    tiles = padded.reshape(rows, high, columns, wide).swapaxes(1, 2)
    flat = tiles.reshape(rows, columns, high * wide)
    best = flat.argmax(axis=2)
    cells = np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]
    row = np.arange(rows)[:, None] * high + best // wide
    column = np.arange(columns)[None, :] * wide + best % wide
    return np.where(np.isinf(cells), np.nan, cells), (row, column)


def _in_ms(cells: Floats, scale: Scale) -> bool:
    known = cells[~np.isnan(cells)]
    return scale.in_seconds and (known.size == 0 or float(known.max()) < 1.0)


def _ends(cells: Floats, scale: Scale) -> tuple[float, float]:
    known = cells[~np.isnan(cells)]
    least, most = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low = least if scale.begin is None else scale.begin
    return low, max(most, low * (1 + _LEAST_SPAN), low + 1e-6)


def _plain(cells: Floats) -> list[list[float | None]]:
    return [[None if np.isnan(cell) else round(float(cell), 5) for cell in row] for row in cells]


def _places(grid: Grid, at: tuple[Ints, Ints]) -> list[list[list[int]]]:
    """Rank, DP rank and stage that each cell shows."""
    stages, columns = grid.values.shape
    row, column = np.minimum(at[0], stages - 1), np.minimum(at[1], columns - 1)
    stacked = np.stack([grid.ranks[row, column], column + grid.first, row], axis=-1)
    places: list[list[list[int]]] = stacked.tolist()
    return places


def _outlines(
    grid: Grid, wide: int, high: int, places: frozenset[tuple[int, int]], line: dict[str, Any]
) -> list[dict[str, Any]]:
    """Frames around the cells that hold these workers."""
    stages, columns = grid.values.shape
    cells = {
        (stage // high, (dp - grid.first) // wide)
        for dp, stage in places
        if 0 <= stage < stages and grid.first <= dp < grid.first + columns
    }
    if len(cells) > _MOST_FRAMES:
        return [_frame(grid, wide, high, (-(-stages // high), -(-columns // wide)), line)]
    return [_frame(grid, wide, high, (1, 1), line, cell) for cell in sorted(cells)]


def _frame(
    grid: Grid,
    wide: int,
    high: int,
    size: tuple[int, int],
    line: dict[str, Any],
    cell: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Around so many (rows, columns) of cells from one on."""
    row, column = cell
    return {
        "type": "rect",
        "x0": grid.first + (column - 0.5) * wide,
        "x1": grid.first + (column - 0.5 + size[1]) * wide,
        "y0": (row - 0.5) * high,
        "y1": (row - 0.5 + size[0]) * high,
        "line": line,
        "fillcolor": "rgba(0,0,0,0)",
    }


def _ticks(count: int, members: int, first: int) -> dict[str, Any]:
    """Ticks at whole groups, at most sixteen of them."""
    step = members * -(-count // _MOST_TICKS)
    return {"tickmode": "linear", "tick0": first, "dtick": step}


def known_of(values: Sequence[float | None]) -> Floats:
    """Numbers as an array, None as NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
