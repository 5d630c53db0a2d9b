"""Routes for agents besides ingest: hello, heartbeat, time.

Flow: agent → **here** → `smon.store.streams`, `smon.ingest.service`. Plain Starlette routes, as
`smon.api.ingest`. ``docs/reference/protocol.md`` describes what is said.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from smon.api.access import Access, Gate
from smon.api.access import Scope as Right
from smon.api.hello import Beat, Hello, read_heartbeat, read_hello
from smon.api.ingest import (
    BodyError,
    Doorman,
    headers_of,
    problem_answers,
    read_body,
    request_id_of,
)
from smon.api.problems import problem_document, problem_of, response_of
from smon.errors import ConflictError, SMonError, WireError
from smon.ingest.service import IngestService
from smon.store import streams
from smon.store.streams import StreamInfo, StreamRequest
from smon.wire import API, ENCODINGS, PROTOCOL, TYPE_ARROW, TYPE_JSON
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

HELLO: Final = f"{API}/agents/hello"
HEARTBEAT: Final = f"{API}/agents/heartbeat"
TIME: Final = f"{API}/time"

#: One server takes so many streams per second of flush interval with ease (a tenth of its limit).
_STREAMS_PER_S: Final = 125
_SHORTEST_FLUSH_S: Final = 1.0
_LONGEST_FLUSH_S: Final = 10.0

#: Flush phases are hashed to so many places of the interval.
_PHASES: Final = 1 << 16

#: Open streams of a tenant are counted again after so long.
_COUNT_FRESH_NS: Final = 10 * 10**9

#: From this share of the limit on, they are counted at each registration.
_NEAR: Final = 0.9

_Handler = Callable[[Request, Access], Awaitable[bytes]]


@dataclass(slots=True)
class _Counted:
    streams: int
    at_ns: int


class Agents:
    """Handlers of the routes for agents."""

    def __init__(self, service: IngestService, gate: Gate) -> None:
        self._service = service
        self._settings = service.settings
        self._doorman = Doorman(gate)
        self._counted: dict[str, _Counted] = {}

    # --- the ways in ----------------------------------------------------------------------------

    def routed(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """A handler as Starlette takes it: with the access of who asks, and failures answered."""

        @functools.wraps(handler)
        async def endpoint(request: Request) -> Response:
            try:
                access = await self._doorman.access(headers_of(request.scope))
                access.need(Right.INGEST)
                return Response(await handler(request, access), media_type=TYPE_JSON)
            except SMonError as error:
                return response_of(error, request_id=request_id_of(request.scope))
            except BodyError:
                return Response(status_code=400)

        return endpoint

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != TYPE_JSON:
            raise WireError(Problem.UNSUPPORTED_TYPE, f"expected Content-Type to be {TYPE_JSON}")
        return await read_body(request.receive, self._settings.max_json_bytes)

    # --- time -----------------------------------------------------------------------------------

    async def time(self, _request: Request, _access: Access) -> bytes:
        """The server's clock, twice: an agent takes what lies between off the round trip."""
        received_ns = self._service.clock()
        return orjson.dumps({"received_ns": received_ns, "sent_ns": self._service.clock()})

    # --- hello ----------------------------------------------------------------------------------

    async def hello(self, request: Request, access: Access) -> bytes:
        """Register streams; each is answered for itself."""
        hello = read_hello(await self._body(request))
        count = await self._open_streams(access.tenant_id)
        most = self._settings.max_streams_per_tenant
        exact = count + len(hello.streams) > most * _NEAR
        registered = await asyncio.to_thread(self._register, access.tenant_id, hello, exact=exact)
        answers = [
            {
                "key": key,
                "stream_id": found.id,
                "epoch": found.epoch,
                "next_seq": self._service.adopt(found),
            }
            if isinstance(found, StreamInfo)
            else {"key": key, "problem": problem_document(*found)}
            for key, found in registered
        ]
        flush = await self._flush(access.tenant_id, hello.host)
        return orjson.dumps(
            {
                "protocol": PROTOCOL,
                "server_id": self._service.server_id,
                "time_ns": self._service.clock(),
                "limits": {
                    "body_bytes": self._settings.max_body_bytes,
                    "decoded_bytes": self._settings.max_decoded_bytes,
                    "events": self._settings.max_events,
                    "ratio": self._settings.max_ratio,
                },
                "content_types": [TYPE_ARROW, TYPE_JSON],
                "encodings": list(ENCODINGS),
                "flush": flush,
                "heartbeat_s": self._settings.heartbeat_interval_s,
                "streams": answers,
            }
        )

    def _register(
        self, tenant_id: str, hello: Hello, *, exact: bool
    ) -> list[tuple[str, StreamInfo | tuple[Problem, str]]]:
        """The streams of a hello, each in a transaction of its own; in a thread.

        Near the limit the tenant's streams are counted each time, which takes a while.
        """
        found: list[tuple[str, StreamInfo | tuple[Problem, str]]] = []
        for key, request in hello.streams:
            try:
                if not isinstance(request, StreamRequest):
                    raise request
                found.append((key, self._registered(tenant_id, request, exact=exact)))
            except (WireError, ConflictError) as error:
                found.append((key, _stream_problem(error)))
        return found

    def _registered(self, tenant_id: str, request: StreamRequest, *, exact: bool) -> StreamInfo:
        settings, now_ns = self._settings, self._service.clock()
        with self._service.database.write() as session:
            info = streams.register(session, tenant_id, request, settings, now_ns)
            most = settings.max_streams_per_tenant
            if exact and streams.count_open(session, tenant_id) > most:
                # Raising undoes the registration, unless the stream was there before.
                raise WireError(
                    Problem.RATE_LIMITED,
                    f"expected at most {most} open streams of this tenant: end some",
                    60.0,
                )
        return info

    # --- heartbeat ------------------------------------------------------------------------------

    async def heartbeat(self, request: Request, access: Access) -> bytes:
        """Note that an agent is alive, and tell it which of its streams are not known."""
        beat = read_heartbeat(await self._body(request))
        unknown = await asyncio.to_thread(self._note, access.tenant_id, beat)
        known = [stream for stream in beat.streams if stream.stream_id not in unknown]
        for stream in known:
            self._service.agents.note(stream.stream_id, stream.spool_bytes, stream.dropped)
        return orjson.dumps(
            {
                "server_id": self._service.server_id,
                "time_ns": self._service.clock(),
                "flush": await self._flush(access.tenant_id, beat.host),
                "unknown_streams": sorted(unknown),
            }
        )

    def _note(self, tenant_id: str, beat: Beat) -> set[str]:
        now_ns = self._service.clock()
        unknown = set()
        with self._service.database.write() as session:
            # In the order in which a commit locks them: else each could wait for the other.
            for stream in sorted(beat.streams, key=lambda each: each.stream_id):
                known = streams.heartbeat(
                    session, tenant_id, stream.stream_id, stream.document, beat.clock, now_ns
                )
                if not known:
                    unknown.add(stream.stream_id)
        return unknown

    # --- flush ----------------------------------------------------------------------------------

    async def _flush(self, tenant_id: str, host: str) -> dict[str, float]:
        """How often to send, and when within that time: agents finish a step all at once."""
        interval_s = self._settings.flush_interval_s
        if not interval_s:
            interval_s = interval_for(await self._open_streams(tenant_id))
        digest = hashlib.sha256(host.encode()).digest()
        phase = int.from_bytes(digest[:2], "big") / _PHASES
        return {"interval_s": interval_s, "phase_s": round(phase * interval_s, 3)}

    async def _open_streams(self, tenant_id: str) -> int:
        now_ns = self._service.clock()
        counted = self._counted.get(tenant_id)
        if counted is None or not 0 <= now_ns - counted.at_ns < _COUNT_FRESH_NS:
            count = await asyncio.to_thread(self._count, tenant_id)
            counted = self._counted[tenant_id] = _Counted(count, now_ns)
        return counted.streams

    def _count(self, tenant_id: str) -> int:
        with self._service.database.read() as session:
            return streams.count_open(session, tenant_id)


