"""Windows of a job, their reports, workers, history, and what fixes would buy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Query
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import (
    JobId,
    Part,
    Reader,
    found,
    packed_answer,
    problems,
    router,
    scoped,
)
from smon.api.schemas.base import PageModel
from smon.api.schemas.jobs import HistoryModel, PlanModel, WindowModel, WorkerModel
from smon.api.words import report_lines
from smon.errors import MissingError
from smon.report import JobReport
from smon.store.models import WindowState
from smon.store.queries.history import MAX_POINTS, History, HistoryFilter, history_of
from smon.store.queries.paging import cut
from smon.store.queries.reports import (
    current_report,
    document_of,
    live_workers,
    report_of_window,
)
from smon.store.queries.windows import WindowFilter, list_windows, need_job
from smon.store.queries.workers import WorkerFilter, WorkersFile, workers_in_step, workers_of
from smon.wire.problems import Problem

routes = router("windows")

_MAX_NUMBER: Final = 2**31 - 1

WINDOW_PATTERN: Final = "^(latest|live|[0-9a-f]{16})$"
WindowName = Annotated[
    str,
    Path(
        pattern=WINDOW_PATTERN,
        description="id of the window; `latest`: the last analysed one; `live`: the running "
        "diagnosis",
    ),
]
Coordinate = Annotated[int | None, Query(ge=0, le=_MAX_NUMBER, description="only these workers")]
StepNumber = Annotated[int | None, Query(ge=0, le=2**53, description="number of a step")]


class Metric(StrEnum):
    """What a history shows of each step."""

    RECORDED_S = "recorded_s"
    SIMULATED_S = "simulated_s"
    IDEAL_S = "ideal_s"
    SLOWDOWN = "slowdown"
    WASTE_RATIO = "waste_ratio"


def _worker_filter(dp: Coordinate = None, stage: Coordinate = None) -> WorkerFilter:
    return WorkerFilter(dp, stage)


def _history_filter(
    attempt: Annotated[
        int | None, Query(ge=0, le=_MAX_NUMBER, description="number of the attempt; none: newest")
    ] = None,
    from_step: StepNumber = None,
    to_step: StepNumber = None,
    points: Annotated[
        int, Query(ge=10, le=MAX_POINTS, description="most steps of the answer")
    ] = MAX_POINTS,
) -> HistoryFilter:
    return HistoryFilter(attempt, from_step, to_step, points)


@routes.get(
    "/jobs/{job_id}/windows",
    summary="Windows of a job",
    response_model=None,
    responses={**found(PageModel[WindowModel], "a page of windows"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def windows(
    asked: Reader,
    part: Part,
    job_id: JobId,
    attempt: Annotated[
        int | None, Query(ge=0, le=_MAX_NUMBER, description="number of the attempt; none: all")
    ] = None,
    state: Annotated[WindowState | None, Query(description="state of the window")] = None,
) -> Response:
    """Windows of a job with what came out of them, newest first."""
    wanted = WindowFilter(attempt, state)
    with asked.read() as session:
        page = list_windows(session, asked.tenant_id, job_id, wanted, part)
    items = [WindowModel.model_validate(row) for row in page.items]
    return asked.answer(PageModel[WindowModel](items=items, next=page.next))


@routes.get(
    "/jobs/{job_id}/windows/{window}",
    summary="Report of a window",
    response_model=None,
    responses={
        **found(JobReport, "the report, schema `smon.report/1`, exactly as it is stored"),
        304: {"description": "the client has it already (If-None-Match)"},
        **problems(Problem.NOT_FOUND),
    },
    openapi_extra=scoped(Scope.READ),
)
def report(asked: Reader, job_id: JobId, window: WindowName) -> Response:
    """The whole report of a window (`docs/reference/report.md`).

    A client that accepts zstd gets it as it is stored; others get it unpacked.
    """
    with asked.read() as session:
        stored = report_of_window(session, asked.tenant_id, job_id, window)
    return packed_answer(asked.request, stored.packed, stored.version)


@routes.get(
    "/jobs/{job_id}/workers",
    summary="Workers of a job",
    response_model=None,
    responses={**found(PageModel[WorkerModel], "a page of workers"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def workers(
    asked: Reader,
    part: Part,
    job_id: JobId,
    wanted: Annotated[WorkerFilter, Depends(_worker_filter)],
    window: Annotated[
        str, Query(pattern=WINDOW_PATTERN, description="id of a window, `latest` or `live`")
    ] = "latest",
    step: StepNumber = None,
) -> Response:
    """Workers, most slowed down first: over a window or, with `step`, in one step of it."""
    with asked.read() as session:
        stored = report_of_window(session, asked.tenant_id, job_id, window)
        live = stored.window_id is None and step is not None
        packed = live_workers(session, asked.tenant_id, job_id) if live else None
    document = document_of(stored.packed)
    if step is None:
        rows = workers_of(document, wanted)
    else:
        file = WorkersFile(asked.service.objects, stored.workers_path, packed)
        rows = workers_in_step(file, step, document, wanted)
    page = cut(rows, part)
    items = [WorkerModel.model_validate(row) for row in page.items]
    return asked.answer(PageModel[WorkerModel](items=items, next=page.next))


@routes.get(
    "/jobs/{job_id}/history",
    summary="A job over time",
    response_model=None,
    responses={**found(HistoryModel, "steps in columns"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def history(
    asked: Reader,
    job_id: JobId,
    wanted: Annotated[HistoryFilter, Depends(_history_filter)],
    metric: Annotated[
        list[Metric] | None, Query(max_length=5, description="columns to show; none: all")
    ] = None,
) -> Response:
    """Step times of an attempt, thinned: of each run of steps, the extremes stay."""
    with asked.read() as session:
        found_steps = history_of(session, asked.tenant_id, job_id, wanted)
    return asked.answer(history_model(found_steps, frozenset(metric or Metric)))


def history_model(history: History, metrics: frozenset[Metric]) -> HistoryModel:
    """A history in columns."""
    points = history.points

    def column(metric: Metric) -> list[float | None] | None:
        if metric not in metrics:
            return None
        if metric is Metric.WASTE_RATIO:
            return [1.0 - 1.0 / each.slowdown if each.slowdown else None for each in points]
        return [getattr(each, metric.value) for each in points]

    return HistoryModel(
        attempt=history.attempt,
        steps=history.steps,
        step=[each.step for each in points],
        start_s=[each.start_s for each in points],
        skipped=[each.skipped for each in points],
        **{metric.value: column(metric) for metric in Metric},
    )


@routes.get(
    "/jobs/{job_id}/plan",
    summary="What fixes would buy",
    response_model=None,
    responses={**found(PlanModel, "the fixes"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def plan(asked: Reader, job_id: JobId) -> Response:
    """Fixes of the newest report, best first, with what each would save."""
    with asked.read() as session:
        stored = current_report(session, asked.tenant_id, job_id)
        if stored is None:
            need_job(session, asked.tenant_id, job_id)
            raise MissingError("nothing of this job has been analysed yet")
    return asked.answer(_plan(document_of(stored.packed), stored.window_id))


def _plan(document: dict[str, Any], window_id: str | None) -> PlanModel:
    window, cost = document["window"], document["cost"]
    return PlanModel(
        window_id=window_id,
        first_step=window["first_step"],
        last_step=window["last_step"],
        slowdown=document["slowdown"]["paper"],
        gpu_hours_per_day=cost["gpu_hours_per_day"],
        cost_per_day=cost["cost_per_day"],
        lines=report_lines(document),
        fixes=document["fixes"],
    )
