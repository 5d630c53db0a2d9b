"""When to try again, by the table of status codes in ``docs/reference/protocol.md``.

Flow: `ingest_agents.sender` tells what happened → **here** → whether it is time. One pace for the
server, one for each stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

#: A server that asks for more is wrong.
_MAX_RETRY_AFTER_S = 3600.0


class Pace:
    """Pauses after failures: exponential, with full jitter, for ever.

    Parameters
    ----------
    min_s, max_s
        The longest that the first pause can be, and any.
    clock
        Seconds that never go back.
    chance
        A number from 0 to 1.
    """

    def __init__(
        self,
        min_s: float,
        max_s: float,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.failures = 0
        self._min_s, self._max_s = min_s, max_s
        self._clock, self._chance = clock, chance
        self._ready_s = float("-inf")

    @property
    def wait_s(self) -> float:
        """Seconds until the next try; 0: now."""
        return max(self._ready_s - self._clock(), 0.0)

    def failed(self, at_least_s: float = 0.0) -> None:
        """It failed: pause, the longer the more often, but at least what the server asked for."""
        highest = min(self._max_s, self._min_s * 2.0 ** min(self.failures, 64))
        self.failures += 1
        self.pause(max(self._chance() * highest, at_least_s))

    def pause(self, seconds: float) -> None:
        """Pause for so long from now, unless it is longer already."""
        self._ready_s = max(self._ready_s, self._clock() + seconds)

    def succeeded(self) -> None:
        """It worked: the next failure is the first."""
        self.failures = 0


def retry_after_s(headers: Mapping[str, str], default: float) -> float:
    """Seconds that an answer asks to wait."""
    text = headers.get("retry-after", "").strip()
    if not (text.isascii() and text.isdigit()):
        return default
    return min(float(text), _MAX_RETRY_AFTER_S)
