"""Jobs as lists and pages show them: where each stands, what it loses, since when.

Flow: tables of `smon.store.models` → **here** → `smon.api.routes`, `smon.api.pages`.
A list looks at the numbers of every job and at the documents of those alone that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from smon.errors import MissingError
from smon.store.models import (
    Attempt,
    Finding,
    Job,
    Mode,
    Result,
    Window,
    WindowKind,
)
from smon.store.queries.paging import Page, Slice, cut, page_of, seconds, seconds_or_none
from smon.store.streams import layout_of
from smon.topology import Layout

#: Lists that are sorted by what is computed look at so many jobs, those with newest data.
MAX_JOBS: Final = 5000
_MAX_FINDINGS: Final = 20_000

#: Below this, what is missing can change the answer.
COMPLETE_RATIO: Final = 0.95

#: Where nothing was found, a job is called slow from here: the published threshold of a straggler.
SLOW: Final = 1.1

_ORDER: Final = {"critical": 0, "warning": 1, "info": 2}


class JobState(StrEnum):
    """Where a job stands, in one word; what needs a person soonest goes first."""

    CRITICAL = "critical"
    SLOW = "slow"
    INCOMPLETE = "incomplete"
    NOT_ALIGNED = "not_aligned"
    WAITING = "waiting"
    HEALTHY = "healthy"
    ENDED = "ended"


_URGENCY: Final = {state: -place for place, state in enumerate(JobState)}


class JobSort(StrEnum):
    """What lists of jobs are sorted by; `cause` by its name, `since` by when it was found."""

    LAST_DATA = "last_data"
    LAST_STEP = "last_step"
    NAME = "name"
    STATE = "state"
    CAUSE = "cause"
    WASTE = "waste"
    SLOWDOWN = "slowdown"
    COST = "cost"
    SINCE = "since"


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are asked for, and in which order; None: any.

    Attributes
    ----------
    name
        Part of the name, in any case.
    min_waste
        Least part of the GPU time that is lost.
    ended_last
        Live jobs that are over come after all others.
    """

    name: str | None = None
    running: bool | None = None
    state: JobState | None = None
    verdict: str | None = None
    min_waste: float | None = None
    sort: JobSort = JobSort.LAST_DATA
    descending: bool = True
    ended_last: bool = False


@dataclass(frozen=True, slots=True)
class OpenFinding:
    """The finding of a job that matters most now.

    Attributes
    ----------
    document
        It as the report has it; empty until `completed`.
    """

    id: str
    severity: str
    verdict: str
    cause: str
    since_step: int
    since_s: float
    excess_s: float | None
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job with its newest attempt and the newest numbers known of it.

    Attributes
    ----------
    gpu_hours_per_day, cost_per_day
        What the slowdown wastes; money only if there is a price.
    missing_count
        Ranks that had not delivered when the last window was analysed.
    aligned
        Whether the clocks of the hosts agreed; None: not measured.
    """

    id: str
    name: str
    running: bool
    pinned: bool
    attempt: int | None
    attempt_id: str | None
    result_id: str | None
    mode: str | None
    layout: Layout | None
    gpus: int | None
    created_s: float
    last_data_s: float
    last_step: int | None
    verdict: str | None
    slowdown: float | None
    waste_ratio: float | None
    recorded_s: float | None
    ideal_s: float | None
    gpu_hours_per_day: float | None
    cost_per_day: float | None
    coverage_ratio: float | None
    missing_count: int
    aligned: bool | None
    open_findings: int
    finding: OpenFinding | None

    @property
    def health(self) -> JobState:
        """Where the job stands, whether or not it is over; what is certain goes first."""
        severity = self.finding.severity if self.finding else None
        if self.slowdown is None and severity is None:
            unknown = JobState.HEALTHY if self.verdict == "none" else JobState.WAITING
            return JobState.INCOMPLETE if self.missing_count else unknown
        if severity == "critical":
            return JobState.CRITICAL
        if self.missing_count or (self.coverage_ratio or 1.0) < COMPLETE_RATIO:
            return JobState.INCOMPLETE
        if severity == "warning" or (self.slowdown or 1.0) >= SLOW:
            return JobState.SLOW
        return JobState.NOT_ALIGNED if self.aligned is False else JobState.HEALTHY

    @property
    def ended(self) -> bool:
        """Whether it is a live job that is over; a recorded trace has no end."""
        return not self.running and self.mode == Mode.LIVE

    @property
    def state(self) -> JobState:
        """`health`, or ended."""
        return JobState.ENDED if self.ended else self.health


def list_jobs(
    session: Session, tenant_id: str, wanted: JobFilter, part: Slice, price: float | None
) -> Page[JobRow]:
    """Jobs of a tenant, a page of them."""
    stored = wanted.sort in (JobSort.LAST_DATA, JobSort.NAME) and not wanted.ended_last
    if stored and wanted == replace(wanted, state=None, verdict=None, min_waste=None):
        column = Job.name if wanted.sort is JobSort.NAME else Job.last_data_ns
        order = column.desc() if wanted.descending else column.asc()
        query = _jobs(tenant_id, wanted).order_by(order, Job.id)
        found = _rows(session, query.offset(part.offset).limit(part.limit + 1), price)
        page = page_of(found, part)
    else:
        page = cut(newest_jobs(session, tenant_id, wanted, price), part)
    return Page(completed(session, page.items), page.next)


def newest_jobs(
    session: Session, tenant_id: str, wanted: JobFilter, price: float | None
) -> list[JobRow]:
    """The `MAX_JOBS` jobs with the newest data that fit, sorted; `completed` adds documents."""
    query = _jobs(tenant_id, wanted).order_by(Job.last_data_ns.desc(), Job.id).limit(MAX_JOBS)
    return chosen(_rows(session, query, price), wanted)


def chosen(rows: Iterable[JobRow], wanted: JobFilter) -> list[JobRow]:
    """Those of these jobs that fit, in the order that is asked for.

    Jobs without a number come last in either direction; equal ones are in the order of names.
    """
    key = _KEYS[wanted.sort]
    fitting = sorted((row for row in rows if _fits(row, wanted)), key=lambda row: row.name)
    known = [row for row in fitting if key(row) is not None]
    known.sort(key=key, reverse=wanted.descending)
    ordered = [*known, *(row for row in fitting if key(row) is None)]
    return sorted(ordered, key=lambda row: row.ended) if wanted.ended_last else ordered


_KEYS: Final[dict[JobSort, Callable[[JobRow], Any]]] = {
    JobSort.LAST_DATA: lambda row: row.last_data_s,
    JobSort.LAST_STEP: lambda row: row.last_step,
    JobSort.NAME: lambda row: row.name,
    JobSort.STATE: lambda row: _URGENCY[row.state],
    JobSort.CAUSE: lambda row: None if row.finding is None else row.finding.cause,
    JobSort.WASTE: lambda row: row.waste_ratio,
    JobSort.SLOWDOWN: lambda row: row.slowdown,
    JobSort.COST: lambda row: row.gpu_hours_per_day,
    JobSort.SINCE: lambda row: None if row.finding is None else row.finding.since_s,
}


def _fits(row: JobRow, wanted: JobFilter) -> bool:
    least = wanted.min_waste
    return (
        (not wanted.name or wanted.name.lower() in row.name.lower())
        and (wanted.running is None or row.running is wanted.running)
        and (wanted.state is None or row.state is wanted.state)
        and (wanted.verdict is None or row.verdict == wanted.verdict)
        and (least is None or (row.waste_ratio is not None and row.waste_ratio >= least))
    )


def completed(session: Session, rows: Sequence[JobRow]) -> tuple[JobRow, ...]:
    """Rows whose findings have their documents, which words are made of."""
    documents: dict[str, dict[str, Any]] = {}
    for ids in _chunks([row.finding.id for row in rows if row.finding is not None]):
        query = select(Finding.id, Finding.document).where(Finding.id.in_(ids))
        documents |= {row.id: row.document for row in session.execute(query)}
    return tuple(
        row
        if row.finding is None
        else replace(row, finding=replace(row.finding, document=documents[row.finding.id]))
        for row in rows
    )


def get_job(session: Session, tenant_id: str, job_id: str, price: float | None) -> JobRow:
    """One job.

    Raises
    ------
    MissingError
        There is none with this id.
    """
    found = _rows(session, _jobs(tenant_id, JobFilter()).where(Job.id == job_id), price)
    if not found:
        raise MissingError("expected the id of a job")
    return completed(session, found)[0]


class _Found(NamedTuple):
    """A row of `_jobs`: attributes of a tuple cost a tenth of those of the library's rows."""

    id: str
    name: str
    pinned: bool
    created_ns: int
    last_data_ns: int
    # of the newest attempt
    attempt_id: str | None
    number: int | None
    mode: str | None
    ended_ns: int | None
    dp: int
    pp: int
    tp: int
    cp: int
    ep: int
    vpp: int
    ready_step: int | None
    live_step: int | None
    live: tuple[Any, ...]
    # of the last result, and its window
    result_id: str | None
    coverage_ratio: float | None
    numbers: tuple[Any, ...]
    window_attempt: str | None
    kind: str | None
    last_step: int | None
    missing_count: int | None


#: What the newest attempt (of its running diagnosis, as ``live_``) and the last result both have.
_NUMBERS: Final = ("slowdown", "verdict", "waste_ratio", "recorded_s", "ideal_s", "aligned")

#: Where the columns of the attempt's numbers, and of the result's, begin in a row.
_LIVE: Final = 17
_LAST: Final = _LIVE + len(_NUMBERS) + 2


def _found(row: Sequence[Any]) -> _Found:
    size = len(_NUMBERS)
    live, numbers = tuple(row[_LIVE : _LIVE + size]), tuple(row[_LAST : _LAST + size])
    result = row[_LIVE + size : _LAST]
    return _Found._make((*row[:_LIVE], live, *result, numbers, *row[_LAST + size :]))


def _jobs(tenant_id: str, wanted: JobFilter) -> Select[*tuple[Any, ...]]:
    """`_columns` of those jobs that fit, as far as the database can say."""
    query = _columns().where(Job.tenant_id == tenant_id)
    if wanted.name:
        query = query.where(func.lower(Job.name).contains(wanted.name.lower(), autoescape=True))
    if wanted.running is not None:
        ended = or_(Attempt.id.is_(None), Attempt.ended_ns.is_not(None))
        query = query.where(~ended if wanted.running else ended)
    return query


@lru_cache(maxsize=1)
def _columns() -> Select[*tuple[Any, ...]]:
    """Columns of each job, its newest attempt, its last result and that one's window.

    Made once: putting it together takes longer than running it for a hundred jobs.
    """
    newest, other, window = aliased(Attempt), aliased(Attempt), aliased(Window)
    attempt_id = (
        select(newest.id)
        .where(newest.job_id == Job.id)
        .order_by(newest.number.desc())
        .limit(1)
        .correlate(Job)
        .scalar_subquery()
    )
    result_id = (
        select(Result.id)
        .join(window, window.id == Result.window_id)
        .join(other, other.id == window.attempt_id)
        .where(other.job_id == Job.id)
        .order_by(
            *(other.number.desc(), window.kind.desc(), window.number.desc()),
            Result.created_ns.desc(),
        )
        .limit(1)
        .correlate(Job)
        .scalar_subquery()
    )
    last = aliased(Result)
    return (
        select(
            *(Job.id, Job.name, Job.pinned, Job.created_ns, Job.last_data_ns),
            *(Attempt.id.label("attempt_id"), Attempt.number, Attempt.mode, Attempt.ended_ns),
            *(Attempt.dp, Attempt.pp, Attempt.tp, Attempt.cp, Attempt.ep, Attempt.vpp),
            *(Attempt.ready_step, Attempt.live_step),
            *(getattr(Attempt, f"live_{name}") for name in _NUMBERS),
            *(last.id.label("result_id"), last.coverage_ratio),
            *(getattr(last, name) for name in _NUMBERS),
            *(Window.attempt_id.label("window_attempt"), Window.kind, Window.last_step),
            Window.missing_count,
        )
        .select_from(Job)
        .outerjoin(Attempt, Attempt.id == attempt_id)
        .outerjoin(last, last.id == result_id)
        .outerjoin(Window, Window.id == last.window_id)
    )


def _rows(session: Session, query: Select[*tuple[Any, ...]], price: float | None) -> list[JobRow]:
    found = [_found(row) for row in session.execute(query)]
    attempts = [row.attempt_id for row in found if row.attempt_id is not None]
    findings = _findings(session, attempts)
    return [_row(each, findings.get(each.attempt_id or "", []), price) for each in found]


def _findings(session: Session, attempts: Sequence[str]) -> dict[str, list[OpenFinding]]:
    """Findings by attempt that hold now or, of an attempt that is over, held at its end."""
    since = func.coalesce(Finding.onset_step, Finding.opened_step)
    columns = (
        *(Finding.attempt_id, Finding.id, Finding.severity, Finding.verdict, Finding.cause),
        *(since, Finding.opened_ns, Finding.excess_s),
    )
    found: dict[str, list[OpenFinding]] = {}
    for ids in _chunks(attempts):
        query = (
            select(*columns)
            .where(Finding.attempt_id.in_(ids), Finding.cleared_step.is_(None))
            .order_by(Finding.excess_s.desc())
            .limit(_MAX_FINDINGS)
        )
        for attempt, name, severity, verdict, cause, step, at_ns, excess_s in session.execute(
            query
        ):
            finding = OpenFinding(
                name, severity, verdict, cause, step, seconds(at_ns), excess_s, {}
            )
            found.setdefault(attempt, []).append(finding)
    return found


def _chunks(ids: Sequence[str], size: int = 500) -> list[Sequence[str]]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def _row(found: _Found, findings: Sequence[OpenFinding], price: float | None) -> JobRow:
    layout = None if found.attempt_id is None else _layout(found)
    gpus = None if layout is None else layout.world_size
    speaks = _is_behind(found) and found.live[0] is not None
    numbers = dict(zip(_NUMBERS, found.live if speaks else found.numbers, strict=True))
    hours = _lost(numbers["waste_ratio"], gpus)
    return JobRow(
        id=found.id,
        name=found.name,
        running=found.attempt_id is not None and found.ended_ns is None,
        pinned=found.pinned,
        attempt=found.number,
        attempt_id=found.attempt_id,
        result_id=found.result_id,
        mode=found.mode,
        layout=layout,
        gpus=gpus,
        created_s=seconds(found.created_ns),
        last_data_s=seconds(found.last_data_ns),
        last_step=_last_step(found),
        gpu_hours_per_day=hours,
        cost_per_day=None if price is None or hours is None else hours * price,
        coverage_ratio=found.coverage_ratio,
        missing_count=found.missing_count or 0,
        open_findings=len(findings),
        finding=min(findings, key=_importance, default=None),
        **numbers,
    )


def _layout(found: _Found) -> Layout:
    return Layout(found.dp, found.pp, found.tp, found.cp, found.ep, found.vpp)


def _lost(waste_ratio: float | None, gpus: int | None) -> float | None:
    """GPU-hours per day."""
    return None if waste_ratio is None or gpus is None else max(waste_ratio, 0.0) * gpus * 24


def _importance(finding: OpenFinding) -> tuple[bool, int, float]:
    calm = finding.verdict in ("planned_pause", "warmup", "none")
    hang = finding.verdict != "hang"
    return calm, 3 * hang + _ORDER.get(finding.severity, 3), -(finding.excess_s or 0.0)


def _last_step(found: _Found) -> int | None:
    mine = found.attempt_id is not None and found.window_attempt == found.attempt_id
    known = (found.ready_step, found.live_step, found.last_step if mine else None)
    # Dumps are of no step.
    return max((step for step in known if step is not None and step >= 0), default=None)


def _is_behind(found: _Found) -> bool:
    """Whether the running diagnosis knows more than the last window."""
    if found.live_step is None:
        return False
    mine = found.window_attempt == found.attempt_id and found.kind == WindowKind.STEPS
    return not mine or found.last_step is None or found.live_step > found.last_step


# --- what the page of one job shows besides --------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One run of a job, from start or restart to its end."""

    number: int
    layout: Layout
    mode: str
    time_base: str
    window_steps: int
    notes: tuple[str, ...]
    created_s: float
    last_data_s: float
    ended_s: float | None
    end_reason: str | None
    ready_step: int | None
    live_step: int | None
    live_analysed_s: float | None


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that had not delivered, as of the last window; at most 64 are named."""

    count: int
    ranks: tuple[int, ...]
    reason: str | None
    since_s: float | None


def attempts_of(
    session: Session, tenant_id: str, job_id: str, limit: int = 50
) -> tuple[AttemptRow, ...]:
    """Attempts of a job, newest first."""
    query = (
        select(Attempt)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
        .order_by(Attempt.number.desc())
        .limit(limit)
    )
    return tuple(
        AttemptRow(
            number=each.number,
            layout=layout_of(each),
            mode=each.mode,
            time_base=each.time_base,
            window_steps=each.window_steps,
            notes=tuple(str(note) for note in each.notes),
            created_s=seconds(each.created_ns),
            last_data_s=seconds(each.last_data_ns),
            ended_s=seconds_or_none(each.ended_ns),
            end_reason=each.end_reason,
            ready_step=each.ready_step,
            live_step=each.live_step,
            live_analysed_s=seconds_or_none(each.live_analysed_ns),
        )
        for each in session.execute(query).scalars()
    )


def missing_of(session: Session, attempt_id: str | None) -> Missing:
    """Ranks that the newest window of an attempt, as far as it was looked at, lacks."""
    window = session.execute(
        select(Window)
        .where(and_(Window.attempt_id == attempt_id, Window.ready_ns.is_not(None)))
        .order_by(Window.kind.desc(), Window.number.desc())
        .limit(1)
    ).scalar()
    if window is None or not window.missing_count:
        return Missing(0, (), None, None)
    return Missing(
        count=window.missing_count,
        ranks=_numbers(window.missing or ()),
        reason=window.reason,
        since_s=seconds_or_none(window.ready_ns),
    )


def _numbers(values: Collection[Any]) -> tuple[int, ...]:
    return tuple(value for value in values if isinstance(value, int))


def fleet_version(session: Session, tenant_id: str) -> str:
    """Changes whenever anything that the fleet page shows does; cheap to ask for."""
    jobs = select(func.count(), func.max(Job.last_data_ns)).where(Job.tenant_id == tenant_id)
    attempts = select(
        func.max(Attempt.live_analysed_ns), func.max(Attempt.ended_ns), func.sum(Attempt.revision)
    ).where(Attempt.tenant_id == tenant_id)
    results = select(func.max(Result.created_ns)).where(Result.tenant_id == tenant_id)
    findings = select(func.max(Finding.last_ns), func.max(Finding.cleared_ns)).where(
        Finding.tenant_id == tenant_id
    )
    queries = (jobs, attempts, results, findings)
    return "-".join(str(each) for query in queries for each in session.execute(query).one())


def job_version(session: Session, tenant_id: str, job_id: str) -> str:
    """Changes whenever anything that the page of a job shows does; cheap to ask for.

    Raises
    ------
    MissingError
        There is no such job.
    """
    job = session.execute(
        select(Job.last_data_ns, Job.pinned).where(Job.tenant_id == tenant_id, Job.id == job_id)
    ).first()
    if job is None:
        raise MissingError("expected the id of a job")
    attempt = session.execute(
        select(Attempt.id, Attempt.revision, Attempt.ended_ns, Attempt.live_analysed_ns)
        .where(Attempt.job_id == job_id)
        .order_by(Attempt.number.desc())
        .limit(1)
    ).first()
    result = session.execute(
        select(func.count(), func.max(Result.created_ns)).where(Result.job_id == job_id)
    ).one()
    findings = session.execute(
        select(func.max(Finding.last_ns), func.max(Finding.cleared_ns)).where(
            Finding.job_id == job_id
        )
    ).one()
    return "-".join(str(each) for each in (*job, *(attempt or ()), *result, *findings))
