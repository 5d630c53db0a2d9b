"""Stored reports: found, unpacked, and read back into the parts that sentences are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import orjson
import zstandard
from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import MissingError, StoreError
from smon.report import Finding, JobReport
from smon.store.models import Attempt, Job, Result, Window
from smon.store.results import unpacked

#: Enough for the first block of a zstd frame, which holds all up to the data quality.
HEAD_BYTES: Final = 132 * 1024

_ALIGNED: Final = re.compile(rb'"aligned": ?(true|false|null)')


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report as it is stored.

    Attributes
    ----------
    packed
        JSON of schema ``smon.report/1`` in zstd.
    window_id
        None of the running diagnosis.
    version
        Changes whenever the report does.
    """

    packed: bytes
    job_id: str
    attempt: int
    window_id: str | None
    workers_path: str | None
    version: str


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


def is_aligned(head: bytes | None) -> bool | None:
    """What the beginning of a stored report says of the clocks; None if it does not."""
    if not head:
        return None
    try:
        text = zstandard.ZstdDecompressor().decompressobj().decompress(head)
    except zstandard.ZstdError:
        return None
    match = _ALIGNED.search(text)
    return {b"true": True, b"false": False}.get(match[1]) if match else None


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
        last = session.execute(
            select(Window.last_step).where(Window.id == latest.window_id)
        ).scalar_one()
        if last >= row.live_step:
            return latest
    try:
        return _live(session, tenant_id, job_id)
    except MissingError:
        return latest


def latest_result_id(session: Session, tenant_id: str, job_id: str) -> str | None:
    """Result of the last analysed window of the newest attempt that has any."""
    return session.execute(
        select(Result.id)
        .join(Window, Window.id == Result.window_id)
        .join(Attempt, Attempt.id == Window.attempt_id)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(Attempt.number.desc(), Window.number.desc(), Result.created_ns.desc())
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
        )
        .join(Attempt, Attempt.id == Result.attempt_id)
        .where(Result.id == result_id)
    ).one()
    version = f"{row.id}-{row.created_ns}"
    return StoredReport(
        row.report, row.job_id, row.number, row.window_id, row.workers_path, version
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


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(kind: Any, value: Any) -> Any:  # noqa: ANN401  # any part of a report
    if value is None:
        return None
    origin = get_origin(kind)
    if origin in (UnionType, Union):
        return _read(next(part for part in get_args(kind) if part is not type(None)), value)
    if origin is tuple:
        inner = get_args(kind)[0]
        return tuple(_read(inner, item) for item in value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], value[name]) for name in hints if name in value})
    return value
