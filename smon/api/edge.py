"""What every request passes: an id, headers that browsers obey, and no traceback on the way out.

Flow: server → **here** → routes. Plain ASGI, so that bodies stream through untouched.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smon.api.problems import problem_response
from smon.wire.problems import Problem

REQUEST_ID: Final = "X-Request-Id"

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

#: Paths whose bodies are batches or files.
_STREAMED: Final = re.compile(r"/api/v1/(?:ingest/|imports/[^/]+/files/)")

#: Everything a page needs comes from this server; nothing may frame it or run inside it.
_POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)

_ALWAYS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    # Not "no-referrer": browsers would then say `Origin: null` when somebody signs in.
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_OF_PAGES: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Frame-Options", "DENY"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)

_log = logging.getLogger(__name__)


class Edge:
    """Wraps the application.

    Parameters
    ----------
    max_body_bytes
        Largest body of a request that is neither a batch nor a file.
    """

    __slots__ = ("_app", "_max_body_bytes")

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                _add_headers(MutableHeaders(scope=message), request_id)
            await send(message)

        refusal = _refusal(scope, self._max_body_bytes)
        if refusal is not None:
            answer = problem_response(*refusal, request_id=request_id)
            await answer(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            _log.exception("%s %s failed (request %s)", scope["method"], scope["path"], request_id)
            if begun:
                raise
            answer = problem_response(
                Problem.INTERNAL,
                "this is a defect of the server: its log says more",
                request_id=request_id,
            )
            await answer(scope, receive, send_with_headers)


def _refusal(scope: Scope, max_body_bytes: int) -> tuple[Problem, str] | None:
    """Why a request goes no further; routes that stream bodies have their own limit."""
    if b"%00" in scope["query_string"] or "\0" in scope["path"]:
        # One database cuts text off there, the other fails.
        return Problem.INVALID, "expected an address without the character NUL"
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return Problem.LENGTH_REQUIRED, "expected Content-Length, and no Transfer-Encoding"
    length = headers.get("content-length", "0")
    digits = length.isascii() and length.isdigit()
    if not digits or (int(length[:20]) > max_body_bytes and not _STREAMED.match(scope["path"])):
        return Problem.TOO_LARGE, f"expected a body of at most {max_body_bytes} bytes"
    return None


def _request_id(scope: Scope) -> str:
    """The client's, if it is harmless, else a new one."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else secrets.token_hex(8)


def _add_headers(headers: MutableHeaders, request_id: str) -> None:
    headers[REQUEST_ID] = request_id
    for name, value in _ALWAYS:
        headers[name] = value
    if headers.get("content-type", "").startswith("text/html"):
        for name, value in _OF_PAGES:
            headers[name] = value
    if "cache-control" not in headers:
        headers["Cache-Control"] = "no-store"
