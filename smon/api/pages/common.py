"""What all pages share: who may read, how a page is made, how an error is shown.

Flow: browser → `smon.api.access` → the modules beside this → **here** → `dashboards.web.pages`.
Pages are read with the token of a header or, in a browser, of a cookie that scripts cannot see and
other sites cannot use.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dashboards.web.pages import files_version
from dashboards.web.pages import page as rendered
from smon.api.access import Access, Scope
from smon.api.problems import problem_of
from smon.api.routes.common import COOKIE, Service, access_of, service_of
from smon.errors import SMonError
from smon.wire.problems import KINDS, Problem

#: What ages on a page by itself is never older than this.
FRESH_NS: Final = 15 * 10**9


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
    return html(request, "error.html", kind.status, **values)


def asked(request: Request) -> tuple[Service, Access]:
    """What the server is, and who asks; refuses whoever may not read."""
    access = access_of(request)
    access.need(Scope.READ)
    return service_of(request), access


def html(
    request: Request,
    template: str,
    code: int = 200,
    **values: Any,  # noqa: ANN401  # what the template shows
) -> Response:
    """A page from its template."""
    signed_in = COOKIE in request.cookies
    text = rendered(
        template,
        signed_in=signed_in,
        path=request.url.path,
        request_id=request.state.request_id,
        **values,
    )
    headers = {"Cache-Control": "private, no-cache", "Vary": "Cookie, Accept-Encoding"}
    return HTMLResponse(text, code, headers)


def tag_of(*parts: str) -> str:
    """An ETag of what a page is made from, and of the version with its files."""
    text = "\0".join((files_version(), *parts))
    return f'W/"{hashlib.sha256(text.encode()).hexdigest()[:24]}"'


def unchanged(tag: str) -> Response:
    """The answer to a browser that has the page as it is."""
    return Response(None, 304, {"ETag": tag, "Cache-Control": "private, no-cache"})


@lru_cache(maxsize=1)
def plotly_version() -> str:
    """Versions of plotly.js and of what is put before it, for the address of its file."""
    return f"{version('plotly')}-{files_version()}"
