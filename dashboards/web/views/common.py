"""What the views of several pages share."""

from __future__ import annotations

from typing import Final

import orjson

#: Icon and word of each state: neither stands without the other.
STATES: Final = {
    "healthy": ("✓", "healthy"),
    "slow": ("▲", "slow"),
    "critical": ("◆", "critical"),
    "incomplete": ("◔", "incomplete"),
    "not_aligned": ("≠", "clocks not aligned"),
    "waiting": ("…", "waiting"),
    "ended": ("■", "ended"),
}


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: it cannot end it, nor begin a comment."""
    text = orjson.dumps(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
