from __future__ import annotations

import pytest
from sqlalchemy import update

from smon.config import Settings
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    ClockSample,
    Coverage,
    EventFile,
    Finding,
    FindingEvent,
    Import,
    Job,
    Node,
    Result,
    StepResult,
    Stream,
    Task,
    Window,
)
from smon.store.objects import Objects
from smon.store.retention import EXPIRED, expire, trim
from smon.store.streams import add_clock_samples
from tests.service import add_tenant
from tests.store.rows import (
    DAY_NS,
    NOW,
    Stored,
    add_row,
    all_rows,
    file_of,
    note,
    open_stream,
    request,
    store,
    stored_job,
)

ONE_DAY = Settings(retention_days=1)


def expired(database: Database) -> dict[int, bool]:
    """Whether the files of each window have gone, by its number."""
    return {row["number"]: row["expired_ns"] is not None for row in all_rows(database, Window)}


def stored_paths(objects: Objects) -> list[str]:
    """All event files that exist."""
    return sorted(file.path for file in objects.list("events"))


def paths(database: Database) -> list[str]:
    """All event files that have a row."""
    return sorted(row["path"] for row in all_rows(database, EventFile))


def age_windows(database: Database) -> None:
    """Window n had its last data n hours after the first one."""
    with database.write() as session:
        session.execute(update(Window).values(updated_ns=NOW + Window.number * 3600 * 10**9))


def test_old_windows_lose_their_files(database: Database, root: str) -> None:
    """By the time of their last data; the windows themselves stay, marked."""
    objects = Objects(root)
    stored_job(database, objects, windows=4, files=2)
    age_windows(database)
    removed = expire(database, objects, ONE_DAY, NOW + DAY_NS + 2 * 3600 * 10**9)
    assert expired(database) == {0: True, 1: True, 2: False, 3: False}
    assert removed.files == 4
    assert removed.bytes > 0
    assert stored_paths(objects) == paths(database)
    assert {row["state"] for row in all_rows(database, Window)} == {"done"}


def test_files_are_kept_for_ever_if_so_set(sqlite: Database, root: str) -> None:
    """0 days: age does not matter."""
    objects = Objects(root)
    stored_job(sqlite, objects)
    assert expire(sqlite, objects, Settings(retention_days=0), NOW + 9999 * DAY_NS).files == 0


@pytest.mark.parametrize("table", [Window, Job])
def test_what_is_pinned_keeps_its_files(
    database: Database, root: str, table: type[Window | Job]
) -> None:
    """A window or a whole job, against age and against size."""
    objects = Objects(root)
    stored_job(database, objects, windows=2)
    pin = update(table).values(pinned=True)
    with database.write() as session:
        session.execute(pin if table is Job else pin.where(Window.number == 0))
    settings = Settings(retention_days=1, retention_bytes=1)
    expire(database, objects, settings, NOW + 2 * DAY_NS)
    assert expired(database) == {0: False, 1: table is Window}
    assert stored_paths(objects) == paths(database)


def test_the_oldest_windows_go_until_the_rest_fits(database: Database, root: str) -> None:
    """By size: as many as needed, the oldest first."""
    objects = Objects(root)
    stored_job(database, objects, windows=5)
    age_windows(database)
    sizes = [row["bytes"] for row in all_rows(database, EventFile)]
    limit = sum(sizes) - min(sizes) - 1
    expire(database, objects, Settings(retention_days=0, retention_bytes=limit), NOW)
    assert expired(database) == {0: True, 1: True, 2: False, 3: False, 4: False}
    assert sum(row["bytes"] for row in all_rows(database, EventFile)) <= limit
    again = expire(database, objects, Settings(retention_days=0, retention_bytes=limit), NOW)
    assert again.files == 0


def test_a_limit_of_size_spares_what_nobody_has_analysed(sqlite: Database, root: str) -> None:
    """Only finished windows make room."""
    objects = Objects(root)
    stored_job(sqlite, objects, windows=2)
    with sqlite.write() as session:
        session.execute(update(Window).where(Window.number == 0).values(state="ready"))
    expire(sqlite, objects, Settings(retention_bytes=1, retention_days=0), NOW)
    assert expired(sqlite) == {0: False, 1: True}


