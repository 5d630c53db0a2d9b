"""Stored reports: found, unpacked, and read back into the parts that sentences are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import orjson
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from smon.errors import MissingError, StoreError
from smon.report import Finding, JobReport
from smon.store.models import Attempt, Job, Result, Window, WindowKind
from smon.store.results import unpacked


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report as it is stored.

    Attributes
    ----------
    packed
        JSON of schema ``smon.report/1`` in zstd.
    window_id
        None of the running diagnosis.
    capture
        Whether it was made of files that hold no ops.
    version
        Changes whenever the report does.
    """

    packed: bytes
    job_id: str
    attempt: int
    window_id: str | None
    workers_path: str | None
    version: str
    capture: bool = False


def document_of(packed: bytes) -> dict[str, Any]:
    """A stored report as plain dicts and lists.

    Raises
    ------
    StoreError
        It is damaged.
    """
    try:
        document: dict[str, Any] = orjson.loads(unpacked(packed))
    except orjson.JSONDecodeError as error:
        raise StoreError("a stored report is damaged: analyse the window again") from error
    return document


def report_of_window(session: Session, tenant_id: str, job_id: str, name: str) -> StoredReport:
    """The report of a window by its id, of the ``latest`` one, or of the ``live`` diagnosis.

    Raises
    ------
    MissingError
        There is no such job or window, or no report of it yet.
    """
    if name == "live":
        return _live(session, tenant_id, job_id)
    if name == "latest":
        return _latest(session, tenant_id, job_id)
    query = (
        select(Result.id)
        .where(Result.tenant_id == tenant_id, Result.job_id == job_id, Result.window_id == name)
        .order_by(Result.created_ns.desc())
        .limit(1)
    )
    found = session.execute(query).scalar()
    if found is None:
        window = session.get(Window, name)
        if window is None or (window.tenant_id, window.job_id) != (tenant_id, job_id):
            raise MissingError("expected the id of a window of this job")
        raise MissingError(f"the window has no report yet: it is {window.state}")
    return _stored(session, found)


def live_workers(session: Session, tenant_id: str, job_id: str) -> bytes | None:
    """Every worker in each step of the running diagnosis: Parquet as beside a window's report."""
    return session.execute(
        select(Attempt.live_workers)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(Attempt.number.desc())
        .limit(1)
    ).scalar()


def current_report(session: Session, tenant_id: str, job_id: str) -> StoredReport | None:
    """The newest thing known of a job: the running diagnosis, or its last window.

    None if nothing has been analysed.
    """
    row = session.execute(
        select(Attempt.number, Attempt.live_step, Attempt.live_analysed_ns)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(Attempt.number.desc())
        .limit(1)
    ).first()
    latest_id = latest_result_id(session, tenant_id, job_id)
    latest = _stored(session, latest_id) if latest_id else None
    if row is None or row.live_step is None or row.live_analysed_ns is None:
        return latest
    if latest is not None and latest.attempt == row.number:
        kind, last = session.execute(
            select(Window.kind, Window.last_step).where(Window.id == latest.window_id)
        ).one()
        if kind == WindowKind.STEPS and last >= row.live_step:
            return latest
    try:
        return _live(session, tenant_id, job_id)
    except MissingError:
        return latest


def newest_first() -> tuple[ColumnElement[Any], ...]:
    """Results of windows, those that say most of a job now first: ops go before captures."""
    return (
        *(Attempt.number.desc(), Window.kind.desc(), Window.number.desc()),
        Result.created_ns.desc(),
    )


def latest_result_id(session: Session, tenant_id: str, job_id: str) -> str | None:
    """Result of the last analysed window of the newest attempt that has any."""
    return session.execute(
        select(Result.id)
        .join(Window, Window.id == Result.window_id)
        .join(Attempt, Attempt.id == Window.attempt_id)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(*newest_first())
        .limit(1)
    ).scalar()


def _latest(session: Session, tenant_id: str, job_id: str) -> StoredReport:
    found = latest_result_id(session, tenant_id, job_id)
    if found is None:
        _need_job(session, tenant_id, job_id)
        raise MissingError("no window of this job has been analysed yet")
    return _stored(session, found)


def _live(session: Session, tenant_id: str, job_id: str) -> StoredReport:
    row = session.execute(
        select(Attempt.number, Attempt.live_report, Attempt.live_analysed_ns)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(Attempt.number.desc())
        .limit(1)
    ).first()
    if row is None or row.live_report is None:
        _need_job(session, tenant_id, job_id)
        raise MissingError("there is no running diagnosis of this job")
    version = f"live-{row.live_analysed_ns or 0}"
    return StoredReport(row.live_report, job_id, row.number, None, None, version)


def _stored(session: Session, result_id: str) -> StoredReport:
    row = session.execute(
        select(
            Result.report,
            Result.job_id,
            Attempt.number,
            Result.window_id,
            Result.workers_path,
            Result.id,
            Result.created_ns,
            Window.kind,
        )
        .join(Attempt, Attempt.id == Result.attempt_id)
        .join(Window, Window.id == Result.window_id)
        .where(Result.id == result_id)
    ).one()
    version = f"{row.id}-{row.created_ns}"
    return StoredReport(
        packed=row.report,
        job_id=row.job_id,
        attempt=row.number,
        window_id=row.window_id,
        workers_path=row.workers_path,
        version=version,
        capture=row.kind == WindowKind.CAPTURE,
    )


def _need_job(session: Session, tenant_id: str, job_id: str) -> None:
    query = select(Job.id).where(Job.tenant_id == tenant_id, Job.id == job_id)
    if session.execute(query).first() is None:
        raise MissingError("expected the id of a job")


# --- back into the dataclasses of `smon.report` ----------------------------------------------


def read_report(document: Mapping[str, Any]) -> JobReport:
    """The report that a document came from; what a newer version has added is left out.

    Raises
    ------
    StoreError
        It is no report.
    """
    try:
        report: JobReport = _read(JobReport, document)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError("expected a report of schema smon.report/1") from error
    return report


def read_finding(document: Mapping[str, Any]) -> Finding:
    """As `read_report`, of one finding.

    Raises
    ------
    StoreError
        It is no finding.
    """
    try:
        finding: Finding = _read(Finding, document)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError("expected a finding of schema smon.report/1") from error
    return finding


Reader = Callable[[Any], Any]


def _read(kind: Any, value: Any) -> Any:  # noqa: ANN401  # any part of a report
    reader = _reader(kind)
    return value if reader is None or value is None else reader(value)


@lru_cache(maxsize=256)
def _reader(kind: Any) -> Reader | None:  # noqa: ANN401  # a type, as annotations have it
    """How a value of this type is read; None: it stays as it is. Found out once for each type."""
    origin = get_origin(kind)
    if origin in (UnionType, Union):
        return _reader(next(part for part in get_args(kind) if part is not type(None)))
    if origin is tuple:
        return _reader_of_many(_reader(get_args(kind)[0]))
    if is_dataclass(kind) and isinstance(kind, type):
        return _reader_of_part(kind)
    return None


def _reader_of_many(one: Reader | None) -> Reader:
    if one is None:
        return tuple
    return lambda values: tuple(None if value is None else one(value) for value in values)


def _reader_of_part(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    parts = [(field.name, _reader(hints[field.name])) for field in fields(kind)]

    def read(values: Mapping[str, Any]) -> Any:  # noqa: ANN401  # of `kind`
        given = {}
        for name, reader in parts:
            if name in values:
                value = values[name]
                given[name] = value if reader is None or value is None else reader(value)
        return kind(**given)

    return read
