"""Imports: trace files that somebody uploads, from the first file to the finished report.

Flow: `smon.api.routes.imports` → **here** → table ``imports`` → `smon.worker`, which reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import ConflictError, MissingError, WireError
from smon.store.models import Import, WorkState, new_id
from smon.store.queries.paging import Page, Slice, page_of, seconds, seconds_or_none
from smon.wire.problems import Problem

_NOT_UPLOADING: Final = "the import takes no files any more: make a new one"


@dataclass(frozen=True, slots=True)
class ImportFile:
    """A file of an import; `name` is what its owner calls it, for people to read."""

    n: int
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileSize:
    """Number and size of a file that is to come."""

    n: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ImportRow:
    """An import; `progress` runs from 0 to 1, `job_id` and `window_id` are known once it is done.

    `files` are the first ones of `file_count`.
    """

    id: str
    state: str
    options: dict[str, Any]
    file_count: int
    bytes: int
    files: tuple[ImportFile, ...]
    progress: float
    phase: str | None
    error: str | None
    job_id: str | None
    window_id: str | None
    created_s: float
    finished_s: float | None


#: Files of an import that answers list.
MAX_FILES_SHOWN: Final = 100


def import_path(import_id: str, n: int) -> str:
    """Where file number `n` of an import lies, below the root of the event files."""
    return f"imports/{import_id}/{n}"


def create_import(
    session: Session, tenant_id: str, options: Mapping[str, Any], now_ns: int
) -> ImportRow:
    """A new import that waits for its files."""
    row = Import(
        id=new_id(),
        tenant_id=tenant_id,
        state=WorkState.UPLOADING,
        options=dict(options),
        files=[],
        progress=0.0,
        created_ns=now_ns,
    )
    session.add(row)
    session.flush()
    return _row(row)


def list_imports(
    session: Session, tenant_id: str, state: str | None, part: Slice
) -> Page[ImportRow]:
    """Imports, newest first."""
    query = (
        select(Import)
        .where(Import.tenant_id == tenant_id)
        .order_by(Import.created_ns.desc(), Import.id)
    )
    if state is not None:
        query = query.where(Import.state == state)
    found = session.execute(query.offset(part.offset).limit(part.limit + 1)).scalars().all()
    return page_of([_row(each) for each in found], part)


def get_import(session: Session, tenant_id: str, import_id: str) -> ImportRow:
    """One import.

    Raises
    ------
    MissingError
        There is none with this id.
    """
    return _row(_find(session, tenant_id, import_id))


def need_room(
    session: Session, tenant_id: str, import_id: str, size: FileSize, limit_bytes: int
) -> None:
    """Let it pass if the import takes a file of this number and size.

    Raises
    ------
    MissingError
        There is none with this id.
    ConflictError
        It takes no files any more.
    WireError
        Its files would be too large.
    """
    _room(_find(session, tenant_id, import_id), size, limit_bytes)


def add_file(
    session: Session, tenant_id: str, import_id: str, file: ImportFile, limit_bytes: int
) -> ImportRow:
    """Note that a file has come; the same number again replaces it.

    Raises
    ------
    MissingError, ConflictError, WireError
        As `need_room`.
    """
    row = _find(session, tenant_id, import_id, lock=True)
    others = _room(row, FileSize(file.n, file.bytes), limit_bytes)
    document = {"n": file.n, "name": file.name, "bytes": file.bytes, "sha256": file.sha256}
    row.files = sorted([*others, document], key=lambda each: int(each["n"]))
    return _row(row)


def _room(row: Import, size: FileSize, limit_bytes: int) -> list[dict[str, Any]]:
    """The other files of an import that takes one of this number and size."""
    if row.state != WorkState.UPLOADING:
        raise ConflictError(_NOT_UPLOADING)
    others = [each for each in row.files if each["n"] != size.n]
    if sum(each["bytes"] for each in others) + size.bytes > limit_bytes:
        raise WireError(
            Problem.TOO_LARGE,
            f"expected at most {limit_bytes} bytes in all files of an import together: "
            "import fewer steps or ranks, or raise SMON_MAX_IMPORT_BYTES",
        )
    return others


def start_import(session: Session, tenant_id: str, import_id: str) -> ImportRow:
    """All files have come: a worker may read them. Again is the same as once.

    Raises
    ------
    MissingError
        There is none with this id.
    ConflictError
        It has no file, or a number is missing among them.
    """
    row = _find(session, tenant_id, import_id, lock=True)
    if row.state != WorkState.UPLOADING:
        return _row(row)
    numbers = [each["n"] for each in row.files]
    if not numbers:
        raise ConflictError("expected at least one file: PUT imports/ID/files/0")
    absent = next((n for n in range(len(numbers)) if n not in set(numbers)), None)
    if absent is not None:
        raise ConflictError(
            f"expected files with numbers from 0 on: number {absent} has not come, upload it"
        )
    row.state = WorkState.QUEUED
    session.flush()
    return _row(row)


def delete_import(session: Session, tenant_id: str, import_id: str) -> tuple[str, ...]:
    """Forget an import; the job that it became stays.

    Returns
    -------
    tuple of str
        Paths of its files, which the caller removes once this is committed.

    Raises
    ------
    MissingError
        There is none with this id.
    ConflictError
        A worker is reading it.
    """
    row = _find(session, tenant_id, import_id, lock=True)
    if row.state == WorkState.RUNNING:
        raise ConflictError("a worker is reading the import: wait until it is done")
    paths = tuple(import_path(row.id, int(each["n"])) for each in row.files)
    session.delete(row)
    return paths


def _find(session: Session, tenant_id: str, import_id: str, *, lock: bool = False) -> Import:
    query = select(Import).where(Import.tenant_id == tenant_id, Import.id == import_id)
    if lock:
        query = query.with_for_update()
    found = session.execute(query).scalar()
    if found is None:
        raise MissingError("expected the id of an import")
    return found


def _row(row: Import) -> ImportRow:
    files = [
        ImportFile(int(each.get("n", n)), str(each["name"]), int(each["bytes"]), each["sha256"])
        for n, each in enumerate(row.files)
    ]
    return ImportRow(
        id=row.id,
        state=row.state,
        options=row.options,
        file_count=len(files),
        bytes=sum(file.bytes for file in files),
        files=tuple(files[:MAX_FILES_SHOWN]),
        progress=row.progress,
        phase=row.phase,
        error=row.error,
        job_id=row.job_id,
        window_id=row.window_id,
        created_s=seconds(row.created_ns),
        finished_s=seconds_or_none(row.finished_ns),
    )
