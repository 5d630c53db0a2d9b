"""One step of a window as marks: asked for, waited for, read, thinned.

Flow: `smon.api.routes.timeline`, `smon.api.pages.timeline` → **here** → table ``tasks`` → a worker
→ **here** → `dashboards.web.figures.timeline`. Nothing is computed here: a worker draws.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
import orjson
from anyio.to_thread import run_sync

from dashboards.web.figures.timeline import Wanted, on_screen
from smon.api.routes.common import Service
from smon.errors import MissingError, WireError
from smon.store.queries.chosen import Chosen, ChosenStep, choose, step_of, steps_in
from smon.store.queries.reports import StoredReport, document_of, report_of_window
from smon.store.queries.tasks import (
    NO_TIMELINE,
    MarksRequest,
    TaskRow,
    ask,
    get_task,
    retry,
    window_of,
)
from smon.wire.problems import Problem

_PAUSE_S: Final = 0.2
_RETRY_AFTER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a window is asked for; None and empty: as `smon.store.queries.chosen` says."""

    step: int | None = None
    dp: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawable:
    """A step of a window that has a report, and who is shown."""

    stored: StoredReport
    document: Mapping[str, Any]
    steps: tuple[ChosenStep, ...]
    step: ChosenStep
    chosen: Chosen

    @property
    def window_id(self) -> str:
        """Id of the window."""
        return self.stored.window_id or ""


def drawable(service: Service, tenant_id: str, place: tuple[str, str], part: Part) -> Drawable:
    """What of a window, (job, window), is to be drawn.

    Raises
    ------
    MissingError
        There is no such window, step, or report of it yet, or it has no ops.
    """
    job_id, window = place
    with service.database.read() as session:
        stored = report_of_window(session, tenant_id, job_id, window)
    if stored.capture:
        raise MissingError(NO_TIMELINE)
    document = document_of(stored.packed)
    steps = steps_in(document)
    chosen = choose(document, part.dp, part.stage)
    return Drawable(stored, document, tuple(steps), step_of(steps, part.step), chosen)


def ask_marks(service: Service, tenant_id: str, wanted: Drawable) -> TaskRow:
    """The task that draws it, made if there is none.

    Raises
    ------
    MissingError
        Retention has removed the events.
    """
    workers = tuple((one.dp, one.stage) for one in wanted.chosen.workers)
    request = MarksRequest(wanted.window_id, wanted.step.step, workers)
    with service.database.write() as session:
        window_of(session, tenant_id, wanted.stored.job_id, wanted.window_id)
        key = request.key(wanted.stored.version)
        task_id = ask(session, tenant_id, key, request.options(), service.clock())
        return get_task(session, tenant_id, task_id)


async def finished(service: Service, tenant_id: str, task_id: str) -> TaskRow:
    """A task once it is done.

    Raises
    ------
    WireError
        It takes longer than a request waits, or it failed.
    """
    with anyio.move_on_after(service.seams.task_wait_s):
        while True:
            task = await run_sync(_task, service, tenant_id, task_id)
            if task.failed:
                raise WireError(
                    Problem.STATE_CONFLICT,
                    f"the timeline cannot be drawn: {task.error or 'the reason is not known'}",
                )
            if task.done:
                return task
            await anyio.sleep(_PAUSE_S)
    raise WireError(
        Problem.NOT_READY,
        "a worker is drawing the timeline, or none is free: ask again",
        _RETRY_AFTER_S,
    )


def _task(service: Service, tenant_id: str, task_id: str) -> TaskRow:
    with service.database.read() as session:
        return get_task(session, tenant_id, task_id)


def need_result(service: Service, tenant_id: str, task: TaskRow) -> str:
    """Path of the file of a task.

    Raises
    ------
    WireError
        It was removed, and is being made again.
    """
    if task.path is not None and service.objects.size(task.path) is not None:
        return task.path
    raise _made_again(service, tenant_id, task)


def _made_again(service: Service, tenant_id: str, task: TaskRow) -> WireError:
    with service.database.write() as session:
        retry(session, tenant_id, task.id, service.clock())
    text = "the timeline was removed, or is damaged, and is drawn again: ask again"
    return WireError(Problem.NOT_READY, text, _RETRY_AFTER_S)


def read_marks(service: Service, tenant_id: str, task: TaskRow) -> dict[str, Any]:
    """The document that a worker made.

    Raises
    ------
    WireError
        It was removed or is damaged, and is being made again.
    """
    packed = service.objects.get(need_result(service, tenant_id, task))
    try:
        document: dict[str, Any] = orjson.loads(gzip.decompress(packed))
    except (orjson.JSONDecodeError, EOFError, OSError, zlib.error) as error:
        raise _made_again(service, tenant_id, task) from error
    return document


def answer_of(wanted: Drawable, document: Mapping[str, Any], screen: Wanted) -> dict[str, Any]:
    """What is drawn, with who is who: `smon.api.schemas.timeline.TimelineMarksModel`."""
    step = wanted.step
    rows = [
        {**row, "host": shown.host, "role": shown.role.value}
        for row, shown in zip(document["rows"], wanted.chosen.workers, strict=True)
    ]
    waits = [
        {
            **{name: value for name, value in wait.items() if name != "for"},
            "waited_for": wait["for"],
        }
        for wait in document["waits"]
    ]
    return {
        "window_id": wanted.window_id,
        "step": step.step,
        "skipped": step.reason,
        # The report's numbers, where it has them: one number, one meaning.
        "recorded_s": document["recorded_s"] if step.recorded_s is None else step.recorded_s,
        "ideal_s": document["ideal_s"] if step.ideal_s is None else step.ideal_s,
        **on_screen(document, screen),
        "workers_asked": wanted.chosen.asked,
        "rows": rows,
        "types": document["types"],
        "longest": document["longest"],
        "waits": waits,
        "notes": document["notes"],
    }
