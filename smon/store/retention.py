"""What goes, and when: event files by age and size, reports by age, and what nobody needs any more.

Flow: `smon.store.housekeeping` → **here**. Rows go first, files after: a crash in between leaves
files without rows, which `smon.store.reconcile` sets aside, and never rows without files. Windows
and jobs that are pinned keep everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from smon.config import Settings
from smon.store.commit import CONTEXT, for_change
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    Base,
    ClockSample,
    Coverage,
    EventFile,
    Finding,
    FindingEvent,
    FindingState,
    Import,
    Job,
    Node,
    Notice,
    Result,
    SentFile,
    StepResult,
    Stream,
    Task,
    Window,
    WindowState,
    WorkState,
)
from smon.store.objects import Objects
from smon.store.streams import chunks

_DAY_NS: Final = 86_400 * 10**9

#: Windows, and rows of other tables, that one round takes: the others wait for the next.
MAX_WINDOWS: Final = 500
MAX_ROWS: Final = 20_000

#: Where event files are kept for ever: age at which offsets of clocks go all the same.
CLOCK_DAYS: Final = 30.0

#: Without data and heartbeat for so long, and without event files, a stream is dead.
DEAD_STREAM_DAYS: Final = 30.0

#: Processes that were not seen for so long, and what was computed on request, are forgotten.
NODE_DAYS: Final = 7.0
TASK_DAYS: Final = 7.0

#: Why a window failed that nobody has analysed in time.
EXPIRED: Final = "its event files expired before it was analysed"

_OVER: Final = (WindowState.DONE.value, WindowState.FAILED.value)
_FINISHED: Final = (WorkState.DONE.value, WorkState.FAILED.value)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: event files and their bytes, and rows of other tables by their name."""

    files: int = 0
    bytes: int = 0
    rows: tuple[tuple[str, int], ...] = ()


