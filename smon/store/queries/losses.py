"""What slow jobs have lost in a period: the windows of the period, added up.

Flow: tables ``results``, ``windows``, ``attempts`` → **here** → `smon.store.queries.fleet`.

A window loses its waste times its mean step time, its number of steps and its GPUs. A window of a
live job belongs to the moment at which its last data came, one of a recorded trace to the moment
at which its last step began; traces without unix times belong to no period. Steps that no window
has yet are not known: `Loss.covered_ratio` says how much of the time that jobs ran is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, case, func, literal, or_, select
from sqlalchemy.orm import Session, aliased

from smon.store.models import Attempt, Job, Mode, Result, StepResult, TimeBase, Window, WindowKind
from smon.store.queries.paging import seconds
from smon.store.streams import chunks

_HOUR_S: Final = 3600.0

#: Cause of what no finding explains.
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Period:
    """From one moment to another, unix ns; `price` of a GPU hour, None: no money."""

    begin_ns: int
    end_ns: int
    price: float | None


@dataclass(frozen=True, slots=True)
class LostCause:
    """What one cause took: windows whose dearest finding it was."""

    cause: str
    jobs: int
    lost_gpu_hours: float
    lost_cost: float | None


@dataclass(frozen=True, slots=True)
class LostJob:
    """What one job lost; `cause` took most of it."""

    job_id: str
    name: str
    cause: str
    gpu_hours: float
    lost_gpu_hours: float
    lost_share: float
    lost_cost: float | None


@dataclass(frozen=True, slots=True)
class Loss:
    """What all jobs lost in a period.

    Attributes
    ----------
    jobs
        With an analysed window in the period.
    gpu_hours, lost_gpu_hours, lost_share
        Of these windows, and the part that was lost.
    ran_gpu_hours, covered_ratio
        How long the GPUs of all jobs were busy, from a job's first data to its last, and the part
        of it that has been analysed; None if nothing ran.
    causes, worst
        Dearest first; `worst` jobs, as many as asked for.
    """

    begin_s: float
    end_s: float
    jobs: int
    gpu_hours: float
    lost_gpu_hours: float
    lost_share: float | None
    lost_cost: float | None
    ran_gpu_hours: float
    covered_ratio: float | None
    causes: tuple[LostCause, ...]
    worst: tuple[LostJob, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one attempt lost by one cause, in GPU-hours."""

    job_id: str
    name: str
    live: bool
    cause: str
    busy: float
    lost: float


def loss_in(session: Session, tenant_id: str, period: Period, most: int) -> Loss:
    """What the jobs of a tenant lost in a period, with the `most` dearest jobs."""
    parts = _parts(session, tenant_id, period)
    busy, lost = sum(part.busy for part in parts), sum(part.lost for part in parts)
    ran = _ran(session, tenant_id, period) + sum(part.busy for part in parts if not part.live)
    return Loss(
        begin_s=seconds(period.begin_ns),
        end_s=seconds(period.end_ns),
        jobs=len({part.job_id for part in parts}),
        gpu_hours=busy,
        lost_gpu_hours=lost,
        lost_share=lost / busy if busy else None,
        lost_cost=_money(lost, period.price),
        ran_gpu_hours=ran,
        covered_ratio=min(busy / ran, 1.0) if ran else None,
        causes=_causes(parts, period.price),
        worst=_jobs(parts, period.price)[:most],
    )


def _money(hours: float, price: float | None) -> float | None:
    return None if price is None else hours * price


def _causes(parts: Sequence[_Part], price: float | None) -> tuple[LostCause, ...]:
    found: dict[str, list[_Part]] = {}
    for part in parts:
        if part.lost > 0.0:
            found.setdefault(part.cause, []).append(part)
    rows = [
        LostCause(cause, len({part.job_id for part in mine}), lost, _money(lost, price))
        for cause, mine in found.items()
        for lost in [sum(part.lost for part in mine)]
    ]
    return tuple(sorted(rows, key=lambda row: (-row.lost_gpu_hours, row.cause)))


def _jobs(parts: Sequence[_Part], price: float | None) -> tuple[LostJob, ...]:
    found: dict[str, list[_Part]] = {}
    for part in parts:
        found.setdefault(part.job_id, []).append(part)
    rows = [_job(mine, price) for mine in found.values()]
    lossy = [row for row in rows if row.lost_gpu_hours > 0.0]
    return tuple(sorted(lossy, key=lambda row: (-row.lost_gpu_hours, row.name)))


