"""Read a stream's batches in order while they are written; what is damaged becomes a GAP.

Flow: segments → **here** → `ingest_agents.shipping`. Numbers are the spool's own. A number that is
missing counts as lost only once something after it is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Final

from ingest_agents.payload import MAX_FLAG, Gap, gap_of, last_seq
from ingest_agents.spool.folder import QUARANTINE_NAME, segments_of, size_of
from smon.errors import WireError
from smon.wire import Batch, BatchKind, batch_of_frame
from smon.wire.frames import HEAD_BYTES, MAX_BODY_BYTES, Damage, Frame, frame_at, scan_frames

DAMAGED: Final = "damaged"

_LOCAL_TYPE: Final = 128

#: Most frames fit; larger ones are read again in a wider view.
_VIEW_BYTES: Final = 256 << 10


class _Segment:
    """One file, from a place on."""

    __slots__ = ("_fruitless", "_handle", "first_seq", "offset", "path", "sound")

    def __init__(self, first_seq: int, path: Path) -> None:
        self.first_seq, self.path = first_seq, path
        self.offset = 0
        self.sound = False
        self._fruitless = (-1, -1)
        self._handle = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self._handle)

    def next(self, *, sealed: bool) -> Frame | Damage | None:
        """The next frame or damage; None if there is no more, or not yet (unless `sealed`)."""
        size = os.fstat(self._handle).st_size
        if self.offset >= size:
            return None
        frame = self._whole(size)
        if frame is not None:
            self.sound = True
            self.offset += frame.end
            return frame
        return self._after_damage(size, sealed=sealed)

    def _whole(self, size: int) -> Frame | None:
        """The frame that begins here, if it is whole."""
        left, width = size - self.offset, _VIEW_BYTES
        while True:
            view = memoryview(os.pread(self._handle, min(width, left), self.offset))
            frame = frame_at(view, 0)
            if frame is not None or width >= min(left, HEAD_BYTES + MAX_BODY_BYTES):
                return frame
            width *= 4

    def _after_damage(self, size: int, *, sealed: bool) -> Damage | None:
        if not sealed and self._fruitless == (self.offset, size):
            return None
        data = os.pread(self._handle, size - self.offset, self.offset)
        for part in scan_frames(data):
            if isinstance(part, Frame) or (sealed and part.end == len(data)):
                end = part.offset if isinstance(part, Frame) else part.end
                damage = Damage(self.offset, self.offset + end)
                self.offset += end
                return damage
        self._fruitless = (self.offset, size)
        return None

    def events_in(self, damage: Damage) -> int:
        """Events of the record that begins there, if its head is still legible; else 0."""
        data = os.pread(self._handle, 512, damage.offset)
        try:
            flags, length = struct.unpack_from("<HH", data, HEAD_BYTES - 2)
            events = json.loads(data[HEAD_BYTES + 2 : HEAD_BYTES + 2 + length])[2]
        except (struct.error, ValueError, LookupError, TypeError):
            return 0
        # Said twice: see `ingest_agents.payload.frame_of`.
        return events if type(events) is int and events == flags < MAX_FLAG else 0


class SpoolReader:
    """Batches of one stream from a number on.

    Parameters
    ----------
    folder
        Of the stream.

    Attributes
    ----------
    damaged
        Records that were lost to damage, and segments that could not be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = 0
        self._segment: _Segment | None = None
        self._held: Batch | None = None
        self._at = 0
        self._legible = 0

    def next(self, seq: int) -> Batch | None:
        """The batch of this number, or a GAP that begins with it; None: not there yet."""
        if seq < self._at:
            self.forget()
        # What is below is passed over, whether something is found or not.
        self._at = seq
        batch, self._held = self._held, None
        while batch is None or last_seq(batch) < seq:
            batch = self._find(seq)
            if batch is None:
                return None
        if batch.seq > seq:
            self._held = batch
            batch = self._lost(seq, batch.seq - 1)
        elif batch.kind is BatchKind.GAP and batch.seq < seq:
            batch = gap_of(batch).after(seq).batch()
        self._at, self._legible = last_seq(batch) + 1, 0
        return batch

    def _lost(self, first: int, last: int) -> Batch:
        self.damaged += last - first + 1
        return Gap(first, last, self._legible if first == last else 0, DAMAGED).batch()

    def _find(self, seq: int) -> Batch | None:
        """The first batch that ends at this number or later."""
        while (segment := self._segment or self._enter(seq)) is not None:
            try:
                part = segment.next(sealed=False)
                later = self._later(segment) if part is None else None
                if later is not None:
                    # All that it will ever hold is there.
                    part = segment.next(sealed=True)
            except OSError:
                if not self._set_aside(segment):
                    return None
                continue
            if isinstance(part, Damage):
                self._legible = segment.events_in(part)
            elif part is not None:
                if (batch := _batch_in(part)) is not None and last_seq(batch) >= seq:
                    return batch
            elif later is None:
                return None
            else:
                self._leave(segment)
                if later > seq:
                    return self._before(seq, later)
        return None

    def _before(self, seq: int, later: int) -> Batch:
        """A GAP up to the next segment: the one before it was read to its end."""
        self.damaged += later - seq
        return Gap(seq, later - 1, self._legible if later == seq + 1 else 0, DAMAGED).batch()

    def _enter(self, seq: int) -> _Segment | None:
        """Open the segment that may hold the number."""
        segments = segments_of(self.folder)
        before = [item for item in segments if item[0] <= seq]
        for first_seq, path in [*before[-1:], *segments[len(before) :]]:
            try:
                self._segment = _Segment(first_seq, path)
            except FileNotFoundError:
                return None
            except OSError:
                if path == segments[-1][1]:
                    return None
                self._quarantine(path)
                continue
            return self._segment
        return None

    def _later(self, segment: _Segment) -> int | None:
        """First number of the segment after this one; None if this is the last."""
        later = [first for first, _ in segments_of(self.folder) if first > segment.first_seq]
        return min(later, default=None)

    def _leave(self, segment: _Segment) -> None:
        """Done with a sealed segment; one without any sound frame goes to quarantine."""
        if not segment.sound and size_of(segment.path):
            self._quarantine(segment.path)
        self.forget()

    def _set_aside(self, segment: _Segment) -> bool:
        """Quarantine for a segment that cannot be read, unless it is still being written."""
        sealed = self._later(segment) is not None
        if sealed:
            self._quarantine(segment.path)
        self.forget()
        return sealed

    def _quarantine(self, path: Path) -> None:
        place = self.folder.parent / QUARANTINE_NAME
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            path.replace(place / f"{self.folder.name}-{path.name}")
        self.damaged += 1

    def forget(self) -> None:
        """Look at the files anew: they have changed, or are done with."""
        segment, self._segment = self._segment, None
        self._held, self._at = None, 0
        if segment is not None:
            segment.close()


def _batch_in(frame: Frame) -> Batch | None:
    if frame.type >= _LOCAL_TYPE:
        return None
    try:
        batch = batch_of_frame(frame.seq, frame.type, frame.body)
        last_seq(batch)
    except WireError:
        return None
    return batch
