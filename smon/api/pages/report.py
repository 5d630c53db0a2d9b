"""The fleet report as a page, and as CSV: what ``GET fleet/summary`` answers, for people.

Flow: browser → **here** → `smon.api.routes.fleet.fleet_model` → `dashboards.web.views.report`.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.report import report_view
from smon.api.pages.common import FRESH_NS, asked, html, tag_of, unchanged
from smon.api.pages.data import csv_answer
from smon.api.pages.fleet import DAYS
from smon.api.routes.fleet import MAX_DAYS, fleet_model
from smon.errors import WireError
from smon.render.fleet import COLUMNS, fleet_rows
from smon.store.queries.fleet import FleetFilter, fleet_report
from smon.store.queries.jobs import fleet_version
from smon.wire.problems import Problem


def report_routes() -> list[BaseRoute]:
    """The fleet report, and its numbers as CSV."""
    return [
        Route("/fleet", _report, methods=["GET"]),
        Route("/fleet.csv", _report_csv, methods=["GET"]),
    ]


def _report(request: Request) -> Response:
    service, access = asked(request)
    days, now = _days(request), service.clock()
    with service.database.read() as session:
        version = fleet_version(session, access.tenant_id)
    tag = tag_of(version, str(now // FRESH_NS), access.tenant_id, f"report {days:g}")
    if tag in request.headers.get("if-none-match", ""):
        return unchanged(tag)
    view = report_view(_document(request, days))
    answer = html(request, "fleet_report.html", view=view, now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer


def _report_csv(request: Request) -> Response:
    days = _days(request)
    rows = fleet_rows(_document(request, days))
    return csv_answer(f"smon-fleet-{days:g}-days.csv", COLUMNS, rows)


def _document(request: Request, days: float) -> dict[str, Any]:
    """What the REST route would answer."""
    service, access = asked(request)
    wanted = FleetFilter(days, service.clock(), service.settings.price)
    with service.database.read() as session:
        report = fleet_report(session, access.tenant_id, wanted)
    return fleet_model(report).model_dump(mode="json")


def _days(request: Request) -> float:
    try:
        days = float(request.query_params.get("days", DAYS))
    except ValueError:
        days = math.nan
    if not 0 < days <= MAX_DAYS:
        raise WireError(Problem.INVALID, f"expected days from 0 to {MAX_DAYS}")
    return days
