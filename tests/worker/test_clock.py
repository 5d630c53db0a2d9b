"""Clocks of workers that do not agree: leases go by the database's."""

from __future__ import annotations

import logging
import time
from unittest.mock import Mock

import pytest

from smon.errors import StoreError
from smon.store import work
from smon.store.database import Database
from smon.store.models import Task, Tenant
from smon.store.work import Terms
from smon.worker.clock import SharedClock

_NS = 10**9
_TERMS = Terms(30.0, 3)


def clock(database: Database, ahead_s: float = 0.0) -> SharedClock:
    """Of a machine whose clock is so far ahead."""
    made = SharedClock(database, lambda: time.time_ns() + int(ahead_s * _NS))
    made.adjust()
    return made


def test_work_is_not_taken_from_who_renews_it_because_of_a_clock(database: Database) -> None:
    """With clocks 40 s apart two workers once took a window from each other until it was lost."""
    if database.is_sqlite:
        # All workers of it are on one machine, and have one clock.
        assert database.ahead_ns() == 0
        return
    with database.write() as session:
        session.merge(Tenant(id="default", name="default", created_ns=1))
        session.flush()
        session.add(
            Task(
                id="k", key="k", tenant_id="default", kind="timeline", options={}, state="queued",
                created_ns=1, fence=0, lease_ns=0, tries=0,
            )
        )  # fmt: skip
    clocks = {"slow": clock(database, -40.0), "right": clock(database), "fast": clock(database, 40)}
    times = [now() for now in clocks.values()]
    assert max(times) - min(times) < 5 * _NS
    taken = []
    for name, now in clocks.items():
        with database.write() as session:
            taken.append(work.claim(session, Task, name, now(), _TERMS))
    assert [claim is not None for claim in taken] == [True, False, False]


def test_a_database_that_is_away_leaves_the_clock_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is asked again; one that is far off is told."""
    now_s = 0.0
    asked = Mock(side_effect=[3 * _NS, StoreError("away"), 5 * _NS // 2])
    database = Mock(spec=Database, ahead_ns=asked)
    found = SharedClock(database, lambda: 100 * _NS, lambda: now_s)
    with caplog.at_level(logging.WARNING):
        found.adjust()
        assert "3.0 s behind" in caplog.text
    assert found() == 103 * _NS
    found.adjust()
    assert asked.call_count == 1
    now_s = 31.0
    found.adjust()
    assert found() == 103 * _NS
    found.adjust()
    assert found() == 102.5 * _NS
    assert asked.call_count == 3
