"""What all routes share: who asks, with which service, and how an answer is made.

Handlers are plain functions: they run in threads, so that the database never holds up ingest.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import zstandard
from fastapi import APIRouter, Depends, Path, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from smon.api.access import Access, Gate, Scope, refuse_other_sites
from smon.api.schemas.base import ID_PATTERN, Model, ProblemDocument
from smon.config import Settings
from smon.store.database import Database
from smon.store.objects import Objects
from smon.store.queries.paging import Slice, slice_of
from smon.store.results import unpacked
from smon.wire.problems import KINDS, Problem

#: Where a browser keeps its token.
COOKIE: Final = "smon_token"

#: Smaller answers are not worth compressing.
_COMPRESS_FROM: Final = 2048
_LEVEL: Final = 3
_GZIP_BITS: Final = 31

_JSON: Final = "application/json"

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

#: Marks, in the OpenAPI document, the scope that a route asks for.
SCOPE_KEY: Final = "x-smon-scope"


@dataclass(frozen=True, slots=True)
class Seams:
    """What tests replace.

    Attributes
    ----------
    clock
        Unix time, ns.
    task_wait_s
        How long a request waits for what a worker has to compute.
    """

    clock: Callable[[], int] = field(default=time.time_ns)
    task_wait_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Service:
    """What handlers work with."""

    settings: Settings
    database: Database
    objects: Objects
    gate: Gate
    seams: Seams

    def clock(self) -> int:
        """Unix time, ns."""
        return self.seams.clock()


def service_of(request: Request) -> Service:
    """The service of the application that the request came to."""
    service: Service = request.app.state.service
    return service


def access_of(request: Request) -> Access:
    """What the request may do, by its token or, from a page of this server, its cookie.

    Raises
    ------
    WireError
        Nothing, or the request comes from a page of another site.
    """
    headers = {name.lower(): value for name, value in request.headers.items()}
    cookie = request.cookies.get(COOKIE)
    if cookie and "authorization" not in headers:
        if request.method not in _SAFE_METHODS:
            refuse_other_sites(headers, must_say=True)
        headers["authorization"] = f"Bearer {cookie}"
    return service_of(request).gate.access(headers)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may do what it asks for."""

    request: Request
    service: Service
    access: Access

    @property
    def tenant_id(self) -> str:
        """Whose rows it may see."""
        return self.access.tenant_id

    @property
    def price(self) -> float | None:
        """Price of a GPU hour; None if there is none."""
        return self.service.settings.price

    def read(self) -> AbstractContextManager[Session]:
        """A transaction that only reads."""
        return self.service.database.read()

    def write(self) -> AbstractContextManager[Session]:
        """A transaction that is committed at its end."""
        return self.service.database.write()

    def answer(self, model: Model, *, status: int = 200) -> Response:
        """A model as JSON, compressed if it is large and the client can read it."""
        body = model.__pydantic_serializer__.to_json(model)
        return json_answer(self.request, body, status=status)


def _need(scope: Scope) -> Callable[[Request], Asked]:
    def need(request: Request) -> Asked:
        access = access_of(request)
        access.need(scope)
        return Asked(request, service_of(request), access)

    return need


Reader = Annotated[Asked, Depends(_need(Scope.READ))]
Ingester = Annotated[Asked, Depends(_need(Scope.INGEST))]
Admin = Annotated[Asked, Depends(_need(Scope.ADMIN))]

JobId = Annotated[str, Path(pattern=ID_PATTERN, description="id of the job")]
Limit = Annotated[int, Query(ge=1, le=500, description="most items of the answer")]
Cursor = Annotated[
    str | None, Query(max_length=64, description="`next` of the page before; none: the first page")
]


def _part_of(limit: Limit = 50, cursor: Cursor = None) -> Slice:
    return slice_of(limit, cursor)


Part = Annotated[Slice, Depends(_part_of)]


def problems(*more: Problem) -> dict[int | str, dict[str, Any]]:
    """Answers that a route gives when it fails, for the OpenAPI document.

    Every route can fail for want of a token, for a parameter, or for the database.
    """
    always = (
        Problem.UNAUTHORIZED,
        Problem.FORBIDDEN,
        Problem.INVALID,
        Problem.INTERNAL,
        Problem.STORE_UNAVAILABLE,
    )
    answers: dict[int | str, dict[str, Any]] = {}
    for problem in (*always, *more):
        kind = KINDS[problem]
        example = {
            "type": f"urn:smon:problem:{problem.value}",
            "title": kind.title,
            "status": kind.status,
            "detail": "expected, found, what to do",
            "instance": "0f3b8c5e9a7d4c21",
        }
        answer = answers.setdefault(
            kind.status,
            {
                "description": kind.title,
                "content": {"application/problem+json": {"schema": _PROBLEM, "examples": {}}},
            },
        )
        answer["content"]["application/problem+json"]["examples"][problem.value] = {
            "value": example
        }
        if kind.status in (429, 503, 507):
            answer["headers"] = {
                "Retry-After": {"description": "seconds", "schema": {"type": "integer"}}
            }
    return answers


_PROBLEM: Final = {"$ref": "#/components/schemas/ProblemDocument"}

#: Its schema is put into the document by `smon.api.openapi`.
PROBLEM_MODEL: Final = ProblemDocument


def router(tag: str) -> APIRouter:
    """An empty router; handlers return finished answers, and nothing is derived from them."""
    return APIRouter(tags=[tag], default_response_class=Response)


def scoped(scope: Scope) -> dict[str, Any]:
    """What the OpenAPI document says of the scope of a route."""
    return {SCOPE_KEY: scope.value}


def found(model: type[Any], text: str, *, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """The answer of a route that succeeds, for the OpenAPI document."""
    return {status: {"model": model, "description": text}}


def json_answer(request: Request, body: bytes, *, status: int = 200) -> Response:
    """JSON as it is, compressed if it is large and the client can read it."""
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= _COMPRESS_FROM:
        accepted = encodings_of(request)
        if "zstd" in accepted:
            body = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
            headers["Content-Encoding"] = "zstd"
        elif "gzip" in accepted:
            packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_BITS)
            body = packer.compress(body) + packer.flush()
            headers["Content-Encoding"] = "gzip"
    return Response(body, status, headers, _JSON)


def packed_answer(request: Request, packed: bytes, version: str) -> Response:
    """A stored report: as it lies there if the client reads zstd, else unpacked.

    `version` becomes the ETag: who has it already gets 304.
    """
    tag = f'W/"{version}"'
    headers = {"Vary": "Accept-Encoding", "ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    if "zstd" in encodings_of(request):
        return Response(packed, 200, {**headers, "Content-Encoding": "zstd"}, _JSON)
    plain = json_answer(request, unpacked(packed))
    plain.headers.update(headers)
    return plain


def encodings_of(request: Request) -> frozenset[str]:
    """Content encodings that the client can read."""
    accepted = set()
    for part in request.headers.get("accept-encoding", "").split(","):
        name, _, quality = part.partition(";")
        if quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            accepted.add(name.strip().lower())
    return frozenset(accepted)
