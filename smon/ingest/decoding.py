"""Who decodes: what the service asks of them, and the plain one, in the server's own process.

Flow: `smon.ingest.service` → **here** → `smon.ingest.decoder`, or `smon.ingest.fence`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from smon.ingest.decode import Content
from smon.ingest.decoder import content_of
from smon.ingest.limits import Limits
from smon.ingest.parcels import Parcel
from smon.wire import TYPE_JSON

#: Larger bodies, and JSON, which costs more, do not stand before small ones.
LARGE_BYTES: Final = 256 << 10
LARGE_JSON_BYTES: Final = 8 << 10


class Decoder(Protocol):
    """What the service asks of whoever decodes."""

    def start(self) -> None:
        """Be ready for `decode`; called where the event loop runs."""

    async def decode(self, parcel: Parcel) -> Content:
        """What is in a body; raises WireError if it is refused."""

    def problem(self) -> str:
        """Why nothing can be decoded; empty if it can. From any thread."""

    async def stop(self) -> None:
        """End."""


class Here:
    """Decodes in the server's own process: a crash there is a crash of the server."""

    def __init__(self, limits: Limits, threads: int) -> None:
        self._limits = limits
        self._aside = ThreadPoolExecutor(threads, "smon-decode")

    def start(self) -> None:
        """Nothing is needed."""

    async def decode(self, parcel: Parcel) -> Content:
        """What is in a body; a large one is decoded beside the event loop.

        Raises
        ------
        WireError
            It is refused.
        """
        if not is_large(parcel):
            return content_of(parcel, self._limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, content_of, parcel, self._limits)

    def problem(self) -> str:
        """Nothing can go wrong that would leave somebody to say so."""
        return ""

    async def stop(self) -> None:
        """Let the threads go."""
        self._aside.shutdown(wait=True, cancel_futures=True)


def is_large(parcel: Parcel) -> bool:
    """Whether others should not wait for it; what comes from the log is nobody's turn."""
    json = parcel.head.content_type == TYPE_JSON
    limit = LARGE_JSON_BYTES if json else LARGE_BYTES
    return len(parcel.body) >= limit or parcel.producer is None
