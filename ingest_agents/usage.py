"""What the agent itself takes of its host: said in heartbeats, so that anybody can look.

Flow: the process → **here** → `ingest_agents.link`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

#: ``ru_maxrss`` counts KiB on Linux, bytes on macOS.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Usage:
    """CPU time since it was asked last, and memory at its most.

    Parameters
    ----------
    cpu, clock
        Seconds of CPU that this process has used, and of time.
    """

    def __init__(
        self,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu, self._clock = cpu, clock
        self._last = cpu(), clock()

    def since_last(self) -> dict[str, float]:
        """``cpu_ratio`` of one core, and ``rss_bytes``."""
        now = self._cpu(), self._clock()
        used, passed = now[0] - self._last[0], now[1] - self._last[1]
        if passed <= 0:
            return {"rss_bytes": self._rss()}
        self._last = now
        return {"cpu_ratio": round(used / passed, 5), "rss_bytes": self._rss()}

    @staticmethod
    def _rss() -> float:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT)
