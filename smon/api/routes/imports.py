"""Imports: make one, send its files, start it, follow it.

Flow: ``smon import`` → **here** → spool in the data folder → object store → `smon.worker`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import mmap
import os
import re
import secrets
from pathlib import Path as FilePath
from typing import Annotated, Any, BinaryIO, Final
from urllib.parse import unquote

from anyio.to_thread import run_sync
from fastapi import Body, Header, Path, Query, Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import (
    Asked,
    Ingester,
    Part,
    Reader,
    found,
    problems,
    router,
    scoped,
)
from smon.api.routes.removal import remove
from smon.api.schemas.base import ID_PATTERN, PageModel
from smon.api.schemas.imports import ImportModel, ImportQuestion
from smon.errors import StoreError, WireError
from smon.store.models import WorkState
from smon.store.objects import Objects
from smon.store.queries import imports as store
from smon.wire import DIGEST_HEADER
from smon.wire.problems import Problem

routes = router("imports")

#: The name of a file, percent-encoded UTF-8; shown to people, and never a path.
NAME_HEADER: Final = "SMon-File-Name"

_MAX_FILES: Final = 1_000_000
_MAX_NAME: Final = 512
_WRITE_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]{44}):\s*(?:,|$)")

ImportId = Annotated[str, Path(pattern=ID_PATTERN, description="id of the import")]


@routes.post(
    "/imports",
    summary="Make an import",
    response_model=None,
    status_code=201,
    responses={
        **found(ImportModel, "the import, which waits for its files", status=201),
        **problems(Problem.MALFORMED_BODY, Problem.LENGTH_REQUIRED, Problem.TOO_LARGE),
    },
    openapi_extra=scoped(Scope.INGEST),
)
def create(
    asked: Ingester,
    question: Annotated[
        ImportQuestion | None, Body(description="what is known of the files; may be left out")
    ] = None,
) -> Response:
    """Begin an import of recorded trace files (`docs/formats.md`).

    Then `PUT` each file, and `POST` start.
    """
    options = {} if question is None else question.model_dump(exclude_none=True)
    with asked.write() as session:
        row = store.create_import(session, asked.tenant_id, options, asked.service.clock())
    return asked.answer(ImportModel.model_validate(row), status=201)


@routes.get(
    "/imports",
    summary="List imports",
    response_model=None,
    responses={**found(PageModel[ImportModel], "a page of imports"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def imports(
    asked: Reader,
    part: Part,
    state: Annotated[WorkState | None, Query(description="only those in this state")] = None,
) -> Response:
    """Imports of the tenant, newest first."""
    with asked.read() as session:
        page = store.list_imports(session, asked.tenant_id, state, part)
    items = [ImportModel.model_validate(row) for row in page.items]
    return asked.answer(PageModel[ImportModel](items=items, next=page.next))


@routes.get(
    "/imports/{import_id}",
    summary="One import",
    response_model=None,
    responses={**found(ImportModel, "the import"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def one(asked: Reader, import_id: ImportId) -> Response:
    """An import: how far it is, and which job it became."""
    with asked.read() as session:
        row = store.get_import(session, asked.tenant_id, import_id)
    return asked.answer(ImportModel.model_validate(row))


@routes.put(
    "/imports/{import_id}/files/{n}",
    summary="Send a file",
    response_model=None,
    responses={
        **found(ImportModel, "the import with the file"),
        **problems(
            Problem.NOT_FOUND,
            Problem.BAD_REQUEST,
            Problem.DIGEST_MISMATCH,
            Problem.STATE_CONFLICT,
            Problem.LENGTH_REQUIRED,
            Problem.TOO_LARGE,
            Problem.DISK_FULL,
        ),
    },
    openapi_extra={
        **scoped(Scope.INGEST),
        "requestBody": {
            "required": True,
            "description": "the file as it is",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        },
    },
)
async def upload(
    asked: Ingester,
    import_id: ImportId,
    n: Annotated[int, Path(ge=0, lt=_MAX_FILES, description="number of the file, from 0")],
    digest: Annotated[
        str | None,
        Header(
            alias=DIGEST_HEADER,
            description="SHA-256 of the body (RFC 9530); needed",
            examples=["sha-256=:LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=:"],
        ),
    ] = None,
    name: Annotated[
        str | None,
        Header(
            alias=NAME_HEADER,
            description="name of the file for people, percent-encoded",
            examples=["trace%20of%20rank%200.parquet"],
        ),
    ] = None,
) -> Response:
    """Send one file of an import; the same number again replaces it."""
    size_bytes = _size(asked, n)
    wanted = _wanted_digest(digest)
    await run_sync(_need_room, asked, import_id, store.FileSize(n, size_bytes))
    spool = await run_sync(_spool_path, asked)
    try:
        got = await _spooled(asked.request, spool, size_bytes)
        if got != wanted:
            raise WireError(
                Problem.DIGEST_MISMATCH, "the body is not what its digest says: send it again"
            )
        file = store.ImportFile(n, _shown(name, n), size_bytes, got)
        row = await run_sync(_keep, asked, spool, import_id, file)
    finally:
        await run_sync(_forget, spool)
    return asked.answer(ImportModel.model_validate(row))


@routes.post(
    "/imports/{import_id}/start",
    summary="Start an import",
    response_model=None,
    responses={
        **found(ImportModel, "the import, queued"),
        **problems(Problem.NOT_FOUND, Problem.STATE_CONFLICT),
    },
    openapi_extra=scoped(Scope.INGEST),
)
def start(asked: Ingester, import_id: ImportId) -> Response:
    """Say that all files have come: a worker reads and analyses them."""
    with asked.write() as session:
        row = store.start_import(session, asked.tenant_id, import_id)
    return asked.answer(ImportModel.model_validate(row))


@routes.delete(
    "/imports/{import_id}",
    summary="Forget an import",
    response_model=None,
    status_code=204,
    responses={
        204: {"description": "it is gone"},
        **problems(Problem.NOT_FOUND, Problem.STATE_CONFLICT),
    },
    openapi_extra=scoped(Scope.INGEST),
)
def delete(asked: Ingester, import_id: ImportId) -> Response:
    """Remove an import and its files; the job that it became stays."""
    with asked.write() as session:
        paths = store.delete_import(session, asked.tenant_id, import_id)
    return Response(
        status_code=204, background=BackgroundTask(remove, asked.service.objects, paths)
    )


# --- one file ---------------------------------------------------------------------------------


def _size(asked: Asked, n: int) -> int:
    headers, limit = asked.request.headers, asked.service.settings.max_import_files
    text = headers.get("content-length", "")
    if not text.isascii() or not text.isdigit() or "transfer-encoding" in headers:
        raise WireError(
            Problem.LENGTH_REQUIRED, "expected Content-Length, and no Transfer-Encoding"
        )
    if n >= limit:
        raise WireError(Problem.INVALID, f"expected at most {limit} files in an import")
    return int(text[:20])


def _wanted_digest(header: str | None) -> str:
    match = _DIGEST.search(header or "")
    try:
        raw = base64.b64decode(match[1], validate=True) if match else b""
    except binascii.Error:
        raw = b""
    if len(raw) != hashlib.sha256().digest_size:
        raise WireError(
            Problem.BAD_REQUEST, f"expected {DIGEST_HEADER}: sha-256=:BASE64: (RFC 9530)"
        )
    return raw.hex()


def _shown(header: str | None, n: int) -> str:
    """A name for people: without folders and control characters."""
    name = unquote(header or "", errors="replace")[:_MAX_NAME]
    last = re.split(r"[/\\]", name)[-1]
    kept = "".join(char for char in last if char.isprintable())
    return kept.strip() or f"file {n}"


def _need_room(asked: Asked, import_id: str, size: store.FileSize) -> None:
    limit = asked.service.settings.max_import_bytes
    with asked.read() as session:
        store.need_room(session, asked.tenant_id, import_id, size, limit)


def _spool_path(asked: Asked) -> FilePath:
    folder = asked.service.settings.data_dir / "uploads"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder / f"{secrets.token_hex(16)}.partial"


async def _spooled(request: Request, spool: FilePath, size_bytes: int) -> str:
    """Write the body to a file; its SHA-256."""
    digest, written = hashlib.sha256(), 0
    file = await run_sync(_opened, spool)
    try:
        waiting = bytearray()
        async for chunk in request.stream():
            written += len(chunk)
            if written > size_bytes:
                break
            waiting += chunk
            if len(waiting) >= _WRITE_BYTES:
                await run_sync(_append, file, digest, bytes(waiting))
                waiting.clear()
        await run_sync(_append, file, digest, bytes(waiting))
    except ClientDisconnect as error:
        raise WireError(Problem.BAD_REQUEST, "the body ended too early: send it again") from error
    finally:
        await run_sync(file.close)
    if written != size_bytes:
        raise WireError(Problem.BAD_REQUEST, "expected as many bytes as Content-Length says")
    return digest.hexdigest()


def _opened(spool: FilePath) -> BinaryIO:
    try:
        return spool.open("xb", buffering=0)
    except OSError as error:
        raise StoreError(f"cannot write {spool}: {error.strerror}") from error


def _append(file: BinaryIO, digest: Any, data: bytes) -> None:  # noqa: ANN401  # hashlib's own type
    digest.update(data)
    rest = memoryview(data)
    try:
        while rest:
            # A full disk may write less than asked for, without an error.
            rest = rest[os.write(file.fileno(), rest) :]
    except OSError as error:
        raise WireError(
            Problem.DISK_FULL, "there is no room for the file: free some, then send it again"
        ) from error


def _keep(asked: Asked, spool: FilePath, import_id: str, file: store.ImportFile) -> store.ImportRow:
    """Move a spooled file to the object store, and note that it is there."""
    _put(asked.service.objects, spool, store.import_path(import_id, file.n))
    limit = asked.service.settings.max_import_bytes
    with asked.write() as session:
        return store.add_file(session, asked.tenant_id, import_id, file, limit)


def _put(objects: Objects, spool: FilePath, path: str) -> None:
    """Copy a file to the object store without holding it in memory."""
    if not spool.stat().st_size:
        objects.put(path, b"")
        return
    with spool.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            objects.put(path, view)
        finally:
            view.release()


def _forget(spool: FilePath) -> None:
    spool.unlink(missing_ok=True)
