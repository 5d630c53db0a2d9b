"""The page of one job, and of one of its windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.job import Detail, JobParts, job_view
from dashboards.web.views.time import Range, TimeParts
from dashboards.web.views.where import HeatAsked, shape_of
from smon.api.access import Access
from smon.api.pages.choices import heat_asked, range_of
from smon.api.pages.common import FRESH_NS, asked, html, plotly_version, tag_of, unchanged
from smon.api.routes.common import Service
from smon.errors import MissingError
from smon.store.queries.agents import AgentFilter, list_agents
from smon.store.queries.findings import FindingFilter, list_findings
from smon.store.queries.history import History, HistoryFilter, history_of
from smon.store.queries.jobs import (
    AttemptRow,
    JobRow,
    attempts_of,
    get_job,
    job_version,
    missing_of,
)
from smon.store.queries.matrix import matrix_of
from smon.store.queries.paging import Slice, slice_of
from smon.store.queries.reports import (
    StoredReport,
    current_report,
    document_of,
    live_workers,
    report_of_window,
)
from smon.store.queries.spans import (
    WindowPlace,
    attempt_spans,
    incomplete_spans,
    stream_totals,
    window_place,
)
from smon.store.queries.windows import WindowFilter, list_windows
from smon.store.queries.workers import WorkersFile

_FINDINGS: Final = 50
_DOWN: Final = 16
_POINTS: Final = 1000
_EARLIER: Final = 2
_EARLIER_POINTS: Final = 200
_WINDOWS: Final = 10


def job_routes() -> list[BaseRoute]:
    """The page of one job, and of one of its windows."""
    return [
        Route("/jobs/{job_id:str}", _page, methods=["GET"]),
        Route("/jobs/{job_id:str}/windows/{window:str}", _page, methods=["GET"]),
    ]


def _page(request: Request) -> Response:
    service, access = asked(request)
    job_id, now = request.path_params["job_id"], service.clock()
    window = request.path_params.get("window")
    with service.database.read() as session:
        version = job_version(session, access.tenant_id, job_id)
    about = (str(request.url.query), window or "", access.tenant_id)
    tag = tag_of(version, str(now // FRESH_NS), *about)
    if tag in request.headers.get("if-none-match", ""):
        return unchanged(tag)
    steps = range_of(request.query_params)
    chosen = Chosen(
        steps,
        not steps.whole,
        heat_asked(request.query_params),
        slice_of(_WINDOWS, request.query_params.get("windows")),
        service.settings.public_url or str(request.base_url).rstrip("/"),
    )
    with service.database.read() as session:
        gather = Gather(session, service, access, job_id)
        view = job_view(gather.job(chosen) if window is None else gather.window(window, chosen))
    answer = html(request, "job.html", view=view, now_s=now / 1e9, plotly=plotly_version())
    answer.headers["ETag"] = tag
    return answer


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the address of the page asks for, and the address of this server."""

    range: Range
    ranged: bool
    heat: HeatAsked
    windows: Slice
    server: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Gets from the store what the page of a job shows."""

    session: Session
    service: Service
    access: Access
    job_id: str

    def job(self, chosen: Chosen) -> JobParts:
        """Of a job, by its newest report."""
        stored = current_report(self.session, self.access.tenant_id, self.job_id)
        return self._parts(chosen, stored, None)

    def window(self, name: str, chosen: Chosen) -> JobParts:
        """Of one of its windows.

        Raises
        ------
        MissingError
            There is no such window, or it has no report.
        """
        if name == "live":
            raise MissingError("the running diagnosis is on the page of the job")
        stored = report_of_window(self.session, self.access.tenant_id, self.job_id, name)
        here = window_place(self.session, self.access.tenant_id, stored.window_id or "")
        if not chosen.ranged:
            chosen = replace(chosen, range=Range(here.first_step, here.last_step))
        return self._parts(chosen, stored, here)

    def _parts(
        self, chosen: Chosen, stored: StoredReport | None, here: WindowPlace | None
    ) -> JobParts:
        session, tenant, now = self.session, self.access.tenant_id, self.service.clock()
        down_ns = round(self.service.settings.agent_down_s * 1e9)
        row = get_job(session, tenant, self.job_id, self.service.settings.price)
        document = None if stored is None else document_of(stored.packed)
        attempts = attempts_of(session, tenant, self.job_id)
        down = AgentFilter(now, down_ns, self.job_id, down=True)
        return JobParts(
            job=row,
            document=document,
            live=stored is not None and stored.window_id is None,
            here=here,
            attempts=attempts,
            missing=missing_of(session, row.attempt_id),
            streams=stream_totals(session, tenant, row.attempt_id, now - down_ns),
            down=list_agents(session, tenant, down, Slice(_DOWN)).items,
            time=self._time(chosen, row, attempts, here),
            windows=list_windows(session, tenant, self.job_id, WindowFilter(), chosen.windows),
            detail=Detail(None, "latest") if document is None else self.detail(stored, document),
            asked=chosen.heat,
            ranged=chosen.ranged,
            runbooks=self.service.settings.runbook_url.rstrip("/") or "/runbooks",
            server=chosen.server,
            capture=stored is not None and stored.capture,
        )

    def detail(self, stored: StoredReport | None, document: dict[str, Any]) -> Detail:
        """Every worker in every step: of the report, or of the newest window that is closed."""
        session, tenant = self.session, self.access.tenant_id
        if stored is None:
            return Detail(None, "latest")
        objects, shape = self.service.objects, shape_of(document)
        if stored.window_id is not None:
            file = WorkersFile(objects, stored.workers_path)
            return Detail(matrix_of(file, shape), stored.window_id)
        packed = live_workers(session, tenant, self.job_id)
        return Detail(matrix_of(WorkersFile(objects, None, packed), shape), "live")

    def _time(
        self,
        chosen: Chosen,
        row: JobRow,
        attempts: tuple[AttemptRow, ...],
        here: WindowPlace | None,
    ) -> TimeParts:
        session, tenant = self.session, self.access.tenant_id
        number = row.attempt if here is None else here.attempt
        before = [each.number for each in attempts if number is not None and each.number < number]
        before = before[:_EARLIER] if here is None else []
        numbers = (*before, *(() if number is None else (number,)))
        wanted = FindingFilter(attempt=None if here is None else here.attempt)
        found = list_findings(session, tenant, self.job_id, wanted, Slice(_FINDINGS))
        return TimeParts(
            history=self._history(chosen.range, number, _POINTS),
            earlier=tuple(
                self._history(chosen.range, each, _EARLIER_POINTS) for each in reversed(before)
            ),
            spans=attempt_spans(session, tenant, self.job_id, numbers),
            incomplete=incomplete_spans(session, tenant, row.attempt_id),
            findings=found.items,
            chosen=chosen.range,
        )

    def _history(self, chosen: Range, attempt: int | None, points: int) -> History:
        wanted = HistoryFilter(attempt, chosen.first, chosen.last, points)
        return history_of(self.session, self.access.tenant_id, self.job_id, wanted)