def interval_for(open_streams: int) -> float:
    """Seconds between two sends of an agent of a tenant with so many open streams."""
    return min(max(open_streams / _STREAMS_PER_S, _SHORTEST_FLUSH_S), _LONGEST_FLUSH_S)


def _stream_problem(error: WireError | ConflictError) -> tuple[Problem, str]:
    """What is wrong with one stream of a hello."""
    kinds: tuple[tuple[type[ConflictError], Problem], ...] = (
        (streams.LayoutConflictError, Problem.LAYOUT_CONFLICT),
        (streams.StaleEpochError, Problem.STALE_EPOCH),
        (streams.KeyConflictError, Problem.KEY_CONFLICT),
    )
    for kind, problem in kinds:
        if isinstance(error, kind):
            return problem, str(error)
    return problem_of(error)


def agent_routes(service: IngestService, gate: Gate) -> list[Route]:
    """The routes, for an application of Starlette or FastAPI."""
    agents = Agents(service, gate)
    return [
        Route(HELLO, agents.routed(agents.hello), methods=["POST"], include_in_schema=False),
        Route(
            HEARTBEAT, agents.routed(agents.heartbeat), methods=["POST"], include_in_schema=False
        ),
        Route(TIME, agents.routed(agents.time), methods=["GET"], include_in_schema=False),
    ]


