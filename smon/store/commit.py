"""The one transaction that makes batches stored: files, covered numbers, windows, revisions.

Flow: `smon.ingest` (log → files) → **here** → workers, which see what is new. Table ``coverage``
says which sequence numbers are stored and is changed here alone, so that each batch counts exactly
once, whoever sends it how often and through which server.

Rows are locked in one order: streams, attempts, windows, jobs; within each by id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import insert, select, tuple_, update
from sqlalchemy.orm import Session

from smon.errors import MissingError, StoreError
from smon.store.files import NOTHING_MORE, FileLimits, NewPart, Taken, take
from smon.store.models import (
    Attempt,
    Coverage,
    EventFile,
    Job,
    Stream,
    Window,
    WindowKind,
    WindowState,
    new_id,
)
from smon.store.streams import ALL_ENDED, LOST, add_clock_samples, chunks, next_seq
from smon.wire import BatchKind

#: (stream, epoch, seq) of a batch.
Key = tuple[str, int, int]

OPS: Final = "ops"
CONTEXT: Final = "context"

#: Reason of a GAP that stands for batches which a server has acknowledged, but this database does
#: not have. They may be in the log of a server that is down: if it comes back, they are taken.
NOT_ON_SERVER: Final = "not-on-server"

_OVER: Final = (WindowState.DONE, WindowState.FAILED)


@dataclass(frozen=True, slots=True)
class BatchNote:
    """What the tables keep of one batch.

    Attributes
    ----------
    last_seq
        As `seq`; for a GAP the last number that it stands for.
    events
        Ops in it; for a GAP, events that are lost.
    steps_done
        All ops of this step and earlier ones are in this batch or in earlier ones of the stream.
    clock
        (offset to the server's clock, its error), ns.
    reason
        Of a GAP or END.
    """

    stream_id: str
    tenant_id: str
    attempt_id: str
    epoch: int
    seq: int
    last_seq: int
    kind: BatchKind
    events: int
    steps_done: int | None
    received_ns: int
    clock: tuple[int, int] | None = None
    reason: str | None = None

    @property
    def key(self) -> Key:
        """(stream, epoch, seq)."""
        return self.stream_id, self.epoch, self.seq


@dataclass(frozen=True, slots=True)
class NewParts:
    """Parts of files that have been written, and what an attempt may send of them."""

    parts: tuple[NewPart, ...] = ()
    limits: FileLimits = NOTHING_MORE


NO_PARTS: Final = NewParts()


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that has been written; ``window_number`` None: side evidence of the attempt."""

    id: str
    tenant_id: str
    job_id: str
    attempt_id: str
    window_number: int | None
    kind: str
    path: str
    rows: int
    bytes: int
    first_step: int
    last_step: int


class AlreadyStored(StoreError):  # noqa: N818  # a state of affairs, not a failure
    """Some of the batches are stored already, so nothing was written.

    Parameters
    ----------
    keys
        (stream, epoch, seq) of those.
    """

    def __init__(self, keys: frozenset[Key]) -> None:
        super().__init__(f"{len(keys)} batches are stored already: leave them out")
        self.keys = keys


def stored_among(session: Session, keys: Collection[Key]) -> frozenset[Key]:
    """Those of the batches that are stored."""
    covered = _coverage(session, {stream for stream, _, _ in keys})
    return frozenset(
        key for key in keys if (row := covered.get(key[:2])) and covers(row.ranges, key[2])
    )


def commit(
    session: Session,
    notes: Sequence[BatchNote],
    files: Sequence[NewFile],
    now: int,
    sent: NewParts = NO_PARTS,
) -> Taken:
    """Make batches and the files that hold them part of the store; the caller commits.

    Parameters
    ----------
    sent
        Parts of files of ranks among the batches.

    Returns
    -------
    Taken
        What became of `sent`.

    Raises
    ------
    AlreadyStored
        Some are stored already; nothing was written.
    MissingError
        A stream does not exist (any more).
    StoreError
        The same batch is given twice.
    """
    if len({note.key for note in notes}) != len(notes):
        raise StoreError("expected every batch once: leave out the second one")
    streams = _lock_streams(session, notes)
    _lock_attempts(session, notes, files)
    covered = _coverage(session, set(streams))
    known = frozenset(
        note.key for note in notes if (row := covered.get(note.key[:2])) and row.has(note)
    )
    if known:
        raise AlreadyStored(known)
    _extend(session, streams, covered, notes)
    _save_streams(session, streams, now)
    windows = _touch_windows(session, files, now)
    _add_files(session, files, windows, now)
    taken = take(session, sent.parts, sent.limits, now)
    _touch_attempts(session, notes, files, now)
    _end_attempts(session, streams, now)
    _touch_jobs(session, notes, files, streams, now)
    add_clock_samples(
        session,
        [(note.stream_id, note.received_ns, *note.clock) for note in notes if note.clock],
    )
    return taken


# --- ranges -----------------------------------------------------------------------------------


def covers(ranges: Sequence[Sequence[int]], seq: int) -> bool:
    """Whether ascending, disjoint ranges contain a number."""
    at = bisect_right(ranges, seq, key=_first) - 1
    return at >= 0 and seq <= ranges[at][1]


def _first(entry: Sequence[int]) -> int:
    return entry[0]


def merged(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Ascending, disjoint ranges of the same numbers; those that touch become one."""
    result: list[list[int]] = []
    for first, last in sorted((entry[0], entry[1]) for entry in ranges):
        if result and first <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result


def without(ranges: Iterable[Sequence[int]], taken: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of some ranges that are not in others; both are ascending and disjoint."""
    result: list[list[int]] = []
    for first, last in ranges:
        at = first
        for low, high in taken:
            if high < at or low > last:
                continue
            if low > at:
                result.append([at, low - 1])
            at = high + 1
        if at <= last:
            result.append([at, last])
    return result


def _pending(ranges: Sequence[Sequence[int]], pending: Iterable[Sequence[int]]) -> list[list[int]]:
    """One entry of each range, its highest step: all of a range comes to count at once."""
    best: dict[int, list[int]] = {}
    for seq, step in pending:
        at = bisect_right(ranges, seq, key=_first) - 1
        entry = best.setdefault(at, [seq, step])
        entry[0], entry[1] = max(entry[0], seq), max(entry[1], step)
    return [best[at] for at in sorted(best)]


# --- streams ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Covered:
    """A row of ``coverage``."""

    ranges: list[list[int]] = field(default_factory=list)
    pending: list[list[int]] = field(default_factory=list)
    awaited: list[list[int]] = field(default_factory=list)
    end_seq: int | None = None

    def has(self, note: BatchNote) -> bool:
        """Whether the batch is stored, or given up for good."""
        if not covers(self.ranges, note.seq):
            return False
        return note.kind is BatchKind.GAP or not covers(self.awaited, note.seq)

    def await_more(self, notes: Sequence[BatchNote]) -> None:
        """Note which of the numbers may still come; before they are added to the ranges."""
        data = [(note.seq, note.seq) for note in notes if note.kind is not BatchKind.GAP]
        lost = [
            (note.seq, note.last_seq)
            for note in notes
            if note.kind is BatchKind.GAP and note.reason == NOT_ON_SERVER
        ]
        fresh = without(merged(lost), self.ranges)
        self.awaited = without(merged([*self.awaited, *fresh]), merged(data))


@dataclass(slots=True)
class _StreamState:
    """What changes of a stream."""

    id: str
    attempt_id: str
    job_id: str
    epoch: int
    steps_done: int | None
    ended: bool
    end_reason: str | None
    events: int
    lost_events: int
    just_ended: bool = False


def for_change(session: Session, statement: Any) -> Any:  # noqa: ANN401  # Select of any columns
    """For change; SQLite has locked everything. Keys stay free, for rows that refer to these."""
    if session.get_bind().dialect.name == "sqlite":
        return statement
    return statement.with_for_update(key_share=True)


def _lock_streams(session: Session, notes: Sequence[BatchNote]) -> dict[str, _StreamState]:
    tenant_of = {note.stream_id: note.tenant_id for note in notes}
    columns = (
        *(Stream.id, Stream.attempt_id, Stream.job_id, Stream.epoch, Stream.steps_done),
        *(Stream.ended, Stream.end_reason, Stream.events, Stream.lost_events, Stream.tenant_id),
    )
    found: dict[str, _StreamState] = {}
    for part in chunks(sorted(tenant_of)):
        wanted = select(*columns).where(Stream.id.in_(part)).order_by(Stream.id)
        for *values, tenant_id in session.execute(for_change(session, wanted)):
            if tenant_id == tenant_of[values[0]]:
                found[values[0]] = _StreamState(*values)
    lacking = set(tenant_of) - set(found)
    if lacking:
        raise MissingError(
            f"expected streams that are registered, found {len(lacking)} others, such as "
            f"{min(lacking)}: send a hello again"
        )
    return found


def _lock_attempts(session: Session, notes: Sequence[BatchNote], files: Sequence[NewFile]) -> None:
    """Two commits that end the last two streams of an attempt must see each other."""
    ids = {note.attempt_id for note in notes} | {file.attempt_id for file in files}
    for part in chunks(sorted(ids)):
        wanted = select(Attempt.id).where(Attempt.id.in_(part)).order_by(Attempt.id)
        session.execute(for_change(session, wanted)).all()


def _coverage(session: Session, stream_ids: set[str]) -> dict[tuple[str, int], _Covered]:
    found: dict[tuple[str, int], _Covered] = {}
    for part in chunks(sorted(stream_ids)):
        rows = session.execute(
            select(
                Coverage.stream_id,
                Coverage.epoch,
                Coverage.ranges,
                Coverage.pending_steps,
                Coverage.awaited,
                Coverage.end_seq,
            ).where(Coverage.stream_id.in_(part))
        )
        for stream_id, epoch, *values in rows:
            found[stream_id, epoch] = _Covered(*values)
    return found


def _extend(
    session: Session,
    streams: dict[str, _StreamState],
    covered: dict[tuple[str, int], _Covered],
    notes: Sequence[BatchNote],
) -> None:
    """Add the numbers of the batches to the ranges, and to the streams what thereby counts."""
    by_epoch: dict[tuple[str, int], list[BatchNote]] = defaultdict(list)
    for note in notes:
        by_epoch[note.stream_id, note.epoch].append(note)
    new: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for place, group in sorted(by_epoch.items()):
        row = covered.get(place, _Covered())
        _extend_one(streams[place[0]], place[1], row, group)
        values = {
            "stream_id": place[0],
            "epoch": place[1],
            "ranges": row.ranges,
            "pending_steps": row.pending,
            "awaited": row.awaited,
            "end_seq": row.end_seq,
        }
        (old if place in covered else new).append(values)
    if new:
        session.execute(insert(Coverage), new)
    if old:
        session.execute(update(Coverage), old)


def _extend_one(
    stream: _StreamState, epoch: int, row: _Covered, notes: Sequence[BatchNote]
) -> None:
    row.await_more(notes)
    row.ranges = merged([*row.ranges, *((note.seq, note.last_seq) for note in notes)])
    done = [[note.seq, note.steps_done] for note in notes if note.steps_done is not None]
    contiguous = next_seq(row.ranges) - 1
    waiting = []
    for seq, step in (*row.pending, *done):
        if seq <= contiguous:
            stream.steps_done = max(step, -1 if stream.steps_done is None else stream.steps_done)
        else:
            waiting.append([seq, step])
    row.pending = _pending(row.ranges, waiting)
    for note in notes:
        if note.kind is BatchKind.OPS:
            stream.events += note.events
        elif note.kind is BatchKind.GAP:
            stream.lost_events += note.events
        elif note.kind is BatchKind.END:
            row.end_seq = note.seq
            if epoch == stream.epoch:
                stream.end_reason = note.reason
    ends = row.end_seq is not None and contiguous >= row.end_seq and epoch == stream.epoch
    if ends and not stream.ended:
        stream.ended = stream.just_ended = True


def _save_streams(session: Session, streams: dict[str, _StreamState], now: int) -> None:
    rows = [
        {
            "id": stream.id,
            "steps_done": stream.steps_done,
            "ended": stream.ended,
            "end_reason": stream.end_reason,
            "events": stream.events,
            "lost_events": stream.lost_events,
            "last_data_ns": now,
        }
        for stream in streams.values()
    ]
    if rows:
        session.execute(update(Stream), rows)


# --- windows and files ------------------------------------------------------------------------


@dataclass(slots=True)
class _Gain:
    """What the files add to one window."""

    first_step: int
    last_step: int
    rows: int
    tenant_id: str
    job_id: str


def _gains(files: Sequence[NewFile]) -> dict[tuple[str, int], _Gain]:
    gains: dict[tuple[str, int], _Gain] = {}
    for file in files:
        if file.window_number is None:
            continue
        place = (file.attempt_id, file.window_number)
        gain = gains.setdefault(
            place, _Gain(file.first_step, file.last_step, 0, file.tenant_id, file.job_id)
        )
        gain.first_step = min(gain.first_step, file.first_step)
        gain.last_step = max(gain.last_step, file.last_step)
        gain.rows += file.rows if file.kind == OPS else 0
    return gains


def _touch_windows(
    session: Session, files: Sequence[NewFile], now: int
) -> dict[tuple[str, int], str]:
    """Make or extend the windows of the files; their ids by (attempt, number)."""
    gains = _gains(files)
    ids: dict[tuple[str, int], str] = {}
    changed = []
    for part in chunks(sorted(gains)):
        wanted = (
            select(
                *(Window.id, Window.attempt_id, Window.number, Window.first_step),
                *(Window.last_step, Window.rows, Window.state, Window.ready_ns, Window.tries),
                *(Window.revision, Window.expired_ns),
            )
            .where(
                tuple_(Window.attempt_id, Window.number).in_(part),
                Window.kind == WindowKind.STEPS.value,
            )
            .order_by(Window.id)
        )
        for row in session.execute(for_change(session, wanted)):
            place = (row.attempt_id, row.number)
            ids[place] = row.id
            changed.append(_extended(row, gains[place], now))
    if changed:
        session.execute(update(Window), changed)
    new = [_opened(place, gain, now) for place, gain in sorted(gains.items()) if place not in ids]
    if new:
        session.execute(insert(Window), new)
        ids.update(((row["attempt_id"], row["number"]), row["id"]) for row in new)
    return ids


def _opened(place: tuple[str, int], gain: _Gain, now: int) -> dict[str, Any]:
    return {
        "id": new_id(),
        "tenant_id": gain.tenant_id,
        "job_id": gain.job_id,
        "attempt_id": place[0],
        "kind": WindowKind.STEPS.value,
        "number": place[1],
        "first_step": gain.first_step,
        "last_step": gain.last_step,
        "rows": gain.rows,
        "state": WindowState.OPEN.value,
        "opened_ns": now,
        "updated_ns": now,
        "revision": 1,
    }


def _extended(row: Any, gain: _Gain, now: int) -> dict[str, Any]:  # noqa: ANN401  # a row of a query
    # A window whose files have expired keeps its report: the latecomers alone make no better one.
    again = row.state in _OVER and row.expired_ns is None
    return {
        "id": row.id,
        "first_step": min(row.first_step, gain.first_step),
        "last_step": max(row.last_step, gain.last_step),
        "rows": row.rows + gain.rows,
        "updated_ns": now,
        "revision": row.revision + 1,
        "compacted_ns": None,
        "state": WindowState.READY.value if again else row.state,
        "ready_ns": now if again else row.ready_ns,
        "tries": 0 if again else row.tries,
    }


def _add_files(
    session: Session, files: Sequence[NewFile], windows: dict[tuple[str, int], str], now: int
) -> None:
    rows = [
        {
            "id": file.id,
            "tenant_id": file.tenant_id,
            "job_id": file.job_id,
            "attempt_id": file.attempt_id,
            "window_id": None
            if file.window_number is None
            else windows[file.attempt_id, file.window_number],
            "kind": file.kind,
            "path": file.path,
            "rows": file.rows,
            "bytes": file.bytes,
            "first_step": file.first_step,
            "last_step": file.last_step,
            "created_ns": now,
        }
        for file in files
    ]
    if rows:
        session.execute(insert(EventFile), rows)


# --- attempts and jobs ------------------------------------------------------------------------


def _touch_attempts(
    session: Session, notes: Sequence[BatchNote], files: Sequence[NewFile], now: int
) -> None:
    ids = {note.attempt_id for note in notes} | {file.attempt_id for file in files}
    for part in chunks(sorted(ids)):
        session.execute(
            update(Attempt)
            .where(Attempt.id.in_(part))
            .values(revision=Attempt.revision + 1, last_data_ns=now)
            .execution_options(synchronize_session=False)
        )
        session.execute(
            update(Attempt)
            .where(Attempt.id.in_(part), Attempt.end_reason == LOST)
            .values(ended_ns=None, end_reason=None)
            .execution_options(synchronize_session=False)
        )


def _end_attempts(session: Session, streams: dict[str, _StreamState], now: int) -> None:
    """End the attempts whose last stream has ended now."""
    ended = sorted({stream.attempt_id for stream in streams.values() if stream.just_ended})
    for part in chunks(ended):
        alive = set(
            session.scalars(
                select(Stream.attempt_id)
                .where(Stream.attempt_id.in_(part), Stream.ended.is_(False))
                .group_by(Stream.attempt_id)
            )
        )
        session.execute(
            update(Attempt)
            .where(Attempt.id.in_(set(part) - alive), Attempt.ended_ns.is_(None))
            .values(ended_ns=now, end_reason=ALL_ENDED)
            .execution_options(synchronize_session=False)
        )


def _touch_jobs(
    session: Session,
    notes: Sequence[BatchNote],
    files: Sequence[NewFile],
    streams: dict[str, _StreamState],
    now: int,
) -> None:
    ids = {streams[note.stream_id].job_id for note in notes} | {file.job_id for file in files}
    # One by one in order, so that two servers never wait for each other in a circle.
    for job_id in sorted(ids):
        session.execute(
            update(Job)
            .where(Job.id == job_id, Job.last_data_ns < now)
            .values(last_data_ns=now)
            .execution_options(synchronize_session=False)
        )
