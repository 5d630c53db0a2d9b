"""Hosts and GPUs that were suspects, over all jobs: what recurs is worth a repair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Attempt, Finding, FindingState, Job
from smon.store.queries.paging import Page, Slice, cut, seconds, seconds_or_none

#: Newest findings that are looked at.
MAX_FINDINGS: Final = 10_000

_DAY_NS: Final = 86_400 * 10**9
_HOURS: Final = 24


class HostKind(StrEnum):
    """What findings are grouped by."""

    HOST = "host"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One finding about a host or GPU."""

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
    excess_s: float | None
    excess_share: float | None
    gpu_hours_per_day: float
    cost_per_day: float | None
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
    """

    id: str
    kind: HostKind
    jobs: int
    findings: int
    open_findings: int
    causes: tuple[str, ...]
    gpu_hours_per_day: float
    cost_per_day: float | None
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class HostDetail:
    """A host or GPU, and each finding about it, newest first."""

    host: HostRow
    findings: tuple[Suspicion, ...]


@dataclass(frozen=True, slots=True)
class HostFilter:
    """Which findings count: of so many days (None: all), by host or by GPU."""

    now_ns: int
    kind: HostKind = HostKind.HOST
    days: float | None = None


def list_hosts(
    session: Session, tenant_id: str, wanted: HostFilter, part: Slice, price: float | None
) -> Page[HostRow]:
    """Suspects, those in most jobs first."""
    column = Finding.host if wanted.kind is HostKind.HOST else Finding.gpu_uuid
    query = _suspicions(tenant_id).where(column.is_not(None))
    if wanted.days is not None:
        query = query.where(Finding.last_ns >= wanted.now_ns - round(wanted.days * _DAY_NS))
    grouped: dict[str, list[Suspicion]] = {}
    for one in _found(session, query, price):
        name = one.host if wanted.kind is HostKind.HOST else one.gpu_uuid
        grouped.setdefault(name or "", []).append(one)
    rows = [_row(name, wanted.kind, mine, price) for name, mine in grouped.items()]
    rows.sort(key=lambda row: (-row.jobs, -row.gpu_hours_per_day, -row.findings, row.id))
    return cut(rows, part)


def get_host(session: Session, tenant_id: str, name: str, price: float | None) -> HostDetail:
    """All that was found about a host, or about a GPU by its UUID.

    Raises
    ------
    MissingError
        It never was a suspect.
    """
    query = _suspicions(tenant_id).where((Finding.host == name) | (Finding.gpu_uuid == name))
    found = _found(session, query, price)
    if not found:
        raise MissingError("expected a host or GPU that was a suspect in some job")
    kind = HostKind.HOST if any(one.host == name for one in found) else HostKind.GPU
    return HostDetail(_row(name, kind, found, price), tuple(found[:500]))


def _suspicions(tenant_id: str) -> Select[Finding, str, Attempt]:
    return (
        select(Finding, Job.name, Attempt)
        .join(Job, Job.id == Finding.job_id)
        .join(Attempt, Attempt.id == Finding.attempt_id)
        .where(Finding.tenant_id == tenant_id)
        .order_by(Finding.last_ns.desc(), Finding.id)
        .limit(MAX_FINDINGS)
    )


def _found(
    session: Session, query: Select[Finding, str, Attempt], price: float | None
) -> list[Suspicion]:
    return [
        _suspicion(finding, name, attempt, price)
        for finding, name, attempt in session.execute(query).all()
    ]


def gpu_hours_per_day(finding: Finding, attempt: Attempt) -> float:
    """What a finding wastes as long as it is there."""
    gpus = attempt.dp * attempt.pp * attempt.tp * attempt.cp
    return max(finding.excess_share or 0.0, 0.0) * gpus * _HOURS


def _suspicion(finding: Finding, job: str, attempt: Attempt, price: float | None) -> Suspicion:
    hours = gpu_hours_per_day(finding, attempt)
    return Suspicion(
        finding_id=finding.id,
        job_id=finding.job_id,
        job=job,
        attempt=attempt.number,
        host=finding.host,
        gpu_uuid=finding.gpu_uuid,
        rank=finding.rank,
        state=finding.state,
        severity=finding.severity,
        cause=finding.cause,
        excess_s=finding.excess_s,
        excess_share=finding.excess_share,
        gpu_hours_per_day=hours,
        cost_per_day=None if price is None else hours * price,
        opened_s=seconds(finding.opened_ns),
        last_s=seconds(finding.last_ns),
        cleared_s=seconds_or_none(finding.cleared_ns),
    )


def _row(name: str, kind: HostKind, found: Sequence[Suspicion], price: float | None) -> HostRow:
    still = [one for one in found if one.state == FindingState.OPEN]
    dearest: dict[str, float] = {}
    for one in still:
        dearest[one.job_id] = max(dearest.get(one.job_id, 0.0), one.gpu_hours_per_day)
    hours = sum(dearest.values())
    return HostRow(
        id=name,
        kind=kind,
        jobs=len({one.job_id for one in found}),
        findings=len(found),
        open_findings=len(still),
        causes=_by_frequency(one.cause for one in found),
        gpu_hours_per_day=hours,
        cost_per_day=None if price is None else hours * price,
        first_s=min(one.opened_s for one in found),
        last_s=max(one.last_s for one in found),
    )


def _by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))
