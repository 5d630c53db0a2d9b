"""What a job's steps come from: attempts, windows that lacked ranks, streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Attempt, Result, StepResult, Stream, Window, WindowKind
from smon.store.queries.paging import seconds_or_none, step_or_none

#: Incomplete windows that a page shows, the newest.
MAX_INCOMPLETE: Final = 20


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """First and last step that are known of an attempt."""

    number: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class IncompleteSpan:
    """Steps of a window that ranks had not delivered when it was analysed."""

    window_id: str
    first_step: int
    last_step: int
    missing_count: int


def attempt_spans(
    session: Session, tenant_id: str, job_id: str, numbers: tuple[int, ...]
) -> tuple[AttemptSpan, ...]:
    """Steps of these attempts, by number; attempts without any are left out."""
    query = (
        select(Attempt.number, func.min(StepResult.step), func.max(StepResult.step))
        .join(StepResult, StepResult.attempt_id == Attempt.id)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .where(Attempt.number.in_(numbers))
        .group_by(Attempt.number)
        .order_by(Attempt.number)
    )
    return tuple(AttemptSpan(*row) for row in session.execute(query))


def incomplete_spans(
    session: Session, tenant_id: str, attempt_id: str | None
) -> tuple[IncompleteSpan, ...]:
    """Windows of an attempt that lacked ranks, by step."""
    query = (
        select(Window.id, Window.first_step, Window.last_step, Window.missing_count)
        .where(Window.tenant_id == tenant_id, Window.attempt_id == attempt_id)
        .where(Window.missing_count > 0, Window.ready_ns.is_not(None))
        .where(Window.kind == WindowKind.STEPS)
        .order_by(Window.number.desc())
        .limit(MAX_INCOMPLETE)
    )
    return tuple(sorted((IncompleteSpan(*row) for row in session.execute(query)), key=_first))


def _first(span: IncompleteSpan) -> int:
    return span.first_step


@dataclass(frozen=True, slots=True)
class StreamTotals:
    """Streams of an attempt together.

    Attributes
    ----------
    down
        Without a heartbeat for too long, and not ended.
    lost
        Events that agents gave up.
    hosts
        Of streams that have not ended.
    """

    streams: int
    down: int
    hosts: int
    events: int
    lost: int


def stream_totals(
    session: Session, tenant_id: str, attempt_id: str | None, late_ns: int
) -> StreamTotals:
    """Streams of an attempt; `late_ns`: heartbeats before that moment are too old."""
    late = or_(
        Stream.heartbeat_ns < late_ns,
        Stream.heartbeat_ns.is_(None) & (Stream.created_ns < late_ns),
    )
    open_ = Stream.ended.is_(False)
    row = session.execute(
        select(
            func.count(),
            func.coalesce(func.sum(case((open_ & late, 1), else_=0)), 0),
            func.count(func.distinct(case((open_, Stream.host)))),
            func.coalesce(func.sum(Stream.events), 0),
            func.coalesce(func.sum(Stream.lost_events), 0),
        ).where(Stream.tenant_id == tenant_id, Stream.attempt_id == attempt_id)
    ).one()
    return StreamTotals(*(int(value) for value in row))


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """A window that has a report, among the others of its attempt.

    Attributes
    ----------
    before, after
        Ids of the windows next to it that have a report; None at the ends.
    """

    id: str
    attempt: int
    number: int
    first_step: int | None
    last_step: int | None
    missing_count: int
    analysed_s: float | None
    before: str | None
    after: str | None
    kind: WindowKind = WindowKind.STEPS


def window_place(session: Session, tenant_id: str, window_id: str) -> WindowPlace:
    """A window that has a report.

    Raises
    ------
    MissingError
        There is no such window.
    """
    found = session.execute(
        select(Window, Attempt.number, func.max(Result.created_ns))
        .join(Attempt, Attempt.id == Window.attempt_id)
        .outerjoin(Result, Result.window_id == Window.id)
        .where(Window.tenant_id == tenant_id, Window.id == window_id)
        .group_by(Window.id, Attempt.number)
    ).first()
    if found is None:
        raise MissingError("expected the id of a window")
    window, attempt, created_ns = found
    others = select(Window.id).where(
        Window.attempt_id == window.attempt_id,
        Window.kind == window.kind,
        select(Result.id).where(Result.window_id == Window.id).exists(),
    )
    return WindowPlace(
        id=window.id,
        attempt=attempt,
        number=window.number,
        first_step=step_or_none(window.first_step),
        last_step=step_or_none(window.last_step),
        kind=WindowKind(window.kind),
        missing_count=window.missing_count,
        analysed_s=seconds_or_none(created_ns),
        before=_one(
            session, others.where(Window.number < window.number).order_by(Window.number.desc())
        ),
        after=_one(session, others.where(Window.number > window.number).order_by(Window.number)),
    )


def _one(session: Session, query: Select[str]) -> str | None:
    return session.execute(query.limit(1)).scalar()
