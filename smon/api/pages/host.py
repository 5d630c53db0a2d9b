"""Hosts and GPUs that were suspects: all of them, and the record of one.

The page of a host has its name in the path, or, as no path can hold the names ``.`` and ``..``, in
the query: ``/hosts?name=``.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from dashboards.web.views.host import HostParts, host_rows, host_view
from dashboards.web.views.hosts import HOSTS_COLUMNS, HostsQuestion, hosts_rows, hosts_view
from smon.api.access import Access
from smon.api.pages.common import FRESH_NS, asked, html, tag_of, unchanged
from smon.api.pages.data import csv_answer, wants_csv
from smon.api.routes.common import Service
from smon.store.queries.agents import AgentFilter, list_agents
from smon.store.queries.hosts import (
    HostFilter,
    HostKind,
    get_host,
    list_hosts,
    standing_of,
)
from smon.store.queries.jobs import fleet_version
from smon.store.queries.paging import Slice, slice_of

_ROWS: Final = 100
_CSV_ROWS: Final = 10_000
_AGENTS: Final = 64
_MAX_NAME: Final = 256

#: Choices of the list, in days; none: all.
_DAYS: Final = (7, 30, 90)


def host_routes() -> list[BaseRoute]:
    """The list of hosts, and the page of one."""
    return [
        Route("/hosts", _hosts, methods=["GET"]),
        Route("/hosts/{name:path}", _host, methods=["GET"]),
    ]


def _hosts(request: Request) -> Response:
    if request.query_params.get("name"):
        return _host(request)
    service, access = asked(request)
    question, cursor = _question(request), request.query_params.get("cursor")
    part = Slice(_CSV_ROWS) if wants_csv(request) else slice_of(_ROWS, cursor)
    now = service.clock()
    wanted = HostFilter(now, question.kind, question.days, question.name or None)
    with service.database.read() as session:
        tag = _tag(request, fleet_version(session, access.tenant_id), access, now)
        if tag in request.headers.get("if-none-match", ""):
            return unchanged(tag)
        page = list_hosts(session, access.tenant_id, wanted, part, service.settings.price)
    if wants_csv(request):
        return csv_answer("smon-hosts.csv", HOSTS_COLUMNS, hosts_rows(page.items))
    answer = html(request, "hosts.html", view=hosts_view(page, question), now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer


def _question(request: Request) -> HostsQuestion:
    """What the list is asked for; whatever else stands in the query counts as not asked."""
    asked_for = request.query_params
    kind = HostKind.GPU if asked_for.get("by") == HostKind.GPU else HostKind.HOST
    days = next((each for each in _DAYS if asked_for.get("days") == str(each)), None)
    return HostsQuestion(asked_for.get("q", "")[:_MAX_NAME], kind, days, _DAYS)


def _host(request: Request) -> Response:
    service, access = asked(request)
    name = request.path_params.get("name") or request.query_params.get("name", "")
    now = service.clock()
    with service.database.read() as session:
        version = fleet_version(session, access.tenant_id)
    tag = _tag(request, version, access, now)
    if tag in request.headers.get("if-none-match", ""):
        return unchanged(tag)
    parts = _parts(service, access, name)
    if wants_csv(request):
        return csv_answer("smon-host.csv", *host_rows(parts.detail.findings))
    view = host_view(parts, now / 1e9)
    answer = html(request, "host.html", view=view, now_s=now / 1e9)
    answer.headers["ETag"] = tag
    return answer


def _tag(request: Request, version: str, access: Access, now: int) -> str:
    where = f"{request.url.path}?{request.url.query}"
    return tag_of(version, str(now // FRESH_NS), access.tenant_id, where)


def _parts(service: Service, access: Access, name: str) -> HostParts:
    tenant, settings = access.tenant_id, service.settings
    down_ns = round(settings.agent_down_s * 1e9)
    agents = AgentFilter(service.clock(), down_ns, host=name)
    with service.database.read() as session:
        detail = get_host(session, tenant, name, settings.price)
        return HostParts(
            detail=detail,
            standing=standing_of(session, tenant, detail.host),
            agents=list_agents(session, tenant, agents, Slice(_AGENTS)).items,
        )
