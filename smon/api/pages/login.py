"""Signing in with a token, and out again."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs, urlsplit

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from smon.api.access import refuse_other_sites
from smon.api.pages.common import html
from smon.api.routes.common import COOKIE, service_of
from smon.errors import WireError
from smon.wire.problems import Problem

_COOKIE_AGE_S: Final = 12 * 3600
_MAX_FORM: Final = 4096


def login_routes() -> list[BaseRoute]:
    """Sign in, sign out."""
    return [
        Route("/login", _login_page, methods=["GET"]),
        Route("/login", _login, methods=["POST"]),
        Route("/logout", _logout, methods=["POST"]),
    ]


def _login_page(request: Request) -> Response:
    target = _inside(request.query_params.get("next", "/"))
    return html(request, "login.html", next=target, error=None)


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
    return html(request, "login.html", 401, next=target, error=text)


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
