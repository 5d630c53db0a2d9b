"""One stream on its way: which batch is next, under which number, and what its answer means.

Flow: `ingest_agents.spool.reader` → **here** → `ingest_agents.sender`. A stream has one batch in
flight at a time, so that the server's ``next_seq`` is the whole truth about it.

The spool counts for ever from 0. A new epoch begins anew on the wire, with what is not sent yet:
``epoch.json`` says which number of the spool became which of the epoch.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ingest_agents.pace import Pace
from ingest_agents.payload import Gap, gap_of, last_seq, parts_of, recoded
from ingest_agents.spool.folder import (
    CHECKPOINT_NAME,
    DEAD_NAME,
    EPOCH_NAME,
    GONE,
    LOCK_NAME,
    is_held,
    read_checkpoint,
    read_json,
    read_spec,
    segments_of,
    size_of,
    write_json,
)
from ingest_agents.spool.reader import DAMAGED, SpoolReader
from smon.errors import StoreError
from smon.wire import Batch, BatchKind

#: What the server lost although it had acknowledged it, e.g. restored from an older backup.
NOT_ON_SERVER: Final = "not-on-server"

#: Far fewer than eviction leaves alone beyond the checkpoint.
_SAVE_BATCHES: Final = 128

#: A server that is down may have in its log what another one lacks; so long it is waited for. After
#: that, what the spool has no more becomes a GAP. (A server that comes back still later with it is
#: believed: `smon.store.commit`.)
_HOLE_S: Final = 120.0

#: A batch of this many parts and more is too large in some other way.
_MAX_PARTS: Final = 64


@dataclass(frozen=True, slots=True)
class _Hole:
    """What a server lacks although it, or another, has acknowledged it, and the spool has no more.

    Attributes
    ----------
    wire
        Its first number.
    since
        Unix seconds.
    """

    wire: int
    since: float


@dataclass(frozen=True, slots=True)
class Numbering:
    """How numbers of the spool become numbers on the wire.

    Attributes
    ----------
    epoch
        On the wire.
    base
        Number of the spool that would be number 0 of this epoch.
    split_seq
        A batch of the spool that the epoch begins with in parts; -1: none.
    parts, part
        So many it is cut into; the first of them in this epoch.
    """

    epoch: int
    base: int
    split_seq: int = -1
    parts: int = 0
    part: int = 0

    @property
    def lead(self) -> int:
        """Numbers on the wire that are parts of one batch."""
        return self.parts - self.part

    def local(self, wire: int) -> int:
        """Number in the spool of what has this number on the wire."""
        return self.split_seq if wire < self.lead else wire + self.base

    def document(self) -> dict[str, int]:
        """The JSON object of it."""
        return {
            "epoch": self.epoch,
            "base": self.base,
            "split_seq": self.split_seq,
            "parts": self.parts,
            "part": self.part,
        }


def _numbering(folder: Path, epoch: int) -> Numbering:
    try:
        document = read_json(folder / EPOCH_NAME)
        names = ("epoch", "base", "split_seq", "parts", "part")
        return Numbering(*(int(document[name]) for name in names))
    except (StoreError, KeyError, TypeError, ValueError):
        return Numbering(epoch, 0)


class Shipper:
    """A stream of the spool; used by one thread at a time.

    Parameters
    ----------
    folder
        Of the stream.
    pace
        Pauses of this stream alone.
    dead_bytes
        Refused batches that are kept.
    wall, clock
        Unix seconds, and seconds that never go back.

    Attributes
    ----------
    spec
        Who writes.
    numbering
        Of the present epoch.
    stream_id
        The server's; None before hello.
    tries
        How often the present batch has been sent.
    dropped
        Events that the agent itself gave up, by reason.
    wants_hello
        The server has to be asked where the stream stands.
    lagging
        The server acknowledged a batch, but said that it lacks one before it.
    blocked
        Why the server does not take the stream at all; empty: it does.
    ended
        Everything up to the END is acknowledged.

    Raises
    ------
    StoreError
        The folder has no description.
    """

    def __init__(
        self,
        folder: Path,
        pace: Pace,
        *,
        dead_bytes: int,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.pace = folder, pace
        self.spec = read_spec(folder)
        self.numbering = _numbering(folder, self.spec.epoch)
        self.stream_id: str | None = None
        self.tries = 0
        self.dropped: Counter[str] = Counter()
        self.wants_hello, self.lagging, self.ended = True, False, False
        self.blocked = ""
        self._reader, self._wall, self._clock = SpoolReader(folder), wall, clock
        self._since: float | None = None
        self._dead_bytes = dead_bytes
        self._wire = 0
        self._message: Batch | None = None
        self._conflict = self._untouched = self._recoded = False
        self._hole: _Hole | None = None
        self._saved = read_checkpoint(folder).next_seq
        # Segments go when all of them is acknowledged: they may be ahead of the checkpoint.
        self._acknowledged = max([self._saved, *(first for first, _ in segments_of(folder)[:1])])

    @property
    def pending(self) -> Batch | None:
        """The batch that was sent last, as long as it is not answered for good."""
        return self._message

    # --- sending ------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a batch could be sent now."""
        if self._message is None and not self.wants_hello and not self.ended:
            local = self.numbering.local(self._wire)
            lead = self._wire < self.numbering.lead
            self._message = self._part(local) if lead else self._whole(local)
            self.tries, self._recoded = 0, False
            if self._message is None:
                self._since = None
            elif self._since is None:
                self._since = self._wall()
        return self._message is not None

    def message(self) -> Batch | None:
        """The batch to send, numbered for the wire; the same one until it is answered for good."""
        if not self.waiting:
            return None
        self.tries += 1
        self._untouched = False
        return self._message

    def _whole(self, local: int) -> Batch | None:
        batch = self._reader.next(local)
        if batch is None:
            return None
        if batch.kind is not BatchKind.GAP:
            return replace(batch, seq=batch.seq - self.numbering.base)
        gap = self._explained(gap_of(batch))
        while (more := self._reader.next(gap.last_seq + 1)) is not None:
            if more.kind is not BatchKind.GAP or gap_of(more).reason != gap.reason:
                break
            gap = gap.joined(gap_of(more))
        return gap.shifted(-self.numbering.base).batch()

    def _explained(self, gap: Gap) -> Gap:
        """A hole below the checkpoint is none of the spool."""
        if gap.reason != DAMAGED or gap.last_seq >= self._acknowledged:
            return gap
        return replace(gap, reason=NOT_ON_SERVER)

    def _part(self, local: int) -> Batch | None:
        """A part of the batch that this epoch begins with."""
        batch = self._reader.next(local)
        if batch is None:
            return None
        pieces = parts_of(batch, self.numbering.parts)
        index = self.numbering.part + self._wire
        if pieces is None:
            return Gap(self._wire, self._wire, 0, DAMAGED).batch()
        return replace(pieces[index], seq=self._wire)

    # --- answers ------------------------------------------------------------------------------

    def acknowledged(self, next_seq: int) -> None:
        """The server has the present batch, and says what it needs next."""
        message = self._message
        if message is None:
            return
        wire = last_seq(message) + 1
        self._message, self._conflict = None, False
        self.pace.succeeded()
        # Another process of the server may have what comes before; if not, a hello will tell.
        self.lagging = next_seq < wire
        ended = message.kind is BatchKind.END
        if next_seq > wire:
            end, closed = self._tail()
            if (local := self.numbering.local(next_seq)) <= end:
                wire, ended = next_seq, closed and local == end
        self._advance(wire)
        if not self.lagging:
            self._hole = None
        self.ended = ended and self._hole is None

    def _advance(self, wire: int) -> None:
        self._wire = wire
        local = self.numbering.local(wire)
        self._acknowledged = max(self._acknowledged, local)
        self._release(local)

    def _release(self, local: int) -> None:
        """Remove segments of which the server has everything, but never the last one."""
        segments = segments_of(self.folder)
        for (_, path), (following, _) in pairwise(segments):
            if following > local:
                break
            with contextlib.suppress(OSError):
                path.unlink()

    def refused(self, status: int, problem: str) -> None:
        """The server will never take the present batch: keep it aside, and send a GAP instead."""
        message = self._message
        if message is None:
            return
        self.tries = 0
        if message.kind is BatchKind.GAP:
            # Not even that: go on behind it, in a new epoch.
            self.dropped["gap-refused"] += message.events
            self._renumber(self._from(last_seq(message) + 1))
            return
        self._bury(message)
        reason = f"refused-{status}-{problem}" if problem else f"refused-{status}"
        self.dropped[reason] += message.events
        gap = Gap(
            message.seq,
            message.seq,
            message.events,
            reason,
            message.first_step,
            message.last_step,
        )
        self._message = gap.batch()

    def recode(self) -> bool:
        """Put the present batch into a simpler encoding, once; False if that is not possible."""
        simpler = None if self._message is None or self._recoded else recoded(self._message)
        if simpler is None:
            return False
        self._message, self._recoded = simpler, True
        return True

    def split(self, limit_bytes: int) -> bool:
        """Cut the present batch so that its parts fit; False if it is a part, or cannot be cut.

        The parts need numbers of their own: a new epoch begins with them.
        """
        message = self._message
        if message is None or message.seq < self.numbering.lead:
            return False
        parts = max(2, -(-2 * len(message.body) // max(limit_bytes, 1)))
        if parts > _MAX_PARTS or parts_of(message, parts) is None:
            return False
        local = self.numbering.local(message.seq)
        self._renumber(Numbering(0, local + 1 - parts, local, parts))
        return True

    def conflict(self) -> None:
        """The server has something else under this number: ask it, then begin a new epoch."""
        self.wants_hello = self._conflict = True

    def _renumber(self, numbering: Numbering) -> None:
        """Begin a new epoch; it counts only once it is on the disk."""
        fresh = replace(numbering, epoch=self.numbering.epoch + 1)
        try:
            write_json(self.folder / EPOCH_NAME, fresh.document(), sync=True)
        except OSError:
            self.pace.failed()
            self.wants_hello = True
            return
        self.numbering, self._wire, self._untouched = fresh, 0, True
        self._message, self._conflict = None, False
        self.wants_hello = True

    def _from(self, wire: int) -> Numbering:
        """A new epoch that begins with what has this number now."""
        now = self.numbering
        if wire >= now.lead:
            return Numbering(0, now.local(wire))
        left = now.lead - wire
        return Numbering(0, now.split_seq + 1 - left, now.split_seq, now.parts, now.part + wire)

    def _rest(self) -> Numbering:
        """A new epoch for what has not been acknowledged."""
        rest = self._from(self._wire)
        if rest.lead or rest.base >= self._acknowledged:
            return rest
        return replace(rest, base=self._acknowledged)

    # --- hello --------------------------------------------------------------------------------

    def greeting(self) -> dict[str, Any]:
        """The stream as it stands in a hello."""
        return {**self.spec.document(), "epoch": self.numbering.epoch}

    def greeted(self, answer: Mapping[str, Any]) -> None:
        """The server knows the stream, and says from where to go on."""
        try:
            stream_id, epoch = str(answer["stream_id"]), int(answer["epoch"])
            next_seq = int(answer["next_seq"])
        except (KeyError, TypeError, ValueError):
            self.pace.failed()
            return
        if epoch != self.numbering.epoch:
            # Another spool of this key was further: go on in an epoch of our own.
            self.numbering = replace(self.numbering, epoch=max(epoch, self.numbering.epoch))
            self._renumber(self._rest())
            return
        self.stream_id, self.blocked = stream_id, ""
        message, stuck = self._message, self._conflict
        if self._untouched and next_seq > 0:
            # Somebody else has used this epoch.
            self._renumber(self._rest())
            return
        if stuck and (message is None or next_seq <= message.seq):
            self._renumber(self._rest())
            return
        end, closed = self._tail()
        local = self.numbering.local(next_seq)
        if local > end:
            # It has more than this spool ever held: the spool was made anew.
            self._wire = max(self._first() - self.numbering.base, 0)
            self._renumber(self._rest())
            return
        self._message, self._conflict = None, False
        self.wants_hello = False
        wire = self._behind_hole(next_seq)
        self.lagging = wire != next_seq
        self._advance(wire)
        self.ended = closed and local == end

    def _behind_hole(self, next_seq: int) -> int:
        """The number to go on with: not with what only another server can have, for a while."""
        known = self._acknowledged - self.numbering.base
        held = min(self._first() - self.numbering.base, known)
        if next_seq >= held or next_seq < self.numbering.lead:
            self._hole = None
            return next_seq
        old, now = self._hole, self._clock()
        self._hole = _Hole(next_seq, now if old is None else old.since)
        if now - self._hole.since >= _HOLE_S:
            return next_seq
        # What the spool still has is sent again, but once.
        return known if old is not None and old.wire == next_seq else held

    def stale(self) -> None:
        """The server knows a later epoch of this stream."""
        self._renumber(self._rest())

    def _tail(self) -> tuple[int, bool]:
        """First number that the spool does not have yet, and whether the stream has its END."""
        segments = segments_of(self.folder)
        if not segments:
            return self._acknowledged, False
        reader = SpoolReader(self.folder)
        at, closed = segments[-1][0], False
        try:
            while (batch := reader.next(at)) is not None:
                at, closed = last_seq(batch) + 1, batch.kind is BatchKind.END
        finally:
            reader.forget()
        return max(at, self._acknowledged), closed

    @property
    def closed(self) -> bool:
        """Whether the spool has the END: sent or not, acknowledged or not."""
        return self._tail()[1]

    def _first(self) -> int:
        segments = segments_of(self.folder)
        return segments[0][0] if segments else self._acknowledged

    # --- the rest -----------------------------------------------------------------------------

    @property
    def next_seq(self) -> int:
        """First number of the spool that the server has not acknowledged."""
        return self._acknowledged

    @property
    def next_wire(self) -> int:
        """The same as the server counts."""
        return self._wire

    @property
    def keep(self) -> int:
        """First number that has certainly not been sent; see `ingest_agents.spool.eviction`."""
        if self._message is None:
            return max(self.numbering.local(self._wire), self._acknowledged)
        last = last_seq(self._message)
        return self.numbering.local(last) + 1

    def backlog(self) -> tuple[int, float | None]:
        """(bytes of the stream's segments, unix seconds since when something waits or None)."""
        segments = segments_of(self.folder)
        since = self._since
        if since is not None and len(segments) > 1:
            with contextlib.suppress(OSError):
                since = min(since, segments[0][1].stat().st_mtime)
        return sum(size_of(path) for _, path in segments), since

    @property
    def abandoned(self) -> bool:
        """Nobody writes any more."""
        return not is_held(self.folder / LOCK_NAME)

    def forget(self) -> None:
        """The files have changed: look at them anew."""
        self._reader.forget()

    def save_some(self) -> None:
        """`save`, if many batches were acknowledged since: it costs more than a request."""
        if self._acknowledged - self._saved >= _SAVE_BATCHES:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, if there is news."""
        if self._saved == self._acknowledged:
            return
        document = {"next_seq": self._acknowledged, "stream_id": self.stream_id or ""}
        with contextlib.suppress(OSError):
            write_json(self.folder / CHECKPOINT_NAME, document)
            self._saved = self._acknowledged

    def remove(self) -> None:
        """Remove the folder of a stream that has ended; nothing is left to send."""
        self._reader.forget()
        gone = self.folder.with_name(f"{GONE}{self.folder.name}")
        with contextlib.suppress(OSError):
            # By another name first: half a folder would look like a stream that has lost data.
            self.folder.rename(gone)
            shutil.rmtree(gone)

    def _bury(self, message: Batch) -> None:
        """Keep a refused batch, for people to look at; the oldest go when there are too many."""
        place = self.folder.parent / DEAD_NAME
        name = f"{self.folder.name}-{self.numbering.epoch}-{message.seq:012d}"
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(message.to_frame())
            kept = sorted(place.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name))
            total = sum(map(size_of, kept))
            for path in kept:
                if total <= self._dead_bytes:
                    break
                total -= size_of(path)
                path.unlink()
