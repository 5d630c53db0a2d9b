"""Runbooks by the name of an alert or cause, open to all: whoever is woken has no token at hand.

Flow: links of alerts, pages and messages → **here** → `dashboards.web.views.runbook`. They hold
nothing of any job.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.runbook import listed, runbook
from smon.api.pages.common import html
from smon.errors import MissingError


def runbook_routes() -> list[BaseRoute]:
    """The runbooks by name, and the list of them."""
    return [
        Route("/runbooks", _list, methods=["GET"]),
        Route("/runbooks/{name:str}", _runbook, methods=["GET"]),
    ]


def _list(request: Request) -> Response:
    return html(request, "runbooks.html", listed=listed())


def _runbook(request: Request) -> Response:
    found = runbook(request.path_params["name"])
    if found is None:
        raise MissingError("expected the name of an alert or a cause")
    return html(request, "runbook.html", runbook=found)
