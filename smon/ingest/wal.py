"""The write-ahead log: a batch is acknowledged when it is in here and the disk says so.

Flow: `smon.ingest.service` → **here** → `smon.ingest.drain`. One thread writes whatever waits in
one go and syncs once (group commit). Whatever the disk says no to is cut away again and refused;
the log then only reads, until there is room. ``docs/reference/problems.md``: disk-full, overloaded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Final

from smon.config import Settings
from smon.errors import ConfigError, SMonError, WireError
from smon.ingest.decode import Content
from smon.ingest.disk import Disk
from smon.ingest.limits import MAX_WINDOWS
from smon.ingest.metrics import WalMetrics
from smon.ingest.records import HEAD_ROOM, Record, RecordHead, Settled
from smon.ingest.segments import Segment, lock, read_back, recover, segment_path
from smon.store.commit import Key
from smon.wire.frames import MAX_BODY_BYTES, encode_frame
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

#: After a failure, the disk is asked again after so long.
_PAUSE_S: Final = 1.0

#: Room that must be there before the log takes records again, over the room below which it stops.
_RESUME: Final = 1.5

#: A drained segment this small is written on: making a new one costs two syncs.
_SMALL_BYTES: Final = 1 << 20

#: Decoded batches that are kept in memory until they are stored; others are decoded once more.
_KEEP_BYTES: Final = 128 << 20

#: What a client that must wait for the disk or the drain is told.
_FULL_RETRY_S: Final = 30.0
_BUSY_RETRY_S: Final = 5.0

Settle = Callable[[Sequence[Record], SMonError | None], None]


def settle_here(records: Sequence[Record], error: SMonError | None) -> None:
    """Tell everybody who waits, in this thread."""
    for record in records:
        if record.settled is not None:
            record.settled(error)


class _WriteError(Exception):
    """The disk did not take all of it."""


@dataclass(slots=True)
class _Open:
    """The segment that is written to."""

    segment: Segment
    descriptor: int


@dataclass(frozen=True, slots=True)
class Seams:
    """What a test replaces.

    Attributes
    ----------
    settle
        Tells those who wait; called by the thread that writes.
    """

    disk: Disk = field(default_factory=Disk)
    settle: Settle = settle_here
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Move:
    """How much is taken from the log at a time; of each, every tenant gets an equal share.

    Attributes
    ----------
    files
        Windows of ops, each of which becomes a file.
    """

    bytes: int
    events: int
    records: int
    files: int = 1 << 40

    def share(self, tenants: int) -> Move:
        """What one of so many gets."""
        return Move(
            self.bytes // tenants,
            self.events // tenants,
            max(self.records // tenants, 1),
            self.files // tenants,
        )


class Wal:
    """The log of one process.

    Parameters
    ----------
    settings
        ``wal``, ``wal_segment_bytes``, ``max_wal_bytes``, ``min_free_bytes``.

    Raises
    ------
    ConfigError
        A batch of the largest size does not fit into a frame.
    """

    def __init__(self, settings: Settings, metrics: WalMetrics, seams: Seams | None = None) -> None:
        if settings.max_body_bytes + HEAD_ROOM > MAX_BODY_BYTES:
            raise ConfigError(
                f"SMON_MAX_BODY_BYTES: expected at most {MAX_BODY_BYTES - HEAD_ROOM}, found "
                f"{settings.max_body_bytes}"
            )
        self._settings = settings
        self._folder = settings.wal
        self._metrics = metrics
        self._seams = seams or Seams()
        self._disk = self._seams.disk
        self._lock: int | None = None
        self._thread: threading.Thread | None = None
        # What waits to be written; guards all below it.
        self._wake = threading.Condition()
        self._queue: list[Record] = []
        self._queued_bytes = 0
        self._closing = False
        self._next_number = 0
        self._pending: dict[int, Record] = {}
        self._pending_bytes = 0
        self._digests: dict[Key, str] = {}
        self._by_stream: dict[str, dict[int, Record]] = {}
        self._by_tenant: dict[str, dict[int, Record]] = {}
        self._kept_bytes = 0
        self._read_only = ""
        self._retry_at = 0.0
        # Segments and the file that is open: held while writing, syncing, removing.
        self._files = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._next_segment = 0
        self._open: _Open | None = None

    # --- life -----------------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Take the folder and recover what is in it; records that are not stored yet.

        Raises
        ------
        ConfigError
            Another process has the folder, or it cannot be read.
        """
        self._lock = lock(self._folder)
        found = recover(self._folder)
        self._metrics.damaged.labels("damaged").inc(found.damaged)
        self._metrics.damaged.labels("torn").inc(found.torn)
        for segment in found.segments:
            self._next_segment = max(self._next_segment, segment.number + 1)
            if segment.live:
                self._segments[segment.number] = segment
            else:
                self._remove(segment)
        for record in found.records:
            self._note(record)
            self._next_number = max(self._next_number, record.number + 1)
        if found.records or found.damaged:
            _log.info("log: %d records to be stored, %d damaged", len(found.records), found.damaged)
        return found.records

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, name="smon-wal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and give the folder back."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        with self._files:
            self._close_open()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- asking ---------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes of records that are not stored yet."""
        return self._pending_bytes + self._queued_bytes

    @property
    def pending_records(self) -> int:
        """Records that are durable but not stored yet."""
        return len(self._pending)

    def read_only(self) -> str:
        """Why the log takes no records; empty if it does. Looks whether there is room again."""
        with self._wake:
            self._try_to_resume()
            return self._read_only

    def digest(self, key: Key) -> str | None:
        """Digest of a record that is not stored yet."""
        return self._digests.get(key)

    def logged(self, stream_id: str) -> list[tuple[int, int, int]]:
        """(epoch, first, last) of the sequence numbers of a stream that are not stored yet."""
        with self._wake:
            records = list(self._by_stream.get(stream_id, {}).values())
        return [(record.key[1], record.key[2], record.last_seq) for record in records]

    # --- writing --------------------------------------------------------------------------------

    def check_room(self, size: int) -> None:
        """Whether so much may still wait to be stored; asked before a body is read and decoded.

        Raises
        ------
        WireError
            The log is full.
        """
        full = self.pending_bytes + size + HEAD_ROOM > self._settings.max_wal_bytes
        if self._closing or full:
            raise WireError(
                Problem.OVERLOADED,
                "the server stores more slowly than batches come, and its log is full: come "
                "again later",
                _BUSY_RETRY_S,
            )

    def append(
        self, head: RecordHead, body: bytes, settled: Settled, content: Content | None = None
    ) -> Record:
        """Put a record in line; `settled` is told when it is durable, or why it is not there.

        Nothing is written before `flush`.

        Parameters
        ----------
        content
            Of the body; it is kept for the drain while there is memory.

        Raises
        ------
        WireError
            The disk is full, or too much waits to be stored.
        """
        with self._wake:
            self._try_to_resume()
            if self._read_only:
                raise _full(self._read_only)
            self.check_room(len(body))
            record = Record(
                number=self._next_number,
                key=head.key,
                last_seq=head.last_seq,
                events=head.batch.events,
                received_ns=head.received_ns,
                digest=head.known_digest,
                tenant_id=head.origin.tenant_id,
                attempt_id=head.origin.attempt_id,
                windows=_windows(head.origin.window_steps, content),
                settled=settled,
            )
            record.frame = encode_frame(record.number, int(head.batch.kind), head.encode(body))
            record.size = len(record.frame)
            self._next_number += 1
            self._queue.append(record)
            self._queued_bytes += record.size
            self._keep(record, head, content)
        return record

    def flush(self) -> None:
        """Have what is in line written. Once for many records: each group costs one sync."""
        with self._wake:
            self._wake.notify()

    def _keep(self, record: Record, head: RecordHead, content: Content | None) -> None:
        kept = 0 if content is None else content.memory_bytes
        if content is not None and self._kept_bytes + kept <= _KEEP_BYTES:
            record.head, record.content = head, content
            self._kept_bytes += kept

    def _forget(self, record: Record) -> None:
        if record.content is not None:
            self._kept_bytes -= record.content.memory_bytes
            record.head = record.content = None

    def _try_to_resume(self) -> None:
        """End the read-only state if there is room again; with `_wake` held."""
        if not self._read_only or self._seams.monotonic() < self._retry_at:
            return
        try:
            free = self._disk.free_bytes(self._folder)
        except OSError:
            return
        if free >= _RESUME * self._settings.min_free_bytes and free > 0:
            _log.warning("log: there is room again, batches are taken")
            self._set_read_only("")
        else:
            self._retry_at = self._seams.monotonic() + _PAUSE_S

    def _set_read_only(self, reason: str) -> None:
        self._read_only = reason
        self._retry_at = self._seams.monotonic() + _PAUSE_S
        self._metrics.read_only.set(bool(reason))

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            self._commit(group)

    def _next_group(self) -> list[Record] | None:
        """What waits, at most about a segment; None at the end."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            if not self._queue:
                return None
            count = size = 0
            for record in self._queue:
                count, size = count + 1, size + record.size
                if size >= self._settings.wal_segment_bytes:
                    break
            group, self._queue = self._queue[:count], self._queue[count:]
            return group

    def _commit(self, group: list[Record]) -> None:
        """Write, sync, and only then tell those who wait."""
        error = self.write_group(group)
        self._seams.settle(group, error)

    def write_group(self, group: Sequence[Record]) -> SMonError | None:
        """Make records durable together; the error if they are not."""
        error: SMonError | None = None
        try:
            with self._files:
                self._write(group)
        except (_WriteError, OSError) as failure:
            error = self._failed(failure)
        with self._wake:
            for record in group:
                self._queued_bytes -= record.size
                record.frame = b""
                if error is None:
                    self._note(record)
                else:
                    self._forget(record)
        return error

    def _write(self, group: Sequence[Record]) -> None:
        free = self._disk.free_bytes(self._folder)
        size = sum(record.size for record in group)
        if free - size < self._settings.min_free_bytes:
            raise _WriteError(
                f"{free} bytes are free, fewer than the {self._settings.min_free_bytes} that are "
                "kept free"
            )
        target = self._target()
        segment, good = target.segment, target.segment.size
        try:
            written = self._disk.write(target.descriptor, [record.frame for record in group])
        except OSError:
            self._cut_back(target, good)
            raise
        if written != size:
            self._cut_back(target, good)
            raise _WriteError("the disk is full")
        self._sync(target, good)
        at = good
        for record in group:
            record.segment, record.offset = segment.number, at
            at += record.size
        segment.size = at
        segment.live += len(group)

    def _target(self) -> _Open:
        """The segment to write to; a new one if the last is full."""
        if self._open is not None and (self._open.segment.size >= self._settings.wal_segment_bytes):
            self._close_open()
        if self._open is None:
            segment = Segment(self._next_segment, segment_path(self._folder, self._next_segment))
            self._next_segment += 1
            self._open = _Open(segment, self._disk.create(segment.path))
            self._segments[segment.number] = segment
        return self._open

    def _sync(self, target: _Open, good: int) -> None:
        began = self._seams.monotonic()
        try:
            self._disk.sync(target.descriptor)
        except OSError:
            # After a failed sync the kernel may have dropped the pages and call the next sync a
            # success: nothing more is acknowledged on this file.
            self._cut_back(target, good)
            self._close_open()
            raise
        self._metrics.fsync_seconds.observe(self._seams.monotonic() - began)

    def _cut_back(self, target: _Open, good: int) -> None:
        try:
            self._disk.cut(target.descriptor, good)
        except OSError as error:
            # What is behind the good part is found, or cut, when the log is recovered.
            _log.error("log: cannot cut %s back: %s", target.segment.path.name, error)
            self._close_open()

    def _close_open(self) -> None:
        if self._open is not None:
            try:
                self._disk.close(self._open.descriptor)
            except OSError as error:
                _log.error("log: cannot close a segment: %s", error)
            segment, self._open = self._open.segment, None
            if not segment.live:
                self._remove(segment)

    def _failed(self, failure: Exception) -> SMonError:
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        _log.error("log: batches are refused: %s", reason)
        with self._wake:
            self._set_read_only(f"the log cannot be written: {reason}")
        return _full(self._read_only)

    def _note(self, record: Record) -> None:
        """The record is durable, and waits to be stored."""
        self._pending[record.number] = record
        self._pending_bytes += record.size
        self._digests[record.key] = record.digest
        self._by_stream.setdefault(record.key[0], {})[record.number] = record
        self._by_tenant.setdefault(record.tenant_id, {})[record.number] = record

    # --- draining -------------------------------------------------------------------------------

    def pending(self, most: Move, without: Collection[int] = ()) -> list[Record]:
        """The oldest records that are not stored yet, of each tenant.

        Who sends much, or what is slow to store, does not hold up the others. At least one, if
        there is one.

        Parameters
        ----------
        without
            Numbers of records that are passed over.
        """
        with self._wake:
            if most.records == 1 or len(self._by_tenant) <= 1:
                return _first(self._pending.values(), most, without)
            share = most.share(len(self._by_tenant))
            chosen = [
                record
                for records in self._by_tenant.values()
                for record in _first(records.values(), share, without)
            ]
        return sorted(chosen, key=attrgetter("number"))

    def oldest_ns(self) -> int | None:
        """When the oldest record that is not stored was received; None if there is none."""
        with self._wake:
            return next((record.received_ns for record in self._pending.values()), None)

    def read(self, records: Sequence[Record]) -> Iterator[tuple[Record, RecordHead, bytes]]:
        """Records with head and body; those that are damaged by now are left out.

        Raises
        ------
        OSError
            A segment cannot be read.
        """
        by_segment: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_segment[record.segment].append(record)
        for number, group in by_segment.items():
            yield from read_back(segment_path(self._folder, number), group)

    def release(self, records: Sequence[Record]) -> None:
        """These are stored, or given up: their segments may go."""
        with self._wake:
            gone = [each for each in records if self._pending.pop(each.number, None) is not None]
            for record in gone:
                self._pending_bytes -= record.size
                self._digests.pop(record.key, None)
                self._leave(record)
                self._forget(record)
        with self._files:
            for record in gone:
                segment = self._segments[record.segment]
                segment.live -= 1
                if not segment.live:
                    self._retire(segment)

    def _leave(self, record: Record) -> None:
        """With `_wake` held."""
        for table, key in (
            (self._by_stream, record.key[0]),
            (self._by_tenant, record.tenant_id),
        ):
            records = table[key]
            del records[record.number]
            if not records:
                del table[key]

    def _retire(self, segment: Segment) -> None:
        """Remove a segment of which everything is stored; with `_files` held."""
        if self._open is None or self._open.segment is not segment:
            self._remove(segment)
        elif segment.size >= _SMALL_BYTES:
            self._close_open()

    def _remove(self, segment: Segment) -> None:
        self._segments.pop(segment.number, None)
        try:
            self._disk.remove(segment.path)
        except OSError as error:
            # Its records are stored: when it is recovered they are found to be.
            _log.error("log: cannot remove %s: %s", segment.path.name, error)

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._folder


def _first(records: Iterable[Record], most: Move, without: Collection[int]) -> list[Record]:
    """The first records that fit; at least one, if there is one."""
    chosen: list[Record] = []
    files: set[tuple[str, int]] = set()
    size = events = 0
    for record in records:
        if record.number in without:
            continue
        first, last = record.windows
        files.update((record.attempt_id, window) for window in range(first, last + 1))
        size, events = size + record.size, events + record.events
        full = size > most.bytes or events > most.events or len(files) > most.files
        if chosen and full:
            break
        chosen.append(record)
        if len(chosen) >= most.records:
            break
    return chosen


def _windows(window_steps: int, content: Content | None) -> tuple[int, int]:
    """First and last window of the ops of a batch."""
    if not window_steps or content is None or content.ops is None or not content.ops.num_rows:
        return 0, 0
    step = content.ops.column("step").to_numpy()
    first, last = int(step.min()) // window_steps, int(step.max()) // window_steps
    return first, min(last, first + MAX_WINDOWS)


def _full(reason: str) -> WireError:
    return WireError(
        Problem.DISK_FULL, f"{reason}: make room; the server then goes on by itself", _FULL_RETRY_S
    )
