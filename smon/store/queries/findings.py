"""Findings of a job over their life: opened, changed, cleared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.store.models import Attempt, Finding, FindingEvent
from smon.store.queries.paging import Page, Slice, page_of, seconds, seconds_or_none
from smon.store.queries.windows import need_job

#: Events of one finding that are shown, the newest.
MAX_EVENTS: Final = 50


@dataclass(frozen=True, slots=True)
class EventRow:
    """One change in a finding's life."""

    at_s: float
    step: int
    event: str
    severity: str
    excess_s: float | None


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding and its life; `document` is it as the last report has it."""

    id: str
    attempt: int
    state: str
    severity: str
    verdict: str
    cause: str
    scope: str
    rank: int | None
    dp: int | None
    stage: int | None
    host: str | None
    gpu_uuid: str | None
    excess_s: float | None
    excess_share: float | None
    onset_step: int | None
    opened_step: int
    opened_s: float
    last_step: int
    last_s: float
    cleared_step: int | None
    cleared_s: float | None
    document: dict[str, Any]
    events: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class FindingFilter:
    """Which findings are asked for; None: any. `since_s`: seen or changed since, unix time."""

    since_s: float | None = None
    state: str | None = None
    attempt: int | None = None


def list_findings(
    session: Session, tenant_id: str, job_id: str, wanted: FindingFilter, part: Slice
) -> Page[FindingRow]:
    """Findings of a job, last seen first.

    Raises
    ------
    MissingError
        There is no such job.
    """
    need_job(session, tenant_id, job_id)
    query = (
        select(Finding, Attempt.number)
        .join(Attempt, Attempt.id == Finding.attempt_id)
        .where(Finding.tenant_id == tenant_id, Finding.job_id == job_id)
        .order_by(Finding.last_ns.desc(), Finding.excess_s.desc(), Finding.id)
    )
    if wanted.since_s is not None:
        since_ns = round(wanted.since_s * 1e9)
        query = query.where((Finding.last_ns >= since_ns) | (Finding.cleared_ns >= since_ns))
    if wanted.state is not None:
        query = query.where(Finding.state == wanted.state)
    if wanted.attempt is not None:
        query = query.where(Attempt.number == wanted.attempt)
    found = session.execute(query.offset(part.offset).limit(part.limit + 1)).all()
    events = _events(session, [finding.id for finding, _ in found])
    rows = [_row(finding, number, events.get(finding.id, ())) for finding, number in found]
    return page_of(rows, part)


def _events(session: Session, ids: Sequence[str]) -> dict[str, tuple[EventRow, ...]]:
    query = (
        select(FindingEvent)
        .where(FindingEvent.finding_id.in_(ids))
        .order_by(FindingEvent.at_ns.desc(), FindingEvent.step.desc())
        .limit(MAX_EVENTS * max(len(ids), 1))
    )
    by_finding: dict[str, list[EventRow]] = {}
    for event in session.execute(query).scalars():
        mine = by_finding.setdefault(event.finding_id, [])
        if len(mine) < MAX_EVENTS:
            mine.append(
                EventRow(
                    at_s=seconds(event.at_ns),
                    step=event.step,
                    event=event.event,
                    severity=event.severity,
                    excess_s=event.excess_s,
                )
            )
    return {name: tuple(reversed(mine)) for name, mine in by_finding.items()}


def _row(finding: Finding, attempt: int, events: Sequence[EventRow]) -> FindingRow:
    return FindingRow(
        id=finding.id,
        attempt=attempt,
        state=finding.state,
        severity=finding.severity,
        verdict=finding.verdict,
        cause=finding.cause,
        scope=finding.scope,
        rank=finding.rank,
        dp=finding.dp,
        stage=finding.stage,
        host=finding.host,
        gpu_uuid=finding.gpu_uuid,
        excess_s=finding.excess_s,
        excess_share=finding.excess_share,
        onset_step=finding.onset_step,
        opened_step=finding.opened_step,
        opened_s=seconds(finding.opened_ns),
        last_step=finding.last_step,
        last_s=seconds(finding.last_ns),
        cleared_step=finding.cleared_step,
        cleared_s=seconds_or_none(finding.cleared_ns),
        document=finding.document,
        events=tuple(events),
    )
