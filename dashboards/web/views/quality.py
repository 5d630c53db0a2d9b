"""What the page of the data quality shows, ready for its template.

Flow: `smon.store.queries.trust` → **here** → `dashboards.web.pages`. Each check says in one
sentence what it means for the trust in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dashboards.web.text import bytes_of, duration, percent, whole
from smon.render.tables import Cell
from smon.store.files import Dropped
from smon.store.queries.agents import AgentRow
from smon.store.queries.quality import FileDropRow
from smon.store.queries.trust import Trust
from smon.store.queries.windows import WindowRow

#: From here on what is missing can change the answer (``docs/method.md`` section 6.2).
_COMPLETE: Final = 0.95
#: Above it the report says not to rely on the numbers (``docs/method.md`` section 4).
_MAX_SIMULATION_ERROR: Final = 0.05
#: A job that loses more of its steps than this is seen in part only.
_MANY_STEPS: Final = 0.1

_MAX_CORRECTED: Final = 64


class Mark(StrEnum):
    """How a check came out; its value is the name of its colours."""

    FINE = "healthy"
    LIMITED = "slow"
    BAD = "critical"
    UNKNOWN = "waiting"


#: Icon and word of each mark.
MARKS: Final = {
    Mark.FINE: ("✓", "fine"),
    Mark.LIMITED: ("▲", "limited"),
    Mark.BAD: ("◆", "not to be trusted"),
    Mark.UNKNOWN: ("…", "not known"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the trust in the numbers rests on."""

    name: str
    value: str
    mark: Mark
    meaning: str
    anchor: str

    @property
    def icon(self) -> str:
        """Of its mark."""
        return MARKS[self.mark][0]

    @property
    def word(self) -> str:
        """Of its mark."""
        return MARKS[self.mark][1]


@dataclass(frozen=True, slots=True)
class CoverageBar:
    """One window as a bar, in a box 1000 wide and 100 high."""

    x: float
    y: float
    width: float
    height: float
    mark: Mark
    words: str


@dataclass(frozen=True, slots=True)
class Corrected:
    """A clock that the analysis corrected, as its ops show it."""

    who: str
    ahead_s: float


@dataclass(frozen=True, slots=True)
class FileLine:
    """Files that are not used for one reason, which `words` explain."""

    reason: str
    words: str
    files: int
    name: str
    last_s: float


#: Why files are not used (`smon.store.files.Dropped`).
_WHY_DROPPED: Final = {
    Dropped.CONTRADICTION: "its parts say different things of it",
    Dropped.DIGEST: "its parts together are not what its agent read",
    Dropped.INCOMPLETE: "parts of it did not come within a day",
    Dropped.LOST: "a part of it is not in the store any more",
    Dropped.LATE: "the capture that it belongs to had been analysed",
    Dropped.TOO_MANY: "the attempt, or the capture, has sent more than is taken",
}


@dataclass(frozen=True, slots=True)
class QualityView:
    """The page of the data quality; `incomplete`: windows that lacked ranks, newest first."""

    trust: Trust
    mark: Mark
    sentence: str
    checks: tuple[Check, ...]
    bars: tuple[CoverageBar, ...]
    bars_words: str
    incomplete: tuple[WindowRow, ...]
    corrected: tuple[Corrected, ...]
    corrected_count: int
    notes: tuple[str, ...]
    job_link: str
    rest: str
    csv: Mapping[str, str]
    streams: str
    files: tuple[FileLine, ...]


