"""Running jobs of all tenants at one moment, for metrics: bounded, and a few queries however many.

Flow: `smon.store.models` → **here** → `smon.metrics`. The numbers are those of the running
diagnosis; nothing is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import case, func, or_, select
from sqlalchemy.orm import Session

from smon.store.models import Attempt, Finding, FindingState, Job, Mode, Stream, Tenant
from smon.store.streams import chunks, layout_of
from smon.topology import Layout

#: Jobs that are looked at, those with the newest data.
MAX_JOBS: Final = 5_000
_MAX_FINDINGS: Final = 20_000

#: A job that has sent nothing for so long is not looked at any more, whatever its agents say.
SILENT_NS: Final = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Agents:
    """Streams of an attempt by state."""

    up: int = 0
    down: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class RunningFinding:
    """An open finding; see `smon.store.models.Finding`."""

    verdict: str
    cause: str
    scope: str
    severity: str
    persistence: str
    rank: int | None
    stage: int | None
    excess_s: float | None
    excess_share: float | None
    since_step: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The newest attempt of a live job, and what the running diagnosis says of it.

    Attributes
    ----------
    tenant
        Its name.
    analysed_ns
        When the running diagnosis was made; None if there is none yet.
    last_ops_ns
        When a stream that sends ops sent last; None if none does.
    """

    tenant: str
    job_id: str
    name: str
    attempt_id: str
    attempt: int
    layout: Layout
    created_ns: int
    last_data_ns: int
    ready_step: int | None
    live_step: int | None
    analysed_ns: int | None
    recorded_s: float | None
    ideal_s: float | None
    slowdown: float | None
    waste_ratio: float | None
    coverage_ratio: float | None
    aligned: bool | None
    agents: Agents
    findings: tuple[RunningFinding, ...]
    last_ops_ns: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Which jobs are running.

    Attributes
    ----------
    ended_ns
        Attempts that ended after this moment still count.
    heard_ns
        Of the others, data or a heartbeat must have come since this moment.
    down_ns
        An agent without a heartbeat since this moment is down.
    silent_ns
        Attempts without data since this moment do not count.
    """

    ended_ns: int
    heard_ns: int
    down_ns: int
    silent_ns: int


def running_jobs(session: Session, asked: Asked) -> list[RunningJob]:
    """Running jobs of all tenants, newest data first, at most `MAX_JOBS`."""
    found = _attempts(session, asked)
    ids = [row.Attempt.id for row in found]
    streams = _streams(session, ids, asked)
    found = [row for row in found if _is_running(row.Attempt, streams, asked)]
    findings = _findings(session, [row.Attempt.id for row in found])
    return [
        _job(
            row,
            streams.get(row.Attempt.id, _Streams()),
            tuple(findings.get(row.Attempt.id, ())),
        )
        for row in found
    ]


def _attempts(session: Session, asked: Asked) -> Sequence[Any]:
    """Newest attempts that may be running, with their jobs and tenants."""
    query = (
        select(Attempt, Job.name.label("job"), Tenant.name.label("tenant"))
        .join(Job, Job.id == Attempt.job_id)
        .join(Tenant, Tenant.id == Attempt.tenant_id)
        .where(
            Attempt.mode == Mode.LIVE,
            Attempt.last_data_ns >= asked.silent_ns,
            or_(Attempt.ended_ns.is_(None), Attempt.ended_ns >= asked.ended_ns),
        )
        .order_by(Attempt.last_data_ns.desc(), Attempt.id)
        .limit(MAX_JOBS)
    )
    newest: dict[str, Any] = {}
    for row in session.execute(query):
        known = newest.get(row.Attempt.job_id)
        if known is None or known.Attempt.number < row.Attempt.number:
            newest[row.Attempt.job_id] = row
    return list(newest.values())


@dataclass(frozen=True, slots=True)
class _Streams:
    """Agents of an attempt by state, when it was heard of last, and when ops came last."""

    agents: Agents = field(default_factory=Agents)
    heard_ns: int = 0
    last_ops_ns: int | None = None


def _streams(session: Session, ids: Sequence[str], asked: Asked) -> dict[str, _Streams]:
    """Streams of attempts, taken together."""
    seen = func.coalesce(Stream.heartbeat_ns, Stream.created_ns)
    ended = func.sum(case((Stream.ended, 1), else_=0))
    down = func.sum(case((Stream.ended.is_(False) & (seen < asked.down_ns), 1), else_=0))
    ops = func.max(case((Stream.events > 0, Stream.last_data_ns)))
    found: dict[str, _Streams] = {}
    for part in chunks(ids):
        query = (
            select(Stream.attempt_id, func.count(), ended, down, func.max(seen), ops)
            .where(Stream.attempt_id.in_(part))
            .group_by(Stream.attempt_id)
        )
        for attempt, total, over, gone, last, last_ops in session.execute(query):
            agents = Agents(int(total - over - gone), int(gone), int(over))
            found[attempt] = _Streams(agents, int(last), last_ops)
    return found


def _is_running(attempt: Attempt, streams: Mapping[str, _Streams], asked: Asked) -> bool:
    if attempt.ended_ns is not None:
        return True
    heard_ns = streams.get(attempt.id, _Streams()).heard_ns
    return max(attempt.last_data_ns, heard_ns) >= asked.heard_ns


def _findings(session: Session, ids: Sequence[str]) -> dict[str, list[RunningFinding]]:
    """Open findings by attempt, dearest first."""
    kind = Finding.document["persistence"]["kind"].as_string().label("kind")
    since = func.coalesce(Finding.onset_step, Finding.opened_step).label("since")
    by_attempt: dict[str, list[RunningFinding]] = {}
    for part in chunks(ids):
        query = (
            select(
                *(Finding.attempt_id, Finding.verdict, Finding.cause, Finding.scope),
                *(Finding.severity, Finding.rank, Finding.stage, Finding.excess_s),
                *(Finding.excess_share, kind, since),
            )
            .where(Finding.attempt_id.in_(part), Finding.state == FindingState.OPEN)
            .order_by(Finding.excess_s.desc(), Finding.id)
            .limit(_MAX_FINDINGS)
        )
        for row in session.execute(query):
            by_attempt.setdefault(row.attempt_id, []).append(_finding(row))
    return by_attempt


def _finding(row: Any) -> RunningFinding:  # noqa: ANN401  # a row of a query
    return RunningFinding(
        verdict=row.verdict,
        cause=row.cause,
        scope=row.scope,
        severity=row.severity,
        persistence=row.kind or "",
        rank=row.rank,
        stage=row.stage,
        excess_s=row.excess_s,
        excess_share=row.excess_share,
        since_step=row.since,
    )


def _job(
    row: Any,  # noqa: ANN401  # a row of a query
    streams: _Streams,
    findings: tuple[RunningFinding, ...],
) -> RunningJob:
    attempt: Attempt = row.Attempt
    return RunningJob(
        tenant=row.tenant,
        job_id=attempt.job_id,
        name=row.job,
        attempt_id=attempt.id,
        attempt=attempt.number,
        layout=layout_of(attempt),
        created_ns=attempt.created_ns,
        last_data_ns=attempt.last_data_ns,
        ready_step=attempt.ready_step,
        live_step=attempt.live_step,
        analysed_ns=attempt.live_analysed_ns,
        recorded_s=attempt.live_recorded_s,
        ideal_s=attempt.live_ideal_s,
        slowdown=attempt.live_slowdown,
        waste_ratio=attempt.live_waste_ratio,
        coverage_ratio=attempt.live_coverage_ratio,
        aligned=attempt.live_aligned,
        agents=streams.agents,
        findings=findings,
        last_ops_ns=streams.last_ops_ns,
    )
