"""Findings over time: a row for each, and an event for each change of it.

Flow: `smon.worker.life` decides what changes → **here** → tables ``findings`` and
``finding_events`` → lists, pages, metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.orm import Session

from smon.report import Finding as FindingPart
from smon.store.models import Attempt, Finding, FindingEvent, FindingState, Mode, new_id


class Event(StrEnum):
    """What happens to a finding."""

    OPENED = "opened"
    SEVERITY = "severity"
    CLEARED = "cleared"
    REOPENED = "reopened"
    #: Its attempt is over.
    ENDED = "ended"


class Source(StrEnum):
    """What a finding was found in: another analysis of the same can say that it is gone."""

    OPS = "ops"
    EVENTS = "rank-events"
    DUMPS = "flight-recorder"
    SERIES = "step-times"


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A finding of the present analysis.

    Attributes
    ----------
    key
        The same finding in the next analysis has the same key.
    severity
        As it is to be shown.
    document
        `finding`, as the report's JSON has it.
    """

    key: str
    severity: str
    finding: FindingPart
    document: dict[str, Any]
    host: str | None
    gpu_uuid: str | None
    source: Source = Source.OPS


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that an earlier analysis has left."""

    id: str
    key: str
    state: FindingState
    severity: str
    onset_step: int | None
    opened_step: int
    last_step: int
    cleared_step: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is to be written of one finding.

    Attributes
    ----------
    event
        None: it is still there, as it was.
    step
        At which that is so; of a finding that has cleared, the first step without it.
    known
        None: it is new.
    seen
        None: the present analysis does not have it.
    """

    event: Event | None
    step: int
    known: Known | None = None
    seen: Seen | None = None


_KNOWN = (
    *(Finding.id, Finding.key, Finding.state, Finding.severity, Finding.onset_step),
    *(Finding.opened_step, Finding.last_step, Finding.cleared_step),
)


def known_findings(
    session: Session, attempt_id: str, cleared_since: int | None, source: Source | None = None
) -> list[Known]:
    """Open findings of an attempt, and those that have cleared at a step or after it.

    Parameters
    ----------
    cleared_since
        None: all that have cleared.
    source
        Those that were found in this; None: in anything.
    """
    wanted = select(*_KNOWN).where(Finding.attempt_id == attempt_id)
    if source is not None:
        wanted = wanted.where(Finding.source == source.value)
    if cleared_since is not None:
        wanted = wanted.where(
            or_(Finding.state == FindingState.OPEN, Finding.cleared_step >= cleared_since)
        )
    rows = session.execute(wanted.order_by(Finding.opened_ns, Finding.id))
    return [Known(row[0], row[1], FindingState(row[2]), *row[3:]) for row in rows]


def write_changes(
    session: Session, ids: Mapping[str, str], changes: Sequence[Change], times: Mapping[int, int]
) -> None:
    """Write what has changed.

    Parameters
    ----------
    ids
        ``tenant_id``, ``job_id`` and ``attempt_id``.
    times
        Unix ns of each step that occurs in the changes.
    """
    for change in changes:
        at = times[change.step]
        if change.known is None:
            finding_id = _open(session, ids, change, at)
        else:
            finding_id = change.known.id
            _update(session, change, change.known, at)
        if change.event is not None:
            _note(session, ids, finding_id, change, at)


def _open(session: Session, ids: Mapping[str, str], change: Change, at: int) -> str:
    finding_id = new_id()
    session.execute(
        insert(Finding).values(
            id=finding_id,
            **ids,
            key=_seen(change).key,
            source=_seen(change).source.value,
            state=FindingState.OPEN.value,
            opened_step=change.step,
            opened_ns=at,
            last_step=change.step,
            last_ns=at,
            **_columns(_seen(change)),
        )
    )
    return finding_id


def _seen(change: Change) -> Seen:
    if change.seen is None:
        raise ValueError("a finding that is new has been seen")
    return change.seen


def _columns(seen: Seen) -> dict[str, Any]:
    """What the present analysis says of a finding."""
    finding, where = seen.finding, seen.finding.where
    return {
        "verdict": finding.verdict,
        "cause": finding.cause,
        "scope": finding.scope,
        "severity": seen.severity,
        "rank": where.rank,
        "dp": where.dp,
        "stage": where.stage,
        "host": seen.host,
        "gpu_uuid": seen.gpu_uuid,
        "excess_s": finding.excess_s,
        "excess_share": finding.excess_share,
        "onset_step": finding.persistence.onset_step,
        "document": seen.document,
    }


