"""A database as it is after some analyses: real reports of synthetic jobs, rows by hand."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import FastAPI
from sqlalchemy.orm import Session

from smon.analysis import analyze, empty_report
from smon.api.access import Gate, Scope, TokenGate
from smon.api.app import create_app
from smon.api.routes.common import Seams
from smon.config import Settings
from smon.errors import NothingUsableError
from smon.report import JobReport
from smon.store import tokens
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    EventFile,
    Finding,
    FindingEvent,
    Job,
    Result,
    StepResult,
    Stream,
    Window,
    new_id,
)
from smon.store.objects import Objects
from smon.store.results import packed
from smon.store.tenants import tenant_of
from tests.builders import synthetic_job
from tests.service import run_aside, sqlite_url

#: The tests' present: all rows are of the minutes before.
NOW = 1_790_000_000 * 10**9
SECOND = 10**9


@functools.cache
def report_of(kind: str) -> JobReport:
    """A real report: of a slow job, a healthy one, or one without usable data."""
    fields: dict[str, Any] = {} if kind == "slow" else {"dp": 2, "pp": 2, "faults": ()}
    table, job = synthetic_job(steps=24, **fields)
    if kind == "empty":
        return empty_report(job, NothingUsableError("no step is complete", [(0, "no ops")]))
    return analyze(table, job)


@dataclass(frozen=True, slots=True)
class Made:
    """Ids of a job that was put into the database."""

    job_id: str
    attempt_id: str
    window_id: str
    stream_id: str


def add_job(
    session: Session,
    tenant_id: str,
    name: str,
    report: JobReport,
    **fields: Any,  # noqa: ANN401  # of the attempt
) -> Made:
    """A job with one attempt, one analysed window, its steps and findings, and one stream."""
    layout = report.job.layout
    job = Job(
        id=new_id(), tenant_id=tenant_id, name=name, created_ns=NOW - 3600 * SECOND,
        last_data_ns=NOW - 5 * SECOND, pinned=False,
    )  # fmt: skip
    attempt = Attempt(
        id=new_id(), tenant_id=tenant_id, job_id=job.id, number=0, dp=layout.dp, pp=layout.pp,
        tp=layout.tp, cp=layout.cp, ep=layout.ep, vpp=layout.vpp,
        **{"mode": "live", "time_base": "unix", "window_steps": 24, "notes": [],
           "created_ns": NOW - 3600 * SECOND, "last_data_ns": NOW - 5 * SECOND, "ended_ns": None,
           "ready_step": report.window.last_step, "live_fence": 0, "live_lease_ns": 0,
           "revision": 3, **fields},
    )  # fmt: skip
    window = Window(
        id=new_id(), tenant_id=tenant_id, job_id=job.id, attempt_id=attempt.id, number=0,
        first_step=report.window.first_step, last_step=report.window.last_step, rows=1000,
        state="done", missing=[], missing_count=0, opened_ns=NOW - 60 * SECOND,
        updated_ns=NOW - 20 * SECOND, ready_ns=NOW - 15 * SECOND, revision=1,
        analysed_revision=1, fence=1, lease_ns=0, tries=1, pinned=False,
    )  # fmt: skip
    stream = Stream(
        tenant_id=tenant_id, job_id=job.id, attempt_id=attempt.id, key=f"key of {job.id}",
        host="node-0", source="recorder", ranks=[0, 1], epoch=0, steps_done=23, ended=False,
        events=1000, lost_events=0, created_ns=NOW - 3600 * SECOND,
        last_data_ns=NOW - 5 * SECOND, heartbeat_ns=NOW - 4 * SECOND,
        heartbeat={"spool_bytes": 12, "oldest_unsent_s": 0.5, "dropped": {"full": 2}},
    )  # fmt: skip
    for row in (job, attempt, window, stream):
        session.add(row)
        session.flush()
    add_result(session, window, report)
    _add_steps(session, attempt, report)
    for finding in report.to_dict()["findings"]:
        add_finding(session, attempt, finding, report.window.last_step)
    return Made(job.id, attempt.id, window.id, stream.id)


def add_result(session: Session, window: Window, report: JobReport) -> None:
    """The report of a window, with the file of its workers' name."""
    result = Result(
        id=new_id(), tenant_id=window.tenant_id, job_id=window.job_id,
        attempt_id=window.attempt_id, window_id=window.id, code_version="test", revision=1,
        fence=1, created_ns=NOW - 10 * SECOND, analysis_s=0.5, verdict=report.verdict,
        cause=report.findings[0].cause if report.findings else None,
        slowdown=report.slowdown.paper, waste_ratio=report.waste_ratio,
        recorded_s=report.step_time.recorded_s, ideal_s=report.step_time.ideal_s,
        coverage_ratio=report.window.coverage_ratio, report=packed(report),
        workers_path=f"results/job={window.job_id}/{window.id}-workers.parquet",
    )  # fmt: skip
    session.add(result)
    session.flush()


def _add_steps(session: Session, attempt: Attempt, report: JobReport) -> None:
    session.add_all(
        StepResult(
            attempt_id=attempt.id, step=each.step, tenant_id=attempt.tenant_id,
            job_id=attempt.job_id, recorded_s=each.recorded_s, simulated_s=each.simulated_s,
            ideal_s=each.ideal_s, slowdown=each.slowdown, start_ns=NOW - 60 * SECOND,
            analysed_ns=NOW,
        )
        for each in report.per_step
    )  # fmt: skip
    session.flush()


