"""What an administrator does to a job: keep it for ever, or remove it."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import (
    Attempt,
    ClockSample,
    Coverage,
    EventFile,
    FileDrop,
    Finding,
    FindingEvent,
    Import,
    Job,
    Notice,
    Result,
    SentFile,
    StepResult,
    Stream,
    Window,
)

#: In this order no row is left that another one still refers to.
_OF_JOB: Final[tuple[Any, ...]] = (
    Notice,
    FindingEvent,
    Finding,
    StepResult,
    Result,
    EventFile,
    SentFile,
    FileDrop,
    Window,
    Stream,
    Attempt,
)

_OF_STREAM: Final[tuple[Any, ...]] = (Coverage, ClockSample)


def pin_job(session: Session, tenant_id: str, job_id: str, *, pinned: bool) -> None:
    """Keep the event files of a job whatever their age, or let them go in time.

    Raises
    ------
    MissingError
        There is no such job.
    """
    changed = session.execute(
        update(Job)
        .where(Job.tenant_id == tenant_id, Job.id == job_id)
        .values(pinned=pinned)
        .returning(Job.id)
    ).all()
    if not changed:
        raise MissingError("expected the id of a job")


def delete_job(session: Session, tenant_id: str, job_id: str) -> tuple[str, ...]:
    """Remove a job with all that is known of it.

    Returns
    -------
    tuple of str
        Paths of its files, which the caller removes once this is committed.

    Raises
    ------
    MissingError
        There is no such job.
    """
    query = select(Job).where(Job.tenant_id == tenant_id, Job.id == job_id).with_for_update()
    job = session.execute(query).scalar()
    if job is None:
        raise MissingError("expected the id of a job")
    files = session.execute(select(EventFile.path).where(EventFile.job_id == job_id)).scalars()
    workers = session.execute(
        select(Result.workers_path).where(Result.job_id == job_id, Result.workers_path.is_not(None))
    ).scalars()
    paths = tuple(path for path in (*files.all(), *workers.all()) if path is not None)
    streams = select(Stream.id).where(Stream.job_id == job_id)
    for table in _OF_STREAM:
        session.execute(delete(table).where(table.stream_id.in_(streams)))
    for table in _OF_JOB:
        session.execute(delete(table).where(table.job_id == job_id))
    session.execute(update(Import).where(Import.job_id == job_id).values(job_id=None))
    session.execute(delete(Job).where(Job.id == job_id))
    return paths
