"""What the fleet page shows, ready for its template.

Flow: `smon.store.queries` → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from dashboards.web.figures.spark import Spark, spark
from smon.api.words import cause_words, job_words
from smon.render.amounts import dollars, gpu_hours, gpu_time
from smon.store.queries.fleet import FleetNow
from smon.store.queries.hosts import HostRow
from smon.store.queries.jobs import JobFilter, JobRow, JobSort, JobState
from smon.store.queries.recent import Recent

#: Rows of one page.
ROWS: Final = 50

#: Suspects in one job only that are listed.
_QUIET: Final = 8

#: What the table shows and can be sorted by; numbers begin with the highest.
COLUMNS: Final = (
    (JobSort.NAME, "Job", False),
    (JobSort.STATE, "State", True),
    (JobSort.CAUSE, "Verdict", False),
    (JobSort.SLOWDOWN, "Slowdown", True),
    (JobSort.WASTE, "Waste", True),
    (JobSort.COST, "Cost", True),
    (JobSort.SINCE, "Since", True),
    (JobSort.LAST_STEP, "Last step", True),
)

_NUMERIC: Final = frozenset(
    {JobSort.SLOWDOWN, JobSort.WASTE, JobSort.COST, JobSort.SINCE, JobSort.LAST_STEP}
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the address of the page asks for; `page` counts from 1."""

    query: str = ""
    state: JobState | None = None
    sort: JobSort = JobSort.COST
    descending: bool = True
    page: int = 1

    @property
    def filter(self) -> JobFilter:
        """The same as a question to the store."""
        return JobFilter(
            name=self.query,
            state=self.state,
            sort=self.sort,
            descending=self.descending,
            ended_last=True,
        )

    def href(self, path: str = "/", **changes: object) -> str:
        """The address that asks for the same, but for some changes; page 1 unless it is one."""
        values = {
            "q": self.query,
            "state": self.state,
            "sort": f"{'-' if self.descending else ''}{self.sort}",
            "page": 1,
            **changes,
        }
        usual = {"q": "", "state": None, "sort": f"-{JobSort.COST}", "page": 1}
        told = {name: value for name, value in values.items() if value != usual[name]}
        return f"{path}?{urlencode(told)}" if told else path


@dataclass(frozen=True, slots=True)
class Column:
    """The head of one column; `order` as ``aria-sort`` says it, None if it is not sorted by."""

    label: str
    href: str
    order: str | None
    numeric: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One job of the table; `lost` in GPU-hours per day."""

    job: JobRow
    words: str
    lost: str
    spark: Spark | None


@dataclass(frozen=True, slots=True)
class Chip:
    """One state with its number of jobs, as a filter."""

    state: JobState
    jobs: int
    href: str
    current: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A host beside the table."""

    name: str
    jobs: int
    causes: str
    wasted: str


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the list the page shows."""

    first: int
    last: int
    total: int
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet page.

    Attributes
    ----------
    jobs
        How many there are, whatever the filter.
    going, over
        Jobs of this page; live ones that are over apart.
    dearest
        The cause that wastes most now, and how much.
    recurring, once
        Hosts that were suspects in several jobs, and in one.
    """

    asked: Asked
    jobs: int
    now: FleetNow
    money: str | None
    dearest: tuple[str, str] | None
    columns: tuple[Column, ...]
    chips: tuple[Chip, ...]
    going: tuple[Line, ...]
    over: tuple[Line, ...]
    part: Part
    recurring: tuple[Suspect, ...]
    once: tuple[Suspect, ...]
    server: str


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What the store knows of the fleet.

    Attributes
    ----------
    everything
        All jobs.
    fitting
        How many of them fit what is asked for.
    shown
        Those of this page, complete.
    recent
        Latest slowdowns by attempt.
    """

    everything: Sequence[JobRow]
    fitting: int
    shown: Sequence[JobRow]
    recent: Mapping[str, Recent]
    now: FleetNow
    hosts: Sequence[HostRow]


def fleet_view(asked: Asked, parts: FleetParts, server: str) -> FleetView:
    """The fleet page; `server`: its address, for the commands that an empty page shows."""
    lines = [_line(row, parts.recent.get(row.attempt_id or "", ())) for row in parts.shown]
    now = parts.now
    cost = now.cost_per_day
    return FleetView(
        asked=asked,
        jobs=len(parts.everything),
        now=now,
        money=None if cost is None else f"{dollars(cost)}/day",
        dearest=_dearest(now),
        columns=tuple(_column(asked, *column) for column in COLUMNS),
        chips=_chips(asked, parts.everything),
        going=tuple(line for line in lines if not line.job.ended),
        over=tuple(line for line in lines if line.job.ended),
        part=_part(asked, parts.fitting),
        recurring=tuple(_suspect(host) for host in parts.hosts if host.recurs),
        once=tuple(_suspect(host) for host in parts.hosts if not host.recurs)[:_QUIET],
        server=server,
    )


def _line(row: JobRow, recent: Recent) -> Line:
    return Line(row, job_words(row), _per_day(row.gpu_hours_per_day), spark(recent))


def _per_day(hours: float | None) -> str:
    return gpu_hours(hours) if hours is None else f"{gpu_hours(hours)}/day"


def _dearest(now: FleetNow) -> tuple[str, str] | None:
    if not now.causes:
        return None
    first = now.causes[0]
    money = "" if first.cost_per_day is None else f", {dollars(first.cost_per_day)}"
    lost = f"{gpu_time(first.gpu_hours_per_day)}{money} per day"
    return cause_words(first.cause), lost


def _column(asked: Asked, sort: JobSort, label: str, falls: bool) -> Column:  # noqa: FBT001  # of COLUMNS
    current = asked.sort is sort
    descending = not asked.descending if current else falls
    order = "descending" if asked.descending else "ascending"
    href = asked.href(sort=f"{'-' if descending else ''}{sort}")
    return Column(label, href, order if current else None, sort in _NUMERIC)


def _chips(asked: Asked, everything: Sequence[JobRow]) -> tuple[Chip, ...]:
    named = asked.query.lower()
    counts = Counter(row.state for row in everything if named in row.name.lower())
    return tuple(
        Chip(
            state,
            counts[state],
            asked.href(state=None if asked.state is state else state),
            asked.state is state,
        )
        for state in JobState
        if counts[state] or asked.state is state
    )


def _part(asked: Asked, total: int) -> Part:
    first = (asked.page - 1) * ROWS
    last = min(first + ROWS, total)
    return Part(
        first=min(first + 1, last),
        last=last,
        total=total,
        before=asked.href(page=asked.page - 1) if asked.page > 1 else None,
        after=asked.href(page=asked.page + 1) if last < total else None,
    )


def _suspect(host: HostRow) -> Suspect:
    causes = ", ".join(cause_words(cause) for cause in host.causes)
    return Suspect(host.id, host.jobs, causes, f"{gpu_hours(host.lost_gpu_hours)} wasted")
