"""The fleet in a few numbers, agents, and what this server is."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from starlette.responses import Response

from smon import __version__
from smon.api.access import Scope
from smon.api.routes.common import (
    Part,
    Reader,
    found,
    problems,
    router,
    scoped,
)
from smon.api.routes.jobs import job_model
from smon.api.schemas.base import ID_PATTERN, PageModel
from smon.api.schemas.fleet import (
    AgentModel,
    CauseModel,
    FleetModel,
    PeriodModel,
    VersionModel,
    WasteBinModel,
)
from smon.api.schemas.hosts import HostModel
from smon.report import SCHEMA
from smon.store.queries.agents import AgentFilter, list_agents
from smon.store.queries.fleet import FleetFilter, FleetReport, fleet_report
from smon.wire import PROTOCOL

routes = router("fleet")

#: Longest period of the fleet and of hosts.
MAX_DAYS: Final = 3650

Days = Annotated[float, Query(gt=0, le=MAX_DAYS, description="how far back to look")]


@routes.get(
    "/fleet/summary",
    summary="The fleet in a few numbers",
    response_model=None,
    responses={**found(FleetModel, "the fleet"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def fleet(asked: Reader, days: Days = 7.0) -> Response:
    """Jobs with data in the last days: how many are slowed down, what it costs, and why.

    `gpu_hours_per_day` and `causes` say what is wasted now; `period` says what was lost.
    """
    wanted = FleetFilter(days, asked.service.clock(), asked.price)
    with asked.read() as session:
        report = fleet_report(session, asked.tenant_id, wanted)
    return asked.answer(fleet_model(report))


def fleet_model(report: FleetReport) -> FleetModel:
    """The fleet report as answers show it."""
    now = report.now
    return FleetModel(
        days=now.days,
        jobs=now.jobs,
        running=now.running,
        analysed=now.analysed,
        slowed=now.slowed,
        slowed_share=now.slowed_share,
        gpu_hours_per_day=now.gpu_hours_per_day,
        cost_per_day=now.cost_per_day,
        states=now.states,
        waste=[WasteBinModel.model_validate(each) for each in now.waste],
        causes=[CauseModel.model_validate(each) for each in now.causes],
        worst_jobs=[job_model(each) for each in report.worst_jobs],
        worst_hosts=[HostModel.model_validate(each) for each in report.worst_hosts],
        period=PeriodModel.model_validate(report.period),
        unplaced=report.unplaced,
    )


@routes.get(
    "/agents",
    summary="Agents",
    response_model=None,
    responses={**found(PageModel[AgentModel], "a page of agents"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def agents(
    asked: Reader,
    part: Part,
    job: Annotated[
        str | None, Query(pattern=ID_PATTERN, description="id of a job; none: all jobs")
    ] = None,
    down: Annotated[bool | None, Query(description="only those that are down, or not")] = None,
    ended: Annotated[bool | None, Query(description="only those that are complete, or not")] = None,
) -> Response:
    """Streams with what their agents say of themselves, last data first."""
    down_ns = round(asked.service.settings.agent_down_s * 1e9)
    wanted = AgentFilter(asked.service.clock(), down_ns, job, down, ended)
    with asked.read() as session:
        page = list_agents(session, asked.tenant_id, wanted, part)
    items = [AgentModel.model_validate(row) for row in page.items]
    return asked.answer(PageModel[AgentModel](items=items, next=page.next))


@routes.get(
    "/version",
    summary="What this server is",
    response_model=None,
    responses={**found(VersionModel, "version, and what the token allows"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def version(asked: Reader) -> Response:
    """Versions of the server, the protocol and the report, and what the token allows."""
    return asked.answer(
        VersionModel(
            version=__version__,
            protocol=PROTOCOL,
            report_schema=SCHEMA,
            tenant_id=asked.tenant_id,
            scopes=sorted(asked.access.scopes),
        ),
    )
