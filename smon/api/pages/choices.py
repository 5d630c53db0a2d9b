"""What the address of a job's page asks for: a range of steps, a step, a switch.

Flow: browser → **here** → `smon.api.pages.job`, `smon.api.pages.heat`.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import QueryParams

from dashboards.web.views.time import Range
from dashboards.web.views.where import HeatAsked, Show
from smon.errors import WireError
from smon.wire.problems import Problem

_MAX_STEP: Final = 2**53


def whole_number(query: QueryParams, name: str) -> int | None:
    """A number of the query; None if it is not there, or empty.

    Raises
    ------
    WireError
        It is no whole number, or negative.
    """
    text = query.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_STEP:
        raise WireError(Problem.INVALID, f"{name}: expected a whole number")
    return int(text)


def range_of(query: QueryParams) -> Range:
    """The chosen steps: ``from`` and ``to``, in either order.

    Raises
    ------
    WireError
        One of them is no number.
    """
    first, last = whole_number(query, "from"), whole_number(query, "to")
    if first is not None and last is not None and first > last:
        first, last = last, first
    return Range(first, last)


def heat_asked(query: QueryParams) -> HeatAsked:
    """What of the heat map: ``show``, ``step``, ``group``.

    Raises
    ------
    WireError
        One of them is not one of the things that there are.
    """
    try:
        show = Show(query.get("show") or Show.EXACT)
    except ValueError:
        known = ", ".join(Show)
        raise WireError(Problem.INVALID, f"show: expected one of {known}") from None
    return HeatAsked(show, whole_number(query, "step"), whole_number(query, "group"))