def _job(parts: Sequence[_Part], price: float | None) -> LostJob:
    busy, lost = sum(part.busy for part in parts), sum(part.lost for part in parts)
    by_cause: dict[str, float] = {}
    for part in parts:
        by_cause[part.cause] = by_cause.get(part.cause, 0.0) + part.lost
    return LostJob(
        job_id=parts[0].job_id,
        name=parts[0].name,
        cause=max(by_cause, key=lambda cause: (by_cause[cause], cause)),
        gpu_hours=busy,
        lost_gpu_hours=lost,
        lost_share=lost / busy if busy else 0.0,
        lost_cost=_money(lost, price),
    )


# --- questions to the database ----------------------------------------------------------------

#: Steps of a window; those that the trace leaves out count like the mean of the others.
_STEPS: Final = Window.last_step - Window.first_step + 1
_GPUS: Final = Attempt.dp * Attempt.pp * Attempt.tp * Attempt.cp
_WASTE: Final = case((Result.waste_ratio > 0.0, Result.waste_ratio), else_=0.0)


def _parts(session: Session, tenant_id: str, period: Period) -> list[_Part]:
    attempts = _attempts(session, tenant_id, period)
    bounds = (period.begin_ns, period.end_ns)
    begun = aliased(StepResult)
    last_begun = (
        select(begun.start_ns)
        .where(begun.attempt_id == Window.attempt_id, begun.step == Window.last_step)
        .scalar_subquery()
    )
    arrived = _sums(tenant_id).where(Window.updated_ns.between(*bounds))
    found = [row for row in session.execute(arrived) if _is_live(attempts.get(row.attempt_id))]
    dated = [
        name
        for name, attempt in attempts.items()
        if attempt.mode == Mode.RECORDED and attempt.time_base == TimeBase.UNIX
    ]
    for ids in chunks(dated):
        recorded = _sums(tenant_id).where(Window.attempt_id.in_(ids), last_begun.between(*bounds))
        found += session.execute(recorded)
    return [_part(attempts[row.attempt_id], row) for row in found]


def _is_live(attempt: Any) -> bool:  # noqa: ANN401  # a row of a query, or none
    return attempt is not None and bool(attempt.mode == Mode.LIVE)


def _part(attempt: Any, row: Any) -> _Part:  # noqa: ANN401  # rows of queries
    gpu_hours = attempt.gpus / _HOUR_S
    return _Part(
        job_id=attempt.job_id,
        name=attempt.name,
        live=attempt.mode == Mode.LIVE,
        cause=row.cause or UNKNOWN,
        busy=row.busy_s * gpu_hours,
        lost=row.lost_s * gpu_hours,
    )


def _attempts(session: Session, tenant_id: str, period: Period) -> dict[str, Any]:
    """Attempts that have had data since the period began, by id."""
    query = (
        select(
            *(Attempt.id, Attempt.job_id, Job.name, Attempt.mode, Attempt.time_base),
            _GPUS.label("gpus"),
        )
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.tenant_id == tenant_id, Attempt.last_data_ns >= period.begin_ns)
    )
    return {row.id: row for row in session.execute(query)}


def _sums(tenant_id: str) -> Select[*tuple[Any, ...]]:
    """Seconds by attempt and cause, of the newest report of each window.

    Where an attempt sends ops, its captures are of steps that these tell of already.
    """
    of_ops = aliased(Window)
    has_ops = (
        select(of_ops.id)
        .where(of_ops.attempt_id == Window.attempt_id, of_ops.kind == WindowKind.STEPS)
        .exists()
    )
    other = aliased(Result)
    newest = (
        select(func.max(other.created_ns))
        .where(other.window_id == Result.window_id)
        .scalar_subquery()
    )
    busy = Result.recorded_s * _STEPS
    return (
        select(
            *(Window.attempt_id, Result.cause),
            func.sum(busy).label("busy_s"),
            func.sum(busy * _WASTE).label("lost_s"),
        )
        .join(Result, Result.window_id == Window.id)
        .where(
            Window.tenant_id == tenant_id,
            Result.waste_ratio.is_not(None),
            Result.recorded_s.is_not(None),
            Result.created_ns == newest,
            or_(Window.kind == WindowKind.STEPS, ~has_ops),
        )
        .group_by(Window.attempt_id, Result.cause)
    )


def _ran(session: Session, tenant_id: str, period: Period) -> float:
    """GPU-hours from the first data of each live attempt to its last, in the period."""
    begin = case((Attempt.created_ns > period.begin_ns, Attempt.created_ns), else_=period.begin_ns)
    end = case((Attempt.last_data_ns < period.end_ns, Attempt.last_data_ns), else_=period.end_ns)
    seconds_run = (end - begin) / literal(1e9)
    total = session.execute(
        select(func.sum(seconds_run * _GPUS)).where(
            Attempt.tenant_id == tenant_id,
            Attempt.mode == Mode.LIVE,
            Attempt.last_data_ns > period.begin_ns,
            Attempt.created_ns < period.end_ns,
        )
    ).scalar()
    return float(total or 0.0) / _HOUR_S
