"""Hosts across jobs: who was a suspect, where, and at what cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.database import Database
from smon.store.models import Attempt, Job, Stream
from smon.store.queries.hosts import (
    HostFilter,
    HostKind,
    Suspicion,
    get_host,
    list_hosts,
    standing_of,
    wasted,
)
from smon.store.queries.paging import Slice
from smon.store.queries.presence import presence_of
from tests.service import add_tenant
from tests.store.rows import DAY_NS, NOW, open_stream, request
from tests.web.places import finding_row

ALL = HostFilter(NOW)
PART = Slice(50)


def one(first: int, last: int, excess_s: float | None, **fields: object) -> Suspicion:
    """A finding in these steps of a job of 100 GPUs."""
    plain = {
        "finding_id": "f", "job_id": "j", "job": "name", "attempt": 0, "host": "node",
        "gpu_uuid": None, "rank": 1, "state": "cleared", "severity": "warning",
        "cause": "slow_gpu", "scope": "rank", "excess_s": excess_s, "excess_share": 0.1,
        "gpus": 100, "first_step": first, "last_step": last, "gpu_hours_per_day": 0.0,
        "cost_per_day": None, "lost_gpu_hours": 0.0, "lost_cost": None, "opened_s": 0.0,
        "last_s": 0.0, "cleared_s": None,
    }  # fmt: skip
    return Suspicion(**{**plain, **fields})  # type: ignore[arg-type]


#: 0.36 s on 100 GPUs, in hours.
STEP = 0.36 * 100 / 3600


@pytest.mark.parametrize(
    "found, steps",
    [
        ([], 0),
        ([one(0, 9, 0.36)], 10),
        ([one(0, 9, 0.36), one(20, 29, 0.36)], 20),
        # The same steps twice: once.
        ([one(0, 9, 0.36), one(0, 9, 0.36)], 10),
        # Half as dear in twice as many steps: ten dear ones and ten cheap ones.
        ([one(0, 9, 0.36), one(0, 19, 0.18)], 15),
        ([one(5, 9, 0.36), one(0, 14, 0.18), one(3, 4, 0.36)], 7 + 8 / 2),
        # Another attempt, or another job, is another time.
        ([one(0, 9, 0.36), one(0, 9, 0.36, attempt=1)], 20),
        ([one(0, 9, 0.36), one(0, 9, 0.36, job_id="k")], 20),
        # What saves time, or says nothing, wastes none.
        ([one(0, 9, -1.0)], 0),
        ([one(0, 9, None)], 0),
    ],
)
def test_each_step_of_a_job_is_paid_for_once(found: list[Suspicion], steps: float) -> None:
    """By the dearest finding that was there in it."""
    assert wasted(found) == pytest.approx(steps * STEP)
    assert wasted(reversed(found)) == pytest.approx(steps * STEP)


@pytest.fixture
def tenant(database: Database) -> str:
    """A tenant without jobs."""
    return add_tenant(database)


def add(session: Session, tenant: str, job: str, **fields: object) -> None:
    """A finding of a job of 4 GPUs, which is made if it is not there."""
    attempt = session.execute(
        select(Attempt)
        .join(Job, Job.id == Attempt.job_id)
        .where(Job.name == job, Attempt.tenant_id == tenant)
    ).scalar_one()
    session.add(finding_row(attempt, **fields))


def test_those_in_most_jobs_come_first(database: Database, tenant: str) -> None:
    """Then those that waste most now, then those that wasted most."""
    for job in ("a", "b"):
        open_stream(database, tenant, replace(request(f"of {job}"), job=job))
    with database.write() as session:
        add(session, tenant, "a", host="once", excess_s=9.0)
        add(session, tenant, "a", host="twice", excess_s=0.1)
        add(session, tenant, "b", host="twice", excess_s=0.1, cause="thermal")
        add(session, tenant, "b", host="over", state="cleared")
    with database.read() as session:
        page = list_hosts(session, tenant, ALL, PART, 2.0)
        names = [row.id for row in page.items]
        first = page.items[0]
        standing = standing_of(session, tenant, page.items[1])
    assert names == ["twice", "once", "over"]
    assert (first.jobs, first.findings, first.recurs) == (2, 2, True)
    assert first.lost_cost == pytest.approx(2.0 * first.lost_gpu_hours)
    assert page.items[2].gpu_hours_per_day == 0.0
    assert (standing.suspects, standing.recurring, standing.worse) == (3, 1, 1)


def test_lists_can_be_narrowed(database: Database, tenant: str) -> None:
    """By name in any case, taken literally; by days; by GPU."""
    open_stream(database, tenant)
    with database.write() as session:
        add(session, tenant, "pretrain", host="Node_1", gpu_uuid="GPU-1")
        add(session, tenant, "pretrain", host="NodeX1", last_ns=NOW - 9 * DAY_NS)

    def names(wanted: HostFilter) -> set[str]:
        with database.read() as session:
            return {row.id for row in list_hosts(session, tenant, wanted, PART, None).items}

    assert names(ALL) == {"Node_1", "NodeX1"}
    assert names(replace(ALL, name="node_1")) == {"Node_1"}
    assert names(replace(ALL, days=8.0)) == {"Node_1"}
    assert names(replace(ALL, kind=HostKind.GPU)) == {"GPU-1"}


def test_pages_of_a_list_join(database: Database, tenant: str) -> None:
    """Every host is on one of them."""
    open_stream(database, tenant)
    with database.write() as session:
        for number in range(5):
            add(session, tenant, "pretrain", host=f"node-{number}")
    with database.read() as session:
        parts = [
            list_hosts(session, tenant, ALL, Slice(2, offset), None).items for offset in (0, 2, 4)
        ]
    assert [row.id for part in parts for row in part] == [f"node-{number}" for number in range(5)]


def test_a_gpu_is_found_by_its_uuid_and_knows_its_host(database: Database, tenant: str) -> None:
    """What runs on that host runs beside it."""
    open_stream(database, tenant, replace(request(), host="node-9"))
    with database.write() as session:
        add(session, tenant, "pretrain", host="node-9", gpu_uuid="GPU-9")
    with database.read() as session:
        detail = get_host(session, tenant, "GPU-9", None)
    assert detail.host.kind is HostKind.GPU
    assert [each.job for each in detail.running] == ["pretrain"]


def test_a_host_is_known_by_its_streams(database: Database, tenant: str) -> None:
    """All of one job are one entry; those that have ended, and other tenants', are none."""
    for key, ranks in (("a", (0, 1)), ("b", (2, 3)), ("ended", (7,))):
        open_stream(database, tenant, replace(request(key), ranks=ranks, host="node-1"))
    open_stream(database, add_tenant(database, "other"), request("theirs"))
    with database.write() as session:
        session.execute(update(Stream).where(Stream.key == "ended").values(ended=True))
    with database.read() as session:
        (found,) = presence_of(session, tenant, "node-1")
        detail = get_host(session, tenant, "node-1", None)
        with pytest.raises(MissingError):
            get_host(session, tenant, "node-2", None)
    assert (found.job, found.streams, found.ranks) == ("pretrain", 2, (0, 1, 2, 3))
    assert (detail.host.jobs, detail.host.first_s) == (0, None)
