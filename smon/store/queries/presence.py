"""Which jobs run on a host now: those with a stream from there that has not ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.store.models import Attempt, Job, Stream
from smon.store.queries.paging import seconds

#: Streams of one host that are looked at, those with the newest data.
MAX_STREAMS: Final = 256

#: Ranks of one job on one host that are named.
MAX_RANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Presence:
    """A job that runs on a host; `ranks`: those that its streams deliver from there."""

    job_id: str
    job: str
    attempt: int
    streams: int
    ranks: tuple[int, ...]
    last_data_s: float


def presence_of(session: Session, tenant_id: str, host: str) -> tuple[Presence, ...]:
    """Jobs with an open stream from a host, newest data first."""
    query = (
        select(Stream.job_id, Job.name, Attempt.number, Stream.ranks, Stream.last_data_ns)
        .join(Job, Job.id == Stream.job_id)
        .join(Attempt, Attempt.id == Stream.attempt_id)
        .where(
            Stream.tenant_id == tenant_id,
            Stream.host == host,
            Stream.ended.is_(False),
            Attempt.ended_ns.is_(None),
        )
        .order_by(Stream.last_data_ns.desc(), Stream.id)
        .limit(MAX_STREAMS)
    )
    found: dict[tuple[str, int], Presence] = {}
    for row in session.execute(query):
        known = found.get((row.job_id, row.number))
        ranks = {*(known.ranks if known else ()), *_whole(row.ranks)}
        found[row.job_id, row.number] = Presence(
            job_id=row.job_id,
            job=row.name,
            attempt=row.number,
            streams=1 + (known.streams if known else 0),
            ranks=tuple(sorted(ranks)[:MAX_RANKS]),
            last_data_s=known.last_data_s if known else seconds(row.last_data_ns),
        )
    return tuple(found.values())


def _whole(values: list[object]) -> list[int]:
    return [value for value in values if isinstance(value, int)]
