"""GPU time and money for people: three significant digits, a unit, large sums in larger units."""

from __future__ import annotations

import math
from typing import Final

_HOURS: Final = 24.0
_IN_DAYS_FROM: Final = 1000.0
_WHOLE_FROM: Final = 100.0
_UNKNOWN: Final = "–"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits; whole ones keep all of theirs."""
    if value == 0:
        return "0"
    after = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{min(after, digits)}f}"


def gpu_hours(hours: float | None) -> str:
    """A sum of GPU-hours in a column: one unit for all."""
    return _UNKNOWN if hours is None else f"{significant(hours)} GPU-h"


def gpu_time(hours: float | None) -> str:
    """A sum of GPU-hours in a sentence; GPU-days where that is shorter."""
    if hours is None or hours < _IN_DAYS_FROM:
        return gpu_hours(hours)
    return f"{significant(hours / _HOURS)} GPU-days"


def dollars(amount: float | None) -> str:
    """A sum of money; cents where they matter."""
    if amount is None:
        return _UNKNOWN
    return f"${amount:,.0f}" if amount >= _WHOLE_FROM else f"${amount:,.2f}"


def share(value: float | None) -> str:
    """A part of a whole."""
    return _UNKNOWN if value is None else f"{value:.1%}".replace("%", " %")
