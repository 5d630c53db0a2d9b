"""Findings of a job, over their life."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import (
    JobId,
    Part,
    Reader,
    found,
    problems,
    router,
    scoped,
)
from smon.api.schemas.base import PageModel
from smon.api.schemas.jobs import FindingModel
from smon.api.words import headline_of
from smon.store.models import FindingState
from smon.store.queries.findings import FindingFilter, FindingRow, list_findings
from smon.store.queries.jobs import get_job
from smon.topology import Layout
from smon.wire.problems import Problem

routes = router("findings")

#: Times beyond it are none: the year 2262, where nanoseconds end.
_MAX_TIME_S = 9.2e9


def _finding_filter(
    since: Annotated[
        float | None,
        Query(ge=0, le=_MAX_TIME_S, description="seen or cleared since then, unix time in seconds"),
    ] = None,
    state: Annotated[FindingState | None, Query(description="open or cleared")] = None,
    attempt: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="number of the attempt; none: all")
    ] = None,
) -> FindingFilter:
    return FindingFilter(since, state, attempt)


@routes.get(
    "/jobs/{job_id}/findings",
    summary="Findings of a job",
    response_model=None,
    responses={
        **found(PageModel[FindingModel], "a page of findings"),
        **problems(Problem.NOT_FOUND),
    },
    openapi_extra=scoped(Scope.READ),
)
def findings(
    asked: Reader,
    part: Part,
    job_id: JobId,
    wanted: Annotated[FindingFilter, Depends(_finding_filter)],
) -> Response:
    """Findings of a job with their events, last seen first; by default of all attempts."""
    with asked.read() as session:
        row = get_job(session, asked.tenant_id, job_id, asked.price)
        page = list_findings(session, asked.tenant_id, job_id, wanted, part)
    items = [finding_model(each, row.layout) for each in page.items]
    return asked.answer(PageModel[FindingModel](items=items, next=page.next))


def finding_model(row: FindingRow, layout: Layout | None) -> FindingModel:
    """A finding as answers show it."""
    own = {name: getattr(row, name) for name in row.__slots__}
    return FindingModel.model_validate({**own, "headline": headline_of(row.document, layout)})