def _update(session: Session, change: Change, known: Known, at: int) -> None:
    values: dict[str, Any] = {}
    if change.seen is not None:
        values = _columns(change.seen)
        # An onset that has left the window is still when it began.
        values["onset_step"] = (
            values["onset_step"] if known.onset_step is None else known.onset_step
        )
        values |= {"last_step": change.step, "last_ns": at}
    if change.event is Event.CLEARED:
        values |= {"state": FindingState.CLEARED.value}
        values |= {"cleared_step": change.step, "cleared_ns": at}
    elif change.event is Event.ENDED:
        values |= {"state": FindingState.CLEARED.value, "cleared_step": None, "cleared_ns": at}
    elif change.event is Event.REOPENED:
        values |= {"state": FindingState.OPEN.value, "cleared_step": None, "cleared_ns": None}
    session.execute(
        update(Finding)
        .where(Finding.id == known.id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )


def _note(
    session: Session, ids: Mapping[str, str], finding_id: str, change: Change, at: int
) -> None:
    latest = change.seen or change.known
    session.execute(
        insert(FindingEvent).values(
            id=new_id(),
            finding_id=finding_id,
            tenant_id=ids["tenant_id"],
            job_id=ids["job_id"],
            at_ns=at,
            step=change.step,
            event=str(change.event),
            severity="" if latest is None else latest.severity,
            excess_s=change.seen.finding.excess_s if change.seen else None,
        )
    )


def write_recorded(
    session: Session,
    ids: Mapping[str, str],
    seen: Sequence[Seen],
    steps: tuple[int, int],
    times: Mapping[int, int],
) -> None:
    """Write the findings of a recorded window, in place of those of an earlier analysis of it.

    The job is over, so none of them is open.

    Parameters
    ----------
    steps
        First and last step of the window.
    times
        Unix ns of these, and of the onsets.
    """
    stale = select(Finding.id).where(
        Finding.attempt_id == ids["attempt_id"],
        Finding.opened_step >= steps[0],
        Finding.last_step <= steps[1],
    )
    session.execute(delete(FindingEvent).where(FindingEvent.finding_id.in_(stale)))
    session.execute(delete(Finding).where(Finding.id.in_(stale)))
    for one in seen:
        onset = one.finding.persistence.onset_step
        begin = steps[0] if onset is None or onset not in times else onset
        opened = Change(Event.OPENED, begin, seen=one)
        finding_id = _open(session, ids, opened, times[begin])
        _note(session, ids, finding_id, opened, times[begin])
        ended = Change(Event.ENDED, steps[1], _fresh(finding_id, one, begin), one)
        write_changes(session, ids, [ended], times)


def _fresh(finding_id: str, seen: Seen, step: int) -> Known:
    return Known(
        id=finding_id,
        key=seen.key,
        state=FindingState.OPEN,
        severity=seen.severity,
        onset_step=None,
        opened_step=step,
        last_step=step,
        cleared_step=None,
    )


def attempts_over(session: Session, before_ns: int) -> list[tuple[str, str, str]]:
    """(tenant, job, attempt) of live attempts that ended before a time and have open findings.

    Those whose last steps the running diagnosis has not seen yet are left out.
    """
    open_ones = select(Finding.attempt_id).where(Finding.state == FindingState.OPEN)
    rows = session.execute(
        select(Attempt.tenant_id, Attempt.job_id, Attempt.id).where(
            Attempt.id.in_(open_ones),
            Attempt.mode == Mode.LIVE,
            Attempt.ended_ns < before_ns,
            Attempt.last_data_ns < before_ns,
            or_(Attempt.ready_step.is_(None), Attempt.live_step >= Attempt.ready_step),
        )
    )
    return [(row.tenant_id, row.job_id, row.id) for row in rows]


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding as lists show it; see `smon.store.models.Finding`."""

    id: str
    attempt_id: str
    state: FindingState
    verdict: str
    cause: str
    scope: str
    severity: str
    rank: int | None
    host: str | None
    gpu_uuid: str | None
    excess_s: float | None
    onset_step: int | None
    opened_step: int
    opened_ns: int
    last_step: int
    last_ns: int
    cleared_step: int | None
    cleared_ns: int | None


_ROW = (
    *(Finding.id, Finding.attempt_id, Finding.state, Finding.verdict, Finding.cause),
    *(Finding.scope, Finding.severity, Finding.rank, Finding.host, Finding.gpu_uuid),
    *(Finding.excess_s, Finding.onset_step, Finding.opened_step, Finding.opened_ns),
    *(Finding.last_step, Finding.last_ns, Finding.cleared_step, Finding.cleared_ns),
)


def findings_since(
    session: Session,
    tenant_id: str,
    job_id: str,
    since_ns: int,
    *,
    limit: int = 1_000,
) -> list[FindingRow]:
    """Findings of a job that are open, or were there or changed at a time or after it.

    Latest first; at most `limit`.
    """
    rows = session.execute(
        select(*_ROW)
        .where(
            Finding.tenant_id == tenant_id,
            Finding.job_id == job_id,
            or_(
                Finding.state == FindingState.OPEN,
                Finding.last_ns >= since_ns,
                Finding.cleared_ns >= since_ns,
            ),
        )
        .order_by(Finding.last_ns.desc(), Finding.id)
        .limit(limit)
    )
    return [_finding_row(row) for row in rows]


def _finding_row(row: Any) -> FindingRow:  # noqa: ANN401  # a row of a query
    return FindingRow(row[0], row[1], FindingState(row[2]), *row[3:])
