"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

#: Far more than anything takes, also on a machine that stands still for a while.
PATIENCE_S: Final = 120.0


def wait_until(
    true: Callable[[], T], what: str, seconds: float = PATIENCE_S, pause_s: float = 0.02
) -> T:
    """Wait until something is so; a test that waits in vain fails.

    Parameters
    ----------
    what
        It is that is waited for.
    pause_s
        From one look to the next: longer ones where a look takes time.

    Returns
    -------
    T
        What the last look gave.
    """
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(pause_s)
    return found


async def wait_in_loop(true: Callable[[], object], what: str) -> None:
    """As `wait_until`, while the tasks of this loop go on."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"waited in vain: {what}"
        await asyncio.sleep(0.005)