# --- OpenAPI ----------------------------------------------------------------------------------

_ALWAYS: Final = (
    Problem.UNAUTHORIZED,
    Problem.FORBIDDEN,
    Problem.TOO_SLOW,
    Problem.INTERNAL,
    Problem.STORE_UNAVAILABLE,
)
_OF_BODIES: Final = (
    Problem.BAD_REQUEST,
    Problem.MALFORMED_BODY,
    Problem.TOO_LARGE,
    Problem.UNSUPPORTED_TYPE,
    Problem.INVALID,
)

_STRING: Final = {"type": "string"}
_WHOLE: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}
_AGENT: Final = {
    "type": "object",
    "required": ["version", "host", "pid"],
    "properties": {"version": _STRING, "host": _STRING, "pid": _WHOLE},
}
_FLUSH: Final = {
    "type": "object",
    "required": ["interval_s", "phase_s"],
    "properties": {"interval_s": _NUMBER, "phase_s": _NUMBER},
}


def agent_openapi() -> dict[str, Any]:
    """The routes in an OpenAPI document: paths, and what can be done with them."""
    return {
        HELLO: {
            "post": _operation(
                "hello",
                "Register streams, and learn how to send",
                _object(protocol={"const": PROTOCOL}, agent=_AGENT, streams=_list(_STREAM)),
                _object(
                    protocol={"const": PROTOCOL},
                    server_id=_STRING,
                    time_ns=_WHOLE,
                    limits={"type": "object"},
                    content_types=_list(_STRING),
                    encodings=_list(_STRING),
                    flush=_FLUSH,
                    heartbeat_s=_NUMBER,
                    streams=_list({"type": "object"}),
                ),
            )
        },
        HEARTBEAT: {
            "post": _operation(
                "heartbeat",
                "Say that an agent is alive",
                _object(agent=_AGENT, streams=_list(_BEAT), clock={"type": ["object", "null"]}),
                _object(
                    server_id=_STRING, time_ns=_WHOLE, flush=_FLUSH, unknown_streams=_list(_STRING)
                ),
            )
        },
        TIME: {
            "get": _operation(
                "time",
                "The server's clock, for the offset of the agent's",
                None,
                _object(received_ns=_WHOLE, sent_ns=_WHOLE),
            )
        },
    }


def _object(**properties: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON schemas
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_LAYOUT: Final = _object(**{name: {"type": "integer", "minimum": 1} for name in ("dp", "pp")})
_STREAM: Final = _object(
    key=_STRING,
    job=_STRING,
    attempt={"type": "integer", "minimum": 0},
    layout=_LAYOUT,
    mode={"enum": ["live", "recorded"]},
    time={"enum": ["unix", "step"]},
    host=_STRING,
    source=_STRING,
    ranks=_list(_WHOLE),
    epoch=_WHOLE,
)
_BEAT: Final = _object(
    stream_id=_STRING,
    epoch=_WHOLE,
    next_seq=_WHOLE,
    spool_bytes=_WHOLE,
    oldest_unsent_s=_NUMBER,
    dropped={"type": "object", "additionalProperties": _WHOLE},
)


def _operation(
    name: str, summary: str, asked: dict[str, Any] | None, answer: dict[str, Any]
) -> dict[str, Any]:
    problems: Sequence[Problem] = _ALWAYS if asked is None else (*_ALWAYS, *_OF_BODIES)
    operation: dict[str, Any] = {
        "tags": ["agents"],
        "operationId": f"agent_{name}",
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": {TYPE_JSON: {"schema": answer}}},
            **problem_answers(problems),
        },
    }
    if asked is not None:
        operation["requestBody"] = {"required": True, "content": {TYPE_JSON: {"schema": asked}}}
    return operation
