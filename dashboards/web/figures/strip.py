"""Bars over time in rows, drawn as SVG without a script: when something was there.

Flow: `dashboards.web.views.host` → **here** → a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

#: Width of a strip in its own units; the page stretches it.
WIDTH: Final = 1000.0

#: A bar is at least so wide, or nobody would see a minute within a month.
_LEAST: Final = 5.0

_TICKS: Final = 4
_DAY_S: Final = 86_400.0
_MINUTES_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, unix seconds; `words` say what it is."""

    begin_s: float
    end_s: float
    words: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One span as a rectangle."""

    x: float
    width: float
    words: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class StripRow:
    """One row: its name, where that leads, and its bars."""

    name: str
    link: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows over one axis; `ticks` are its labels from left to right, equally far apart."""

    rows: tuple[StripRow, ...]
    ticks: tuple[str, ...]


def strip_of(rows: Sequence[tuple[str, str, Sequence[Span]]]) -> Strip:
    """Rows of (name, link, spans), at least one span in all."""
    begin = min(span.begin_s for _, _, spans in rows for span in spans)
    latest = max(span.end_s for _, _, spans in rows for span in spans)
    end = max(latest, begin + 1.0)
    scale = WIDTH / (end - begin)
    return Strip(
        tuple(
            StripRow(name, link, tuple(_bar(span, begin, scale) for span in spans))
            for name, link, spans in rows
        ),
        tuple(
            _tick(begin + (end - begin) * number / _TICKS, end - begin)
            for number in range(_TICKS + 1)
        ),
    )


def _bar(span: Span, begin: float, scale: float) -> Bar:
    width = max((span.end_s - span.begin_s) * scale, _LEAST)
    x = min((span.begin_s - begin) * scale, WIDTH - width)
    return Bar(round(max(x, 0.0), 2), round(width, 2), _words(span), span.is_open)


def _words(span: Span) -> str:
    begin = _moment(span.begin_s).strftime("%Y-%m-%d %H:%M")
    end = "now" if span.is_open else _moment(span.end_s).strftime("%Y-%m-%d %H:%M UTC")
    return f"{span.words}: {begin} to {end}"


def _tick(at_s: float, length_s: float) -> str:
    if length_s > 2 * _DAY_S:
        return _moment(at_s).strftime("%Y-%m-%d")
    return _moment(at_s).strftime("%H:%M" if length_s > _MINUTES_S else "%H:%M:%S")


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, tz=UTC)
