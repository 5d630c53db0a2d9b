"""Jobs: list, one with all that matters now, keep for ever, remove."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Depends, Query
from starlette.background import BackgroundTask
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import (
    Admin,
    Asked,
    JobId,
    Part,
    Reader,
    found,
    problems,
    router,
    scoped,
)
from smon.api.routes.findings import finding_model
from smon.api.routes.removal import remove
from smon.api.schemas.base import PageModel
from smon.api.schemas.jobs import (
    AgentsModel,
    AttemptModel,
    JobDetailModel,
    JobModel,
    MissingModel,
    OpenFindingModel,
)
from smon.api.words import headline_of, job_lines, job_sentence
from smon.store.models import FindingState
from smon.store.queries import admin
from smon.store.queries.agents import AgentFilter, AgentRow, list_agents
from smon.store.queries.findings import FindingFilter, list_findings
from smon.store.queries.jobs import (
    JobFilter,
    JobRow,
    JobSort,
    attempts_of,
    get_job,
    list_jobs,
    missing_of,
)
from smon.store.queries.paging import Slice
from smon.wire.problems import Problem

routes = router("jobs")

_MAX_AGENTS: Final = 500
_MAX_FINDINGS: Final = 50

_SORTS: Final = [f"{sign}{name.value}" for name in JobSort for sign in ("", "-")]
_SORT_PATTERN: Final = "^(" + "|".join(_SORTS) + ")$"


def _job_filter(
    name: Annotated[
        str | None, Query(max_length=256, description="part of the name, in any case")
    ] = None,
    state: Annotated[
        str | None, Query(pattern="^(running|ended)$", description="running or ended")
    ] = None,
    verdict: Annotated[
        str | None, Query(pattern="^[a-z_]{1,64}$", description="of the newest analysis")
    ] = None,
    min_waste: Annotated[
        float | None, Query(ge=-1, le=1, description="least part of the GPU time that is lost")
    ] = None,
    sort: Annotated[
        str,
        Query(pattern=_SORT_PATTERN, description="what to sort by; - before it: highest first"),
    ] = "-last_data",
) -> JobFilter:
    return JobFilter(
        name=name,
        running=None if state is None else state == "running",
        verdict=verdict,
        min_waste=min_waste,
        sort=JobSort(sort.removeprefix("-")),
        descending=sort.startswith("-"),
    )


@routes.get(
    "/jobs",
    summary="List jobs",
    response_model=None,
    responses={**found(PageModel[JobModel], "a page of jobs"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def jobs(asked: Reader, part: Part, wanted: Annotated[JobFilter, Depends(_job_filter)]) -> Response:
    """Jobs of the tenant, each with its newest numbers and the finding that matters most.

    Filters other than `name` and `state`, and sorts other than `name` and `last_data`, look at the
    5,000 jobs with the newest data.
    """
    with asked.read() as session:
        page = list_jobs(session, asked.tenant_id, wanted, part, asked.price)
    items = [job_model(row) for row in page.items]
    return asked.answer(PageModel[JobModel](items=items, next=page.next))


@routes.get(
    "/jobs/{job_id}",
    summary="One job",
    response_model=None,
    responses={**found(JobDetailModel, "the job"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def job(asked: Reader, job_id: JobId) -> Response:
    """A job: layout, attempts, state, verdict in words, cost, open findings, missing ranks."""
    return asked.answer(job_detail(asked, job_id))


@routes.post(
    "/jobs/{job_id}/pin",
    summary="Keep a job",
    response_model=None,
    responses={**found(JobModel, "the job, pinned"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.ADMIN),
)
def pin(asked: Admin, job_id: JobId) -> Response:
    """Keep the events of a job whatever their age, until it is unpinned."""
    return _pinned(asked, job_id, pinned=True)


@routes.post(
    "/jobs/{job_id}/unpin",
    summary="Let a job go in time",
    response_model=None,
    responses={**found(JobModel, "the job, not pinned"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.ADMIN),
)
def unpin(asked: Admin, job_id: JobId) -> Response:
    """Let the events of a job go when they are as old as the retention allows."""
    return _pinned(asked, job_id, pinned=False)


@routes.delete(
    "/jobs/{job_id}",
    summary="Remove a job",
    response_model=None,
    status_code=204,
    responses={204: {"description": "it is gone"}, **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.ADMIN),
)
def delete(asked: Admin, job_id: JobId) -> Response:
    """Remove a job with its events, reports and findings, for ever.

    A job whose agents still send comes back with what they send next.
    """
    with asked.write() as session:
        paths = admin.delete_job(session, asked.tenant_id, job_id)
    return Response(
        status_code=204, background=BackgroundTask(remove, asked.service.objects, paths)
    )


def job_model(row: JobRow) -> JobModel:
    """A job as lists show it."""
    return JobModel.model_validate(_with_words(row))


def job_detail(asked: Asked, job_id: str) -> JobDetailModel:
    """A job as its page shows it.

    Raises
    ------
    MissingError
        There is no such job.
    """
    tenant, settings, now = asked.tenant_id, asked.service.settings, asked.service.clock()
    with asked.read() as session:
        row = get_job(session, tenant, job_id, settings.price)
        agents = list_agents(
            session,
            tenant,
            AgentFilter(now, round(settings.agent_down_s * 1e9), job_id),
            Slice(_MAX_AGENTS),
        ).items
        findings = list_findings(
            session,
            tenant,
            job_id,
            FindingFilter(state=FindingState.OPEN),
            Slice(_MAX_FINDINGS),
        ).items
        attempts = attempts_of(session, tenant, job_id)
        missing = missing_of(session, row.attempt_id)
    return JobDetailModel(
        **_with_words(row),
        lines=job_lines(row),
        attempts=[AttemptModel.model_validate(each) for each in attempts],
        missing=MissingModel.model_validate(missing),
        agents=_agents(agents),
        findings=[finding_model(each, row.layout) for each in findings],
    )


def _with_words(row: JobRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in JobModel.model_fields if hasattr(row, name)}
    if row.finding is not None:
        headline = headline_of(row.finding.document, row.layout)
        own = {name: getattr(row.finding, name) for name in row.finding.__slots__}
        values["finding"] = OpenFindingModel.model_validate({**own, "headline": headline})
    return {**values, "sentence": job_sentence(row)}


def _agents(agents: tuple[AgentRow, ...]) -> AgentsModel:
    return AgentsModel(
        total=len(agents),
        down=sum(agent.down for agent in agents),
        ended=sum(agent.ended for agent in agents),
    )


def _pinned(asked: Asked, job_id: str, *, pinned: bool) -> Response:
    with asked.write() as session:
        admin.pin_job(session, asked.tenant_id, job_id, pinned=pinned)
        row = get_job(session, asked.tenant_id, job_id, asked.price)
    return asked.answer(job_model(row))
