"""Hosts and GPUs that were suspects, over all jobs: what recurs is worth a repair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Select, distinct, func, select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Attempt, Finding, FindingState, Job
from smon.store.queries.paging import Page, Slice, cut, seconds, seconds_or_none
from smon.store.queries.presence import Presence, presence_of

#: Newest findings that are looked at.
MAX_FINDINGS: Final = 10_000

#: Findings about one host that are shown, the newest.
MAX_SHOWN: Final = 500

#: In so many jobs, a host is worth a repair: one job alone can have its own reasons.
RECURS: Final = 2

_DAY_NS: Final = 86_400 * 10**9
_HOURS: Final = 24
_HOUR_S: Final = 3600.0


class HostKind(StrEnum):
    """What findings are grouped by."""

    HOST = "host"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One finding about a host or GPU.

    Attributes
    ----------
    first_step, last_step
        From its onset, where one is known, to the last analysis that saw it.
    gpus
        All GPUs of the job: they wait for the suspect.
    gpu_hours_per_day, cost_per_day
        What it wastes as long as it is there.
    lost_gpu_hours, lost_cost
        What it has wasted: the excess of its last analysis in each of its steps, on all GPUs.
    """

    finding_id: str
    job_id: str
    job: str
    attempt: int
    host: str | None
    gpu_uuid: str | None
    rank: int | None
    state: str
    severity: str
    cause: str
    scope: str
    excess_s: float | None
    excess_share: float | None
    gpus: int
    first_step: int
    last_step: int
    gpu_hours_per_day: float
    cost_per_day: float | None
    lost_gpu_hours: float
    lost_cost: float | None
    opened_s: float
    last_s: float
    cleared_s: float | None


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host or GPU with all that was found about it.

    Attributes
    ----------
    causes
        Most frequent first.
    gpu_hours_per_day, cost_per_day
        What its open findings waste; the dearest one of each job counts.
    lost_gpu_hours, lost_cost
        What all its findings have wasted; in each step of a job the dearest one counts.
    first_s, last_s
        None if it never was a suspect.
    """

    id: str
    kind: HostKind
    jobs: int
    findings: int
    open_findings: int
    causes: tuple[str, ...]
    gpu_hours_per_day: float
    cost_per_day: float | None
    lost_gpu_hours: float
    lost_cost: float | None
    first_s: float | None
    last_s: float | None

    @property
    def recurs(self) -> bool:
        """Whether it was a suspect in several jobs."""
        return self.jobs >= RECURS


@dataclass(frozen=True, slots=True)
class HostDetail:
    """A host or GPU, each finding about it, last seen first, and the jobs that run there now."""

    host: HostRow
    findings: tuple[Suspicion, ...]
    running: tuple[Presence, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """How one record compares: suspects of its kind, those that recur, those in more jobs."""

    suspects: int
    recurring: int
    worse: int


@dataclass(frozen=True, slots=True)
class HostFilter:
    """Which findings count, by host or by GPU; None: any.

    Attributes
    ----------
    days
        Seen in so many days.
    name
        Part of the name of the host or GPU, in any case.
    """

    now_ns: int
    kind: HostKind = HostKind.HOST
    days: float | None = None
    name: str | None = None


def list_hosts(
    session: Session, tenant_id: str, wanted: HostFilter, part: Slice, price: float | None
) -> Page[HostRow]:
    """Suspects, those in most jobs first."""
    column = Finding.host if wanted.kind is HostKind.HOST else Finding.gpu_uuid
    query = _suspicions(tenant_id).where(column.is_not(None))
    if wanted.days is not None:
        query = query.where(Finding.last_ns >= wanted.now_ns - round(wanted.days * _DAY_NS))
    if wanted.name:
        query = query.where(func.lower(column).contains(wanted.name.lower(), autoescape=True))
    grouped: dict[str, list[Suspicion]] = {}
    for one in _found(session, query, price):
        name = one.host if wanted.kind is HostKind.HOST else one.gpu_uuid
        grouped.setdefault(name or "", []).append(one)
    rows = [_row(name, wanted.kind, mine, price) for name, mine in grouped.items()]
    rows.sort(key=lambda row: (-row.jobs, -row.gpu_hours_per_day, -row.lost_gpu_hours, row.id))
    return cut(rows, part)


def get_host(session: Session, tenant_id: str, name: str, price: float | None) -> HostDetail:
    """All that was found about a host, or about a GPU by its UUID, and what runs there.

    Raises
    ------
    MissingError
        It never was a suspect, and no job runs there.
    """
    query = _suspicions(tenant_id).where((Finding.host == name) | (Finding.gpu_uuid == name))
    found = _found(session, query, price)
    known_as_host = not found or any(one.host == name for one in found)
    kind = HostKind.HOST if known_as_host else HostKind.GPU
    host = name if known_as_host else next((one.host for one in found if one.host), None)
    running = () if host is None else presence_of(session, tenant_id, host)
    if not found and not running:
        raise MissingError("expected a host or GPU that was a suspect, or on which a job runs")
    return HostDetail(_row(name, kind, found, price), tuple(found[:MAX_SHOWN]), running)


def standing_of(session: Session, tenant_id: str, row: HostRow) -> Standing:
    """How the record of a host or GPU compares with those of all others."""
    column = Finding.host if row.kind is HostKind.HOST else Finding.gpu_uuid
    jobs = func.count(distinct(Finding.job_id)).label("jobs")
    each = (
        select(jobs)
        .where(Finding.tenant_id == tenant_id, column.is_not(None))
        .group_by(column)
        .subquery()
    )
    compared = select(
        func.count(),
        func.count().filter(each.c.jobs >= RECURS),
        func.count().filter(each.c.jobs > row.jobs),
    ).select_from(each)
    suspects, recurring, worse = session.execute(compared).one()
    return Standing(suspects, recurring, worse)


_COLUMNS: Final = (
    *(Finding.id, Finding.job_id, Job.name, Attempt.number),
    *(Attempt.dp, Attempt.pp, Attempt.tp, Attempt.cp),
    *(Finding.host, Finding.gpu_uuid, Finding.rank, Finding.state, Finding.severity),
    *(Finding.cause, Finding.scope, Finding.excess_s, Finding.excess_share),
    *(Finding.onset_step, Finding.opened_step, Finding.last_step),
    *(Finding.opened_ns, Finding.last_ns, Finding.cleared_ns),
)


def _suspicions(tenant_id: str) -> Select[*tuple[Any, ...]]:
    """Columns only: the documents of ten thousand findings would take seconds to read."""
    return (
        select(*_COLUMNS)
        .join(Job, Job.id == Finding.job_id)
        .join(Attempt, Attempt.id == Finding.attempt_id)
        .where(Finding.tenant_id == tenant_id)
        .order_by(Finding.last_ns.desc(), Finding.id)
        .limit(MAX_FINDINGS)
    )


def _found(
    session: Session, query: Select[*tuple[Any, ...]], price: float | None
) -> list[Suspicion]:
    return [_suspicion(row, price) for row in session.execute(query)]


def gpu_hours_per_day(excess_share: float | None, gpus: int) -> float:
    """What a finding wastes as long as it is there."""
    return max(excess_share or 0.0, 0.0) * gpus * _HOURS


def _suspicion(row: Any, price: float | None) -> Suspicion:  # noqa: ANN401  # of `_COLUMNS`
    gpus = row.dp * row.pp * row.tp * row.cp
    per_day = gpu_hours_per_day(row.excess_share, gpus)
    first = row.opened_step if row.onset_step is None else min(row.onset_step, row.last_step)
    hours = _hours(max(row.excess_s or 0.0, 0.0) * gpus, row.last_step + 1 - first)
    return Suspicion(
        finding_id=row.id,
        job_id=row.job_id,
        job=row.name,
        attempt=row.number,
        host=row.host,
        gpu_uuid=row.gpu_uuid,
        rank=row.rank,
        state=row.state,
        severity=row.severity,
        cause=row.cause,
        scope=row.scope,
        excess_s=row.excess_s,
        excess_share=row.excess_share,
        gpus=gpus,
        first_step=first,
        last_step=row.last_step,
        gpu_hours_per_day=per_day,
        cost_per_day=_money(per_day, price),
        lost_gpu_hours=hours,
        lost_cost=_money(hours, price),
        opened_s=seconds(row.opened_ns),
        last_s=seconds(row.last_ns),
        cleared_s=seconds_or_none(row.cleared_ns),
    )


def _row(name: str, kind: HostKind, found: Sequence[Suspicion], price: float | None) -> HostRow:
    still = [one for one in found if one.state == FindingState.OPEN]
    dearest: dict[str, float] = {}
    for one in still:
        dearest[one.job_id] = max(dearest.get(one.job_id, 0.0), one.gpu_hours_per_day)
    per_day, hours = sum(dearest.values(), 0.0), wasted(found)
    return HostRow(
        id=name,
        kind=kind,
        jobs=len({one.job_id for one in found}),
        findings=len(found),
        open_findings=len(still),
        causes=_by_frequency(one.cause for one in found),
        gpu_hours_per_day=per_day,
        cost_per_day=_money(per_day, price),
        lost_gpu_hours=hours,
        lost_cost=_money(hours, price),
        first_s=min((one.opened_s for one in found), default=None),
        last_s=max((one.last_s for one in found), default=None),
    )


def wasted(found: Iterable[Suspicion]) -> float:
    """GPU-hours that findings have wasted; where they overlap, the dearest one counts."""
    by_attempt: dict[tuple[str, int], list[Suspicion]] = {}
    for one in found:
        by_attempt.setdefault((one.job_id, one.attempt), []).append(one)
    return sum((_wasted_in_one(mine) for mine in by_attempt.values()), 0.0)


def _wasted_in_one(found: Sequence[Suspicion]) -> float:
    """Dearest first; each adds its steps that no dearer one has."""
    total = 0.0
    taken: list[tuple[int, int]] = []
    for one in sorted(found, key=lambda one: -(one.excess_s or 0.0)):
        mine = (one.first_step, one.last_step + 1)
        steps = mine[1] - mine[0] - _overlap(mine, taken)
        total += _hours(max(one.excess_s or 0.0, 0.0) * one.gpus, steps)
        taken = _united([*taken, mine])
    return total


def _overlap(mine: tuple[int, int], taken: Iterable[tuple[int, int]]) -> int:
    return sum(max(min(mine[1], end) - max(mine[0], begin), 0) for begin, end in taken)


def _united(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same steps as runs that do not overlap."""
    united: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((begin, end))
    return united


def _hours(gpu_seconds_per_step: float, steps: int) -> float:
    return gpu_seconds_per_step * steps / _HOUR_S


def _money(hours: float, price: float | None) -> float | None:
    return None if price is None else hours * price


def _by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))
