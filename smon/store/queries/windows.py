"""Windows of a job: which steps, in what state, with what result."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from smon.errors import MissingError
from smon.store.models import Attempt, Job, Result, Window, WindowKind
from smon.store.queries.paging import Page, Slice, page_of, seconds, seconds_or_none, step_or_none


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A window, and the newest result of it; None where there is none.

    Steps are None of a capture that is of no step.
    """

    id: str
    attempt: int
    number: int
    first_step: int | None
    last_step: int | None
    rows: int
    state: str
    reason: str | None
    missing: tuple[int, ...]
    missing_count: int
    opened_s: float
    updated_s: float
    ready_s: float | None
    pinned: bool
    expired: bool
    analysed_s: float | None
    analysis_s: float | None
    code_version: str | None
    verdict: str | None
    cause: str | None
    slowdown: float | None
    waste_ratio: float | None
    recorded_s: float | None
    ideal_s: float | None
    coverage_ratio: float | None
    kind: WindowKind = WindowKind.STEPS


def need_job(session: Session, tenant_id: str, job_id: str) -> None:
    """Let it pass if there is such a job.

    Raises
    ------
    MissingError
        There is none, or it is another tenant's.
    """
    query = select(Job.id).where(Job.tenant_id == tenant_id, Job.id == job_id)
    if session.execute(query).first() is None:
        raise MissingError("expected the id of a job")


@dataclass(frozen=True, slots=True)
class WindowFilter:
    """Which windows are asked for; None: any."""

    attempt: int | None = None
    state: str | None = None


def list_windows(
    session: Session, tenant_id: str, job_id: str, wanted: WindowFilter, part: Slice
) -> Page[WindowRow]:
    """Windows of a job, newest first.

    Raises
    ------
    MissingError
        There is no such job.
    """
    need_job(session, tenant_id, job_id)
    other = aliased(Result)
    newest = (
        select(other.id)
        .where(other.window_id == Window.id)
        .order_by(other.created_ns.desc())
        .limit(1)
        .correlate(Window)
        .scalar_subquery()
    )
    query = (
        select(Window, Attempt.number, Result)
        .join(Attempt, Attempt.id == Window.attempt_id)
        .outerjoin(Result, Result.id == newest)
        .where(Window.tenant_id == tenant_id, Window.job_id == job_id)
        .order_by(Attempt.number.desc(), Window.kind.desc(), Window.number.desc())
    )
    if wanted.attempt is not None:
        query = query.where(Attempt.number == wanted.attempt)
    if wanted.state is not None:
        query = query.where(Window.state == wanted.state)
    found = session.execute(query.offset(part.offset).limit(part.limit + 1)).all()
    return page_of([_row(window, number, result) for window, number, result in found], part)


def _row(window: Window, attempt: int, result: Result | None) -> WindowRow:
    return WindowRow(
        id=window.id,
        attempt=attempt,
        number=window.number,
        first_step=step_or_none(window.first_step),
        last_step=step_or_none(window.last_step),
        rows=window.rows,
        state=window.state,
        reason=window.reason,
        missing=tuple(rank for rank in window.missing or () if isinstance(rank, int)),
        missing_count=window.missing_count,
        opened_s=seconds(window.opened_ns),
        updated_s=seconds(window.updated_ns),
        ready_s=seconds_or_none(window.ready_ns),
        pinned=window.pinned,
        expired=window.expired_ns is not None,
        analysed_s=None if result is None else seconds(result.created_ns),
        analysis_s=None if result is None else result.analysis_s,
        code_version=None if result is None else result.code_version,
        verdict=None if result is None else result.verdict,
        cause=None if result is None else result.cause,
        slowdown=None if result is None else result.slowdown,
        waste_ratio=None if result is None else result.waste_ratio,
        recorded_s=None if result is None else result.recorded_s,
        ideal_s=None if result is None else result.ideal_s,
        coverage_ratio=None if result is None else result.coverage_ratio,
        kind=WindowKind(window.kind),
    )
