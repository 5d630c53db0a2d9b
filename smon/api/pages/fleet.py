"""The fleet page: all jobs, dearest first, and hosts that recur; the same jobs as CSV.

Flow: browser → **here** → `smon.store.queries` → `dashboards.web.views.fleet`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.fleet import ROWS, Asked, FleetParts, fleet_view
from smon.api.pages.common import FRESH_NS, asked, html, tag_of, unchanged
from smon.api.pages.data import csv_answer
from smon.api.words import job_words
from smon.errors import WireError
from smon.render.tables import Cell
from smon.store.queries.fleet import FleetFilter, dearest_jobs, fleet_now, suspects
from smon.store.queries.jobs import JobRow, JobSort, JobState, chosen, completed, fleet_version
from smon.store.queries.paging import MAX_OFFSET
from smon.store.queries.recent import recent_slowdowns
from smon.wire.problems import Problem

#: How far back numbers and hosts go.
DAYS: Final = 7.0

_MAX_QUERY: Final = 256
_SUSPECTS: Final = 40


def fleet_routes() -> list[BaseRoute]:
    """The fleet page, and its table as CSV."""
    return [
        Route("/", _fleet, methods=["GET"]),
        Route("/jobs.csv", _jobs_csv, methods=["GET"]),
    ]


def _fleet(request: Request) -> Response:
    service, access = asked(request)
    wanted = _wanted(request)
    now, price, tenant = service.clock(), service.settings.price, access.tenant_id
    with service.database.read() as session:
        version = fleet_version(session, tenant)
        tag = tag_of(version, str(now // FRESH_NS), tenant, request.url.query)
        if tag in request.headers.get("if-none-match", ""):
            return unchanged(tag)
        everything = dearest_jobs(session, tenant, price)
        fitting = chosen(everything, wanted.filter)
        first = (wanted.page - 1) * ROWS
        shown = completed(session, fitting[first : first + ROWS])
        period = FleetFilter(DAYS, now, price)
        attempts = [row.attempt_id for row in shown if row.attempt_id is not None]
        parts = FleetParts(
            everything=everything,
            fitting=len(fitting),
            shown=shown,
            recent=recent_slowdowns(session, tenant, attempts),
            now=fleet_now(period, everything),
            hosts=suspects(session, tenant, period, _SUSPECTS),
        )
    server = service.settings.public_url or str(request.base_url).rstrip("/")
    answer = html(request, "fleet.html", view=fleet_view(wanted, parts, server), now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer


def _wanted(request: Request) -> Asked:
    given = request.query_params
    sort, page = given.get("sort", f"-{JobSort.COST}"), given.get("page", "1")
    state = given.get("state") or None
    try:
        found = Asked(
            query=given.get("q", "")[:_MAX_QUERY],
            state=None if state is None else JobState(state),
            sort=JobSort(sort.removeprefix("-")),
            descending=sort.startswith("-"),
            page=int(page) if page.isascii() and page.isdigit() else 0,
        )
    except ValueError as error:
        raise WireError(Problem.INVALID, f"expected a state and a sort order: {error}") from error
    if not 1 <= found.page <= MAX_OFFSET // ROWS:
        raise WireError(Problem.INVALID, "expected the number of a page, from 1")
    return found


# --- CSV --------------------------------------------------------------------------------------

_COLUMNS: Final = (
    *("job", "id", "state", "verdict", "cause", "severity", "since_step", "gpus", "slowdown"),
    *("waste_ratio", "gpu_hours_per_day", "cost_per_day", "recorded_s", "ideal_s", "last_step"),
    "last_data_s",
)


def _jobs_csv(request: Request) -> Response:
    """All jobs that fit, in the order of the table, not only those of one page."""
    service, access = asked(request)
    with service.database.read() as session:
        everything = dearest_jobs(session, access.tenant_id, service.settings.price)
        rows = completed(session, chosen(everything, _wanted(request).filter))
    return csv_answer("smon-jobs.csv", _COLUMNS, _cells(rows))


def _cells(rows: tuple[JobRow, ...]) -> Iterator[dict[str, Cell]]:
    for row in rows:
        finding = row.finding
        same = {name: getattr(row, name) for name in _COLUMNS if hasattr(row, name)}
        yield {
            **same,
            "job": row.name,
            "state": row.state.value,
            "verdict": job_words(row),
            "cause": None if finding is None else finding.cause,
            "severity": None if finding is None else finding.severity,
            "since_step": None if finding is None else finding.since_step,
        }
