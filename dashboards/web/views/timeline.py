"""What the timeline page shows, ready for its template.

Flow: a stored report, the marks that a worker made → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlencode

from dashboards.web.figures.timeline import CLASSES, MAX_MARKS, class_of
from dashboards.web.text import difference, duration, times, whole
from dashboards.web.views.common import script_json
from smon.store.queries.chosen import ChosenStep, Role, Shown
from smon.store.queries.jobs import JobRow

#: Words of the roles, and which of the two meanings a colour has.
ROLES: Final = {
    Role.SUSPECT: "suspect",
    Role.VICTIM: "waits",
    Role.PIPELINE: "same pipeline",
    Role.SLOWEST: "slowest",
    Role.PEER: "peer",
    Role.CHOSEN: "chosen",
}

#: A worker that computes longer than its peers by less than this part of the step is one of them.
_STANDS_OUT: Final = 0.02


class DrawingState(StrEnum):
    """How far the drawing is."""

    DRAWN = "drawn"
    DRAWING = "drawing"
    FAILED = "failed"
    GONE = "gone"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the address of the page asks for; `dp` and `stage` as they were typed.

    Attributes
    ----------
    places
        The DP ranks and stages as numbers.
    """

    step: int | None
    dp: str
    stage: str
    kind: str
    places: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class Window:
    """Which window it is; `newest`: the newest one that has been analysed."""

    job_id: str
    window_id: str
    first_step: int
    last_step: int
    newest: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """What the page is made from.

    Attributes
    ----------
    drawn
        The marks as `smon.api.schemas.timeline.TimelineMarksModel` describes them; None until a
        worker has made them.
    problem
        Why there are none, and will be none.
    workers_asked
        Workers that were asked for; `workers` holds as many as are shown.
    """

    job: JobRow
    window: Window
    asked: Asked
    steps: tuple[ChosenStep, ...]
    step: ChosenStep
    workers: tuple[Shown, ...]
    workers_asked: int
    state: DrawingState
    drawn: Mapping[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RowView:
    """The label of a row."""

    rank: int
    dp: int
    stage: int
    host: str | None
    role: str
    words: str
    compute_s: float | None
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class WaitView:
    """A line of the table of waits."""

    op: str
    rank: int
    place: str
    for_rank: int
    for_place: str
    microbatch: int | None
    start_s: float
    wait_s: float
    ideal_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses that go with what is shown; None: there is nothing to go to."""

    here: str
    previous: str | None
    next: str | None
    marks: str
    data: str
    csv: str
    perfetto_step: str
    perfetto_window: str
    newest: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The page."""

    job: JobRow
    window: Window
    asked: Asked
    step: ChosenStep
    steps: tuple[ChosenStep, ...]
    state: DrawingState
    problem: str | None
    sentence: str
    longest: str
    drawn_words: str
    workers_words: str
    rows: tuple[RowView, ...]
    waits: tuple[WaitView, ...]
    notes: tuple[str, ...]
    legend: tuple[tuple[str, str], ...]
    figure: str
    links: Links


def timeline_view(parts: Parts) -> TimelineView:
    """The page of one step."""
    drawn = parts.drawn
    return TimelineView(
        job=parts.job,
        window=parts.window,
        asked=parts.asked,
        step=parts.step,
        steps=parts.steps,
        state=parts.state,
        problem=parts.problem,
        sentence=_sentence(parts.step, drawn),
        longest="" if drawn is None else _longest(drawn),
        drawn_words="" if drawn is None else drawn_words(drawn),
        workers_words=_workers_words(parts),
        rows=_rows(parts),
        waits=() if drawn is None else tuple(_wait(wait) for wait in drawn["waits"]),
        notes=() if drawn is None else tuple(drawn["notes"]),
        legend=CLASSES,
        figure="" if drawn is None else script_json(figure_of(drawn, parts.asked.kind)),
        links=_links(parts),
    )


def figure_of(drawn: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What the script draws."""
    names = ("begin_s", "end_s", "length_s", "recorded_s", "ideal_s", "ops", "alone", "types")
    rows = [
        {"label": f"rank {row['rank']} ({_place(row)})", "role": row["role"]}
        for row in drawn["rows"]
    ]
    return {
        **{name: drawn[name] for name in names},
        "classes": [class_of(label) for label in drawn["types"]],
        "kinds": {"actual": [0], "ideal": [1]}.get(kind, [0, 1]),
        "rows": rows,
        "marks": drawn["marks"],
    }


def _place(place: Mapping[str, Any]) -> str:
    return f"DP {place['dp']}, stage {place['stage']}"


def _sentence(step: ChosenStep, drawn: Mapping[str, Any] | None) -> str:
    """How long the step took, and its ideal; of a step that was left out, as drawn."""
    recorded, ideal = step.recorded_s, step.ideal_s
    if recorded is None and drawn is not None:
        recorded, ideal = drawn["recorded_s"], drawn["ideal_s"]
    if recorded is None or ideal is None:
        return f"Step {step.step} was left out of the analysis: {step.reason}."
    text = (
        f"Step {step.step} took {duration(recorded)}; its ideal is {duration(ideal)} "
        f"({difference(recorded - ideal)}"
    )
    text += f", slowdown {times(step.slowdown)})." if step.slowdown is not None else ")."
    return text if step.reason is None else f"{text} The analysis left it out: {step.reason}."


def _longest(drawn: Mapping[str, Any]) -> str:
    """Who computes longest, and how late it comes to where all others wait."""
    longest = drawn["longest"]
    if longest is None:
        return "No worker has peers to be compared with."
    more = longest["compute_s"] - longest["peers_s"]
    who = f"{longest['rank']} ({_place(longest)})"
    if more < _STANDS_OUT * drawn["recorded_s"]:
        return (
            "No worker computes much longer than the others of its stage: the most is "
            f"{difference(more)}, rank {who}."
        )
    text = (
        f"Rank {who} computes longest for its stage: {duration(longest['compute_s'])}, "
        f"{difference(more)} against the median of the others"
    )
    late = longest["late_s"]
    if late is None or late <= 0:
        return f"{text}."
    return f"{text}; it comes to {longest['meeting']} {duration(late)} after them."


def drawn_words(drawn: Mapping[str, Any]) -> str:
    """How much of what is there stands on the screen."""
    ops, alone = drawn["ops"], drawn["alone"]
    if alone == ops:
        return f"All {whole(ops)} ops are drawn."
    return (
        f"{whole(alone)} of {whole(ops)} ops are drawn one by one, the others as groups of short "
        "neighbours: zoom in to see all."
    )


def _workers_words(parts: Parts) -> str:
    shown, asked = len(parts.workers), parts.workers_asked
    if not shown:
        return "No worker of this job has these DP ranks and stages."
    if any(parts.asked.places):
        return f"The first {shown} of {asked} workers asked for." if asked > shown else ""
    everyone = parts.job.layout is not None and shown == parts.job.layout.dp * parts.job.layout.pp
    return (
        "All workers of the job."
        if everyone
        else "Suspects first, then workers that wait for them, the same pipeline, and usual peers."
    )


def _rows(parts: Parts) -> tuple[RowView, ...]:
    totals: Sequence[Mapping[str, Any]] = [] if parts.drawn is None else parts.drawn["rows"]
    empty: dict[str, Any] = {"compute_s": None, "wait_s": None}
    padded = [*totals, *[empty] * (len(parts.workers) - len(totals))]
    return tuple(
        RowView(
            rank=one.rank,
            dp=one.dp,
            stage=one.stage,
            host=one.host,
            role=one.role.value,
            words=ROLES[one.role],
            compute_s=row["compute_s"],
            wait_s=row["wait_s"],
        )
        for one, row in zip(parts.workers, padded, strict=True)
    )


def _wait(wait: Mapping[str, Any]) -> WaitView:
    return WaitView(
        op=wait["op"],
        rank=wait["rank"],
        place=_place(wait),
        for_rank=wait["waited_for"]["rank"],
        for_place=_place(wait["waited_for"]),
        microbatch=wait["microbatch"],
        start_s=wait["start_s"],
        wait_s=wait["wait_s"],
        ideal_s=wait["ideal_s"],
        workers=wait["workers"],
    )


# --- addresses ------------------------------------------------------------------------------


def _links(parts: Parts) -> Links:
    window = parts.window
    below = f"/jobs/{window.job_id}/windows/{window.window_id}"
    page, rest = f"{below}/timeline-view", f"/api/v1{below}/timeline"
    number, (dp, stage) = parts.step.step, parts.asked.places
    places = [*(("dp", str(one)) for one in dp), *(("stage", str(one)) for one in stage)]
    marks = [("step", str(number)), *places, ("kind", parts.asked.kind)]
    at = parts.steps.index(parts.step)
    earlier = parts.steps[at - 1].step if at else None
    later = parts.steps[at + 1].step if at + 1 < len(parts.steps) else None
    one_step = [("kind", "both"), ("steps", str(number)), *(places or _replicas(parts))]
    return Links(
        here=page,
        previous=None if earlier is None else f"{page}?{_query(parts.asked, earlier)}",
        next=None if later is None else f"{page}?{_query(parts.asked, later)}",
        marks=f"{rest}/marks?{urlencode(marks)}",
        data=f"{rest}/marks?{urlencode([*marks, ('most', str(MAX_MARKS))])}",
        csv=f"{page}?{_query(parts.asked, number)}&as=csv",
        perfetto_step=f"{rest}?{urlencode(one_step)}",
        perfetto_window=f"{rest}?{urlencode([('kind', 'both'), *(places or _replicas(parts))])}",
        newest=f"/jobs/{window.job_id}/windows/latest/timeline-view",
    )


def _query(asked: Asked, step: int) -> str:
    """The same choice in another step."""
    more = {
        "dp": asked.dp,
        "stage": asked.stage,
        "kind": "" if asked.kind == "both" else asked.kind,
    }
    return urlencode([("step", str(step)), *((name, text) for name, text in more.items() if text)])


def _replicas(parts: Parts) -> list[tuple[str, str]]:
    """The whole pipelines of the workers that are shown."""
    return [("dp", str(dp)) for dp in sorted({one.dp for one in parts.workers})]
