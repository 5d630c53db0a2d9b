"""The route that batches come in by: ``PUT /api/v1/ingest/{stream}/{epoch}/{seq}``.

Flow: `smon.api.protocol` → **here** → `smon.ingest.service`. A plain ASGI route: the framework's
parameter machinery would cost as much as decoding the batch. Everything that headers tell is
checked before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any, Final

import orjson
from starlette.datastructures import URLPath
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import ASGIApp, Receive, Scope, Send

from smon.api.access import Access, Gate
from smon.api.access import Scope as Right
from smon.api.problems import CONTENT_TYPE, problem_of, problem_response, response_of
from smon.errors import SMonError, StoreError, WireError
from smon.ingest.service import Ack, IngestService
from smon.wire import (
    API,
    ATTEMPT_HEADER,
    CLOCK_ERROR_HEADER,
    CLOCK_OFFSET_HEADER,
    DIGEST_HEADER,
    ENCODINGS,
    EVENTS_HEADER,
    KIND_BY_SCHEMA,
    SCHEMA_HEADER,
    STEPS_DONE_HEADER,
    TYPE_ARROW,
    TYPE_JSON,
    parse_headers,
)
from smon.wire.problems import KINDS, TYPE_PREFIX, Problem

_log = logging.getLogger(__name__)

PREFIX: Final = f"{API}/ingest/"
PATH: Final = f"{API}/ingest/{{stream}}/{{epoch}}/{{seq}}"

_REST: Final = re.compile(r"([A-Za-z0-9-]{1,64})/([0-9]{1,10})/([0-9]{1,18})", re.ASCII)

#: Headers by which a gate tells who asks.
_TELLING: Final = ("authorization", "host", "origin", "sec-fetch-site", "sec-fetch-mode")

#: What a gate said holds for so long, so that it is not asked for each of a thousand batches; and
#: for so long while it cannot tell, because the database is down.
_FRESH_S: Final = 2.0
_STALE_S: Final = 900.0
_REMEMBERED: Final = 4096

_OK: Final = 200

Headers = Mapping[str, str]
_Telling = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """What the gate said, when, and when it was asked last."""

    access: Access
    verified_s: float
    asked_s: float


class Doorman:
    """Asks the gate beside the event loop, and remembers for seconds what it said.

    While the database is down, who was let in within the last quarter of an hour is let in: known
    streams keep being taken in. A refusal is never remembered.
    """

    __slots__ = ("_asking", "_gate", "_known", "_monotonic")

    def __init__(self, gate: Gate, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._monotonic = monotonic
        self._known: OrderedDict[_Telling, _Known] = OrderedDict()
        self._asking: set[_Telling] = set()

    async def access(self, headers: Headers) -> Access:
        """What the request with these headers may do.

        Raises
        ------
        WireError
            The gate refuses it.
        StoreError
            The gate cannot tell, and has not told lately.
        """
        telling = tuple(headers.get(name) for name in _TELLING)
        now_s = self._monotonic()
        known = self._known.get(telling)
        if known is not None and now_s - known.verified_s >= _STALE_S:
            known = None
        if known is not None and (telling in self._asking or now_s - known.asked_s < _FRESH_S):
            # While somebody asks, the others go on: a thousand agents must not ask all at once.
            return known.access
        self._asking.add(telling)
        try:
            return await self._ask(telling, headers, known)
        finally:
            self._asking.discard(telling)

    async def _ask(self, telling: _Telling, headers: Headers, known: _Known | None) -> Access:
        try:
            access = await asyncio.to_thread(self._gate.access, headers)
        except StoreError:
            if known is None:
                raise
            self._known[telling] = replace(known, asked_s=self._monotonic())
            return known.access
        except SMonError:
            self._known.pop(telling, None)
            raise
        now_s = self._monotonic()
        self._known[telling] = _Known(access, now_s, now_s)
        self._known.move_to_end(telling)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return access


class BodyError(Exception):
    """The client went away before its request was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The body of a request.

    Raises
    ------
    WireError
        It is longer than the limit.
    BodyError
        The client went away.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise BodyError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise WireError(Problem.TOO_LARGE, f"expected a body of at most {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request; names are lower case, and no name counts twice."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def request_id_of(scope: Scope) -> str | None:
    """The id that `smon.api.edge` gave the request."""
    found = scope.get("state", {}).get("request_id")
    return found if isinstance(found, str) else None


class IngestRoute(BaseRoute):
    """The route as Starlette and FastAPI take it; put it first: most requests are its.

    Parameters
    ----------
    monotonic
        Seconds, for the time to the acknowledgement.
    """

    def __init__(
        self,
        service: IngestService,
        gate: Gate,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._doorman = Doorman(gate, monotonic)
        self._monotonic = monotonic
        self._statuses: dict[int, Any] = {}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for this route."""
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            return Match.FULL, {"endpoint": self}
        return Match.NONE, {}

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:  # noqa: ANN401  # Starlette's
        """No page links here.

        Raises
        ------
        NoMatchFound
            Always.
        """
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            response = await self._answer(scope, receive)
        except BodyError:
            return
        self._count(response.status_code)
        await response(scope, receive, send)

    def _count(self, status: int) -> None:
        counter = self._statuses.get(status)
        if counter is None:
            counter = self._statuses[status] = self._service.metrics.requests.labels(str(status))
        counter.inc()

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        try:
            ack = await self._put(scope, receive)
        except SMonError as error:
            problem, _ = problem_of(error)
            self._refused(problem)
            # A body that was not read is passed over by the server, within its deadline: to close
            # the connection instead could cost the client this answer.
            return response_of(error, request_id=request_id_of(scope))
        except BodyError:
            raise
        except Exception:  # noqa: BLE001  # a defect is answered here, as nothing behind this does
            request_id = request_id_of(scope)
            _log.exception("a batch could not be taken (request %s)", request_id)
            self._refused(Problem.INTERNAL)
            detail = "this is a defect of the server: its log says more"
            return problem_response(Problem.INTERNAL, detail, request_id=request_id)
        return Response(_document(ack), media_type=TYPE_JSON)

    def _refused(self, problem: Problem) -> None:
        self._service.metrics.refused.labels(problem.value).inc()
        self._service.metrics.refused_batches.inc()

    async def _put(self, scope: Scope, receive: Receive) -> Ack:
        match = _REST.fullmatch(scope["path"], len(PREFIX))
        if match is None:
            raise WireError(
                Problem.NOT_FOUND, f"expected {PATH} with the id from the hello and two numbers"
            )
        if scope["method"] != "PUT":
            raise WireError(Problem.METHOD_NOT_ALLOWED, "expected PUT")
        headers = headers_of(scope)
        access = await self._doorman.access(headers)
        access.need(Right.INGEST)
        head = parse_headers(headers)
        stream_id, epoch, seq = match[1], int(match[2]), int(match[3])
        with self._service.admit(access, stream_id, head):
            body = await read_body(receive, head.length)
            began_s = self._monotonic()
            ack = await self._service.put(access, stream_id, epoch, seq, head, body)
            self._service.metrics.ack_seconds.observe(self._monotonic() - began_s)
            return ack


def _document(ack: Ack) -> bytes:
    return orjson.dumps({"status": ack.status, "next_seq": ack.next_seq})


def ingest_routes(service: IngestService, gate: Gate) -> list[BaseRoute]:
    """The route, for an application of Starlette or FastAPI."""
    return [IngestRoute(service, gate)]


class FastLane:
    """An application behind the ingest route: batches do not pass its middleware.

    What a framework does for every request takes a fifth of the time that a batch takes.

    Parameters
    ----------
    app
        Answers all other requests.
    """

    __slots__ = ("_app", "_route")

    def __init__(self, app: ASGIApp, service: IngestService, gate: Gate) -> None:
        self._app = app
        self._route = IngestRoute(service, gate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        match, _ = self._route.matches(scope)
        if match is Match.NONE:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = token_hex(8)
        await self._route.handle(scope, receive, send)


def ingest_openapi() -> dict[str, Any]:
    """The route in an OpenAPI document: a path, and what can be done with it."""
    parameters = [
        _parameter("stream", "path", {"type": "string"}, "id of the stream, from the hello"),
        _parameter("epoch", "path", _WHOLE, "epoch of the stream"),
        _parameter("seq", "path", _WHOLE, "place of the batch in the stream, from 0"),
        _parameter(DIGEST_HEADER, "header", {"type": "string"}, "sha-256=:BASE64: of the body"),
        _parameter(SCHEMA_HEADER, "header", {"enum": list(KIND_BY_SCHEMA)}, "what the body is"),
        _parameter(EVENTS_HEADER, "header", _WHOLE, "ops, or rows of side evidence, in it"),
        *(
            _parameter(name, "header", _WHOLE, meaning, required=False)
            for name, meaning in (
                (STEPS_DONE_HEADER, "all ops up to this step are in this batch or earlier ones"),
                (ATTEMPT_HEADER, "how often this batch has been sent, this time included"),
                (CLOCK_OFFSET_HEADER, "offset of the sender's clock to the server's, ns"),
                (CLOCK_ERROR_HEADER, "how wrong that may be, ns"),
            )
        ),
        _parameter(
            "Content-Encoding", "header", {"enum": list(ENCODINGS)}, "of the body", required=False
        ),
    ]
    body = {"schema": {"type": "string", "format": "binary"}}
    return {
        PATH: {
            "put": {
                "tags": ["agents"],
                "operationId": "put_batch",
                "summary": "Deliver one batch",
                "description": "Answers 200 when the batch is durable. The same batch again is a "
                "duplicate and changes nothing. Content-Length is needed.",
                "parameters": parameters,
                "requestBody": {"required": True, "content": {TYPE_ARROW: body, TYPE_JSON: body}},
                "responses": {
                    "200": _ACK,
                    **problem_answers(
                        problem for problem in Problem if problem not in _NOT_OF_INGEST
                    ),
                },
            }
        }
    }


_WHOLE: Final = {"type": "integer", "minimum": 0}

_ACK: Final = {
    "description": "The batch is durable, or was before",
    "content": {
        TYPE_JSON: {
            "schema": {
                "type": "object",
                "required": ["status", "next_seq"],
                "properties": {
                    "status": {"enum": ["stored", "duplicate"]},
                    "next_seq": {
                        **_WHOLE,
                        "description": "first sequence number that has not come yet",
                    },
                },
            }
        }
    },
}

_NOT_OF_INGEST: Final = frozenset(
    {Problem.LAYOUT_CONFLICT, Problem.STATE_CONFLICT, Problem.NOT_READY, Problem.INVALID}
)


def _parameter(
    name: str, where: str, schema: Mapping[str, Any], meaning: str, *, required: bool = True
) -> dict[str, Any]:
    return {
        "name": name,
        "in": where,
        "required": required,
        "schema": dict(schema),
        "description": meaning,
    }


def problem_answers(problems: Iterable[Problem]) -> dict[str, Any]:
    """The failures of a route in an OpenAPI document, by status."""
    by_status: dict[int, list[Problem]] = {}
    for problem in problems:
        by_status.setdefault(KINDS[problem].status, []).append(problem)
    return {
        str(status): {
            "description": "; ".join(f"{each.value}: {KINDS[each].title}" for each in found),
            "content": {
                CONTENT_TYPE: {
                    "schema": {
                        "type": "object",
                        "required": ["type", "title", "status", "detail"],
                        "properties": {
                            "type": {"enum": [f"{TYPE_PREFIX}{each.value}" for each in found]},
                            "title": {"type": "string"},
                            "status": {"const": status},
                            "detail": {"type": "string"},
                            "instance": {"type": "string"},
                        },
                    }
                }
            },
        }
        for status, found in sorted(by_status.items())
    }
