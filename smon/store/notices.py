"""What channels have been told of findings, and what there is to tell.

Flow: tables ``findings``, ``finding_events`` → **here** ↔ `smon.notify` → table ``notices``. What
has been said is compared with what is there now, so that it does not matter who looks how often,
and nothing is said twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, func, select, tuple_, update
from sqlalchemy.orm import Session

from smon.store.models import (
    Attempt,
    Finding,
    FindingEvent,
    FindingState,
    Job,
    Notice,
    Tenant,
    WorkState,
)
from smon.store.queries.hosts import gpu_hours_per_day
from smon.store.streams import chunks, insert_new, layout_of
from smon.topology import Layout

#: A finding over restarts of its job: (tenant, job, key).
Place = tuple[str, str, str]

#: Changes in a finding's life after which it is there.
_THERE: Final = ("opened", "reopened")

_PLACES: Final = 200


@dataclass(frozen=True, slots=True)
class Told:
    """What a channel has been told of a finding; see `smon.store.models.Notice`."""

    id: str
    severity: str | None
    opened_ns: int
    messages: int
    state: WorkState
    given_up: str | None


@dataclass(frozen=True, slots=True)
class Truth:
    """How a finding stands now."""

    is_open: bool
    severity: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A finding beside what a channel knows of it; None: nothing yet, or there is none any more."""

    place: Place
    truth: Truth | None
    told: Told | None


def places_changed(session: Session, since_ns: int) -> set[Place]:
    """Findings of live jobs with whatever has changed in them at a time or after it."""
    found = session.execute(
        select(Finding.tenant_id, Finding.job_id, Finding.key)
        .join(FindingEvent, FindingEvent.finding_id == Finding.id)
        .where(FindingEvent.at_ns >= since_ns)
        .distinct()
    )
    return {(row[0], row[1], row[2]) for row in found}


def places_open(session: Session, channel: str) -> set[Place]:
    """All findings that are there, or that a channel believes to be there."""
    there = select(Finding.tenant_id, Finding.job_id, Finding.key).where(
        Finding.state == FindingState.OPEN
    )
    told = select(Notice.tenant_id, Notice.job_id, Notice.key).where(
        Notice.channel == channel, Notice.told_severity.is_not(None)
    )
    found = session.execute(there.union(told))
    return {(row[0], row[1], row[2]) for row in found}


def standings(session: Session, channel: str, places: set[Place]) -> list[Standing]:
    """How these findings stand, and what a channel knows of them."""
    result = []
    for part in chunks(sorted(places), _PLACES):
        truths = _truths(session, part)
        told = _told(session, channel, part)
        result += [Standing(place, truths.get(place), told.get(place)) for place in part]
    return result


def _truths(session: Session, places: list[Place]) -> dict[Place, Truth]:
    rows = session.execute(
        select(Finding.tenant_id, Finding.job_id, Finding.key, Finding.state, Finding.severity)
        .where(tuple_(Finding.tenant_id, Finding.job_id, Finding.key).in_(places))
        # The later one replaces the earlier: one that is there counts, then the newest.
        .order_by(_is_open().asc(), Finding.last_ns, Finding.id)
    )
    return {
        (row.tenant_id, row.job_id, row.key): Truth(row.state == FindingState.OPEN, row.severity)
        for row in rows
    }


def _is_open() -> ColumnElement[bool]:
    return Finding.state == FindingState.OPEN.value


def _told(session: Session, channel: str, places: list[Place]) -> dict[Place, Told]:
    rows = session.execute(
        select(Notice).where(
            Notice.channel == channel,
            tuple_(Notice.tenant_id, Notice.job_id, Notice.key).in_(places),
        )
    ).scalars()
    return {(row.tenant_id, row.job_id, row.key): _told_of(row) for row in rows}


def _told_of(row: Notice) -> Told:
    return Told(
        id=row.id,
        severity=row.told_severity,
        opened_ns=row.opened_ns,
        messages=row.messages,
        state=WorkState(row.state),
        given_up=row.given_up,
    )