def quality_view(trust: Trust) -> QualityView:
    """The page of the data quality."""
    checks = tuple(check(trust) for check in _CHECKS)
    mark, sentence = _verdict(trust, checks)
    quality = {} if trust.report is None else trust.report["quality"]
    told = quality["clock"]["offsets"] if quality else ()
    offsets = [one for one in told if one["offset_s"] is not None]
    link = f"/jobs/{trust.job_id}/quality?attempt={trust.attempt}"
    return QualityView(
        trust=trust,
        mark=mark,
        sentence=sentence,
        checks=checks,
        bars=_bars(trust.windows),
        bars_words=_bars_words(trust.windows),
        incomplete=tuple(each for each in trust.windows if each.missing_count)[:_MAX_CORRECTED],
        corrected=tuple(_corrected(one) for one in offsets[:_MAX_CORRECTED]),
        corrected_count=len(offsets),
        notes=tuple(quality["notes"]) if quality else (),
        job_link=f"/jobs/{trust.job_id}",
        rest=f"/api/v1/jobs/{trust.job_id}/quality?attempt={trust.attempt}",
        csv={name: f"{link}&as=csv&of={name}" for name in TABLES},
        streams=counted(trust.streams.streams),
        files=tuple(_file_line(one) for one in trust.files),
    )


def _file_line(row: FileDropRow) -> FileLine:
    words = _WHY_DROPPED[Dropped(row.reason)]
    return FileLine(row.reason, words, row.files, row.name, row.last_s)


def _verdict(trust: Trust, checks: Iterable[Check]) -> tuple[Mark, str]:
    marks = {one.mark for one in checks}
    named = ", ".join(one.name.lower() for one in checks if one.mark in (Mark.LIMITED, Mark.BAD))
    if trust.report is None:
        return Mark.UNKNOWN, "Nothing has been analysed yet, so there is nothing to trust."
    if Mark.BAD in marks:
        return Mark.BAD, f"Do not rely on these numbers before this is mended: {named}."
    if Mark.LIMITED in marks:
        return Mark.LIMITED, f"These numbers can be used, with limits: {named}."
    return Mark.FINE, "These numbers can be trusted."


def counted(streams: int) -> str:
    """So many streams."""
    return "1 stream" if streams == 1 else f"{streams:,} streams"


# --- the checks -------------------------------------------------------------------------------


def _coverage(trust: Trust) -> Check:
    name, anchor = "Coverage", "coverage"
    if trust.report is None:
        return Check(name, "–", Mark.UNKNOWN, "Known once a window has been analysed.", anchor)
    ratio = trust.report["window"]["coverage_ratio"]
    if ratio >= 1.0:
        meaning = "Every op that the layout expects is there."
        return Check(name, percent(ratio), Mark.FINE, meaning, anchor)
    if ratio >= _COMPLETE:
        meaning = "A few ops are missing; replicas and steps that lack them are left out."
        return Check(name, percent(ratio), Mark.FINE, meaning, anchor)
    meaning = (
        "What is missing can change the answer: who is missing cannot be named as slow, and "
        "waiting for it shows as transfer time."
    )
    return Check(name, percent(ratio), Mark.LIMITED, meaning, anchor)


def _missing(trust: Trust) -> Check:
    name, anchor = "Missing ranks", "missing"
    count = trust.missing.count
    if not count:
        meaning = "Every expected rank has delivered the newest window."
        return Check(name, "0", Mark.FINE, meaning, anchor)
    meaning = "The newest window was analysed without them; see that their agents run."
    return Check(name, whole(count), Mark.LIMITED, meaning, anchor)


def _clocks(trust: Trust) -> Check:
    name, anchor = "Clocks", "clocks"
    clock = None if trust.report is None else trust.report["quality"]["clock"]
    if clock is None or clock["aligned"] is None:
        meaning = "No two workers can be compared; nothing here rests on times of several hosts."
        return Check(name, "not measured", Mark.UNKNOWN, meaning, anchor)
    residual = f"residual {duration(clock['residual_s'])}"
    if clock["aligned"]:
        fixed = len(clock["offsets"])
        done = f"{fixed} corrected first" if fixed else "no correction was needed"
        meaning = f"Times of different hosts can be compared ({done})."
        return Check(name, f"aligned, {residual}", Mark.FINE, meaning, anchor)
    meaning = (
        "Communication causes (links, data loader) are withheld; compute and stages stand as "
        "they are."
    )
    return Check(name, f"not aligned, {residual}", Mark.LIMITED, meaning, anchor)