def expire(database: Database, objects: Objects, settings: Settings, now: int) -> Removed:
    """Remove event files that are too old, or too many; the oldest windows first.

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    with database.write() as session:
        files = []
        if settings.retention_days:
            before = now - int(settings.retention_days * _DAY_NS)
            files += _expire_windows(session, _old_windows(session, before), now)
            files += _take_files(session, _left_context(before))
        if settings.retention_bytes:
            windows = _surplus_windows(session, settings.retention_bytes)
            files += _expire_windows(session, windows, now)
    for file in files:
        objects.delete(file.path)
    return Removed(len(files), sum(file.bytes for file in files))


def _not_pinned() -> ColumnElement[bool]:
    return and_(Window.pinned.is_(False), Job.pinned.is_(False))


def _old_windows(session: Session, before: int) -> list[str]:
    """Windows that have had no data since, and have files."""
    wanted = (
        select(Window.id)
        .join(Job, Job.id == Window.job_id)
        .where(
            Window.updated_ns < before,
            Window.state != WindowState.CLAIMED.value,
            _not_pinned(),
            exists().where(EventFile.window_id == Window.id),
        )
        .order_by(Window.updated_ns)
        .limit(MAX_WINDOWS)
    )
    return list(session.scalars(wanted))


def _surplus_windows(session: Session, most: int) -> list[str]:
    """The oldest analysed windows, so many that the rest fits."""
    surplus = int(session.scalar(select(func.coalesce(func.sum(EventFile.bytes), 0))) or 0) - most
    if surplus <= 0:
        return []
    size = func.sum(EventFile.bytes)
    wanted = (
        select(Window.id, size)
        .join(Job, Job.id == Window.job_id)
        .join(EventFile, EventFile.window_id == Window.id)
        .where(Window.state.in_(_OVER), _not_pinned())
        .group_by(Window.id)
        .order_by(Window.updated_ns, Window.id)
        .limit(MAX_WINDOWS)
    )
    chosen: list[str] = []
    for window_id, held in session.execute(wanted):
        if surplus <= 0:
            break
        chosen.append(window_id)
        surplus -= int(held)
    return chosen


def _expire_windows(session: Session, window_ids: Sequence[str], now: int) -> list[Any]:
    """Mark windows as expired and take the rows of their files; (path, bytes) of those."""
    files: list[Any] = []
    for part in chunks(sorted(window_ids)):
        # A worker may just have claimed one of them: it keeps its files.
        wanted = select(Window.id).where(
            Window.id.in_(part), Window.state != WindowState.CLAIMED.value
        )
        ids = list(session.scalars(for_change(session, wanted.order_by(Window.id))))
        session.execute(
            update(Window)
            .where(Window.id.in_(ids), Window.state.not_in(_OVER))
            .values(state=WindowState.FAILED.value, reason=EXPIRED)
            .execution_options(synchronize_session=False)
        )
        session.execute(
            update(Window)
            .where(Window.id.in_(ids))
            .values(expired_ns=now)
            .execution_options(synchronize_session=False)
        )
        files += _take_files(session, EventFile.window_id.in_(ids))
        _delete(session, SentFile, SentFile.window_id.in_(ids))
    return files


def _left_context(before: int) -> ColumnElement[bool]:
    """Old side evidence of attempts that have no files of windows any more."""
    other = EventFile.__table__.alias()
    of_pinned = exists().where(Job.id == EventFile.job_id, Job.pinned.is_(True))
    with_windows = exists().where(
        other.c.attempt_id == EventFile.attempt_id, other.c.window_id.is_not(None)
    )
    return and_(
        *(EventFile.window_id.is_(None), EventFile.kind == CONTEXT),
        *(EventFile.created_ns < before, ~of_pinned, ~with_windows),
    )


def _take_files(session: Session, which: ColumnElement[bool]) -> list[Any]:
    """Remove rows of files; (path, bytes) of them."""
    rows = session.execute(select(EventFile.id, EventFile.path, EventFile.bytes).where(which)).all()
    for part in chunks([row.id for row in rows]):
        _delete(session, EventFile, EventFile.id.in_(part))
    return list(rows)


# --- everything that is not events ------------------------------------------------------------


def trim(database: Database, objects: Objects, settings: Settings, now: int) -> Removed:
    """Remove old reports, and what nobody needs any more.

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    paths: list[str] = []
    counts: dict[str, int] = {}
    with database.write() as session:
        if settings.report_days:
            before = now - int(settings.report_days * _DAY_NS)
            paths += _trim_results(session, before, counts)
            _trim_findings(session, before, counts)
            _trim_steps(session, before, counts)
            _trim_windows(session, before, counts)
            old = and_(Import.state.in_(_FINISHED), Import.finished_ns < before)
            _count(counts, Import, _delete(session, Import, old))
        paths += _trim_tasks(session, now - int(TASK_DAYS * _DAY_NS), counts)
        _trim_clocks(session, settings, now, counts)
        _trim_streams(session, now - int(DEAD_STREAM_DAYS * _DAY_NS), counts)
        old = Node.seen_ns < now - int(NODE_DAYS * _DAY_NS)
        _count(counts, Node, _delete(session, Node, old))
    for path in paths:
        objects.delete(path)
    return Removed(rows=tuple(sorted((name, count) for name, count in counts.items() if count)))


def _delete(session: Session, table: type[Base], which: ColumnElement[bool]) -> int:
    done: Any = session.execute(
        delete(table).where(which).execution_options(synchronize_session=False)
    )
    return max(int(done.rowcount), 0)


def _count(counts: dict[str, int], table: type[Base], rows: int) -> None:
    counts[table.__tablename__] = counts.get(table.__tablename__, 0) + rows


def _pinned_jobs() -> Any:  # noqa: ANN401  # a subquery of ids
    return select(Job.id).where(Job.pinned.is_(True))


def _trim_results(session: Session, before: int, counts: dict[str, int]) -> list[str]:
    rows = session.execute(
        select(Result.id, Result.workers_path)
        .join(Window, Window.id == Result.window_id)
        .join(Job, Job.id == Result.job_id)
        .where(Result.created_ns < before, _not_pinned())
        .order_by(Result.created_ns)
        .limit(MAX_ROWS)
    ).all()
    for part in chunks([row.id for row in rows]):
        _count(counts, Result, _delete(session, Result, Result.id.in_(part)))
    return [row.workers_path for row in rows if row.workers_path]


