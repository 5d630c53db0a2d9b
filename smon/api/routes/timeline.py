"""Timelines: a worker draws them, the request waits for it and then streams the file."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Final

import anyio
from anyio.to_thread import run_sync
from fastapi import Path, Query
from starlette.responses import Response, StreamingResponse

from smon.api.access import Scope
from smon.api.routes.common import Asked, JobId, Reader, problems, router, scoped
from smon.errors import StoreError, WireError
from smon.store.models import WorkState
from smon.store.objects import Objects
from smon.store.queries.tasks import TaskRow, TimelineRequest, ask, get_task, retry, window_of
from smon.wire.problems import Problem

routes = router("timeline")

_PAUSE_S: Final = 0.2
_RETRY_AFTER_S: Final = 5.0
_CHUNK_BYTES: Final = 256 * 1024
_MAX_PLACES: Final = 64

Places = Annotated[
    list[Annotated[int, Query(ge=0, le=2**31 - 1)]] | None,
    Query(max_length=_MAX_PLACES, description="only these; may be given several times; none: all"),
]


class Kind(StrEnum):
    """Which run is drawn: as it was, or as it could have been."""

    ACTUAL = "actual"
    IDEAL = "ideal"


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
                    "example": {"traceEvents": [], "displayTimeUnit": "ms"},
                }
            },
        },
        **problems(Problem.NOT_FOUND, Problem.NOT_READY),
    },
    openapi_extra=scoped(Scope.READ),
)
async def timeline(
    asked: Reader,
    job_id: JobId,
    window: Annotated[
        str,
        Path(
            pattern="^(latest|[0-9a-f]{16})$",
            description="id of the window, or `latest`: the last analysed one",
        ),
    ],
    kind: Annotated[Kind, Query(description="the run as it was, or the ideal one")] = Kind.ACTUAL,
    dp: Places = None,
    stage: Places = None,
) -> Response:
    """The ops of chosen workers, step by step, as a trace file.

    A worker makes it, once: who asks again gets the same file. Takes it longer than 20 s, the
    answer is 503 with Retry-After; the work goes on.
    """
    task_id = await run_sync(_asked, asked, (job_id, window), (kind, dp or (), stage or ()))
    task = await _finished(asked, task_id)
    path = task.path
    if task.state == WorkState.FAILED or path is None:
        raise WireError(
            Problem.STATE_CONFLICT,
            f"the timeline cannot be drawn: {task.error or 'the reason is not known'}",
        )
    await run_sync(_need_object, asked, task)
    return StreamingResponse(
        _chunks(asked.service.objects, path),
        media_type="application/json",
        headers={
            "Content-Encoding": "gzip",
            "Content-Disposition": f'attachment; filename="timeline-{window}-{kind}.json"',
        },
    )


def _asked(
    asked: Asked,
    place: tuple[str, str],
    what: tuple[Kind, list[int] | tuple[()], list[int] | tuple[()]],
) -> str:
    kind, dp, stage = what
    with asked.write() as session:
        window_id, revision = window_of(session, asked.tenant_id, *place)
        places = tuple(sorted(set(dp))), tuple(sorted(set(stage)))
        wanted = TimelineRequest(window_id, kind, *places)
        return ask(
            session, asked.tenant_id, wanted.key(revision), wanted.options(), asked.service.clock()
        )


async def _finished(asked: Asked, task_id: str) -> TaskRow:
    with anyio.move_on_after(asked.service.seams.task_wait_s):
        while True:
            task = await run_sync(_task, asked, task_id)
            if task.state in (WorkState.DONE, WorkState.FAILED):
                return task
            await anyio.sleep(_PAUSE_S)
    raise WireError(
        Problem.NOT_READY,
        "a worker is drawing the timeline, or none is free: ask again",
        _RETRY_AFTER_S,
    )


def _task(asked: Asked, task_id: str) -> TaskRow:
    with asked.read() as session:
        return get_task(session, asked.tenant_id, task_id)


def _need_object(asked: Asked, task: TaskRow) -> None:
    """Let it pass if the file is there; else have it made again."""
    if task.path is not None and asked.service.objects.size(task.path) is not None:
        return
    with asked.write() as session:
        retry(session, asked.tenant_id, task.id, asked.service.clock())
    raise WireError(
        Problem.NOT_READY, "the timeline was removed and is drawn again: ask again", _RETRY_AFTER_S
    )


def _chunks(objects: Objects, path: str) -> Iterator[bytes]:
    try:
        with objects.open(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield bytes(chunk)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
