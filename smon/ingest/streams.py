"""What has come of each stream: marks, batches in flight, digests of late.

Flow: `smon.ingest.service` asks **here** whether a batch is new. One copy per process, made from
the database and the log, and only ever behind the truth: a batch that another server has stored is
taken once more, and `smon.store.commit` drops it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from smon.store.commit import Key
from smon.store.streams import StreamInfo

#: Holes in the numbers of a stream that are remembered: agents send a few ahead.
MAX_AHEAD: Final = 4096

#: Streams that are remembered, and for how long after their last batch or heartbeat: most are over
#: by then. Of others the database is asked again.
MAX_STREAMS: Final = 65_536
KEEP_STREAMS_S: Final = 600.0

#: Digests that are remembered, of all streams together: 60 MB at most. Who does not know whether a
#: batch was taken sends it again within a minute (``SMON_RETRY_MAX_S`` of the agent); what came
#: minutes ago is known by its numbers only.
MAX_DIGESTS: Final = 1 << 18
KEEP_DIGESTS_S: Final = 300.0


class Ranges:
    """A set of sequence numbers as ascending, disjoint stretches."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Add all numbers from first to last."""
        # Stretches from `low` up to `high` touch the new one and become part of it.
        low = bisect_right(self._firsts, first)
        if low and self._lasts[low - 1] >= first - 1:
            low -= 1
        high = bisect_right(self._firsts, last + 1)
        if low < high:
            first = min(first, self._firsts[low])
            last = max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def missing(self, first: int, last: int) -> int | None:
        """The first number from first to last that is not in the set; None if all are."""
        at = bisect_right(self._firsts, first) - 1
        if at < 0 or self._lasts[at] < first:
            return first
        return self._lasts[at] + 1 if self._lasts[at] < last else None

    def leaves_hole(self, number: int) -> bool:
        """Whether one more hole would be there with this number."""
        near = (number - 1, number, number + 1)
        apart = all(each < 0 or self.missing(each, each) is not None for each in near)
        return apart and number != 0

    @property
    def next_seq(self) -> int:
        """The first number from 0 that is not in the set."""
        return self._lasts[0] + 1 if self._firsts and self._firsts[0] == 0 else 0

    @property
    def holes(self) -> int:
        """Stretches of missing numbers below the largest one in the set."""
        return len(self._firsts) - bool(self.next_seq)


@dataclass(slots=True)
class StreamState:
    """What is known of a stream.

    Attributes
    ----------
    asked_ns
        When the database was asked last.
    used_s
        When it was looked up last, as `StreamTable` reckons time.
    """

    info: StreamInfo
    asked_ns: int
    used_s: float = 0.0
    epochs: dict[int, Ranges] = field(default_factory=dict)

    def update(self, info: StreamInfo, now_ns: int) -> None:
        """Take over what the database says; what is known besides stays."""
        self.info, self.asked_ns = info, now_ns
        for epoch, ranges in info.covered.items():
            self.add_all(epoch, ranges)

    def add_all(self, epoch: int, ranges: Iterable[Sequence[int]]) -> None:
        """Add stretches of an epoch."""
        mine = self.ranges(epoch)
        for first, last in ranges:
            mine.add(first, last)

    def ranges(self, epoch: int) -> Ranges:
        """Sequence numbers of an epoch that are durable here or stored."""
        return self.epochs.setdefault(epoch, Ranges())


class StreamTable:
    """The streams that this process has met lately.

    Parameters
    ----------
    capacity
        Streams that are remembered.
    keep_s
        A stream that was not looked up for so long is forgotten when another one comes.
    monotonic
        Seconds that never go back.
    """

    __slots__ = ("_capacity", "_keep_s", "_monotonic", "_states")

    def __init__(
        self,
        capacity: int = MAX_STREAMS,
        keep_s: float = KEEP_STREAMS_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._keep_s = keep_s
        self._monotonic = monotonic
        # The one that was looked up longest ago first.
        self._states: OrderedDict[tuple[str, str], StreamState] = OrderedDict()

    def get(self, tenant_id: str, stream_id: str) -> StreamState | None:
        """A stream of this tenant; None if it is not known here."""
        state = self._states.get((tenant_id, stream_id))
        if state is not None:
            self._use((tenant_id, stream_id), state)
        return state

    def adopt(
        self, info: StreamInfo, logged: Iterable[tuple[int, int, int]], now_ns: int
    ) -> StreamState:
        """Take over what the database says of a stream.

        Parameters
        ----------
        logged
            (epoch, first, last) of its batches in the log, taken **before** the database was asked.
        """
        place = (info.tenant_id, info.id)
        state = self._states.get(place)
        if state is None:
            state = self._states[place] = StreamState(info, now_ns)
        state.update(info, now_ns)
        for epoch, first, last in logged:
            state.ranges(epoch).add(first, last)
        self._use(place, state)
        self._forget_old()
        return state

    def _use(self, place: tuple[str, str], state: StreamState) -> None:
        state.used_s = self._monotonic()
        self._states.move_to_end(place)

    def _forget_old(self) -> None:
        before_s = self._monotonic() - self._keep_s
        while len(self._states) > self._capacity or (
            next(iter(self._states.values())).used_s < before_s
        ):
            self._states.popitem(last=False)

    def forget(self, stream_id: str) -> None:
        """Ask the database again when the stream comes next."""
        for place in [place for place in self._states if place[1] == stream_id]:
            del self._states[place]

    def __len__(self) -> int:
        return len(self._states)


class Digests:
    """Digests of the batches that came last.

    They are kept in two halves: when the younger one is full or old enough, the older one goes, and
    the younger one takes its place. So little load takes little memory, however long it lasts.

    Parameters
    ----------
    capacity
        Digests in both halves.
    keep_s
        A digest is remembered for at least so long, unless there are too many, and for about twice
        that at most.
    monotonic
        Seconds that never go back.
    """

    __slots__ = ("_half", "_keep_s", "_monotonic", "_older", "_turned_s", "_younger")

    def __init__(
        self,
        capacity: int = MAX_DIGESTS,
        keep_s: float = KEEP_DIGESTS_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._half = max(capacity // 2, 1)
        self._keep_s = keep_s
        self._monotonic = monotonic
        self._older: dict[Key, bytes] = {}
        self._younger: dict[Key, bytes] = {}
        self._turned_s = monotonic()

    def get(self, key: Key) -> str | None:
        """Digest of a batch, hexadecimal; None if it is not remembered."""
        digest = self._younger.get(key) or self._older.get(key)
        return None if digest is None else digest.hex()

    def put(self, key: Key, digest: str) -> None:
        """Remember the digest of a batch; the oldest are forgotten."""
        now_s = self._monotonic()
        if len(self._younger) >= self._half or now_s - self._turned_s >= self._keep_s:
            self._older, self._younger = self._younger, {}
            self._turned_s = now_s
        self._younger[key] = bytes.fromhex(digest)


class Deduplication:
    """Decides whether a batch is new here. A seam: the tests of the tests switch it off."""

    __slots__ = ()

    def missing(self, state: StreamState, epoch: int, first: int, last: int) -> int | None:
        """The first of these sequence numbers that has not come; None: it is a duplicate."""
        return state.ranges(epoch).missing(first, last)