def _simulation(trust: Trust) -> Check:
    name, anchor = "Simulation error", "notes"
    error = None if trust.report is None else trust.report["quality"]["simulation_error_ratio"]
    if error is None:
        return Check(name, "–", Mark.UNKNOWN, "No step could be replayed.", anchor)
    if error > _MAX_SIMULATION_ERROR:
        meaning = "The replay does not reproduce the recorded steps: do not rely on slowdowns."
        return Check(name, percent(error), Mark.BAD, meaning, anchor)
    meaning = "The replay reproduces the recorded step times, so what-if numbers hold."
    return Check(name, percent(error), Mark.FINE, meaning, anchor)


def _skipped(trust: Trust) -> Check:
    name, anchor = "Steps left out", "skipped"
    steps = trust.steps
    value = f"{steps.skipped:,} of {steps.steps:,}"
    if not steps.steps:
        return Check(name, "–", Mark.UNKNOWN, "No step has been analysed yet.", anchor)
    if not steps.skipped:
        return Check(name, value, Mark.FINE, "Every step that was seen counts.", anchor)
    if steps.skipped / steps.steps <= _MANY_STEPS:
        meaning = "Too few to change the means; what happened in them is not seen."
        return Check(name, value, Mark.FINE, meaning, anchor)
    meaning = "Slowdown and cost are those of the other steps only."
    return Check(name, value, Mark.LIMITED, meaning, anchor)


def _losses(trust: Trust) -> Check:
    name, anchor = "Events lost", "losses"
    lost, came = trust.streams.lost_events, trust.streams.events
    dropped = sum(one.events for one in trust.drops)
    files = sum(one.files for one in trust.files)
    unused = f", {files:,} {'file' if files == 1 else 'files'} not used" if files else ""
    value = f"{lost:,} lost, {dropped:,} dropped{unused}"
    if not (lost or dropped or trust.gaps or files):
        return Check(name, value, Mark.FINE, "Nothing was lost on the way.", anchor)
    if not (lost or dropped or trust.gaps):
        meaning = "Files of ranks came that are in no report; the table says why."
        return Check(name, value, Mark.LIMITED, meaning, anchor)
    share = percent(lost / (lost + came)) if lost + came else "0 %"
    meaning = f"{share} of the events are gone for good; the steps that lack them are left out."
    return Check(name, value, Mark.LIMITED, meaning, anchor)


def _agents(trust: Trust) -> Check:
    name, anchor = "Agents", "agents"
    streams = trust.streams
    value = f"{counted(streams.streams)}, {streams.down:,} down"
    if streams.down:
        meaning = "A silent agent sends nothing: its ranks will be missing from the next windows."
        return Check(name, value, Mark.LIMITED, meaning, anchor)
    if not streams.streams:
        return Check(name, value, Mark.UNKNOWN, "Nobody sends for this attempt.", anchor)
    if streams.ended == streams.streams:
        return Check(name, value, Mark.FINE, "All streams are complete.", anchor)
    waiting = bytes_of(streams.spool_bytes)
    meaning = f"All of them say that they are there; {waiting} wait on their disks."
    return Check(name, value, Mark.FINE, meaning, anchor)


_CHECKS: Final[tuple[Callable[[Trust], Check], ...]] = (
    *(_coverage, _missing, _clocks, _simulation, _skipped, _losses, _agents),
)


# --- coverage over the windows ----------------------------------------------------------------


#: Of the chart of coverage, and what parts two windows: a hairline, so that it is not taken for a
#: hole in the data.
_WIDTH: Final = 1000.0
_GAP: Final = 1.5


def _bars(windows: tuple[WindowRow, ...]) -> tuple[CoverageBar, ...]:
    """Oldest first, from left to right."""
    width = _WIDTH / max(len(windows), 1)
    return tuple(_bar(each, number * width, width) for number, each in enumerate(windows[::-1]))


