"""What figures share: margins, fonts, axes.

Figures are what plotly.js draws, as plain data, made by pure functions. A colour such as
``var(--ink)`` stands for a variable of the style sheet, so that light and dark need one figure.
"""

from __future__ import annotations

from typing import Any, Final

Figure = dict[str, Any]

_FONT: Final = {"color": "var(--ink-2)", "size": 12}
#: Pixels around each figure.
MARGIN: Final = {"l": 56, "r": 12, "t": 8, "b": 40}


def layout(**more: Any) -> dict[str, Any]:  # noqa: ANN401  # of plotly.js
    """What all figures look like, and more."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": _FONT,
        "margin": MARGIN,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--card)", "font": {"color": "var(--ink)"}},
        "showlegend": False,
        **more,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # of plotly.js
    """An axis with its title."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "var(--line)",
        "zeroline": False,
        "linecolor": "var(--line)",
        "fixedrange": True,
        **more,
    }
