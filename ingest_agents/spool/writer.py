"""Append batches to a stream's folder: numbered, framed, whole after a kill at any byte.

Flow: recorder, or a source of the agent → **here** → segments → `ingest_agents.spool.reader`. A
batch that does not fit on the disk keeps its number; a GAP says so as soon as there is space.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ingest_agents.payload import Gap, end_batch, frame_of, last_seq
from ingest_agents.spool.eviction import make_room
from ingest_agents.spool.folder import (
    LOCK_NAME,
    SPEC_NAME,
    Lock,
    StreamSpec,
    read_checkpoint,
    read_spec,
    segment_path,
    segments_of,
    write_json,
    write_whole,
)
from smon.errors import StoreError, WireError
from smon.wire import Batch, batch_of_frame
from smon.wire.frames import Frame, encode_frame, scan_frames

#: Frames of this type and above stay on the host.
LOCAL_TYPE: Final = 128

#: A frame that says where a source has got to: valid once the batch of the same number is there.
POSITION_TYPE: Final = 128

#: Flag of a position that begins a segment: valid by itself.
_CARRIED: Final = 1

#: Somebody may only have looked whether the lock is held.
_LOCK_TRIES: Final = 20
_LOCK_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """When a segment is full, and how much a whole spool may hold."""

    segment_bytes: int = 8 << 20
    segment_s: float = 60.0
    cap_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class _Found:
    """What an earlier writer left."""

    next_seq: int
    size: int
    torn_bytes: int
    position: dict[str, Any]
    carried: bool


class SpoolWriter:
    """The one writer of a stream.

    Parameters
    ----------
    root
        The spool.
    spec
        Who writes. An existing folder of the same key is continued.
    limits
        Of segments and of the spool.
    clock
        Seconds that never go back.

    Attributes
    ----------
    dropped
        Events that were not written, by reason; each also becomes a GAP.
    position
        Where the source had got to, as `try_append` was told; empty at first.
    torn_bytes
        What a killed writer had left of a frame, and what was cut.

    Raises
    ------
    StoreError
        The folder cannot be written, or another process writes there.
    """

    def __init__(
        self,
        root: Path,
        spec: StreamSpec,
        limits: SpoolLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = root / spec.folder_name
        self.dropped: Counter[str] = Counter()
        self._root, self._limits, self._clock = root, limits, clock
        self._loss: Gap | None = None
        self._handle = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
            self.spec = self._described(spec)
            self._resume()
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from error

    def _described(self, spec: StreamSpec) -> StreamSpec:
        with contextlib.suppress(StoreError):
            # The epoch is that of the spool, however it is described today.
            spec = replace(spec, epoch=read_spec(self.folder).epoch)
        write_json(self.folder / SPEC_NAME, spec.document(), sync=True)
        return spec

    def _resume(self) -> None:
        acknowledged = read_checkpoint(self.folder).next_seq
        segments = segments_of(self.folder)
        found = _found(segments)
        # A batch that was sent before its frame was damaged has used its number.
        self.next_seq = max(found.next_seq, acknowledged)
        self.position = found.position
        self.torn_bytes = found.torn_bytes
        self._size = found.size
        if segments:
            self._open(segments[-1][1])
            os.ftruncate(self._handle, found.size)
        else:
            self._begin()

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._handle = os.open(path, flags, 0o640)
        self._opened = self._clock()
        self._batches = 0

    def _begin(self) -> None:
        """Begin a segment. It appears together with the last position: never one without it.

        Raises
        ------
        OSError
            There is no space; all is as before.
        """
        position = {name: value for name, value in self.position.items() if value is not None}
        frame = encode_frame(self.next_seq, POSITION_TYPE, _json(position), _CARRIED)
        path = segment_path(self.folder, self.next_seq)
        aside = path.with_name(f".{path.name}")
        write_whole(aside, frame)
        aside.replace(path)
        self._open(path)
        self._size = len(frame)

    # --- appending ----------------------------------------------------------------------------

    def append(self, batch: Batch) -> bool:
        """Give a batch the next number and write it; if that fails, it is counted as lost.

        Returns
        -------
        bool
            Whether it is in the spool.
        """
        if self.try_append(batch):
            return True
        self._lose(batch.events, "disk-full", (batch.first_step, batch.last_step))
        return False

    def try_append(self, batch: Batch, position: Mapping[str, Any] | None = None) -> bool:
        """Write a batch, for a source that can bring it again: if that fails, nothing has happened.

        Parameters
        ----------
        position
            What the source has to know to go on after this batch: added to `position`, and
            committed together with the batch.
        """
        self._roll()
        if not self._settle():
            return False
        numbered = replace(batch, seq=self.next_seq)
        frames = frame_of(numbered)
        if position:
            frames = encode_frame(self.next_seq, POSITION_TYPE, _json(position)) + frames
        if not self._put(frames):
            return False
        self.position.update(position or {})
        self.next_seq += 1
        self._batches += 1
        return True

    def lose(
        self, events: int, reason: str, steps: tuple[int | None, int | None] = (None, None)
    ) -> None:
        """Say that events were lost before they became a batch; takes a number of its own."""
        self._lose(events, reason, steps)
        self._settle()

    def _lose(self, events: int, reason: str, steps: tuple[int | None, int | None]) -> None:
        self.dropped[reason] += events
        loss = Gap(self.next_seq, self.next_seq, events, reason, *steps)
        self.next_seq += 1
        self._loss = loss if self._loss is None else self._loss.joined(loss)

    def _settle(self) -> bool:
        """Write the GAP of what was lost, if anything was; False if it does not fit either."""
        if self._loss is None:
            return True
        if not self._put(frame_of(self._loss.batch())):
            return False
        self._loss = None
        self._batches += 1
        return True

    def flush(self, *, sync: bool = False) -> None:
        """Write what was lost if that is possible now; with `sync`, survive a crash of the host."""
        self._settle()
        if sync:
            with contextlib.suppress(OSError):
                os.fdatasync(self._handle)

    def end(self, reason: str) -> bool:
        """Write the END of the stream; whether that was possible."""
        return self.try_append(end_batch(reason))

    def close(self) -> None:
        """Let another process write."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Let go without writing: in a forked child, where the stream is the parent's."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
        self._lock.release()

    # --- bytes --------------------------------------------------------------------------------

    def _roll(self) -> None:
        """Begin a new segment if this one is full or old."""
        aged = self._clock() - self._opened >= self._limits.segment_s
        if not self._batches or not (aged or self._size >= self._limits.segment_bytes):
            return
        if not self._settle():
            return
        full = self._handle
        try:
            self._begin()
        except OSError:
            self._handle = full
            return
        os.close(full)
        with contextlib.suppress(OSError):
            make_room(self._root, self._limits.cap_bytes)

    def _put(self, data: bytes) -> bool:
        """Write all of it, or nothing: a full disk writes a part without a word."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError:
            self._cut()
            return False
        self._size += len(data)
        return True

    def _cut(self) -> None:
        # If even that fails, the reader passes over the torn frame.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, self._size)


def _locked(folder: Path) -> Lock:
    for _ in range(_LOCK_TRIES):
        lock = Lock.take(folder / LOCK_NAME)
        if lock is not None:
            return lock
        time.sleep(_LOCK_PAUSE_S)
    raise StoreError(f"{folder}: expected to be the only writer, found another: stop one of them")


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _found(segments: Sequence[tuple[int, Path]]) -> _Found:
    """What earlier segments hold: the last one all, those before it the position if need be."""
    parts: list[_Found] = []
    for first_seq, path in reversed(segments):
        parts.insert(0, _left_in(first_seq, path))
        if parts[0].carried:
            break
    if not parts:
        return _Found(0, 0, 0, {}, carried=False)
    position: dict[str, Any] = {}
    for part in parts:
        position.update(part.position)
    return replace(parts[-1], position=position)


def _left_in(first_seq: int, path: Path) -> _Found:
    """What a segment holds, up to the end of its last whole frame."""
    data = path.read_bytes()
    next_seq, size, carried = first_seq, 0, False
    committed: dict[str, Any] = {}
    proposed: dict[int, dict[str, Any]] = {}
    for part in scan_frames(data):
        if not isinstance(part, Frame):
            continue
        size = part.end
        if part.type == POSITION_TYPE and part.flags & _CARRIED:
            committed.update(_position_in(part))
            carried = True
        elif part.type == POSITION_TYPE:
            proposed[part.seq] = _position_in(part)
        elif part.type < LOCAL_TYPE:
            committed.update(proposed.pop(part.seq, {}))
            next_seq = max(next_seq, _last_of(part) + 1)
    return _Found(next_seq, size, len(data) - size, committed, carried=carried)


def _position_in(frame: Frame) -> dict[str, Any]:
    try:
        document = json.loads(frame.body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _last_of(frame: Frame) -> int:
    try:
        return last_seq(batch_of_frame(frame.seq, frame.type, frame.body))
    except WireError:
        return frame.seq
