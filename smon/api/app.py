"""The application: ingest, REST and pages behind one gate.

Flow: `smon.api.serve` → **here** → `smon.api.routes`, `smon.api.pages`, `smon.api.ingest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from smon import __version__
from smon.api.access import Gate
from smon.api.edge import Edge
from smon.api.openapi import DESCRIPTION, TITLE, document
from smon.api.pages import failed_page, page_routes, wants_page
from smon.api.problems import problem_response, response_of
from smon.api.routes import findings, fleet, hosts, imports, jobs, ranks, timeline, windows
from smon.api.routes.common import Seams, Service
from smon.config import Settings
from smon.errors import SMonError, WireError
from smon.store.database import Database
from smon.store.objects import Objects
from smon.wire import API
from smon.wire.problems import Problem

if TYPE_CHECKING:
    from smon.ingest.service import IngestService

OPENAPI_PATH: Final = f"{API}/openapi.json"

_MODULES: Final = (jobs, findings, windows, timeline, ranks, hosts, fleet, imports)

#: What Starlette itself says, as problems.
_BY_STATUS: Final = {
    # FastAPI says so of a body that it cannot read.
    400: Problem.MALFORMED_BODY,
    401: Problem.UNAUTHORIZED,
    403: Problem.FORBIDDEN,
    404: Problem.NOT_FOUND,
    405: Problem.METHOD_NOT_ALLOWED,
    413: Problem.TOO_LARGE,
}

_DETAILS: Final = {
    Problem.NOT_FOUND: f"expected a route of this server: GET {OPENAPI_PATH} lists them",
    Problem.MALFORMED_BODY: "expected JSON",
    Problem.METHOD_NOT_ALLOWED: "expected one of the methods in the header Allow",
}

#: Errors of validation that are told; the first ones say enough.
_MAX_TOLD: Final = 5

_DEFAULT: Final = Seams()


def create_app(
    settings: Settings,
    database: Database,
    objects: Objects,
    ingest: IngestService | None,
    gate: Gate,
    seams: Seams = _DEFAULT,
) -> FastAPI:
    """The application of one server process.

    Parameters
    ----------
    ingest
        Takes in what agents send; None: a server of REST and pages only.
    """
    app = FastAPI(
        title=TITLE,
        description=DESCRIPTION,
        version=__version__,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = Service(settings, database, objects, gate, seams)
    for module in _MODULES:
        app.include_router(module.routes, prefix=API)
    paths: dict[str, Any] = {}
    if ingest is not None:
        routes, paths = _of_agents(ingest, gate)
        app.router.routes.extend(routes)
    app.router.routes.extend(page_routes())
    _answer_errors(app)
    app.add_middleware(Edge, max_body_bytes=settings.max_json_bytes)
    _describe(app, paths)
    return app


def _of_agents(ingest: IngestService, gate: Gate) -> tuple[list[BaseRoute], dict[str, Any]]:
    """Routes of agents, and what the OpenAPI document says of them."""
    from smon.api.agents import agent_openapi, agent_routes
    from smon.api.ingest import ingest_openapi, ingest_routes

    routes = [*ingest_routes(ingest, gate), *agent_routes(ingest, gate)]
    return routes, {**ingest_openapi(), **agent_openapi()}


def _describe(app: FastAPI, paths: dict[str, Any]) -> None:
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(document(app, paths))
        return made

    # FastAPI's own way to change the document.
    app.openapi = openapi  # type: ignore[method-assign]


def _answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(SMonError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, SMonError):
        raise error
    if wants_page(request):
        return failed_page(request, error)
    return response_of(error, request_id=request.state.request_id)


async def _on_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    told = error.errors()
    syntax = any(each["type"] == "json_invalid" for each in told)
    problem = Problem.MALFORMED_BODY if syntax else Problem.INVALID
    # Never `input`, nor what a validator makes of it: that is what the client has sent.
    lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in told[:_MAX_TOLD]]
    detail = "expected JSON" if syntax else "; ".join(lines)
    return problem_response(problem, detail, request_id=request.state.request_id)


async def _on_http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    problem = _BY_STATUS.get(error.status_code, Problem.BAD_REQUEST)
    detail = _DETAILS.get(problem, str(error.detail))
    if wants_page(request):
        return failed_page(request, WireError(problem, detail))
    answer = problem_response(problem, detail, request_id=request.state.request_id)
    answer.headers.update(error.headers or {})
    return answer
