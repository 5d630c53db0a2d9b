"""Running jobs in a database, as agents and the running diagnosis leave them."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from smon.config import Settings
from smon.metrics.jobs import JobCollector
from smon.store.database import Database
from smon.store.models import Attempt, Finding, Job, Stream, new_id
from smon.store.tenants import tenant_of

SECOND = 10**9

#: The tests' present.
NOW = 1_790_000_000 * SECOND

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def add_job(
    session: Session,
    name: str = "llama",
    *,
    tenant: str = "default",
    streams: int = 1,
    **fields: Any,  # noqa: ANN401  # of the attempt
) -> Attempt:
    """A job whose running diagnosis was made a second ago; its attempt."""
    tenant_id = tenant_of(session, tenant, NOW)
    job = Job(
        id=new_id(), tenant_id=tenant_id, name=name, created_ns=NOW - 3600 * SECOND,
        last_data_ns=NOW - 2 * SECOND,
    )  # fmt: skip
    plain: dict[str, Any] = {
        "number": 0, "dp": 8, "pp": 4, "tp": 8, "cp": 1, "ep": 1, "vpp": 1, "mode": "live",
        "time_base": "unix", "window_steps": 40, "notes": [], "created_ns": NOW - 3600 * SECOND,
        "last_data_ns": NOW - 2 * SECOND, "ready_step": 100, "live_step": 100,
        "live_analysed_ns": NOW - SECOND, "live_verdict": "none", "live_slowdown": 1.25,
        "live_waste_ratio": 0.2, "live_recorded_s": 5.0, "live_ideal_s": 4.0,
        "live_coverage_ratio": 1.0, "live_aligned": True,
    }  # fmt: skip
    attempt = Attempt(tenant_id=tenant_id, job_id=job.id, **{**plain, **fields})
    session.add(job)
    session.flush()
    session.add(attempt)
    session.flush()
    for number in range(streams):
        add_stream(session, attempt, number)
    return attempt


def add_stream(session: Session, attempt: Attempt, number: int, **fields: Any) -> None:  # noqa: ANN401  # any column
    """A producer of a job, whose agent was heard of a second ago."""
    plain: dict[str, Any] = {
        "key": f"{attempt.id}-{number}", "host": f"node-{number}", "source": "recorder",
        "ranks": [number], "epoch": 0, "ended": False, "created_ns": NOW - 3600 * SECOND,
        "last_data_ns": attempt.last_data_ns, "heartbeat_ns": NOW - SECOND, "events": 1000,
    }  # fmt: skip
    ids = {"tenant_id": attempt.tenant_id, "job_id": attempt.job_id, "attempt_id": attempt.id}
    session.add(Stream(**ids, **{**plain, **fields}))
    session.flush()


def add_finding(session: Session, attempt: Attempt, **fields: Any) -> None:  # noqa: ANN401  # any column
    """An open finding; `kind`: of its persistence."""
    kind = fields.pop("kind", "onset")
    plain: dict[str, Any] = {
        "key": new_id(), "state": "open", "verdict": "straggler", "cause": "slow_gpu",
        "scope": "tp_group", "severity": "warning", "rank": 168, "dp": 5, "stage": 2,
        "excess_s": 0.5, "excess_share": 0.1, "onset_step": 42, "opened_step": 46,
        "opened_ns": NOW - 60 * SECOND, "last_step": 100, "last_ns": NOW - SECOND,
        "document": {"persistence": {"kind": kind}},
    }  # fmt: skip
    ids = {"tenant_id": attempt.tenant_id, "job_id": attempt.job_id, "attempt_id": attempt.id}
    session.add(Finding(**ids, **{**plain, **fields}))
    session.flush()


def collector(database: Database, now: int = NOW, **settings: Any) -> JobCollector:  # noqa: ANN401  # fields of Settings
    """A collector whose present is the tests'."""
    plain = {"public_url": "https://smon.example"}
    return JobCollector(database, Settings(**{**plain, **settings}), clock=lambda: now)


def scraped(one: JobCollector) -> Samples:
    """Values by name and labels, as a scrape has them."""
    found: Samples = {}
    for family in one.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    """Labels as `scraped` has them."""
    return frozenset(labels.items())
