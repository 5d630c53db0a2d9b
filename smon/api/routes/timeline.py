"""Timelines: a worker draws them, the request waits for it and then streams the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Final

from anyio.to_thread import run_sync
from fastapi import Depends, Path, Query
from starlette.responses import Response, StreamingResponse

from dashboards.web.figures.timeline import MAX_MARKS, USUAL_MARKS, Wanted
from smon.api.access import Scope
from smon.api.marks import (
    Drawable,
    Part,
    answer_of,
    ask_marks,
    drawable,
    finished,
    need_result,
    read_marks,
)
from smon.api.routes.common import Asked, JobId, Reader, found, problems, router, scoped
from smon.api.schemas.timeline import TimelineMarksModel
from smon.errors import StoreError, WireError
from smon.store.objects import Objects
from smon.store.queries.tasks import TaskRow, TimelineRequest, ask, window_of
from smon.wire.problems import Problem

routes = router("timeline")

_CHUNK_BYTES: Final = 256 * 1024
_MAX_PLACES: Final = 64

Places = Annotated[
    list[Annotated[int, Query(ge=0, le=2**31 - 1)]] | None,
    Query(max_length=_MAX_PLACES, description="only these; may be given several times; none: all"),
]
ShownPlaces = Annotated[
    list[Annotated[int, Query(ge=0, le=2**31 - 1)]] | None,
    Query(
        max_length=_MAX_PLACES,
        description="only these; may be given several times; neither `dp` nor `stage`: suspects, "
        "those that wait for them, and usual peers",
    ),
]
WindowOrLatest = Annotated[
    str,
    Path(
        pattern="^(latest|[0-9a-f]{16})$",
        description="id of the window, or `latest`: the last analysed one",
    ),
]
Moment = Annotated[
    float | None, Query(ge=0, le=1e6, description="seconds since the start of the step")
]


class Kind(StrEnum):
    """Which run is drawn: as it was, as it could have been, or both."""

    ACTUAL = "actual"
    IDEAL = "ideal"
    BOTH = "both"


#: As marks name them.
_KINDS: Final = {
    Kind.ACTUAL: frozenset({0}),
    Kind.IDEAL: frozenset({1}),
    Kind.BOTH: frozenset({0, 1}),
}


def _timeline_request(
    window: WindowOrLatest,
    kind: Annotated[
        Kind, Query(description="the run as it was, the ideal one, or both")
    ] = Kind.ACTUAL,
    dp: Places = None,
    stage: Places = None,
    steps: Annotated[
        str | None,
        Query(
            pattern="^[0-9]{1,15}(-[0-9]{1,15})?$",
            description="only these steps, `A-B` or `A`; none: all. What would be too large is "
            "cut after its first steps",
        ),
    ] = None,
) -> TimelineRequest:
    places = tuple(sorted(set(dp or ()))), tuple(sorted(set(stage or ())))
    return TimelineRequest(window, kind, *places, steps_of(steps))


def steps_of(text: str | None) -> tuple[int, int] | None:
    """First and last step of ``A-B`` or ``A``.

    Raises
    ------
    WireError
        B is before A.
    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    found = int(first), int(last or first)
    if found[0] > found[1]:
        raise WireError(Problem.INVALID, f"steps: expected A-B, e.g. 40-49, found {text!r}")
    return found


