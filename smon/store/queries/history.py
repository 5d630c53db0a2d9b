"""A job over time: step by step, thinned so that no peak is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Attempt, StepResult
from smon.store.queries.paging import seconds_or_none
from smon.store.queries.windows import need_job

#: Most points of one answer.
MAX_POINTS: Final = 2000

#: Of each run of steps these are kept: shortest, longest, and most slowed down.
_KEPT: Final = 3


@dataclass(frozen=True, slots=True)
class HistoryFilter:
    """Which steps are asked for; None: the newest attempt, all its steps."""

    attempt: int | None = None
    from_step: int | None = None
    to_step: int | None = None
    points: int = MAX_POINTS


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What is known of one step."""

    step: int
    recorded_s: float | None
    simulated_s: float | None
    ideal_s: float | None
    slowdown: float | None
    skipped: str | None
    start_s: float | None


@dataclass(frozen=True, slots=True)
class History:
    """Steps of one attempt, ascending; `steps` is how many there are before thinning."""

    attempt: int | None
    steps: int
    points: tuple[StepPoint, ...]


def history_of(session: Session, tenant_id: str, job_id: str, wanted: HistoryFilter) -> History:
    """Steps of a job, at most as many points as wanted, with the extremes of what is left out.

    Raises
    ------
    MissingError
        There is no such job or attempt.
    """
    need_job(session, tenant_id, job_id)
    attempt = _attempt(session, tenant_id, job_id, wanted.attempt)
    if attempt is None:
        return History(None, 0, ())
    bounds = [StepResult.attempt_id == attempt.id, StepResult.tenant_id == tenant_id]
    if wanted.from_step is not None:
        bounds.append(StepResult.step >= wanted.from_step)
    if wanted.to_step is not None:
        bounds.append(StepResult.step <= wanted.to_step)
    count, first, last = session.execute(
        select(func.count(), func.min(StepResult.step), func.max(StepResult.step)).where(*bounds)
    ).one()
    query: Select[Any] = select(StepResult).where(*bounds).order_by(StepResult.step)
    if count > wanted.points:
        kept = _extremes(bounds, (first, last), max((wanted.points - 2) // _KEPT, 1))
        query = query.where(StepResult.step.in_(kept))
    points = tuple(_point(step) for step in session.execute(query).scalars())
    return History(attempt.number, count, points)


def _attempt(session: Session, tenant_id: str, job_id: str, number: int | None) -> Attempt | None:
    query = select(Attempt).where(Attempt.tenant_id == tenant_id, Attempt.job_id == job_id)
    if number is not None:
        query = query.where(Attempt.number == number)
    found = session.execute(query.order_by(Attempt.number.desc()).limit(1)).scalar()
    if found is None and number is not None:
        raise MissingError("expected the number of an attempt of this job")
    return found


def _extremes(
    bounds: list[ColumnElement[bool]], ends: tuple[int, int], runs: int
) -> Select[tuple[int]]:
    """The steps that are kept, of so many runs of steps of equal length."""
    first, last = ends
    width = -(-(last - first + 1) // runs)
    run = (StepResult.step - first) // width

    def place(order: Any) -> Any:  # noqa: ANN401  # SQL expressions
        return func.row_number().over(partition_by=run, order_by=(order, StepResult.step))

    ranked = (
        select(
            StepResult.step,
            place(StepResult.recorded_s.asc().nulls_last()).label("shortest"),
            place(StepResult.recorded_s.desc().nulls_last()).label("longest"),
            place(StepResult.slowdown.desc().nulls_last()).label("slowest"),
        )
        .where(*bounds)
        .subquery()
    )
    at_ends = ranked.c.step.in_((first, last))
    kept = or_(at_ends, ranked.c.shortest == 1, ranked.c.longest == 1, ranked.c.slowest == 1)
    return select(ranked.c.step).where(kept)


def _point(step: StepResult) -> StepPoint:
    return StepPoint(
        step=step.step,
        recorded_s=step.recorded_s,
        simulated_s=step.simulated_s,
        ideal_s=step.ideal_s,
        slowdown=step.slowdown,
        skipped=step.skipped,
        start_s=seconds_or_none(step.start_ns),
    )