def _trim_findings(session: Session, before: int, counts: dict[str, int]) -> None:
    ids = session.scalars(
        select(Finding.id)
        .where(
            Finding.last_ns < before,
            Finding.state == FindingState.CLEARED.value,
            Finding.job_id.not_in(_pinned_jobs()),
        )
        .limit(MAX_ROWS)
    ).all()
    for part in chunks(ids):
        which = FindingEvent.finding_id.in_(part)
        _count(counts, FindingEvent, _delete(session, FindingEvent, which))
        _count(counts, Finding, _delete(session, Finding, Finding.id.in_(part)))
    told = and_(
        Notice.told_ns < before,
        Notice.created_ns < before,
        Notice.told_severity.is_(None),
        Notice.state != WorkState.QUEUED,
        Notice.job_id.not_in(_pinned_jobs()),
    )
    _count(counts, Notice, _delete(session, Notice, told))


def _trim_steps(session: Session, before: int, counts: dict[str, int]) -> None:
    """By attempt, of which there are few: the table has no index of times."""
    old = session.scalars(
        select(Attempt.id).where(
            Attempt.last_data_ns < before, Attempt.job_id.not_in(_pinned_jobs())
        )
    ).all()
    for part in chunks(old):
        which = and_(StepResult.attempt_id.in_(part), StepResult.analysed_ns < before)
        _count(counts, StepResult, _delete(session, StepResult, which))


def _trim_windows(session: Session, before: int, counts: dict[str, int]) -> None:
    """Windows that have neither files nor a report any more."""
    ids = session.scalars(
        select(Window.id)
        .join(Job, Job.id == Window.job_id)
        .where(
            Window.updated_ns < before,
            Window.expired_ns.is_not(None),
            Window.state.in_(_OVER),
            _not_pinned(),
            ~exists().where(Result.window_id == Window.id),
            ~exists().where(EventFile.window_id == Window.id),
        )
        .limit(MAX_ROWS)
    ).all()
    for part in chunks(ids):
        _count(counts, Window, _delete(session, Window, Window.id.in_(part)))


def _trim_tasks(session: Session, before: int, counts: dict[str, int]) -> list[str]:
    rows = session.execute(
        select(Task.id, Task.path)
        .where(Task.state.in_(_FINISHED), Task.finished_ns < before)
        .limit(MAX_ROWS)
    ).all()
    for part in chunks([row.id for row in rows]):
        _count(counts, Task, _delete(session, Task, Task.id.in_(part)))
    return [row.path for row in rows if row.path]


def _trim_clocks(session: Session, settings: Settings, now: int, counts: dict[str, int]) -> None:
    days = settings.retention_days or CLOCK_DAYS
    which = ClockSample.at_ns < now - int(days * _DAY_NS)
    _count(counts, ClockSample, _delete(session, ClockSample, which))


def _trim_streams(session: Session, before: int, counts: dict[str, int]) -> None:
    """Streams that nobody sends any more, of attempts whose event files have gone."""
    ids = session.scalars(
        select(Stream.id)
        .join(Attempt, Attempt.id == Stream.attempt_id)
        .where(
            Stream.last_data_ns < before,
            or_(Stream.heartbeat_ns.is_(None), Stream.heartbeat_ns < before),
            Attempt.last_data_ns < before,
            Stream.job_id.not_in(_pinned_jobs()),
            ~exists().where(EventFile.attempt_id == Stream.attempt_id),
        )
        .limit(MAX_ROWS)
    ).all()
    for part in chunks(sorted(ids)):
        _count(counts, Coverage, _delete(session, Coverage, Coverage.stream_id.in_(part)))
        _count(counts, ClockSample, _delete(session, ClockSample, ClockSample.stream_id.in_(part)))
        _count(counts, Stream, _delete(session, Stream, Stream.id.in_(part)))
