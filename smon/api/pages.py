"""Pages for people: fleet, job, sign-in; and the files that they need.

Flow: browser → `smon.api.access` → **here** → `dashboards.web`. Pages are read with the token of a
header or, in a browser, of a cookie that scripts cannot see and other sites cannot use.
"""

from __future__ import annotations

import hashlib
import mimetypes
import zlib
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dashboards.web.pages import STATIC
from dashboards.web.pages import page as rendered
from dashboards.web.views import JobParts, fleet_view, job_view
from smon import __version__
from smon.api.access import Access, Scope, refuse_other_sites
from smon.api.problems import problem_of
from smon.api.routes.common import COOKIE, Service, access_of, encodings_of, service_of
from smon.errors import MissingError, SMonError, WireError
from smon.store.queries.agents import AgentFilter, list_agents
from smon.store.queries.findings import FindingFilter, list_findings
from smon.store.queries.fleet import FleetFilter, dearest_jobs, fleet_summary
from smon.store.queries.history import HistoryFilter, history_of
from smon.store.queries.jobs import (
    attempts_of,
    fleet_version,
    get_job,
    job_version,
    missing_of,
    with_clocks,
)
from smon.store.queries.paging import Slice, cut, slice_of
from smon.store.queries.reports import current_report, document_of
from smon.wire.problems import KINDS, Problem

_FLEET_ROWS: Final = 100
_FLEET_DAYS: Final = 7.0
_FINDINGS: Final = 50
_AGENTS: Final = 500
_POINTS: Final = 1000

#: What ages on a page by itself is never older than this.
_FRESH_NS: Final = 15 * 10**9

_COOKIE_AGE_S: Final = 12 * 3600
_MAX_FORM: Final = 4096
_MAX_QUERY: Final = 256

_PLOTLY: Final = "plotly.min.js"
_STATIC: Final = frozenset({"smon.css", "smon.js", "plotly.css", "icon.svg"})
_MINUTES_5: Final = "private, max-age=300"
_FOR_EVER: Final = "private, max-age=31536000, immutable"


def page_routes() -> list[BaseRoute]:
    """The routes of all pages."""
    return [
        Route("/", _fleet, methods=["GET"]),
        Route("/jobs/{job_id:str}", _job, methods=["GET"]),
        Route("/login", _login_page, methods=["GET"]),
        Route("/login", _login, methods=["POST"]),
        Route("/logout", _logout, methods=["POST"]),
        Route("/static/{name:str}", _static, methods=["GET"]),
    ]


def wants_page(request: Request) -> bool:
    """Whether an error is better shown as a page."""
    accepts = "text/html" in request.headers.get("accept", "")
    return accepts and not request.url.path.startswith("/api/")


def failed_page(request: Request, error: SMonError) -> Response:
    """The page that shows an error; without a token, the way to sign in."""
    problem, detail = problem_of(error)
    if problem is Problem.UNAUTHORIZED and request.method == "GET":
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)
    kind = KINDS[problem]
    values = {"title": kind.title, "detail": detail, "status": kind.status}
    return _html(request, "error.html", kind.status, **values)


# --- fleet and job ----------------------------------------------------------------------------


