"""Numbers for people: three significant digits, always with a unit."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from smon.render.amounts import gpu_time
from smon.render.words import seconds

_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_UNKNOWN: Final = "–"


def duration(value: float | None) -> str:
    """Step times and the like: ms below one second."""
    return _UNKNOWN if value is None else seconds(value)


def difference(value: float | None) -> str:
    """As `duration`, with its sign."""
    if value is None:
        return _UNKNOWN
    return f"{'+' if value >= 0 else '−'}{seconds(abs(value))}"


def percent(value: float | None) -> str:
    """A part of a whole."""
    return _UNKNOWN if value is None else f"{value:.1%}".replace("%", " %").replace("-", "−")


def times(value: float | None) -> str:
    """A slowdown."""
    return _UNKNOWN if value is None else f"{value:.3f} ×"


def gpu_hours(value: float | None) -> str:
    """GPU-hours per day; GPU-days where that is shorter."""
    return _UNKNOWN if value is None else f"{gpu_time(value)}/day"


def money(value: float | None) -> str:
    """Money per day."""
    return _UNKNOWN if value is None else f"${value:,.0f}/day"


def age(value_s: float | None) -> str:
    """How long ago, in one unit."""
    if value_s is None:
        return _UNKNOWN
    value_s = max(value_s, 0.0)
    for limit, size, unit in (
        (_MINUTE_S, 1.0, "s"),
        (_HOUR_S, _MINUTE_S, "min"),
        (2 * _DAY_S, _HOUR_S, "h"),
    ):
        if value_s < limit:
            return f"{value_s / size:.0f} {unit}"
    return f"{value_s / _DAY_S:.0f} d"


def utc(value_s: float | None) -> str:
    """A moment, in UTC."""
    if value_s is None:
        return _UNKNOWN
    moment = datetime.fromtimestamp(value_s, tz=UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def whole(value: float | None) -> str:
    """A count."""
    return _UNKNOWN if value is None else f"{value:,.0f}"


def bytes_of(value: float | None) -> str:
    """A size."""
    if value is None:
        return _UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:  # noqa: PLR2004  # of binary units
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
