"""Hosts that recur, the fleet in a few numbers, agents, and what this server is."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path, Query
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
    HostDetailModel,
    HostModel,
    VersionModel,
    WasteBinModel,
)
from smon.report import SCHEMA
from smon.store.queries.agents import AgentFilter, list_agents
from smon.store.queries.fleet import FleetFilter, FleetSummary, dearest_jobs, fleet_summary
from smon.store.queries.hosts import HostFilter, HostKind, get_host, list_hosts
from smon.wire import PROTOCOL
from smon.wire.problems import Problem

routes = router("fleet")

_MAX_DAYS: Final = 3650
_HOST_PATTERN: Final = r"^[A-Za-z0-9._:/@+-]{1,256}$"

Days = Annotated[float, Query(gt=0, le=_MAX_DAYS, description="how far back to look")]


@routes.get(
    "/hosts",
    summary="Hosts that were suspects",
    response_model=None,
    responses={**found(PageModel[HostModel], "a page of hosts"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def hosts(
    asked: Reader,
    part: Part,
    by: Annotated[HostKind, Query(description="group findings by host or by GPU")] = HostKind.HOST,
    days: Annotated[
        float | None, Query(gt=0, le=_MAX_DAYS, description="how far back; none: all")
    ] = None,
) -> Response:
    """Hosts or GPUs about which there is a finding, those in most jobs first.

    The 10,000 newest findings count.
    """
    wanted = HostFilter(asked.service.clock(), by, days)
    with asked.read() as session:
        page = list_hosts(session, asked.tenant_id, wanted, part, asked.price)
    items = [HostModel.model_validate(row) for row in page.items]
    return asked.answer(PageModel[HostModel](items=items, next=page.next))


@routes.get(
    "/hosts/{host:path}",
    summary="One host or GPU",
    response_model=None,
    responses={**found(HostDetailModel, "the host"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def host(
    asked: Reader,
    host: Annotated[
        str, Path(pattern=_HOST_PATTERN, description="name of the host, or UUID of the GPU")
    ],
) -> Response:
    """Every finding about a host or GPU, over all jobs."""
    with asked.read() as session:
        detail = get_host(session, asked.tenant_id, host, asked.price)
    return asked.answer(HostDetailModel.model_validate(detail))


@routes.get(
    "/fleet/summary",
    summary="The fleet in a few numbers",
    response_model=None,
    responses={**found(FleetModel, "the fleet"), **problems()},
    openapi_extra=scoped(Scope.READ),
)
def fleet(asked: Reader, days: Days = 7.0) -> Response:
    """Jobs with data in the last days: how many are slowed down, what it costs, and why."""
    wanted = FleetFilter(days, asked.service.clock(), asked.price)
    with asked.read() as session:
        everything = dearest_jobs(session, asked.tenant_id, asked.price)
        summary = fleet_summary(session, asked.tenant_id, wanted, everything)
    return asked.answer(fleet_model(summary))


def fleet_model(summary: FleetSummary) -> FleetModel:
    """The fleet as answers show it."""
    return FleetModel(
        days=summary.days,
        jobs=summary.jobs,
        running=summary.running,
        analysed=summary.analysed,
        slowed=summary.slowed,
        slowed_share=summary.slowed_share,
        gpu_hours_per_day=summary.gpu_hours_per_day,
        cost_per_day=summary.cost_per_day,
        waste=[WasteBinModel.model_validate(each) for each in summary.waste],
        causes=[CauseModel.model_validate(each) for each in summary.causes],
        worst_jobs=[job_model(each) for each in summary.worst_jobs],
        worst_hosts=[HostModel.model_validate(each) for each in summary.worst_hosts],
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