def test_a_window_that_nobody_analysed_in_time_has_failed(database: Database, root: str) -> None:
    """It says so; one that a worker has just claimed keeps its files."""
    objects = Objects(root)
    stored_job(database, objects, windows=3)
    with database.write() as session:
        session.execute(update(Window).where(Window.number == 0).values(state="ready"))
        session.execute(update(Window).where(Window.number == 1).values(state="claimed"))
    expire(database, objects, ONE_DAY, NOW + 2 * DAY_NS)
    found = {row["number"]: (row["state"], row["reason"]) for row in all_rows(database, Window)}
    assert found == {0: ("failed", EXPIRED), 1: ("claimed", None), 2: ("done", None)}
    assert expired(database) == {0: True, 1: False, 2: True}


def test_late_data_of_an_expired_window_expires_too(sqlite: Database, root: str) -> None:
    """Its files are not kept for ever because the window is marked already."""
    objects = Objects(root)
    job = stored_job(sqlite, objects)
    expire(sqlite, objects, ONE_DAY, NOW + 2 * DAY_NS)
    store(sqlite, [note(job.stream, 50)], [file_of(job.stream)], NOW + 2 * DAY_NS)
    assert len(paths(sqlite)) == 1
    expire(sqlite, objects, ONE_DAY, NOW + 4 * DAY_NS)
    assert paths(sqlite) == []


def test_side_evidence_of_the_attempt_goes_last(database: Database, root: str) -> None:
    """As long as a window of the attempt has files, hosts and GPUs are needed."""
    objects = Objects(root)
    job = stored_job(database, objects, windows=2)
    file = file_of(job.stream, None, kind="context", path="events/all.jsonl.zst")
    objects.put(file.path, b"x")
    store(database, [note(job.stream, 50)], [file])
    with database.write() as session:
        session.execute(update(Window).where(Window.number == 1).values(pinned=True))
    expire(database, objects, ONE_DAY, NOW + 2 * DAY_NS)
    assert file.path in paths(database)
    with database.write() as session:
        session.execute(update(Window).values(pinned=False))
    expire(database, objects, ONE_DAY, NOW + 2 * DAY_NS)
    assert paths(database) == stored_paths(objects) == []


# --- reports and the rest ---------------------------------------------------------------------


def of_job(job: Stored) -> dict[str, str]:
    """Keys that rows of a job have."""
    stream = job.stream
    return {"tenant_id": job.tenant, "job_id": stream.job_id, "attempt_id": stream.attempt_id}


def add_report(database: Database, objects: Objects, job: Stored, window: int, at: int) -> str:
    """A result with its file, a finding with an event, a step; the path of the file."""
    windows = {row["number"]: row["id"] for row in all_rows(database, Window)}
    path = f"results/job={job.stream.job_id}/r{window}-workers.parquet"
    objects.put(path, b"workers")
    add_row(
        database,
        Result,
        **of_job(job),
        window_id=windows[window],
        code_version="1",
        revision=1,
        fence=1,
        created_ns=at,
        analysis_s=0.1,
        verdict="none",
        coverage_ratio=1.0,
        report=b"\x00\xff",
        workers_path=path,
    )
    for state in ("open", "cleared"):
        finding = f"{state}-{window}"
        add_row(
            database,
            Finding,
            **of_job(job),
            id=finding,
            key=finding,
            state=state,
            verdict="v",
            cause="c",
            scope="s",
            severity="info",
            opened_step=0,
            opened_ns=at,
            last_step=0,
            last_ns=at,
            document={},
        )
        add_row(
            database,
            FindingEvent,
            finding_id=finding,
            tenant_id=job.tenant,
            job_id=job.stream.job_id,
            at_ns=at,
            step=0,
            event="opened",
            severity="info",
        )
    add_row(database, StepResult, **of_job(job), step=window, analysed_ns=at)
    return path


REPORTS = (Result, Finding, FindingEvent, StepResult)


def counts(database: Database) -> list[int]:
    """Rows of the tables of reports."""
    return [len(all_rows(database, table)) for table in REPORTS]


def test_old_reports_go_with_their_files(database: Database, root: str) -> None:
    """Results, steps, and findings that are over; not those that are still there."""
    objects = Objects(root)
    job = stored_job(database, objects, windows=2)
    old = add_report(database, objects, job, 0, NOW - 5 * DAY_NS)
    new = add_report(database, objects, job, 1, NOW)
    with database.write() as session:
        session.execute(update(Attempt).values(last_data_ns=NOW - 3 * DAY_NS))
    trim(database, objects, Settings(report_days=0), NOW)
    assert counts(database) == [2, 4, 4, 2]
    removed = trim(database, objects, Settings(report_days=2), NOW)
    assert counts(database) == [1, 3, 3, 1]
    assert dict(removed.rows) == {"results": 1, "findings": 1, "finding_events": 1, "steps": 1}
    assert (objects.size(old), objects.size(new)) == (None, 7)


