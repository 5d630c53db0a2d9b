"""The timeline page: one step of some workers, recorded over ideal.

The page shows at once; a worker draws, and the marks come when they are there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dashboards.web.figures.timeline import MAX_MARKS, USUAL_MARKS, Wanted
from dashboards.web.views.timeline import Asked, DrawingState, Parts, Window, timeline_view
from smon.api.access import Access
from smon.api.marks import Drawable, Part, answer_of, ask_marks, drawable, read_marks
from smon.api.pages.choices import whole_number
from smon.api.pages.common import asked, html
from smon.api.pages.data import csv_answer, wants_csv
from smon.api.routes.common import Service
from smon.errors import MissingError, WireError
from smon.store.queries.jobs import get_job
from smon.store.queries.tasks import newest_window_id
from smon.wire.problems import Problem

_MAX_PLACES: Final = 64
_MAX_NUMBER: Final = 2**31 - 1
_RANGE: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_KINDS: Final = {
    "both": frozenset({0, 1}),
    "actual": frozenset({0}),
    "ideal": frozenset({1}),
}

_COLUMNS: Final = (
    "rank", "dp", "stage", "host", "role", "run", "op", "microbatch", "start_s", "duration_s",
    "wait_s", "filled", "ops",
)  # fmt: skip


def timeline_routes() -> list[BaseRoute]:
    """The page."""
    path = "/jobs/{job_id:str}/windows/{window:str}/timeline-view"
    return [Route(path, _timeline, methods=["GET"])]


def _timeline(request: Request) -> Response:
    service, access = asked(request)
    place = (request.path_params["job_id"], request.path_params["window"])
    if place[1] == "live":
        # The ops of the running diagnosis become a window once it closes.
        place = (place[0], "latest")
    wanted = _asked(request.query_params)
    part = Part(wanted.step, *wanted.places)
    found = drawable(service, access.tenant_id, place, part)
    if place[1] != found.window_id:
        # What is shown stays what it is while newer windows close.
        query = f"?{request.url.query}" if request.url.query else ""
        target = f"/jobs/{quote(place[0])}/windows/{found.window_id}/timeline-view{query}"
        return RedirectResponse(target, 303)
    drawing = _drawing(service, access, found, _screen(request, wanted))
    if wants_csv(request):
        return _csv(found, drawing)
    view = timeline_view(_parts(service, access, (found, wanted), drawing))
    return html(request, "timeline.html", view=view, now_s=service.clock() / 1e9)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How far the drawing is, and what came of it."""

    state: DrawingState
    drawn: dict[str, Any] | None = None
    problem: str | None = None


def _drawing(service: Service, access: Access, found: Drawable, screen: Wanted) -> _Drawing:
    if not found.chosen.workers:
        return _Drawing(DrawingState.NOBODY)
    try:
        task = ask_marks(service, access.tenant_id, found)
    except MissingError as error:
        return _Drawing(DrawingState.GONE, problem=str(error))
    if task.failed:
        return _Drawing(DrawingState.FAILED, problem=task.error or "the reason is not known")
    if not task.done:
        return _Drawing(DrawingState.DRAWING)
    try:
        document = read_marks(service, access.tenant_id, task)
    except WireError:
        return _Drawing(DrawingState.DRAWING)
    return _Drawing(DrawingState.DRAWN, answer_of(found, document, screen))


def _parts(
    service: Service, access: Access, what: tuple[Drawable, Asked], drawing: _Drawing
) -> Parts:
    found, wanted = what
    job_id = found.stored.job_id
    with service.database.read() as session:
        job = get_job(session, access.tenant_id, job_id, service.settings.price)
        newest = newest_window_id(session, access.tenant_id, job_id)
    window = found.document["window"]
    return Parts(
        job=job,
        window=Window(
            job_id=job_id,
            window_id=found.window_id,
            first_step=window["first_step"],
            last_step=window["last_step"],
            newest=newest == found.window_id,
        ),
        asked=wanted,
        steps=found.steps,
        step=found.step,
        workers=found.chosen.workers,
        workers_asked=found.chosen.asked,
        state=drawing.state,
        drawn=drawing.drawn,
        problem=drawing.problem,
    )


# --- what the address asks for --------------------------------------------------------------


def _asked(query: QueryParams) -> Asked:
    kind = query.get("kind") or "both"
    if kind not in _KINDS:
        raise WireError(Problem.INVALID, f"kind: expected one of {', '.join(_KINDS)}")
    dp, stage = (", ".join(filter(None, query.getlist(name))) for name in ("dp", "stage"))
    places = _numbers("dp", dp), _numbers("stage", stage)
    return Asked(whole_number(query, "step"), dp, stage, kind, places)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers of a list such as ``0, 3-5``, ascending.

    Raises
    ------
    WireError
        It is none, or too long.
    """
    found: set[int] = set()
    for piece in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        match = _RANGE.fullmatch(piece) if piece.isascii() else None
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MAX_NUMBER:
            raise WireError(Problem.INVALID, f"{name}: expected numbers such as 0, 3-5")
        if last - first >= _MAX_PLACES or len(found) > _MAX_PLACES:
            raise WireError(Problem.INVALID, f"{name}: expected at most {_MAX_PLACES} numbers")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _screen(request: Request, wanted: Asked) -> Wanted:
    query = request.query_params
    most = MAX_MARKS if wants_csv(request) else USUAL_MARKS
    begin, end = (_seconds(query, name) for name in ("begin_s", "end_s"))
    return Wanted(begin, end, _KINDS[wanted.kind], most)


def _seconds(query: QueryParams, name: str) -> float | None:
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not 0 <= value <= 1e6:  # noqa: PLR2004  # NaN too is refused
        raise WireError(Problem.INVALID, f"{name}: expected seconds")
    return value


# --- as a table -----------------------------------------------------------------------------


def _csv(found: Drawable, drawing: _Drawing) -> Response:
    """The marks, one a line."""
    drawn = drawing.drawn
    if drawn is None:
        if drawing.state is DrawingState.DRAWING:
            raise WireError(Problem.NOT_READY, "a worker is drawing the timeline: ask again", 5.0)
        raise WireError(Problem.STATE_CONFLICT, f"nothing is drawn: {drawing.problem}")
    marks, rows = drawn["marks"], drawn["rows"]
    lines = (
        {
            **{name: rows[row][name] for name in ("rank", "dp", "stage", "host", "role")},
            "run": ("actual", "ideal")[marks["kind"][at]],
            "op": drawn["types"][marks["type"][at]],
            "ops": marks["count"][at],
            **{
                name: marks[name][at]
                for name in ("microbatch", "start_s", "duration_s", "wait_s", "filled")
            },
        }
        for at, row in enumerate(marks["row"])
    )
    return csv_answer(f"timeline-{found.window_id}-{found.step.step}.csv", _COLUMNS, lines)
