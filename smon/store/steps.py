"""What is known of every step of an attempt: the newest analysis that saw it.

Flow: `smon.worker.windows`, `smon.worker.live` → **here** → table ``steps``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import Session

from smon.report import Outline
from smon.store.models import StepResult
from smon.store.results import finite
from smon.store.streams import chunks

#: Rows of one statement: each has 11 parameters, and SQLite takes 32,766.
_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step; times None where it was left out.

    Attributes
    ----------
    skipped
        Why it was left out, if it was.
    start_ns
        When it began, unix time; None if the trace does not say.
    """

    step: int
    recorded_s: float | None
    simulated_s: float | None
    ideal_s: float | None
    slowdown: float | None
    skipped: str | None
    start_ns: int | None


def rows_of(
    outline: Outline, starts: Mapping[int, int], only: Collection[int] | None = None
) -> list[StepRow]:
    """What a report says of its steps, used or left out.

    Parameters
    ----------
    starts
        Unix time of each step's first op; empty if the trace has none.
    only
        These steps, if given.
    """
    used = [
        StepRow(
            step=part.step,
            recorded_s=finite(part.recorded_s),
            simulated_s=finite(part.simulated_s),
            ideal_s=finite(part.ideal_s),
            slowdown=finite(part.slowdown),
            skipped=None,
            start_ns=starts.get(part.step),
        )
        for part in outline.per_step
    ]
    left_out = [
        StepRow(one.step, None, None, None, None, one.reason, starts.get(one.step))
        for one in outline.window.skipped
    ]
    rows = sorted([*used, *left_out], key=lambda row: row.step)
    return rows if only is None else [row for row in rows if row.step in only]


def put_steps(session: Session, ids: Mapping[str, str], rows: Sequence[StepRow], now: int) -> None:
    """Write what is known of steps, in place of what was known before.

    Parameters
    ----------
    ids
        ``attempt_id``, ``job_id`` and ``tenant_id``.
    """
    insert = sqlite_insert if session.get_bind().dialect.name == "sqlite" else postgres_insert
    for part in chunks(rows, _ROWS):
        values: list[dict[str, Any]] = [
            {
                **ids,
                "step": row.step,
                "recorded_s": row.recorded_s,
                "simulated_s": row.simulated_s,
                "ideal_s": row.ideal_s,
                "slowdown": row.slowdown,
                "skipped": row.skipped,
                "start_ns": row.start_ns,
                "analysed_ns": now,
            }
            for row in part
        ]
        new = insert(StepResult)
        names = [name for name in values[0] if name not in {"attempt_id", "step"}]
        session.execute(
            new.on_conflict_do_update(
                index_elements=["attempt_id", "step"],
                set_={name: new.excluded[name] for name in names},
            ),
            values,
        )


def latest_steps(session: Session, attempt_id: str, count: int) -> list[int]:
    """Numbers of the latest steps that have been analysed, latest first."""
    return list(
        session.scalars(
            select(StepResult.step)
            .where(StepResult.attempt_id == attempt_id)
            .order_by(StepResult.step.desc())
            .limit(count)
        )
    )


def starts_of(session: Session, attempt_id: str, steps: Collection[int]) -> dict[int, int]:
    """When these steps began, unix ns, as far as that is known."""
    found = session.execute(
        select(StepResult.step, StepResult.start_ns).where(
            StepResult.attempt_id == attempt_id,
            StepResult.step.in_(list(steps)),
            StepResult.start_ns.is_not(None),
        )
    )
    return {row.step: row.start_ns for row in found}
