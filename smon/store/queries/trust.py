"""How far the numbers of a job can be trusted, all of it together.

Flow: `smon.store.queries.quality`, stored reports → **here** → the page of the data quality, REST.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Attempt, Job
from smon.store.queries.agents import AgentFilter, AgentRow, list_agents
from smon.store.queries.jobs import Missing, missing_of
from smon.store.queries.paging import Slice
from smon.store.queries.quality import (
    MAX_STREAMS,
    ClockRow,
    DropRow,
    FileDropRow,
    GapRow,
    StepCounts,
    StreamCounts,
    clocks_of,
    drops_of,
    file_drops_of,
    gaps_of,
    step_counts,
    stream_counts,
)
from smon.store.queries.reports import current_report, document_of
from smon.store.queries.windows import WindowFilter, WindowRow, list_windows
from smon.store.streams import layout_of
from smon.topology import Layout

#: Windows that are shown, the newest.
MAX_WINDOWS: Final = 120


@dataclass(frozen=True, slots=True)
class TrustQuestion:
    """Which attempt of which job (None: the newest), and when an agent counts as down."""

    job_id: str
    attempt: int | None
    now_ns: int
    down_ns: int


@dataclass(frozen=True, slots=True)
class Trust:
    """What is known of the quality of an attempt's data.

    Attributes
    ----------
    report
        The parts ``window`` and ``quality`` of the newest report; None without one.
    windows
        Newest first.
    missing
        Ranks that the newest window lacks.
    """

    job_id: str
    job: str
    attempt: int
    attempts: int
    mode: str
    layout: Layout
    report: Mapping[str, Any] | None
    windows: tuple[WindowRow, ...]
    missing: Missing
    steps: StepCounts
    clocks: tuple[ClockRow, ...]
    streams: StreamCounts
    agents: tuple[AgentRow, ...]
    drops: tuple[DropRow, ...]
    gaps: tuple[GapRow, ...]
    files: tuple[FileDropRow, ...] = ()


def trust_of(session: Session, tenant_id: str, asked: TrustQuestion) -> Trust:
    """What is known of the quality of an attempt's data.

    Raises
    ------
    MissingError
        There is no such job or attempt.
    """
    query = (
        select(Attempt, Job.name)
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == asked.job_id)
        .order_by(Attempt.number.desc())
    )
    newest = session.execute(query.limit(1)).first()
    if newest is None:
        raise MissingError("expected the id of a job that has sent something")
    attempt, name = newest
    if asked.attempt is not None:
        older = session.execute(query.where(Attempt.number == asked.attempt)).first()
        if older is None:
            raise MissingError("expected the number of an attempt of this job")
        attempt = older[0]
    windows = list_windows(
        session, tenant_id, asked.job_id, WindowFilter(attempt.number), Slice(MAX_WINDOWS)
    )
    agents = AgentFilter(
        asked.now_ns, asked.down_ns, attempt_id=attempt.id, worst_first=True, job_id=asked.job_id
    )
    return Trust(
        job_id=asked.job_id,
        job=name,
        attempt=attempt.number,
        attempts=newest[0].number,
        mode=attempt.mode,
        layout=layout_of(attempt),
        report=_report(session, tenant_id, asked.job_id, attempt.number),
        windows=windows.items,
        missing=missing_of(session, attempt.id),
        steps=step_counts(session, attempt.id),
        clocks=clocks_of(session, attempt.id),
        streams=stream_counts(session, attempt.id, asked.now_ns - asked.down_ns),
        agents=list_agents(session, tenant_id, agents, Slice(MAX_STREAMS)).items,
        drops=drops_of(session, attempt.id),
        gaps=gaps_of(session, attempt.id),
        files=file_drops_of(session, attempt.id),
    )


def _report(
    session: Session, tenant_id: str, job_id: str, attempt: int
) -> Mapping[str, Any] | None:
    """What the newest report says of itself, if it is of this attempt."""
    stored = current_report(session, tenant_id, job_id)
    if stored is None or stored.attempt != attempt:
        return None
    document = document_of(stored.packed)
    return {"window": document["window"], "quality": document["quality"]}