def _fleet(request: Request) -> Response:
    service, access = _asked(request)
    query = request.query_params.get("q", "")[:_MAX_QUERY]
    cursor = request.query_params.get("cursor")
    part = slice_of(_FLEET_ROWS, cursor)
    now, price = service.clock(), service.settings.price
    with service.database.read() as session:
        version = fleet_version(session, access.tenant_id)
        tag = _tag(version, str(now // _FRESH_NS), access.tenant_id, query, cursor or "")
        if tag in request.headers.get("if-none-match", ""):
            return _unchanged(tag)
        everything = dearest_jobs(session, access.tenant_id, price)
        wanted = FleetFilter(_FLEET_DAYS, now, price)
        summary = fleet_summary(session, access.tenant_id, wanted, everything)
        named = [row for row in everything if query.lower() in row.name.lower()]
        page = cut(named, part)
        page = replace(page, items=with_clocks(session, page.items))
    server = service.settings.public_url or str(request.base_url).rstrip("/")
    view = fleet_view(page, query, summary, server)
    answer = _html(request, "fleet.html", view=view, now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer


def _unchanged(tag: str) -> Response:
    return Response(None, 304, {"ETag": tag, "Cache-Control": "private, no-cache"})


def _job(request: Request) -> Response:
    service, access = _asked(request)
    job_id, now = request.path_params["job_id"], service.clock()
    with service.database.read() as session:
        version = job_version(session, access.tenant_id, job_id)
    tag = _tag(version, str(now // _FRESH_NS), access.tenant_id)
    if tag in request.headers.get("if-none-match", ""):
        return _unchanged(tag)
    view = job_view(_parts(service, access, job_id))
    answer = _html(request, "job.html", view=view, now_s=now / 1e9, plotly=_plotly_version())
    answer.headers["ETag"] = tag
    return answer


def _asked(request: Request) -> tuple[Service, Access]:
    access = access_of(request)
    access.need(Scope.READ)
    return service_of(request), access


def _tag(*parts: str) -> str:
    text = "\0".join((__version__, *parts))
    return f'W/"{hashlib.sha256(text.encode()).hexdigest()[:24]}"'


def _parts(service: Service, access: Access, job_id: str) -> JobParts:
    tenant, now = access.tenant_id, service.clock()
    down_ns = round(service.settings.agent_down_s * 1e9)
    with service.database.read() as session:
        row = get_job(session, tenant, job_id, service.settings.price)
        stored = current_report(session, tenant, job_id)
        agents = list_agents(session, tenant, AgentFilter(now, down_ns, job_id), Slice(_AGENTS))
        findings = list_findings(session, tenant, job_id, FindingFilter(), Slice(_FINDINGS))
        return JobParts(
            job=row,
            document=None if stored is None else document_of(stored.packed),
            live=stored is not None and stored.window_id is None,
            attempts=attempts_of(session, tenant, job_id),
            missing=missing_of(session, row.attempt_id),
            agents=agents.items,
            findings=findings.items,
            history=history_of(session, tenant, job_id, HistoryFilter(points=_POINTS)),
        )


# --- signing in -------------------------------------------------------------------------------


def _login_page(request: Request) -> Response:
    target = _inside(request.query_params.get("next", "/"))
    return _html(request, "login.html", next=target, error=None)


async def _login(request: Request) -> Response:
    headers = _headers(request)
    refuse_other_sites(headers)
    form = await _form(request)
    token, target = form.get("token", "").strip(), _inside(form.get("next", "/"))
    gate = service_of(request).gate
    try:
        plain = {**headers, "authorization": f"Bearer {token}"}
        await run_sync(gate.access, plain)
    except WireError as error:
        if error.problem != Problem.UNAUTHORIZED:
            raise
        text = "This token is not known, or has expired or been revoked."
        return await run_sync(_failed_login, request, target, text)
    answer = RedirectResponse(target, 303)
    answer.set_cookie(
        COOKIE,
        token,
        max_age=_COOKIE_AGE_S,
        path="/",
        httponly=True,
        samesite="strict",
        secure=_is_https(request),
    )
    return answer


def _failed_login(request: Request, target: str, text: str) -> Response:
    return _html(request, "login.html", 401, next=target, error=text)


def _logout(request: Request) -> Response:
    refuse_other_sites(_headers(request))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(
        COOKIE, path="/", httponly=True, samesite="strict", secure=_is_https(request)
    )
    return answer


def _headers(request: Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _is_https(request: Request) -> bool:
    public = service_of(request).settings.public_url
    return request.url.scheme == "https" or urlsplit(public).scheme == "https"


async def _form(request: Request) -> dict[str, str]:
    """A small form, ``application/x-www-form-urlencoded``."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM:
            raise WireError(Problem.TOO_LARGE, f"expected a form of at most {_MAX_FORM} bytes")
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=8)
    except (UnicodeDecodeError, ValueError) as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a form") from error
    return {name: values[-1] for name, values in fields.items()}


def _inside(target: str) -> str:
    """A path of this server, whatever was asked for."""
    harmless = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if harmless and target.isprintable() and "\\" not in target else "/"


# --- what pages are made of -------------------------------------------------------------------


def _html(
    request: Request,
    template: str,
    code: int = 200,
    **values: Any,  # noqa: ANN401  # what the template shows
) -> Response:
    signed_in = COOKIE in request.cookies
    text = rendered(
        template,
        signed_in=signed_in,
        request_id=request.state.request_id,
        **values,
    )
    headers = {"Cache-Control": "private, no-cache", "Vary": "Cookie, Accept-Encoding"}
    return HTMLResponse(text, code, headers)


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name == _PLOTLY:
        raw, packed, tag = _plotly()
    elif name in _STATIC:
        raw, packed, tag = _file(name)
    else:
        raise MissingError("expected one of the files of the pages")
    # Files are asked for with their version, which changes when they do.
    lasting = _FOR_EVER if request.query_params.get("v") else _MINUTES_5
    headers = {"ETag": tag, "Cache-Control": lasting, "Vary": "Accept-Encoding"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    body = raw
    if "gzip" in encodings_of(request):
        body, headers["Content-Encoding"] = packed, "gzip"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(body, 200, headers, kind)


@lru_cache(maxsize=8)
def _file(name: str) -> tuple[bytes, bytes, str]:
    return _packed((STATIC / name).read_bytes())


@lru_cache(maxsize=1)
def _plotly() -> tuple[bytes, bytes, str]:
    return _packed((resources.files("plotly") / "package_data" / _PLOTLY).read_bytes())


def _packed(raw: bytes) -> tuple[bytes, bytes, str]:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return raw, packer.compress(raw) + packer.flush(), _tag(hashlib.sha256(raw).hexdigest())


@lru_cache(maxsize=1)
def _plotly_version() -> str:
    from importlib.metadata import version

    return version("plotly")
