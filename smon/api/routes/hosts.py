"""Hosts and GPUs that were suspects, over all jobs."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path, Query
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import Part, Reader, found, problems, router, scoped
from smon.api.schemas.base import PageModel
from smon.api.schemas.hosts import HostDetailModel, HostModel
from smon.store.queries.hosts import HostFilter, HostKind, get_host, list_hosts
from smon.wire.problems import Problem

routes = router("hosts")

_MAX_DAYS: Final = 3650
_MAX_NAME: Final = 256

#: Names are printable, and may be anything beyond that.
_HOST_PATTERN: Final = r"^[^\x00-\x1f\x7f]{1,256}$"


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
    name: Annotated[
        str | None, Query(max_length=_MAX_NAME, description="part of the name, in any case")
    ] = None,
) -> Response:
    """Hosts or GPUs about which there is a finding, those in most jobs first.

    The 10,000 newest findings count.
    """
    wanted = HostFilter(asked.service.clock(), by, days, name)
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
    """Every finding about a host or GPU, over all jobs, and the jobs that run there now."""
    with asked.read() as session:
        detail = get_host(session, asked.tenant_id, host, asked.price)
    return asked.answer(HostDetailModel.model_validate(detail))
