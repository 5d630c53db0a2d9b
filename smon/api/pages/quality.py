"""The page of a job's data quality."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.quality import TABLES, quality_view
from smon.api.pages.common import FRESH_NS, asked, html, tag_of, unchanged
from smon.api.pages.data import attempt_asked, csv_answer, wants_csv
from smon.store.queries.jobs import job_version
from smon.store.queries.trust import TrustQuestion, trust_of

_FIRST: Final = "windows"


def quality_routes() -> list[BaseRoute]:
    """The page of a job's data quality."""
    return [Route("/jobs/{job_id:str}/quality", _quality, methods=["GET"])]


def _quality(request: Request) -> Response:
    service, access = asked(request)
    now, job_id = service.clock(), request.path_params["job_id"]
    down_ns = round(service.settings.agent_down_s * 1e9)
    question = TrustQuestion(job_id, attempt_asked(request), now, down_ns)
    with service.database.read() as session:
        version = job_version(session, access.tenant_id, job_id)
        parts = (version, str(now // FRESH_NS), access.tenant_id, job_id, request.url.query)
        tag = tag_of(*parts)
        if tag in request.headers.get("if-none-match", ""):
            return unchanged(tag)
        trust = trust_of(session, access.tenant_id, question)
    if wants_csv(request):
        of = request.query_params.get("of", _FIRST)
        name = of if of in TABLES else _FIRST
        return csv_answer(f"smon-{name}.csv", *TABLES[name](trust))
    answer = html(request, "quality.html", view=quality_view(trust), now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer
