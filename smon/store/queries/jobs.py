"""Jobs as lists and pages show them: where each stands, what it loses, since when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

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
)
from smon.store.queries.paging import Page, Slice, cut, page_of, seconds, seconds_or_none
from smon.store.queries.reports import HEAD_BYTES, is_aligned
from smon.store.streams import layout_of
from smon.topology import Layout

#: Lists that are sorted by what is computed look at so many jobs, those with newest data.
MAX_JOBS: Final = 5000
_MAX_FINDINGS: Final = 20_000

#: Below this, what is missing can change the answer.
_COMPLETE_RATIO: Final = 0.95

#: Where nothing was found, a job is called slow from here: the published threshold of a straggler.
SLOW: Final = 1.1

#: Job, its newest attempt, its last result, and that one's window.
_Found = tuple[Job, Attempt | None, Result | None, Window | None]

_ORDER: Final = {"critical": 0, "warning": 1, "info": 2}


class JobState(StrEnum):
    """Where a job stands, in one word."""

    HEALTHY = "healthy"
    SLOW = "slow"
    CRITICAL = "critical"
    INCOMPLETE = "incomplete"
    NOT_ALIGNED = "not_aligned"
    WAITING = "waiting"
    ENDED = "ended"


class JobSort(StrEnum):
    """What lists of jobs are sorted by."""

    LAST_DATA = "last_data"
    NAME = "name"
    WASTE = "waste"
    SLOWDOWN = "slowdown"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are asked for, and in which order; None: any.

    Attributes
    ----------
    name
        Part of the name, in any case.
    min_waste
        Least part of the GPU time that is lost.
    """

    name: str | None = None
    running: bool | None = None
    verdict: str | None = None
    min_waste: float | None = None
    sort: JobSort = JobSort.LAST_DATA
    descending: bool = True


@dataclass(frozen=True, slots=True)
class OpenFinding:
    """The finding of a job that matters most now; `document` is it as the report has it."""

    id: str
    severity: str
    verdict: str
    cause: str
    since_step: int
    since_s: float
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job with its newest attempt and the newest numbers known of it.

    Attributes
    ----------
    state
        `health`, or ended for a live job that is over.
    gpu_hours_per_day, cost_per_day
        What the slowdown wastes; money only if there is a price.
    missing_count
        Ranks that had not delivered when the last window was analysed.
    """

    id: str
    name: str
    state: JobState
    health: JobState
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


def list_jobs(
    session: Session, tenant_id: str, wanted: JobFilter, part: Slice, price: float | None
) -> Page[JobRow]:
    """Jobs of a tenant, a page of them."""
    computed = wanted.sort not in (JobSort.LAST_DATA, JobSort.NAME)
    if computed or wanted.verdict is not None or wanted.min_waste is not None:
        page = cut(newest_jobs(session, tenant_id, wanted, price), part)
    else:
        column = Job.name if wanted.sort is JobSort.NAME else Job.last_data_ns
        order = column.desc() if wanted.descending else column.asc()
        query = _jobs(tenant_id, wanted).order_by(order, Job.id)
        found = _rows(session, query.offset(part.offset).limit(part.limit + 1), price)
        page = page_of(found, part)
    return Page(with_clocks(session, page.items), page.next)


def newest_jobs(
    session: Session, tenant_id: str, wanted: JobFilter, price: float | None
) -> list[JobRow]:
    """The `MAX_JOBS` jobs with the newest data that fit, sorted; `with_clocks` completes them."""
    query = _jobs(tenant_id, wanted).order_by(Job.last_data_ns.desc(), Job.id).limit(MAX_JOBS)
    rows = [row for row in _rows(session, query, price) if _matches(row, wanted)]
    return _sorted(rows, wanted)


def with_clocks(session: Session, rows: Sequence[JobRow]) -> tuple[JobRow, ...]:
    """Rows that also know whether the clocks agreed, which only the reports say."""
    heads: dict[str, bytes] = {}
    for ids in _chunks([row.result_id for row in rows if row.result_id is not None]):
        head = func.substr(Result.report, 1, HEAD_BYTES).label("head")
        query = select(Result.id, head).where(Result.id.in_(ids))
        heads |= {row.id: row.head for row in session.execute(query)}
    return tuple(
        _with_state(replace(row, aligned=is_aligned(heads.get(row.result_id or ""))))
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
    return with_clocks(session, found)[0]


def _jobs(tenant_id: str, wanted: JobFilter) -> Select[Job, Attempt, Result, Window]:
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
        .order_by(other.number.desc(), window.number.desc(), Result.created_ns.desc())
        .limit(1)
        .correlate(Job)
        .scalar_subquery()
    )
    last = aliased(Result)
    query = (
        select(Job, Attempt, last, Window)
        .select_from(Job)
        .outerjoin(Attempt, Attempt.id == attempt_id)
        .outerjoin(last, last.id == result_id)
        .outerjoin(Window, Window.id == last.window_id)
        .where(Job.tenant_id == tenant_id)
    )
    if wanted.name:
        query = query.where(func.lower(Job.name).contains(wanted.name.lower(), autoescape=True))
    if wanted.running is not None:
        ended = or_(Attempt.id.is_(None), Attempt.ended_ns.is_not(None))
        query = query.where(~ended if wanted.running else ended)
    return query


def _rows(
    session: Session, query: Select[Job, Attempt, Result, Window], price: float | None
) -> list[JobRow]:
    found: list[_Found] = [(*row,) for row in session.execute(query)]
    findings = _findings(session, found)
    return [_row(each, findings.get(each[0].id, []), price) for each in found]


def _findings(session: Session, found: Sequence[_Found]) -> dict[str, list[Finding]]:
    """Findings by job that hold now or, of an attempt that is over, held at its end."""
    by_job: dict[str, list[Finding]] = {}
    for ids in _chunks([row[1].id for row in found if row[1] is not None]):
        query = (
            select(Finding)
            .where(Finding.attempt_id.in_(ids), Finding.cleared_step.is_(None))
            .order_by(Finding.excess_s.desc())
            .limit(_MAX_FINDINGS)
        )
        for finding in session.execute(query).scalars():
            by_job.setdefault(finding.job_id, []).append(finding)
    return by_job


def _chunks(ids: Sequence[str], size: int = 500) -> list[Sequence[str]]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def _row(found: _Found, findings: Sequence[Finding], price: float | None) -> JobRow:
    job, attempt, result, window = found
    layout = None if attempt is None else layout_of(attempt)
    dearest = min(findings, key=_importance, default=None)
    row = JobRow(
        id=job.id,
        name=job.name,
        state=JobState.WAITING,
        health=JobState.WAITING,
        running=attempt is not None and attempt.ended_ns is None,
        pinned=job.pinned,
        attempt=None if attempt is None else attempt.number,
        attempt_id=None if attempt is None else attempt.id,
        result_id=None if result is None else result.id,
        mode=None if attempt is None else attempt.mode,
        layout=layout,
        gpus=None if layout is None else layout.world_size,
        created_s=seconds(job.created_ns),
        last_data_s=seconds(job.last_data_ns),
        last_step=_last_step(attempt, window),
        verdict=None if result is None else result.verdict,
        slowdown=None if result is None else result.slowdown,
        waste_ratio=None if result is None else result.waste_ratio,
        recorded_s=None if result is None else result.recorded_s,
        ideal_s=None if result is None else result.ideal_s,
        gpu_hours_per_day=None,
        cost_per_day=None,
        coverage_ratio=None if result is None else result.coverage_ratio,
        missing_count=0 if window is None else window.missing_count,
        aligned=None,
        open_findings=len(findings),
        finding=None if dearest is None else _open(dearest),
    )
    if attempt is not None and _is_behind(attempt, window):
        row = _with_live(row, attempt)
    return _with_state(_with_cost(row, price))


def _with_state(row: JobRow) -> JobRow:
    health = health_of(row)
    ended = not row.running and row.mode == Mode.LIVE
    return replace(row, health=health, state=JobState.ENDED if ended else health)


def _importance(finding: Finding) -> tuple[bool, int, float]:
    calm = finding.verdict in ("planned_pause", "warmup", "none")
    hang = finding.verdict != "hang"
    return calm, 3 * hang + _ORDER.get(finding.severity, 3), -(finding.excess_s or 0.0)


def _open(finding: Finding) -> OpenFinding:
    since = finding.opened_step if finding.onset_step is None else finding.onset_step
    return OpenFinding(
        id=finding.id,
        severity=finding.severity,
        verdict=finding.verdict,
        cause=finding.cause,
        since_step=since,
        since_s=seconds(finding.opened_ns),
        document=finding.document,
    )


def _last_step(attempt: Attempt | None, window: Window | None) -> int | None:
    known = [] if attempt is None else [attempt.ready_step, attempt.live_step]
    if window is not None and attempt is not None and window.attempt_id == attempt.id:
        known.append(window.last_step)
    return max((step for step in known if step is not None), default=None)


def _is_behind(attempt: Attempt, window: Window | None) -> bool:
    """Whether the running diagnosis knows more than the last window."""
    if attempt.live_step is None:
        return False
    mine = window is not None and window.attempt_id == attempt.id
    return not mine or window is None or attempt.live_step > window.last_step


def _with_live(row: JobRow, attempt: Attempt) -> JobRow:
    """The numbers of the running diagnosis, if it could say any."""
    if attempt.live_slowdown is None:
        return row
    return replace(
        row,
        verdict=attempt.live_verdict,
        slowdown=attempt.live_slowdown,
        waste_ratio=attempt.live_waste_ratio,
        recorded_s=attempt.live_recorded_s,
        ideal_s=attempt.live_ideal_s,
    )


def _with_cost(row: JobRow, price: float | None) -> JobRow:
    if row.waste_ratio is None or row.gpus is None:
        return row
    hours = max(row.waste_ratio, 0.0) * row.gpus * 24
    return replace(
        row, gpu_hours_per_day=hours, cost_per_day=None if price is None else hours * price
    )


def health_of(row: JobRow) -> JobState:
    """Where a job stands, whether or not it is over; what is certain goes first."""
    severity = row.finding.severity if row.finding else None
    if row.slowdown is None and severity is None:
        return JobState.INCOMPLETE if row.missing_count else JobState.WAITING
    if severity == "critical":
        return JobState.CRITICAL
    if row.missing_count or (row.coverage_ratio or 1.0) < _COMPLETE_RATIO:
        return JobState.INCOMPLETE
    if severity == "warning" or (row.slowdown or 1.0) >= SLOW:
        return JobState.SLOW
    return JobState.NOT_ALIGNED if row.aligned is False else JobState.HEALTHY


def _matches(row: JobRow, wanted: JobFilter) -> bool:
    verdict = wanted.verdict is None or row.verdict == wanted.verdict
    least = wanted.min_waste
    return verdict and (least is None or (row.waste_ratio is not None and row.waste_ratio >= least))


def _sorted(rows: Sequence[JobRow], wanted: JobFilter) -> list[JobRow]:
    """By one key; jobs without a number come last in either direction."""

    def key(row: JobRow) -> Any:  # noqa: ANN401  # names or numbers
        return {
            JobSort.LAST_DATA: row.last_data_s,
            JobSort.NAME: row.name,
            JobSort.WASTE: row.waste_ratio,
            JobSort.SLOWDOWN: row.slowdown,
            JobSort.COST: row.gpu_hours_per_day,
        }[wanted.sort]

    known = sorted(
        (row for row in rows if key(row) is not None), key=key, reverse=wanted.descending
    )
    return [*known, *(row for row in rows if key(row) is None)]


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
        .order_by(Window.number.desc())
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
    results = select(func.count(), func.max(Result.created_ns)).where(Result.tenant_id == tenant_id)
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
