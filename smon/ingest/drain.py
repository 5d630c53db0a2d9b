"""From the log to files and rows: what is acknowledged becomes visible, exactly once.

Flow: `smon.ingest.wal` → **here** → `smon.store.events`, `smon.store.commit`. Files are written
first, then one transaction makes batches and files part of the store; only then may the log forget
them. Whatever fails is tried again for ever: nothing that was acknowledged is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from smon.config import Settings
from smon.errors import MissingError, StoreError, WireError
from smon.ingest.decode import Content
from smon.ingest.decoder import content_of
from smon.ingest.documents import Gap
from smon.ingest.files import Item, write_files, write_parts
from smon.ingest.limits import TRUSTED
from smon.ingest.metrics import IngestMetrics, reason_label
from smon.ingest.parcels import Parcel
from smon.ingest.ports import Store
from smon.ingest.records import Record, RecordHead
from smon.ingest.segments import quarantine
from smon.ingest.streams import Ranges
from smon.ingest.wal import Move, Wal
from smon.store.commit import AlreadyStored, BatchNote, Key, NewFile, NewParts
from smon.store.files import FileLimits, NewPart
from smon.wire import BatchKind
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

#: Ops that one move takes. With two million acknowledgements that come meanwhile wait twice as long
#: (99th percentile at 800 batches a second: 178 ms against 86), with fewer files become many. After
#: a move of more than half of that the next one follows at once.
_MOVE_EVENTS: Final = 300_000
_MOVE_RECORDS: Final = 65_536

#: Files that one move writes, at some 8 ms each: others wait behind it.
_MOVE_FILES: Final = 1024

#: Pause after a failure; doubles up to the last.
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0

#: A batch that fails alone so often is set aside.
_TRIES_ALONE: Final = 3

#: A batch that was set aside is tried again after so long; the others go on meanwhile.
_ASIDE_S: Final = 60.0

#: An idle drain asks the database so often whether it is there.
_PING_S: Final = 5.0

#: Older batches in the log mean that moving does not keep up.
_STUCK_S: Final = 120.0

_NS: Final = 10**9

UNDECODABLE: Final = "undecodable"
DECODER_DIED: Final = "decoder-died"
STREAM_REMOVED: Final = "stream-removed"


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seams: unix time in ns, and seconds that only go forward."""

    unix_ns: Callable[[], int] = time.time_ns
    monotonic: Callable[[], float] = time.monotonic


#: Problems that say nothing of a body: it is tried again.
_NOT_ITS_FAULT: Final = frozenset({Problem.OVERLOADED, Problem.INTERNAL})

#: What is in bodies of the log, or why that cannot be said; raises StoreError: not now.
DecodeLogged = Callable[[Sequence[Parcel]], Sequence[Content | WireError]]


def decode_here(parcels: Sequence[Parcel]) -> Sequence[Content | WireError]:
    """What is in bodies of the log, decoded in this process."""
    found: list[Content | WireError] = []
    for parcel in parcels:
        try:
            found.append(content_of(parcel, TRUSTED))
        except WireError as error:
            found.append(error)
    return found


