"""How much may come in at a time: bytes in flight, requests and events of a tenant.

Flow: `smon.api.ingest` asks `smon.ingest.service`, which asks **here**, before a body is read.
"""

from __future__ import annotations

import random
import time
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import Gauge

from smon.config import Settings
from smon.errors import WireError
from smon.wire.problems import Problem

#: First pause of who is refused for want of memory, how often it doubles, and how much it varies.
_FIRST_PAUSE_S: Final = 6.0
_DOUBLINGS: Final = 4
_SPREAD: Final = 0.5

#: A tenant may hold so many times what it leaves free, as a queue of a shared buffer: alone three
#: quarters of the room, two of them three sevenths each; whoever comes with nothing finds some.
_OF_FREE: Final = 3

#: A bucket holds what comes in so many seconds: agents flush in bursts.
_BURST_S: Final = 2.0

#: Streams and tenants of which refusals and buckets are remembered.
_REMEMBERED: Final = 65_536


def jitter() -> float:
    """A random factor between a half and one and a half."""
    return random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311  # spreads retries, no secret


class InFlight:
    """Bytes of bodies that are being taken in, and the patience of those who are refused.

    No tenant takes all the room: one that has nothing in flight is refused only if the rest is too
    small for its body.

    Parameters
    ----------
    spread
        Factor of each pause; random, so that those refused together do not come together.
    """

    __slots__ = ("_bytes", "_gauge", "_held", "_limit", "_refusals", "_spread")

    def __init__(self, limit: int, gauge: Gauge, spread: Callable[[], float] = jitter) -> None:
        self._limit = limit
        self._gauge = gauge
        self._spread = spread
        self._bytes = 0
        self._held: Counts[str] = Counts()
        self._refusals: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def reserve(self, size: int, tenant_id: str, stream_id: str = "") -> Iterator[None]:
        """Room for a body of this size, while the context lasts.

        Raises
        ------
        WireError
            There is none; the pause doubles with each refusal in a row.
        """
        who = f"{tenant_id}/{stream_id}"
        if not self._fits(size, tenant_id):
            raise WireError(
                Problem.OVERLOADED,
                "the server takes in as many bodies as it has memory for: come again later",
                self._pause_s(who),
            )
        self._refusals.pop(who, None)
        self._change(tenant_id, size)
        try:
            yield
        finally:
            self._change(tenant_id, -size)

    def _fits(self, size: int, tenant_id: str) -> bool:
        """Whether there is room: always for a body that is alone."""
        free, held = self._limit - self._bytes - size, self._held[tenant_id]
        most = _OF_FREE * free if held else self._limit
        return not self._bytes or (free >= 0 and held + size <= most)

    def _change(self, tenant_id: str, size: int) -> None:
        self._bytes += size
        self._held[tenant_id] += size
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._gauge.set(self._bytes)

    def _pause_s(self, who: str) -> float:
        refusals = self._refusals.pop(who, 0)
        self._refusals[who] = refusals + 1
        if len(self._refusals) > _REMEMBERED:
            self._refusals.popitem(last=False)
        return _FIRST_PAUSE_S * (1 << min(refusals, _DOUBLINGS)) * self._spread()


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_s: float


class TenantRates:
    """Requests and events per second of each tenant; 0: no limit."""

    __slots__ = ("_buckets", "_limits", "_monotonic")

    def __init__(self, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limits = {
            "requests": settings.tenant_requests_per_s,
            "events": settings.tenant_events_per_s,
        }
        self._monotonic = monotonic
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def take(self, tenant_id: str, events: int) -> None:
        """Count one request with so many events.

        Raises
        ------
        WireError
            The tenant is over one of its limits.
        """
        wanted = {"requests": 1, "events": events}
        now_s = self._monotonic()
        for what, limit in self._limits.items():
            wait_s = self._wait_s(tenant_id, what, now_s) if limit else 0.0
            if wait_s:
                raise WireError(
                    Problem.RATE_LIMITED,
                    f"expected at most {limit:g} {what} per second of this tenant",
                    wait_s,
                )
        for what, limit in self._limits.items():
            if limit:
                self._buckets[tenant_id, what].level -= wanted[what]

    def _wait_s(self, tenant_id: str, what: str, now_s: float) -> float:
        """Time until the bucket holds something again.

        A bucket may go below empty, by one request: else a batch larger than the bucket would
        never pass. The debt is paid off before the next one passes.
        """
        limit = self._limits[what]
        full = max(limit * _BURST_S, 1.0)
        bucket = self._buckets.pop((tenant_id, what), None) or _Bucket(full, now_s)
        bucket.level = min(full, bucket.level + (now_s - bucket.filled_s) * limit)
        bucket.filled_s = now_s
        self._buckets[tenant_id, what] = bucket
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        return 0.0 if bucket.level >= min(1.0, full) else (1.0 - bucket.level) / limit