def queue(session: Session, channel: str, standing: Standing, not_before_ns: int, now: int) -> None:
    """Note that there is something to tell; a row that somebody has at hand stays as it is."""
    waiting = {"state": WorkState.QUEUED.value, "lease_ns": not_before_ns, "tries": 0}
    tenant_id, job_id, key = standing.place
    if standing.told is None:
        values = {"tenant_id": tenant_id, "job_id": job_id, "key": key, "channel": channel}
        session.execute(insert_new(session, Notice).values(**values, **waiting, created_ns=now))
        return
    session.execute(
        update(Notice)
        .where(
            Notice.id == standing.told.id,
            Notice.state.in_((WorkState.DONE.value, WorkState.FAILED.value)),
        )
        .values(**waiting)
        .execution_options(synchronize_session=False)
    )


def waiting(session: Session, channel: str) -> int:
    """How many findings a channel is yet to be told of."""
    under_way = (WorkState.QUEUED.value, WorkState.RUNNING.value)
    query = select(func.count()).where(Notice.channel == channel, Notice.state.in_(under_way))
    return int(session.execute(query).scalar_one())


# --- what a message is made of ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A finding with all that a message says of it.

    Attributes
    ----------
    came_back
        How often it has been there again since the channel was told that it is there.
    changed_ns
        When its life changed last.
    coverage_ratio, aligned
        Of the running diagnosis of its attempt; None where that does not say.
    """

    place: Place
    told: Told
    truth: Truth
    tenant: str
    job: str
    finding: Mapping[str, Any]
    document: Mapping[str, Any]
    layout: Layout
    attempt: int
    attempt_over: bool
    gpu_hours_per_day: float
    came_back: int
    changed_ns: int
    coverage_ratio: float | None
    aligned: bool | None


#: What a message says of a finding that stands in its row rather than in its document.
FIELDS: Final = (
    *("id", "state", "severity", "verdict", "cause", "scope", "host", "gpu_uuid"),
    *("excess_s", "excess_share", "onset_step", "opened_step", "opened_ns"),
    *("last_step", "last_ns", "cleared_step", "cleared_ns"),
)


def subject(session: Session, notice_id: str) -> Subject | None:
    """The finding that a notice is about; None if it is gone."""
    row = session.execute(
        select(Notice, Tenant.name, Job.name)
        .join(Tenant, Tenant.id == Notice.tenant_id)
        .join(Job, Job.id == Notice.job_id)
        .where(Notice.id == notice_id)
    ).first()
    if row is None:
        return None
    notice, tenant, job = row
    found = session.execute(
        select(Finding, Attempt)
        .join(Attempt, Attempt.id == Finding.attempt_id)
        .where(
            Finding.tenant_id == notice.tenant_id,
            Finding.job_id == notice.job_id,
            Finding.key == notice.key,
        )
        .order_by(_is_open().desc(), Finding.last_ns.desc(), Finding.id.desc())
        .limit(1)
    ).first()
    if found is None:
        return None
    return _subject(session, notice, (tenant, job), *found)


def _subject(
    session: Session,
    notice: Notice,
    names: tuple[str, str],
    finding: Finding,
    attempt: Attempt,
) -> Subject:
    tenant, job = names
    layout = layout_of(attempt)
    came_back, changed_ns = _life(session, notice)
    return Subject(
        place=(notice.tenant_id, notice.job_id, notice.key),
        told=_told_of(notice),
        truth=Truth(finding.state == FindingState.OPEN, finding.severity),
        tenant=tenant,
        job=job,
        finding={name: getattr(finding, name) for name in FIELDS},
        document=finding.document,
        layout=layout,
        attempt=attempt.number,
        attempt_over=attempt.ended_ns is not None,
        gpu_hours_per_day=gpu_hours_per_day(finding.excess_share, layout.world_size),
        came_back=came_back,
        changed_ns=changed_ns,
        coverage_ratio=attempt.live_coverage_ratio,
        aligned=attempt.live_aligned,
    )


def _life(session: Session, notice: Notice) -> tuple[int, int]:
    again = and_(FindingEvent.event.in_(_THERE), FindingEvent.at_ns > notice.opened_ns)
    row = session.execute(
        select(func.count().filter(again), func.max(FindingEvent.at_ns))
        .join(Finding, Finding.id == FindingEvent.finding_id)
        .where(
            Finding.tenant_id == notice.tenant_id,
            Finding.job_id == notice.job_id,
            Finding.key == notice.key,
        )
    ).one()
    return int(row[0]), int(row[1] or 0)
