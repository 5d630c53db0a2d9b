"""Limits of a batch, in the units of the wire: sizes, counts, times.

Flow: `smon.config` → **here** → `smon.ingest.decode`, `smon.ingest.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from smon.config import Settings

#: Up to this decoded size, the ratio to the encoded one does not matter: small bodies of zeros
#: compress well and harm nobody.
RATIO_FREE_BYTES: Final = 64 << 10

#: Memory that one zstd decoder may take for its window.
MAX_WINDOW_BYTES: Final = 8 << 20

#: Blocks of one zstd frame: 32 MiB in full blocks are 256; who flushes often makes more.
MAX_BLOCKS: Final = 8192

#: Windows that one batch may touch: each becomes a file.
MAX_WINDOWS: Final = 256

#: Sequence numbers that one gap may cover: a year of ten batches a second.
MAX_GAP: Final = 1 << 28

#: Events that one gap may say are lost: sums of them fit into 64 bits.
MAX_LOST: Final = 1 << 40

#: Steps: exact in every JSON reader, and far beyond any job.
MAX_STEP: Final = 1 << 53

#: Values of one document of side evidence.
MAX_VALUES: Final = 2_000_000

_NS: Final = 10**9
_MAX_NS: Final = 2**62


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may be.

    Attributes
    ----------
    encoded, decoded
        Bytes of the body.
    ratio
        Decoded over encoded size, above `RATIO_FREE_BYTES`.
    events
        Rows.
    duration_ns, past_ns, future_ns
        Longest op; oldest and latest start, from now, of a live job with unix time.
    """

    encoded: int
    decoded: int
    ratio: int
    events: int
    duration_ns: int
    past_ns: int
    future_ns: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The limits that these settings give."""
        return cls(
            encoded=settings.max_body_bytes,
            decoded=settings.max_decoded_bytes,
            ratio=settings.max_ratio,
            events=settings.max_events,
            duration_ns=min(round(settings.max_duration_s * _NS), _MAX_NS),
            past_ns=min(round(settings.max_past_s * _NS), _MAX_NS),
            future_ns=min(round(settings.max_future_s * _NS), _MAX_NS),
        )

    def decoded_cap(self, encoded: int) -> int:
        """Bytes that a body of this encoded size may decode to."""
        return min(self.decoded, max(RATIO_FREE_BYTES, self.ratio * encoded))


#: For what was accepted before: settings that have become stricter since lose nothing.
TRUSTED: Final = Limits(
    encoded=1 << 40,
    decoded=1 << 40,
    ratio=1 << 40,
    events=1 << 40,
    duration_ns=_MAX_NS,
    past_ns=_MAX_NS,
    future_ns=_MAX_NS,
)