def add_finding(
    session: Session,
    attempt: Attempt,
    document: dict[str, Any],
    last_step: int,
    **fields: Any,  # noqa: ANN401  # of the row
) -> Finding:
    """A finding as a report has it, with the event of its opening."""
    where = document["where"]
    row = Finding(
        **{"id": new_id(), "tenant_id": attempt.tenant_id, "job_id": attempt.job_id,
           "attempt_id": attempt.id, "key": f"{document['cause']} {where}", "state": "open",
           "verdict": document["verdict"], "cause": document["cause"],
           "scope": document["scope"], "severity": document["severity"], "rank": where["rank"],
           "dp": where["dp"], "stage": where["stage"], "host": "node-7",
           "gpu_uuid": "GPU-00000007", "excess_s": document["excess_s"],
           "excess_share": document["excess_share"],
           "onset_step": document["persistence"]["onset_step"], "opened_step": 0,
           "opened_ns": NOW - 60 * SECOND, "last_step": last_step, "last_ns": NOW - 10 * SECOND,
           "cleared_step": None, "cleared_ns": None, "document": document, **fields}
    )  # fmt: skip
    session.add(row)
    session.flush()
    session.add(
        FindingEvent(
            id=new_id(), finding_id=row.id, tenant_id=row.tenant_id, job_id=row.job_id,
            at_ns=NOW - 60 * SECOND, step=0, event="opened", severity=row.severity,
            excess_s=row.excess_s,
        )
    )  # fmt: skip
    session.flush()
    return row


@dataclass(frozen=True, slots=True)
class World:
    """A server with two tenants, and a token for every scope of the first.

    Attributes
    ----------
    tokens
        By scope; ``other`` has all scopes of the other tenant.
    """

    settings: Settings
    database: Database
    objects: Objects
    app: FastAPI
    tenant_id: str
    other_id: str
    tokens: dict[str, str]

    def client(self, scope: str | None = "read") -> Client:
        """A client with the token of a scope; None: without any."""
        return Client(self.app, {"authorization": f"Bearer {self.tokens[scope]}"} if scope else {})


@dataclass(frozen=True, slots=True)
class Client:
    """Asks the application itself, without a network; redirects are not followed."""

    app: FastAPI
    headers: dict[str, str]

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        **more: Any,  # noqa: ANN401  # of httpx
    ) -> httpx.Response:
        """One request; the headers of the client go along."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=self.headers
            ) as client:
                return await client.request(method, path, headers=headers, **more)

        return run_aside(ask)

    def get(self, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401  # of httpx
        """GET."""
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401  # of httpx
        """POST."""
        return self.request("POST", path, **more)

    def json(self, path: str, **more: Any) -> Any:  # noqa: ANN401  # of httpx; any JSON
        """GET what must succeed, as JSON."""
        answer = self.get(path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()


def make_world(
    folder: Path,
    gate: Gate | None = None,
    settings: dict[str, Any] | None = None,
    url: str | None = None,
) -> World:
    """An empty server in a folder; `url`: of a database with the schema."""
    database_url = url or sqlite_url(folder / "sql")
    usual = Settings(data_dir=folder, database_url=database_url, decode_processes=0)
    given = replace(usual, **(settings or {}))
    database, objects = Database(given.database), Objects(given.traces)
    texts = {}
    with database.write() as session:
        for scope in Scope:
            texts[scope.value] = tokens.create(session, "mine", scope, [scope], None, NOW)
        texts["other"] = tokens.create(session, "theirs", "all", list(Scope), None, NOW)
        mine, theirs = tenant_of(session, "mine", NOW), tenant_of(session, "theirs", NOW)
    chosen = gate or TokenGate(database, lambda: NOW)
    app = create_app(given, database, objects, None, chosen, Seams(lambda: NOW, 0.05))
    return World(given, database, objects, app, mine, theirs, texts)


def open_world(folder: Path, like: World) -> World:
    """The server in a folder that is a copy of another one's."""
    url = f"sqlite:///{folder / 'sql' / 'smon.db'}"
    settings = replace(like.settings, data_dir=folder, database_url=url)
    database, objects = Database(url), Objects(settings.traces)
    gate = TokenGate(database, lambda: NOW)
    app = create_app(settings, database, objects, None, gate, Seams(lambda: NOW, 0.05))
    return replace(like, settings=settings, database=database, objects=objects, app=app)


def put_workers(objects: Objects, made: Made, report: JobReport) -> None:
    """The file of every worker in every step."""
    rows = [
        {
            "step": each.step, "dp": worker.dp, "stage": worker.stage,
            "slowdown": worker.slowdown, "compute_s": 0.5, "wait_s": 0.1,
        }
        for each in report.per_step
        for worker in report.workers
    ]  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    objects.put(f"results/job={made.job_id}/{made.window_id}-workers.parquet", sink.getvalue())


def add_event_file(session: Session, tenant_id: str, made: Made, path: str) -> None:
    """A row for a file of events."""
    session.add(
        EventFile(
            tenant_id=tenant_id, job_id=made.job_id, attempt_id=made.attempt_id,
            window_id=made.window_id, kind="ops", path=path, rows=10, bytes=10, first_step=0,
            last_step=23, created_ns=NOW,
        )
    )  # fmt: skip
