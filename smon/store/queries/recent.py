"""The latest steps of many attempts at once: what a sparkline shows.

Flow: table ``steps`` → **here** → `dashboards.web.views.fleet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from smon.store.models import Attempt, StepResult

#: Steps of one sparkline.
POINTS: Final = 32

#: (step, slowdown); None where the step was left out.
Recent = tuple[tuple[int, float | None], ...]


def recent_slowdowns(
    session: Session, tenant_id: str, attempts: Sequence[str], points: int = POINTS
) -> dict[str, Recent]:
    """The latest steps of each of these attempts, ascending, as the history has them.

    Each attempt costs as many rows as it has points, however old it is.
    """
    earlier = aliased(StepResult)
    first = (
        select(earlier.step)
        .where(earlier.attempt_id == Attempt.id)
        .order_by(earlier.step.desc())
        .offset(points - 1)
        .limit(1)
        .scalar_subquery()
    )
    query = (
        select(StepResult.attempt_id, StepResult.step, StepResult.slowdown)
        .join(Attempt, Attempt.id == StepResult.attempt_id)
        .where(
            Attempt.tenant_id == tenant_id,
            Attempt.id.in_(list(attempts)),
            StepResult.step >= func.coalesce(first, -1),
        )
        .order_by(StepResult.attempt_id, StepResult.step)
    )
    found: dict[str, list[tuple[int, float | None]]] = {}
    for attempt, step, slowdown in session.execute(query):
        found.setdefault(attempt, []).append((step, slowdown))
    return {attempt: tuple(mine) for attempt, mine in found.items()}