def _bar(window: WindowRow, x: float, width: float) -> CoverageBar:
    ratio = window.coverage_ratio
    steps = _name(window)
    if ratio is None:
        words = f"{steps}: {window.state}" + (f" ({window.reason})" if window.reason else "")
        return CoverageBar(
            round(x, 2), 0, round(max(width - _GAP, width / 2), 2), 100, Mark.UNKNOWN, words
        )
    mark = Mark.FINE if ratio >= _COMPLETE else Mark.LIMITED
    missing = f", {window.missing_count:,} ranks missing" if window.missing_count else ""
    height = round(max(ratio, 0.02) * 100, 2)
    words = f"{steps}: {percent(ratio)}{missing}"
    return CoverageBar(
        round(x, 2), 100 - height, round(max(width - _GAP, width / 2), 2), height, mark, words
    )


def _bars_words(windows: tuple[WindowRow, ...]) -> str:
    known = [(each.coverage_ratio, each) for each in windows if each.coverage_ratio is not None]
    if not known:
        return "No window has been analysed yet."
    ratio, worst = min(known, key=lambda pair: pair[0])
    if len(known) == 1:
        return f"One window was analysed, {percent(ratio)} of its expected ops are there."
    return (
        f"Ops that are there of those expected, in each of the {len(known)} newest windows; the "
        f"least, {percent(ratio)}, in {_name(worst)}."
    )


def _name(window: WindowRow) -> str:
    """Its steps, or its number if it is of none."""
    if window.first_step is None:
        return f"capture {window.number}"
    return f"steps {window.first_step}–{window.last_step}"


def _corrected(offset: Mapping[str, Any]) -> Corrected:
    host = offset.get("host")
    who = f"rank {offset['rank']}" + (f" ({host})" if host else "")
    return Corrected(who, float(offset["offset_s"]))


# --- CSV --------------------------------------------------------------------------------------

_WINDOW_COLUMNS: Final = (
    *("id", "kind", "number", "first_step", "last_step", "rows", "state", "reason"),
    "coverage_ratio",
    *("missing_count", "missing", "ready_s", "analysed_s"),
)
_CLOCK_COLUMNS: Final = ("host", "ahead_s", "error_s", "drift_s", "probes", "last_s")
_AGENT_COLUMNS: Final = (
    *(
        "stream_id",
        "host",
        "source",
        "version",
        "cpu_ratio",
        "rss_bytes",
        "ranks",
        "ended",
        "end_reason",
        "down",
    ),
    *("steps_done", "events", "lost_events", "heartbeat_age_s", "spool_bytes", "oldest_unsent_s"),
    "dropped",
)
_SKIPPED_COLUMNS: Final = ("reason", "steps", "first_step", "last_step")

Rows = tuple[tuple[str, ...], Iterator[dict[str, Cell]]]


def _plain(found: Iterable[object], columns: tuple[str, ...]) -> Iterator[dict[str, Cell]]:
    for one in found:
        yield {name: getattr(one, name) for name in columns}


def _window_rows(trust: Trust) -> Rows:
    rows = (
        {**row, "missing": " ".join(map(str, each.missing))}
        for row, each in zip(_plain(trust.windows, _WINDOW_COLUMNS), trust.windows, strict=True)
    )
    return _WINDOW_COLUMNS, rows


def _agent_rows(trust: Trust) -> Rows:
    rows = (
        {**row, "dropped": _dropped(each)}
        for row, each in zip(_plain(trust.agents, _AGENT_COLUMNS), trust.agents, strict=True)
    )
    return _AGENT_COLUMNS, rows


def _dropped(agent: AgentRow) -> str:
    return " ".join(f"{reason}={count}" for reason, count in (agent.dropped or {}).items())


def _clock_rows(trust: Trust) -> Rows:
    return _CLOCK_COLUMNS, _plain(trust.clocks, _CLOCK_COLUMNS)


def _skipped_rows(trust: Trust) -> Rows:
    return _SKIPPED_COLUMNS, _plain(trust.steps.reasons, _SKIPPED_COLUMNS)


#: What the page has as CSV, by the name in its address.
TABLES: Final[Mapping[str, Callable[[Trust], Rows]]] = {
    "windows": _window_rows,
    "clocks": _clock_rows,
    "skipped": _skipped_rows,
    "agents": _agent_rows,
}
