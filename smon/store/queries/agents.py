"""Agents: who sends, since when, what they hold back and what they dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from smon.store.models import Attempt, Job, Stream
from smon.store.queries.paging import Page, Slice, page_of, seconds


@dataclass(frozen=True, slots=True)
class AgentRow:
    """One stream: a producer process of a job attempt on a host, as its agent reports it.

    Attributes
    ----------
    down
        Its heartbeat is older than it may be, and it has not ended.
    heartbeat_age_s, spool_bytes, oldest_unsent_s, dropped
        As of the last heartbeat; None if there was none. `dropped`: events by reason.
    """

    stream_id: str
    host: str
    source: str
    job_id: str
    job: str
    attempt: int
    ranks: int
    epoch: int
    ended: bool
    end_reason: str | None
    down: bool
    steps_done: int | None
    events: int
    lost_events: int
    last_data_s: float
    heartbeat_age_s: float | None
    spool_bytes: int | None
    oldest_unsent_s: float | None
    dropped: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents are asked for; None: any.

    Attributes
    ----------
    now_ns, down_ns
        Unix time, and the age of a heartbeat from which an agent is down.
    """

    now_ns: int
    down_ns: int
    job_id: str | None = None
    down: bool | None = None
    ended: bool | None = None


def list_agents(
    session: Session, tenant_id: str, wanted: AgentFilter, part: Slice
) -> Page[AgentRow]:
    """Streams of a tenant, last data first."""
    limit = wanted.now_ns - wanted.down_ns
    query = (
        select(Stream, Job.name, Attempt.number)
        .join(Job, Job.id == Stream.job_id)
        .join(Attempt, Attempt.id == Stream.attempt_id)
        .where(Stream.tenant_id == tenant_id)
        .order_by(Stream.last_data_ns.desc(), Stream.id)
    )
    if wanted.job_id is not None:
        query = query.where(Stream.job_id == wanted.job_id)
    if wanted.ended is not None:
        query = query.where(Stream.ended.is_(wanted.ended))
    if wanted.down is not None:
        # Without any heartbeat, the moment of registration counts.
        late = or_(
            Stream.heartbeat_ns < limit,
            Stream.heartbeat_ns.is_(None) & (Stream.created_ns < limit),
        )
        query = query.where(Stream.ended.is_(False) & late if wanted.down else Stream.ended | ~late)
    found = session.execute(query.offset(part.offset).limit(part.limit + 1)).all()
    rows = [_row(stream, name, number, wanted) for stream, name, number in found]
    return page_of(rows, part)


def _row(stream: Stream, job: str, attempt: int, wanted: AgentFilter) -> AgentRow:
    seen = stream.heartbeat_ns or stream.created_ns
    said = stream.heartbeat or {}
    dropped = said.get("dropped")
    return AgentRow(
        stream_id=stream.id,
        host=stream.host,
        source=stream.source,
        job_id=stream.job_id,
        job=job,
        attempt=attempt,
        ranks=len(stream.ranks),
        epoch=stream.epoch,
        ended=stream.ended,
        end_reason=stream.end_reason,
        down=not stream.ended and seen < wanted.now_ns - wanted.down_ns,
        steps_done=stream.steps_done,
        events=stream.events,
        lost_events=stream.lost_events,
        last_data_s=seconds(stream.last_data_ns),
        heartbeat_age_s=(
            None
            if stream.heartbeat_ns is None
            else max(wanted.now_ns - stream.heartbeat_ns, 0) / 1e9
        ),
        spool_bytes=_whole(said.get("spool_bytes")),
        oldest_unsent_s=_number(said.get("oldest_unsent_s")),
        dropped=_counts(dropped) if isinstance(dropped, dict) else None,
    )


def _whole(value: Any) -> int | None:  # noqa: ANN401  # what an agent said
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:  # noqa: ANN401  # what an agent said
    return float(value) if isinstance(value, int | float) else None


def _counts(said: dict[str, Any]) -> dict[str, int]:
    return {str(name): value for name, value in said.items() if isinstance(value, int)}