def test_reports_of_a_pinned_job_stay(sqlite: Database, root: str) -> None:
    """Whatever their age."""
    objects = Objects(root)
    job = stored_job(sqlite, objects)
    add_report(sqlite, objects, job, 0, NOW - 50 * DAY_NS)
    with sqlite.write() as session:
        session.execute(update(Attempt).values(last_data_ns=NOW - 50 * DAY_NS))
        session.execute(update(Job).values(pinned=True))
    trim(sqlite, objects, Settings(report_days=2), NOW)
    assert counts(sqlite) == [1, 2, 2, 1]


def test_a_window_without_files_and_report_goes(database: Database, root: str) -> None:
    """There is nothing left to look at."""
    objects = Objects(root)
    stored_job(database, objects, windows=2)
    later = NOW + 9 * DAY_NS
    with database.write() as session:
        session.execute(update(Window).where(Window.number == 1).values(pinned=True))
    expire(database, objects, ONE_DAY, later)
    trim(database, objects, Settings(report_days=30), later)
    assert len(all_rows(database, Window)) == 2
    trim(database, objects, Settings(report_days=5), later)
    assert [row["number"] for row in all_rows(database, Window)] == [1]


def test_dead_streams_go_with_all_that_is_kept_of_them(database: Database, root: str) -> None:
    """After a month of silence, once their event files have gone; others stay."""
    objects = Objects(root)
    job = stored_job(database, objects)
    later = NOW + 31 * DAY_NS
    alive = open_stream(database, job.tenant, request("new", job="other"), now=later)
    with database.write() as session:
        add_clock_samples(session, [(job.stream.id, NOW, 1, 1), (alive.id, later, 1, 1)])
    settings = Settings(retention_days=40)
    trim(database, objects, settings, later)
    assert len(all_rows(database, Stream)) == 2
    expire(database, objects, ONE_DAY, later)
    removed = trim(database, objects, settings, later)
    assert dict(removed.rows) == {"streams": 1, "coverage": 1, "clock_samples": 1}
    assert [row["id"] for row in all_rows(database, Stream)] == [alive.id]
    assert all_rows(database, Coverage) == []


def test_offsets_of_clocks_go_with_the_events_that_they_are_of(database: Database) -> None:
    """They are of no use without them."""
    objects_root = Settings(retention_days=2)
    job_stream = open_stream(database, add_tenant(database))
    with database.write() as session:
        for days in (0, 1, 3):
            add_clock_samples(session, [(job_stream.id, NOW - days * DAY_NS, days, 1)])
    with database.write() as session:
        session.execute(update(Stream).values(last_data_ns=NOW))
    trim(database, NO_OBJECTS, objects_root, NOW)
    assert sorted(row["offset_ns"] for row in all_rows(database, ClockSample)) == [0, 1]


class _NoObjects(Objects):
    """A root that must not be touched."""

    def __init__(self) -> None:
        """Nothing to open."""


NO_OBJECTS = _NoObjects()


def test_processes_and_requests_of_the_past_are_forgotten(database: Database, root: str) -> None:
    """After a week: rows of nodes, finished tasks and their files; imports with the reports."""
    objects = Objects(root)
    tenant = add_tenant(database)
    objects.put("tasks/old.json", b"x")
    for name, days in (("old", 8), ("new", 1)):
        at = NOW - days * DAY_NS
        add_row(
            database, Node, id=name, role="api", host="h", started_ns=at, seen_ns=at, version="1"
        )
        add_row(
            database,
            Task,
            tenant_id=tenant,
            key=name,
            kind="timeline",
            options={},
            state="done",
            path=f"tasks/{name}.json",
            created_ns=at,
            finished_ns=at,
        )
        add_row(
            database,
            Import,
            tenant_id=tenant,
            state="done",
            options={},
            files=[],
            created_ns=at,
            finished_ns=at,
        )
    trim(database, objects, Settings(report_days=4), NOW)
    assert [row["id"] for row in all_rows(database, Node)] == ["new"]
    assert [row["key"] for row in all_rows(database, Task)] == ["new"]
    assert [row["created_ns"] for row in all_rows(database, Import)] == [NOW - DAY_NS]
    assert objects.size("tasks/old.json") is None