class Drain:
    """Moves what is in the log to the store, in a thread of its own.

    Parameters
    ----------
    on_lost
        Called with the stream of a record that was acknowledged but is damaged in the log.
    decode_logged
        Decodes what lies in the log since before a restart, or for want of memory.
    """

    def __init__(  # noqa: PLR0913  # the seams of a thread that has a loop of its own
        self,
        wal: Wal,
        store: Store,
        settings: Settings,
        metrics: IngestMetrics,
        on_lost: Callable[[str], None],
        clocks: Clocks | None = None,
        *,
        decode_logged: DecodeLogged = decode_here,
    ) -> None:
        self._wal = wal
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._on_lost = on_lost
        self._clocks = clocks or Clocks()
        self._decode_logged = decode_logged
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop_at: float | None = None
        self._most = _MOVE_RECORDS
        self._more = False
        self._aside: dict[int, float] = {}
        self._alone: Counter[int] = Counter()
        self._asked_s = -_PING_S
        self._problem = ""
        metrics.drain_lag_seconds.set_function(self._lag_s)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to move."""
        self._thread = threading.Thread(target=self._run, name="smon-drain", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Move what is in the log, for at most so long, and end."""
        self._stop_at = self._clocks.monotonic() + timeout_s
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def problems(self) -> list[str]:
        """Why batches are not moved; empty if they are."""
        problems = [self._problem] if self._problem else []
        lag_s = self._lag_s()
        if lag_s > _STUCK_S:
            problems.append(f"the oldest batch in the log has waited for {lag_s:.0f} s")
        return problems

    def _lag_s(self) -> float:
        oldest_ns = self._wal.oldest_ns()
        return 0.0 if oldest_ns is None else max(0, self._clocks.unix_ns() - oldest_ns) / _NS

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._ends():
            failed = not self.tick()
            wait_s = pause_s if failed else self._settings.drain_interval_s
            pause_s = min(2 * pause_s, _LAST_PAUSE_S) if failed else _FIRST_PAUSE_S
            if self._stop_at is not None:
                # Stopping: what is there is moved without a pause, but a failure is not hurried.
                wait_s = min(wait_s, max(0.0, self._stop_at - self._clocks.monotonic()))
                time.sleep(wait_s if failed else 0.0)
            elif failed or not self._more:
                self._wake.wait(wait_s)

    def _ends(self) -> bool:
        if self._stop_at is None:
            return False
        left = bool(self._wal.pending(Move(1, 1, 1), self._aside))
        return not left or self._clocks.monotonic() >= self._stop_at

    # --- one move -------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Move what is there, once; False if that failed and must be tried again."""
        now_s = self._clocks.monotonic()
        self._aside = {number: at for number, at in self._aside.items() if at > now_s}
        move = Move(self._settings.drain_max_bytes, _MOVE_EVENTS, self._most, _MOVE_FILES)
        records = self._wal.pending(move, self._aside)
        self._more = 2 * sum(record.events for record in records) > _MOVE_EVENTS or (
            2 * sum(record.size for record in records) > self._settings.drain_max_bytes
        )
        try:
            if not records:
                return self._ping(now_s)
            self._store.ping()
        except StoreError as error:
            return self._failed(f"the database does not answer: {error}")
        try:
            self._move(records)
        except StoreError as error:
            self._shrink(records)
            return self._failed(str(error))
        except Exception:  # noqa: BLE001  # a defect set off by one batch must not hold up all others
            _log.exception("the drain failed")
            self._shrink(records)
            return self._failed("the drain failed: the log says why")
        self._most = min(2 * self._most, _MOVE_RECORDS)
        self._alone.clear()
        self._problem = ""
        self._metrics.drain_seconds.observe(self._clocks.monotonic() - now_s)
        return True

    def _ping(self, now_s: float) -> bool:
        if now_s - self._asked_s >= _PING_S:
            self._store.ping()
            self._asked_s = now_s
            self._problem = ""
        return True

    def _failed(self, problem: str) -> bool:
        if problem != self._problem:
            _log.warning("batches stay in the log: %s", problem)
        self._problem = problem
        self._metrics.drain_failures.inc()
        return False

    def _shrink(self, records: Sequence[Record]) -> None:
        """Try half as many next time, to find the one that cannot be stored, and set it aside."""
        self._most = max(1, len(records) // 2)
        if len(records) == 1:
            number = records[0].number
            self._alone[number] += 1
            if self._alone[number] >= _TRIES_ALONE:
                del self._alone[number]
                self._aside[number] = self._clocks.monotonic() + _ASIDE_S

    def _move(self, records: Sequence[Record]) -> None:
        items = self._items(records)
        self._count_gaps(self._store_all(items))
        self._wal.release(records)

    def _items(self, records: Sequence[Record]) -> list[Item]:
        """Batches of the records; each of them once."""
        items: dict[Key, Item] = {}
        unread = []
        for record in records:
            if record.head is not None and record.content is not None:
                items.setdefault(record.key, Item(record.head, record.content))
            else:
                unread.append(record)
        lost = {record.number: record for record in unread}
        try:
            read = list(self._wal.read(unread))
        except OSError as error:
            raise StoreError(f"the log cannot be read: {error.strerror}") from error
        for (record, head, _), content in zip(read, self._decoded(read), strict=True):
            lost.pop(record.number)
            items.setdefault(record.key, Item(head, content))
        for record in lost.values():
            _log.error("log: the record of %s is damaged and lost", record.key)
            self._metrics.wal.damaged.labels("damaged").inc()
            self._on_lost(record.key[0])
        return list(items.values())

    def _decoded(self, read: Sequence[tuple[Record, RecordHead, bytes]]) -> Iterator[Content]:
        """What is in records of the log; of one that cannot be decoded, a gap."""
        parcels = [
            Parcel(head.batch, body, head.first_seq, None, head.received_ns)
            for _, head, body in read
        ]
        found = self._decode_logged(parcels)
        for content in found:
            if isinstance(content, WireError) and content.problem in _NOT_ITS_FAULT:
                raise StoreError(f"batches of the log wait: {content}")
        for (record, head, body), content in zip(read, found, strict=True):
            if isinstance(content, Content):
                yield content
                continue
            _log.error("log: the batch %s cannot be decoded any more: %s", record.key, content)
            died = content.problem == Problem.UNDECODABLE
            reason = DECODER_DIED if died else UNDECODABLE
            self._keep_aside(head, body, reason)
            lost = Gap(head.first_seq, head.last_seq, head.batch.events, reason, None, None)
            yield Content(gap=lost)

    def _keep_aside(self, head: RecordHead, body: bytes, reason: str) -> None:
        name = f"{head.origin.stream_id}-{head.epoch}-{head.first_seq}"
        quarantine(self._wal.folder, name, head.encode(body))
        self._metrics.quarantined.labels(reason).inc()

    # --- files and rows -------------------------------------------------------------------------

    def _store_all(self, items: list[Item]) -> list[Item]:
        """Store batches, apart from those that are stored already; those that were new."""
        while items:
            files: list[NewFile] = []
            parts: list[NewPart] = []
            try:
                write_files(self._store, items, self._clocks.unix_ns(), files)
                write_parts(self._store, items, self._clocks.unix_ns(), parts)
            except StoreError:
                self._delete((*files, *parts))
                raise
            try:
                notes, sent = [note_of(item) for item in items], self._sent(parts)
                dropped = self._store.commit(notes, files, self._clocks.unix_ns(), sent)
            except AlreadyStored as stored:
                self._delete((*files, *parts))
                items = self._without(items, stored.keys)
            except MissingError:
                self._delete((*files, *parts))
                items = self._without_removed(items)
            else:
                for reason in dropped:
                    self._metrics.files_dropped.labels(reason.value).inc()
                break
            # Of any other error nobody knows whether the commit took place after all, so the files
            # stay: the next try writes new ones, and those that no row names are cleared away.
        return items

    def _sent(self, parts: Sequence[NewPart]) -> NewParts:
        settings = self._settings
        limits = FileLimits(settings.max_attempt_files, settings.max_attempt_file_bytes)
        return NewParts(tuple(parts), limits)

    def _delete(self, files: Iterable[NewFile | NewPart]) -> None:
        for file in files:
            try:
                self._store.delete(file.path)
            except StoreError as error:
                _log.warning("cannot remove the unused file %s: %s", file.path, error)

    def _without(self, items: Sequence[Item], keys: frozenset[Key]) -> list[Item]:
        """The batches that are not stored; of a gap, the rest of it."""
        kept: list[Item] = []
        for item in items:
            if item.head.key not in keys:
                kept.append(item)
                continue
            rest = self._rest_of_gap(item) if item.content.gap is not None else None
            if rest is not None:
                kept.append(rest)
            else:
                self._metrics.drain_duplicates.inc()
        return kept

    def _rest_of_gap(self, item: Item) -> Item | None:
        head = item.head
        info = self._store.find(head.origin.tenant_id, head.origin.stream_id)
        covered = Ranges(info.covered.get(head.epoch, ()) if info is not None else ())
        first = covered.missing(head.first_seq, head.last_seq)
        return None if first is None else Item(replace(head, first_seq=first), item.content)

    def _without_removed(self, items: Sequence[Item]) -> list[Item]:
        """The batches whose stream is still there; nobody can have the others."""
        origins = {item.head.origin.stream_id: item.head.origin for item in items}
        removed = {
            stream_id
            for stream_id, origin in origins.items()
            if self._store.find(origin.tenant_id, stream_id) is None
        }
        if not removed:
            raise StoreError("a stream was missing, and is there again: try once more")
        for item in items:
            if item.head.origin.stream_id in removed:
                self._metrics.quarantined.labels(STREAM_REMOVED).inc()
        for stream_id in removed:
            _log.warning("batches of stream %s are dropped: it was removed", stream_id)
            self._on_lost(stream_id)
        return [item for item in items if item.head.origin.stream_id not in removed]

    def _count_gaps(self, items: Iterable[Item]) -> None:
        lost: dict[str, int] = defaultdict(int)
        for item in items:
            if item.content.gap is not None:
                lost[reason_label(item.content.gap.reason)] += item.content.gap.events
        for reason, events in lost.items():
            self._metrics.lost_events.labels(reason).inc(events)


def note_of(item: Item) -> BatchNote:
    """What the tables keep of a batch."""
    head, gap = item.head, item.content.gap
    return BatchNote(
        stream_id=head.origin.stream_id,
        tenant_id=head.origin.tenant_id,
        attempt_id=head.origin.attempt_id,
        epoch=head.epoch,
        seq=head.first_seq,
        last_seq=head.last_seq,
        kind=head.batch.kind if gap is None else BatchKind.GAP,
        events=head.batch.events,
        steps_done=head.batch.steps_done,
        received_ns=head.received_ns,
        clock=head.batch.clock,
        reason=item.content.end_reason if gap is None else gap.reason,
    )
