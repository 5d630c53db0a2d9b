"""What agents say of themselves in their heartbeats, added up for the metrics.

Flow: `smon.api.agents` → **here** → `smon.ingest.metrics`. Only sums: the figures of one agent are
in the database, with its stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from smon.ingest.metrics import IngestMetrics, reason_label

#: Streams that are remembered; the ones that are silent longest are forgotten.
_REMEMBERED: Final = 262_144

_NS: Final = 10**9


@dataclass(slots=True)
class _Figures:
    seen_ns: int = 0
    spool_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class AgentFigures:
    """Sums over the streams of which a heartbeat came lately.

    Parameters
    ----------
    down_s
        A stream without heartbeat for so long counts no more.
    clock
        Unix time, ns.
    """

    __slots__ = ("_clock", "_down_ns", "_figures", "_lock", "_metrics")

    def __init__(self, metrics: IngestMetrics, down_s: float, clock: Callable[[], int]) -> None:
        self._metrics = metrics
        self._down_ns = round(down_s * _NS)
        self._clock = clock
        self._lock = Lock()
        self._figures: OrderedDict[str, _Figures] = OrderedDict()
        metrics.streams.set_function(lambda: len(self._recent()))
        metrics.spool_bytes.set_function(
            lambda: sum(figures.spool_bytes for figures in self._recent())
        )

    def note(self, stream_id: str, spool_bytes: int, dropped: Mapping[str, int]) -> None:
        """Take over what a heartbeat says of a stream.

        Parameters
        ----------
        dropped
            Events by reason since the agent began; fewer than before: it began anew.
        """
        with self._lock:
            figures = self._figures.pop(stream_id, None) or _Figures()
            self._figures[stream_id] = figures
            figures.seen_ns, figures.spool_bytes = self._clock(), spool_bytes
            counts: dict[str, int] = {}
            for reason, count in dropped.items():
                label = reason_label(reason)
                counts[label] = counts.get(label, 0) + count
            for label, count in counts.items():
                before = figures.dropped.get(label, 0)
                more = count - before if count >= before else count
                self._metrics.dropped.labels(label).inc(more)
            figures.dropped = counts
            while len(self._figures) > _REMEMBERED:
                self._figures.popitem(last=False)

    def _recent(self) -> list[_Figures]:
        since = self._clock() - self._down_ns
        with self._lock:
            return [figures for figures in self._figures.values() if figures.seen_ns >= since]
