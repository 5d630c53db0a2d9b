"""The files that pages need: style sheets, scripts, icon, and plotly.js from its package."""

from __future__ import annotations

import hashlib
import mimetypes
import zlib
from functools import lru_cache
from importlib import resources
from threading import Thread
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.pages import STATIC
from smon.api.pages.common import tag_of
from smon.api.routes.common import encodings_of
from smon.errors import MissingError

_PLOTLY: Final = "plotly.min.js"
_BEFORE_PLOTLY: Final = "strict.js"
#: Chromium then compiles beside the page, not in its way: half of the 1.7 s that 4.8 MB block it.
_COMPILE_NOW: Final = b"//# allFunctionsCalledOnLoad\n"
_STATIC: Final = frozenset(each.name for each in STATIC.iterdir())
_MINUTES_5: Final = "private, max-age=300"
_FOR_EVER: Final = "private, max-age=31536000, immutable"


def static_routes() -> list[BaseRoute]:
    """The files by name."""
    return [Route("/static/{name:str}", _static, methods=["GET"])]


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


def pack_early() -> None:
    """Pack plotly.js in a thread of its own, so that nobody waits for it (0.3 s)."""
    Thread(target=_plotly, name="plotly", daemon=True).start()


@lru_cache(maxsize=64)
def _file(name: str) -> tuple[bytes, bytes, str]:
    return _packed((STATIC / name).read_bytes())


@lru_cache(maxsize=1)
def _plotly() -> tuple[bytes, bytes, str]:
    """plotly.js, after what makes it keep to the policy of the pages."""
    whole = (resources.files("plotly") / "package_data" / _PLOTLY).read_bytes()
    return _packed(_COMPILE_NOW + (STATIC / _BEFORE_PLOTLY).read_bytes() + whole)


def _packed(raw: bytes) -> tuple[bytes, bytes, str]:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return raw, packer.compress(raw) + packer.flush(), tag_of(hashlib.sha256(raw).hexdigest())