@routes.get(
    "/jobs/{job_id}/windows/{window}/timeline",
    summary="Timeline of a window",
    response_model=None,
    responses={
        200: {
            "description": "a trace file that Perfetto and chrome://tracing open, in gzip",
            "content": {
                "application/json": {
                    "schema": {"type": "object"},
                    "example": {
                        "displayTimeUnit": "ms",
                        "otherData": {"writer": "smon", "steps": "40-49"},
                        "traceEvents": [],
                    },
                }
            },
        },
        **problems(Problem.NOT_FOUND, Problem.STATE_CONFLICT, Problem.NOT_READY),
    },
    openapi_extra=scoped(Scope.READ),
)
async def timeline(
    asked: Reader, job_id: JobId, wanted: Annotated[TimelineRequest, Depends(_timeline_request)]
) -> Response:
    """The ops of chosen steps and workers, step by step, as a trace file.

    A worker makes it, once: who asks again gets the same file. Takes it longer than 20 s, the
    answer is 503 with Retry-After; the work goes on. A file holds about a million ops at most, and
    at least one step: of more, the first steps are drawn, and `otherData` says so (`steps`,
    `bounded`); steps that cannot be drawn stand in `leftOut` with their reasons.
    """
    task_id = await run_sync(_asked, asked, job_id, wanted)
    task = await finished(asked.service, asked.tenant_id, task_id)
    path = await run_sync(need_result, asked.service, asked.tenant_id, task)
    return StreamingResponse(
        _chunks(asked.service.objects, path),
        media_type="application/json",
        headers={
            "Content-Encoding": "gzip",
            "Content-Disposition": f'attachment; filename="{_file_name(wanted)}"',
        },
    )


def _file_name(wanted: TimelineRequest) -> str:
    steps = "" if wanted.steps is None else f"-{wanted.steps[0]}-{wanted.steps[1]}"
    return f"timeline-{wanted.window_id}{steps}-{wanted.kind}.json"


def _asked(asked: Asked, job_id: str, wanted: TimelineRequest) -> str:
    with asked.write() as session:
        window_id, revision = window_of(session, asked.tenant_id, job_id, wanted.window_id)
        wanted = replace(wanted, window_id=window_id)
        return ask(
            session, asked.tenant_id, wanted.key(revision), wanted.options(), asked.service.clock()
        )


def _part(
    step: Annotated[
        int | None, Query(ge=0, le=2**53, description="number of the step; none: the worst one")
    ] = None,
    dp: ShownPlaces = None,
    stage: ShownPlaces = None,
) -> Part:
    return Part(step, tuple(sorted(set(dp or ()))), tuple(sorted(set(stage or ()))))


def _screen(
    kind: Annotated[
        Kind, Query(description="the run as it was, the ideal one, or both")
    ] = Kind.BOTH,
    begin_s: Moment = None,
    end_s: Moment = None,
    most: Annotated[int, Query(ge=100, le=MAX_MARKS, description="most marks")] = USUAL_MARKS,
) -> Wanted:
    return Wanted(begin_s, end_s, _KINDS[kind], most)


@routes.get(
    "/jobs/{job_id}/windows/{window}/timeline/marks",
    summary="One step of a window, for a screen",
    response_model=None,
    responses={
        **found(TimelineMarksModel, "the marks of the range"),
        **problems(Problem.NOT_FOUND, Problem.STATE_CONFLICT, Problem.NOT_READY),
    },
    openapi_extra=scoped(Scope.READ),
)
async def timeline_marks(
    asked: Reader,
    job_id: JobId,
    window: WindowOrLatest,
    part: Annotated[Part, Depends(_part)],
    screen: Annotated[Wanted, Depends(_screen)],
) -> Response:
    """The ops of at most 24 workers in one step, as marks: short neighbours are joined.

    A worker reads the step, once; ranges of it come from what it made. Until then the answer is
    503 with Retry-After after 20 s; the work goes on.
    """
    place = (job_id, window)
    wanted, task = await run_sync(_asked_marks, asked, place, part)
    task = await finished(asked.service, asked.tenant_id, task.id)
    return await run_sync(_marks, asked, wanted, task, screen)


def _asked_marks(asked: Asked, place: tuple[str, str], part: Part) -> tuple[Drawable, TaskRow]:
    wanted = drawable(asked.service, asked.tenant_id, place, part)
    return wanted, ask_marks(asked.service, asked.tenant_id, wanted)


def _marks(asked: Asked, wanted: Drawable, task: TaskRow, screen: Wanted) -> Response:
    document = read_marks(asked.service, asked.tenant_id, task)
    answer = answer_of(wanted, document, screen)
    return asked.answer(TimelineMarksModel.model_validate(answer))


def _chunks(objects: Objects, path: str) -> Iterator[bytes]:
    try:
        with objects.open(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield bytes(chunk)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
