"""Agents: who sends, since when, what they hold back and what they dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
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
    version, heartbeat_age_s, spool_bytes, oldest_unsent_s, dropped, cpu_ratio, rss_bytes
        As of the last heartbeat; None if there was none. `dropped`: events by reason. `cpu_ratio`:
        of one core.
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
    version: str | None
    cpu_ratio: float | None = None
    rss_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents are asked for; None: any.

    Attributes
    ----------
    now_ns, down_ns
        Unix time, and the age of a heartbeat from which an agent is down.
    worst_first
        Those that are down first, then those that lost most; else last data first.
    """

    now_ns: int
    down_ns: int
    job_id: str | None = None
    down: bool | None = None
    ended: bool | None = None
    host: str | None = None
    attempt_id: str | None = None
    worst_first: bool = False


def list_agents(
    session: Session, tenant_id: str, wanted: AgentFilter, part: Slice
) -> Page[AgentRow]:
    """Streams of a tenant, a page of them."""
    limit = wanted.now_ns - wanted.down_ns
    # Without any heartbeat, the moment of registration counts.
    late = func.coalesce(Stream.heartbeat_ns, Stream.created_ns) < limit
    down = Stream.ended.is_(False) & late
    order = (Stream.last_data_ns.desc(), Stream.id)
    query = (
        select(Stream, Job.name, Attempt.number)
        .join(Job, Job.id == Stream.job_id)
        .join(Attempt, Attempt.id == Stream.attempt_id)
        .where(Stream.tenant_id == tenant_id)
        .order_by(*((down.desc(), Stream.lost_events.desc()) if wanted.worst_first else ()), *order)
    )
    if wanted.job_id is not None:
        query = query.where(Stream.job_id == wanted.job_id)
    if wanted.host is not None:
        query = query.where(Stream.host == wanted.host)
    if wanted.ended is not None:
        query = query.where(Stream.ended.is_(wanted.ended))
    if wanted.attempt_id is not None:
        query = query.where(Stream.attempt_id == wanted.attempt_id)
    if wanted.down is not None:
        query = query.where(down if wanted.down else ~down)
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
        version=_version(said.get("agent")),
        cpu_ratio=_of_agent(said, "cpu_ratio"),
        rss_bytes=_of_agent(said, "rss_bytes"),
    )


def _of_agent(said: Mapping[str, Any], name: str) -> float | None:
    agent = said.get("agent")
    return _number(agent.get(name)) if isinstance(agent, dict) else None


def _version(agent: Any) -> str | None:  # noqa: ANN401  # what an agent said
    version = agent.get("version") if isinstance(agent, dict) else None
    return version if isinstance(version, str) else None


def _whole(value: Any) -> int | None:  # noqa: ANN401  # what an agent said
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:  # noqa: ANN401  # what an agent said
    return float(value) if isinstance(value, int | float) else None


def _counts(said: dict[str, Any]) -> dict[str, int]:
    return {str(name): value for name, value in said.items() if isinstance(value, int)}
