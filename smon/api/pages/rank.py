"""The page of one rank of a job."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.rank import MAX_SHOWN, rank_table, rank_view
from smon.api.pages.common import FRESH_NS, asked, html, plotly_version, tag_of, unchanged
from smon.api.pages.data import attempt_asked, csv_answer, wants_csv
from smon.store.queries.jobs import job_version
from smon.store.queries.rank import RankQuestion, rank_detail, rank_rows

#: Larger numbers are no ranks.
_MAX_RANK: Final = 2**31


def rank_routes() -> list[BaseRoute]:
    """The page of one rank."""
    return [Route("/jobs/{job_id:str}/ranks/{rank:int}", _rank, methods=["GET"])]


def _rank(request: Request) -> Response:
    service, access = asked(request)
    job_id, rank = request.path_params["job_id"], min(request.path_params["rank"], _MAX_RANK)
    question = RankQuestion(job_id, rank, attempt_asked(request))
    now, tenant = service.clock(), access.tenant_id
    with service.database.read() as session:
        version = job_version(session, tenant, job_id)
        tag = tag_of(version, str(now // FRESH_NS), tenant, str(question), request.url.query)
        if tag in request.headers.get("if-none-match", ""):
            return unchanged(tag)
        rows = rank_rows(session, service.objects, tenant, question)
    if wants_csv(request):
        return csv_answer(f"smon-rank-{rank}.csv", *rank_table(rank_detail(service.objects, rows)))
    view = rank_view(rank_detail(service.objects, rows, MAX_SHOWN))
    answer = html(request, "rank.html", view=view, now_s=now / 1e9, plotly=plotly_version())
    answer.headers["ETag"] = tag
    return answer
