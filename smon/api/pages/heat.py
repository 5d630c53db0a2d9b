"""One step of the heat map as JSON for the slider, and the numbers of a job's page as CSV.

Flow: the step slider, links below charts → **here** → `dashboards.web.views`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.job import Detail, rotation_marks, small_report
from dashboards.web.views.where import heat_of
from dashboards.web.views.why import why_view
from smon.api.pages.choices import heat_asked, range_of, whole_number
from smon.api.pages.common import asked
from smon.api.pages.job import Gather
from smon.api.routes.common import json_answer
from smon.errors import MissingError
from smon.render.tables import csv_text
from smon.store.queries.history import HistoryFilter, history_of
from smon.store.queries.reports import (
    StoredReport,
    current_report,
    document_of,
    report_of_window,
)
from smon.store.queries.windows import need_job

_HEADERS: Final = {"Cache-Control": "private, no-cache", "Vary": "Cookie, Accept-Encoding"}


def heat_routes() -> list[BaseRoute]:
    """The heat map of one step, and the tables."""
    return [
        Route("/jobs/{job_id:str}/heat", _heat, methods=["GET"]),
        Route("/jobs/{job_id:str}/csv/{table:str}", _csv, methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A report that is asked for, and every worker in every step of it."""

    request: Request
    document: dict[str, Any]
    detail: Detail


def _source(request: Request) -> _Source:
    """The report of a window, or the newest one."""
    service, access = asked(request)
    job_id, name = request.path_params["job_id"], request.query_params.get("window")
    with service.database.read() as session:
        need_job(session, access.tenant_id, job_id)
        if name:
            stored: StoredReport | None = report_of_window(session, access.tenant_id, job_id, name)
        else:
            stored = current_report(session, access.tenant_id, job_id)
        if stored is None:
            raise MissingError("nothing of this job has been analysed yet")
        document = document_of(stored.packed)
        detail = Gather(session, service, access, job_id).detail(stored, document)
    return _Source(request, document, detail)


def _heat(request: Request) -> Response:
    source = _source(request)
    heat = heat_of(source.document, source.detail.matrix, heat_asked(request.query_params))
    body = {
        "figure": heat.figure,
        "title": heat.title,
        "words": heat.words,
        "lines": [asdict(line) for line in heat.lines],
    }
    answer = json_answer(request, orjson.dumps(body))
    answer.headers.update(_HEADERS)
    return answer


# --- tables -----------------------------------------------------------------------------------


def _csv(request: Request) -> Response:
    name = request.path_params["table"]
    if name not in _TABLES:
        raise MissingError(f"expected one of the tables {', '.join(_TABLES)}")
    headers = {**_HEADERS, "Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(_TABLES[name](request), 200, headers, "text/csv; charset=utf-8")


def _steps(request: Request) -> str:
    """Step times, thinned as the history is."""
    service, access = asked(request)
    chosen, attempt = range_of(request.query_params), whole_number(request.query_params, "attempt")
    wanted = HistoryFilter(attempt, chosen.first, chosen.last)
    with service.database.read() as session:
        history = history_of(session, access.tenant_id, request.path_params["job_id"], wanted)
    columns = ("step", "recorded_s", "simulated_s", "ideal_s", "slowdown", "skipped", "start_s")
    return csv_text(columns, (asdict(point) for point in history.points))


def _workers(request: Request) -> str:
    """Every worker over the steps of the report, or with ``step`` in one of them."""
    source, step = _source(request), whole_number(request.query_params, "step")
    workers = source.document["workers"]
    if step is None:
        return csv_text(("rank", "dp", "stage", "host", "slowdown", "approx_slowdown"), workers)
    if source.detail.matrix is None:
        raise MissingError("what each worker did in single steps is not kept for this window")
    known = {(one["dp"], one["stage"]): one for one in workers}
    rows = (
        {**known.get((row["dp"], row["stage"]), {}), **row}
        for row in source.detail.matrix.rows(step)
    )
    columns = ("step", "rank", "dp", "stage", "host", "slowdown", "compute_s", "wait_s")
    return csv_text(columns, rows)


def _rotation(request: Request) -> str:
    """The slowest worker of each step."""
    source, chosen = _source(request), range_of(request.query_params)
    marks = rotation_marks(source.document, source.detail.matrix)
    within = (asdict(mark) for mark in marks if chosen.holds(mark.step, mark.step))
    return csv_text(("step", "rank", "dp", "stage", "slowdown"), within)


def _ledger(request: Request) -> str:
    """The waterfall, with the ideal and the recorded step time at its ends."""
    bars = why_view(small_report(_source(request).document)).bars
    rows = ({"bar": bar.name, "excess_s": bar.value_s, "share": bar.share} for bar in bars)
    return csv_text(("bar", "excess_s", "share"), rows)


def _fixes(request: Request) -> str:
    columns = ("fix", "detail", "step_time_s", "speedup", "gpu_hours_per_day", "cost_per_day")
    return csv_text(columns, _source(request).document["fixes"])


def _groups(request: Request) -> str:
    """Groups of the report, in its order."""
    columns = (
        "kind", "dp", "stage", "members", "transfer_p50_s", "transfer_p99_s", "peers_p50_s",
        "last_rank", "last_share",
    )  # fmt: skip
    return csv_text(columns, _source(request).document.get("groups", ()))


_TABLES: Final[dict[str, Callable[[Request], str]]] = {
    "steps": _steps,
    "workers": _workers,
    "rotation": _rotation,
    "ledger": _ledger,
    "fixes": _fixes,
    "groups": _groups,
}
