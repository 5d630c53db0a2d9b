"""Problem documents (RFC 9457): what a client gets when a request fails.

Flow: `smon.errors` → **here** → every route. The only place that knows which error is which status.
A document says what was expected and what to do; it holds no traceback and nothing of the body.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import orjson
from starlette.responses import Response

from smon.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    MissingError,
    SMonError,
    StoreError,
    TopologyError,
    TraceError,
    WireError,
)
from smon.wire.problems import KINDS, TYPE_PREFIX, Problem

CONTENT_TYPE: Final = "application/problem+json"

#: Statuses that say when to come again (RFC 9110, 10.2.3), and when, if nobody knows better.
RETRY_AFTER_S: Final = {429: 1.0, 503: 5.0, 507: 30.0}

#: What kind of error is which problem; the first that fits counts.
_PROBLEMS: Final[tuple[tuple[type[SMonError], Problem], ...]] = (
    (MissingError, Problem.NOT_FOUND),
    (ConflictError, Problem.STATE_CONFLICT),
    (FencedError, Problem.STATE_CONFLICT),
    (StoreError, Problem.STORE_UNAVAILABLE),
    (TopologyError, Problem.INVALID),
    (TraceError, Problem.INVALID),
    (ConfigError, Problem.INVALID),
)

#: Details that may name hosts, files or statements: they go to the log, not to the client.
_GENERAL: Final = {
    Problem.STORE_UNAVAILABLE: "the database or object store cannot be used now: try again later",
    Problem.INTERNAL: "this is a defect of the server: its log says more",
}

_log = logging.getLogger(__name__)


def problem_document(
    problem: Problem, detail: str, *, request_id: str | None = None
) -> dict[str, Any]:
    """The members of a problem document.

    Parameters
    ----------
    detail
        One sentence for a person: expected, found, what to do.
    request_id
        Becomes ``instance``: the server's log has it too.
    """
    kind = KINDS[problem]
    document: dict[str, Any] = {
        "type": f"{TYPE_PREFIX}{problem.value}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
    }
    if request_id is not None:
        document["instance"] = request_id
    return document


def problem_response(
    problem: Problem,
    detail: str,
    *,
    retry_after_s: float | None = None,
    request_id: str | None = None,
) -> Response:
    """The answer to a request that fails.

    Parameters
    ----------
    detail
        One sentence for a person: expected, found, what to do.
    retry_after_s
        When to come again; 429, 503 and 507 say it always.
    """
    status = KINDS[problem].status
    headers = {}
    wait_s = RETRY_AFTER_S.get(status) if retry_after_s is None else retry_after_s
    if wait_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    if status == KINDS[Problem.UNAUTHORIZED].status:
        headers["WWW-Authenticate"] = "Bearer"
    document = problem_document(problem, detail, request_id=request_id)
    return Response(orjson.dumps(document), status, headers, CONTENT_TYPE)


def problem_of(error: SMonError) -> tuple[Problem, str]:
    """The problem that an error is, and what the client is told of it.

    Of a database or file that fails, the client learns only that; the log has the rest.
    """
    if isinstance(error, WireError):
        # A conversion that fails would be a defect: problems have names of `Problem` only.
        return Problem(error.problem), str(error)
    for kind, problem in _PROBLEMS:
        if isinstance(error, kind):
            return problem, _GENERAL.get(problem, str(error))
    return Problem.INTERNAL, _GENERAL[Problem.INTERNAL]


def response_of(error: SMonError, *, request_id: str | None = None) -> Response:
    """The answer to a request that failed with this error.

    A failure of the server itself (5xx) is logged; a client's mistake is not.
    """
    problem, detail = problem_of(error)
    if detail is _GENERAL.get(problem):
        _log.warning("%s: %s (request %s)", problem.value, error, request_id)
    retry_after_s = error.retry_after_s if isinstance(error, WireError) else None
    return problem_response(problem, detail, retry_after_s=retry_after_s, request_id=request_id)
