"""What a period has lost: exact sums, each window once, and how much of the period is known."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, select, update

from smon.store.database import Database
from smon.store.models import Attempt, Result, StepResult, Tenant, Window, new_id
from smon.store.queries.losses import Loss, Period, loss_in
from tests.load.pages import IDEAL_S, SECOND, SMALL, STEP_S, WINDOW, add_job, report_of_shape
from tests.store.rows import NOW

#: GPU-hours of one window of a small job, and what it loses at a slowdown of 1.25.
BUSY = STEP_S * WINDOW * SMALL.world_size / 3600
LOST = BUSY * (1 - IDEAL_S / STEP_S)

WINDOW_NS = int(STEP_S * SECOND) * WINDOW
DAY_NS = 86_400 * SECOND


def put(database: Database, name: str, cause: str | None = "slow_gpu", windows: int = 3) -> str:
    """A live job at 1.25 times its ideal step time, or a healthy one; its id."""
    slowdown = STEP_S / IDEAL_S if cause else 1.0
    report = report_of_shape(SMALL, range(WINDOW), slowdown, cause)
    with database.write() as session:
        if session.get(Tenant, "default") is None:
            session.execute(insert(Tenant), [{"id": "default", "name": "d", "created_ns": NOW}])
        return add_job(session, name, report, windows, NOW)


def lost(
    database: Database,
    begin_ns: int = NOW - DAY_NS,
    end_ns: int = NOW,
    *,
    price: float | None = None,
    tenant: str = "default",
    most: int = 10,
) -> Loss:
    """Of the last day."""
    with database.read() as session:
        return loss_in(session, tenant, Period(begin_ns, end_ns, price), most)


def change(database: Database, job_id: str, table: Any, **values: Any) -> None:  # noqa: ANN401  # a table, columns
    """Set columns of all rows of a job."""
    with database.write() as session:
        session.execute(update(table).where(table.job_id == job_id).values(**values))


def test_windows_add_up(database: Database) -> None:
    """Waste times step time times steps times GPUs, over all windows; money by the price."""
    put(database, "job")
    found = lost(database, price=2.0)
    assert found.gpu_hours == pytest.approx(3 * BUSY)
    assert found.lost_gpu_hours == pytest.approx(3 * LOST)
    assert found.lost_share == pytest.approx(0.2)
    assert found.lost_cost == pytest.approx(2 * 3 * LOST)
    assert found.covered_ratio == pytest.approx(1.0)
    assert found.jobs == 1


def test_the_period_ends_where_it_says(database: Database) -> None:
    """Only windows whose last data came in the period count, and only that time."""
    put(database, "job")
    late = lost(database, begin_ns=NOW - WINDOW_NS - SECOND)
    assert late.gpu_hours == pytest.approx(2 * BUSY)
    early = lost(database, end_ns=NOW - WINDOW_NS)
    assert early.gpu_hours == pytest.approx(2 * BUSY)
    assert early.ran_gpu_hours == pytest.approx(2 * BUSY)
    nothing = lost(database, begin_ns=NOW - 3 * DAY_NS, end_ns=NOW - 2 * DAY_NS)
    assert (nothing.jobs, nothing.lost_share, nothing.covered_ratio) == (0, None, None)


def test_what_is_not_analysed_is_not_covered(database: Database) -> None:
    """A job that ran twice as long as its windows is known by half."""
    job_id = put(database, "job")
    change(database, job_id, Attempt, created_ns=NOW - 6 * WINDOW_NS)
    found = lost(database)
    assert found.ran_gpu_hours == pytest.approx(6 * BUSY)
    assert found.covered_ratio == pytest.approx(0.5)
    assert found.lost_gpu_hours == pytest.approx(3 * LOST)


def test_causes_and_jobs_share_the_whole(database: Database) -> None:
    """Each window counts for its own cause; the parts make the sum, dearest first."""
    first = put(database, "a", windows=4)
    put(database, "b", cause="gc", windows=2)
    put(database, "calm", cause=None)
    with database.write() as session:
        window = session.scalars(
            select(Window.id).where(Window.job_id == first).order_by(Window.number).limit(1)
        ).one()
        session.execute(update(Result).where(Result.window_id == window).values(cause=None))
    found = lost(database, price=1.0)
    assert [(each.cause, each.jobs) for each in found.causes] == [
        ("slow_gpu", 1),
        ("gc", 1),
        ("unknown", 1),
    ]
    hours = [each.lost_gpu_hours / LOST for each in found.causes]
    assert hours == pytest.approx([3, 2, 1])
    assert [(each.name, each.cause) for each in found.worst] == [("a", "slow_gpu"), ("b", "gc")]
    money = [(each.lost_cost or 0.0) / LOST for each in found.worst]
    assert money == pytest.approx([4, 2])
    assert sum(each.lost_gpu_hours for each in found.worst) == pytest.approx(found.lost_gpu_hours)
    assert [each.name for each in lost(database, most=1).worst] == ["a"]
    assert found.jobs == 3


def test_the_newest_report_of_a_window_counts_alone(database: Database) -> None:
    """A window that a later version has analysed again is not counted twice."""
    put(database, "job", windows=1)
    with database.write() as session:
        old = session.scalars(select(Result)).one()
        columns = {each.name: getattr(old, each.name) for each in Result.__table__.columns}
        new = {"id": new_id(), "code_version": "next", "created_ns": NOW + 1, "waste_ratio": 0.5}
        session.execute(insert(Result), [{**columns, **new}])
    found = lost(database)
    assert found.gpu_hours == pytest.approx(BUSY)
    assert found.lost_gpu_hours == pytest.approx(BUSY / 2)


def test_faster_than_ideal_gives_nothing_back(database: Database) -> None:
    """The error of a simulation must not pay for what another window lost."""
    first = put(database, "a", windows=1)
    put(database, "b", windows=1)
    change(database, first, Result, waste_ratio=-0.1)
    assert lost(database).lost_gpu_hours == pytest.approx(LOST)
    change(database, first, Result, waste_ratio=None)
    assert lost(database).gpu_hours == pytest.approx(BUSY)


def test_recorded_traces_count_when_they_ran(database: Database) -> None:
    """By the start of their last step; without unix times they belong to no period."""
    job_id = put(database, "job", windows=1)
    change(database, job_id, Attempt, mode="recorded")
    found = lost(database)
    assert found.lost_gpu_hours == pytest.approx(LOST)
    assert found.ran_gpu_hours == pytest.approx(BUSY)
    change(database, job_id, StepResult, start_ns=NOW - 9 * DAY_NS)
    assert lost(database).jobs == 0
    assert lost(database, begin_ns=NOW - 10 * DAY_NS).jobs == 1
    change(database, job_id, Attempt, time_base="step")
    assert lost(database, begin_ns=NOW - 10 * DAY_NS).jobs == 0


def test_another_tenant_sees_nothing(database: Database) -> None:
    """Sums are of one tenant."""
    put(database, "job")
    other = lost(database, tenant="other")
    assert (other.jobs, other.ran_gpu_hours, other.worst) == (0, 0.0, ())
