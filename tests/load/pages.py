"""How quickly pages answer with many jobs: a filled store, a real server process, one browser.

``python -m tests.load.pages``. The store holds 500 live jobs, 200 of them with findings, each with
32 analysed windows of 40 steps, and one live job of 16,384 ranks. Rows and reports are made by
shape, not by analysis. Every page is asked for 50 times, one at a time, as a browser does that has
never seen it. Prints one JSON line: times in ms, memory in MiB.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import insert
from sqlalchemy.orm import Session

from smon.config import Settings
from smon.nodes import drain
from smon.report import (
    ClockPart,
    Cost,
    FixPart,
    GroupPart,
    JobPart,
    JobReport,
    LayoutPart,
    LedgerEntry,
    PersistencePart,
    QualityPart,
    Slowdown,
    StepPart,
    StepTime,
    Victims,
    Where,
    WindowPart,
    WorkerPart,
    WorstPart,
)
from smon.report import (
    Finding as FindingPart,
)
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    Finding,
    FindingEvent,
    Job,
    Result,
    StepResult,
    Stream,
    Tenant,
    Window,
    new_id,
    new_uuid,
)
from smon.store.objects import Objects
from smon.store.results import numbers_of, packed
from smon.store.schema import upgrade
from smon.topology import Layout
from tests.load.samples import cpu_s, memory

SECOND: Final = 10**9
STEP_S: Final = 2.0
IDEAL_S: Final = 1.6

#: Steps of a window, and of the running diagnosis beyond the last one.
WINDOW: Final = 40
AHEAD: Final = 8

SMALL: Final = Layout(dp=8, pp=4, tp=8)
WIDE: Final = Layout(dp=128, pp=16, tp=8)
WIDE_STEPS: Final = 200

_CAUSES: Final = ("slow_gpu", "thermal", "slow_link", "gc", "stage_partition")
_OPTYPES: Final = ("forward-compute", "backward-compute", "forward-pp-comm", "dp-comm")


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is in the store."""

    jobs: int = 500
    slow: int = 200
    windows: int = 32


@dataclass(frozen=True, slots=True)
class Filled:
    """What was put in: ids of one slow job and of the wide one."""

    slow_id: str
    wide_id: str
    wide_window_id: str


# --- reports by shape -------------------------------------------------------------------------


def report_of_shape(
    layout: Layout, steps: range, slowdown: float, cause: str | None, price: float = 2.0
) -> JobReport:
    """A report as large as a real one, with one slow worker if there is a cause."""
    noise = np.random.default_rng(layout.dp)
    excess = STEP_S * (1 - 1 / slowdown)
    waste = 1 - 1 / slowdown
    hours = waste * layout.world_size * 24
    return JobReport(
        job=JobPart("job", 0, _layout(layout), layout.world_size),
        window=WindowPart(steps[0], steps[-1], len(steps), len(steps), (), 1.0),
        quality=QualityPart(0.004, ClockPart(aligned=True, residual_s=0.0001), ()),
        step_time=StepTime(STEP_S, STEP_S, STEP_S / slowdown),
        slowdown=Slowdown(slowdown, None, None, (slowdown - 0.01, slowdown + 0.01), 1.0),
        waste_ratio=waste,
        per_step=tuple(_step(layout, step, slowdown, noise) for step in steps),
        by_optype=dict.fromkeys(_OPTYPES, 1.02),
        by_dp_rank={str(dp): 1.01 for dp in range(layout.dp)},
        by_stage={str(stage): 1.01 for stage in range(layout.pp)},
        workers=tuple(_workers(layout, slowdown, noise)),
        worker_share=0.8,
        last_stage_share=0.1,
        cost=Cost(hours, hours * price, price),
        groups=tuple(_group(layout, stage) for stage in range(layout.pp)),
        groups_count=layout.pp,
        verdict="straggler" if cause else "none",
        ledger=(LedgerEntry("worker", excess * 0.9, 0.9), LedgerEntry("microbatch", 0.01, 0.1)),
        findings=() if cause is None else (_finding(layout, cause, excess, steps[0]),),
        fixes=(FixPart("replace", "rank 8", STEP_S / slowdown, slowdown, hours, hours * price),),
    )


def _layout(layout: Layout) -> LayoutPart:
    return LayoutPart(layout.dp, layout.pp, layout.tp, layout.cp, layout.ep, layout.vpp)


def _step(layout: Layout, step: int, slowdown: float, noise: np.random.Generator) -> StepPart:
    recorded = STEP_S * float(noise.normal(1.0, 0.005))
    return StepPart(
        step=step,
        recorded_s=recorded,
        simulated_s=recorded,
        ideal_s=recorded / slowdown,
        slowdown=slowdown,
        by_optype=dict.fromkeys(_OPTYPES, 1.02),
        by_dp_rank={str(dp): 1.0123456 for dp in range(layout.dp)},
        by_stage={str(stage): 1.0123456 for stage in range(layout.pp)},
        worst=WorstPart(1, 0, layout.rank(1, 0), slowdown),
    )


def _workers(layout: Layout, slowdown: float, noise: np.random.Generator) -> Iterator[WorkerPart]:
    for dp in range(layout.dp):
        for stage in range(layout.pp):
            own = slowdown if (dp, stage) == (1, 0) else 1 + abs(float(noise.normal(0, 0.002)))
            rank = layout.rank(dp, stage)
            yield WorkerPart(dp, stage, rank, f"node-{rank // 8:04d}", own, own)


def _group(layout: Layout, stage: int) -> GroupPart:
    ranks = tuple(layout.rank(dp, stage) for dp in range(min(layout.dp, 16)))
    return GroupPart("dp-comm", None, stage, layout.dp, ranks, 0.01, 0.02, 0.01, ranks[1], 0.9)


def _finding(layout: Layout, cause: str, excess_s: float, onset: int) -> FindingPart:
    rank = layout.rank(1, 0)
    victims = tuple(layout.rank(dp, 0) for dp in range(2, min(layout.dp, 18)))
    return FindingPart(
        severity="critical" if excess_s > 0.2 * STEP_S else "warning",
        verdict="straggler",
        cause=cause,
        scope="rank",
        where=Where(rank=rank, dp=1, stage=0, node="node-0001", gpu_uuid="GPU-0001"),
        phase="forward",
        optypes=_OPTYPES[:2],
        excess_s=excess_s,
        excess_share=excess_s / STEP_S,
        persistence=PersistencePart("onset", 1.0, onset, None),
        confidence=0.92,
        evidence=tuple(f"evidence {n} of rank {rank}: 1.23 × its peers" for n in range(4)),
        victims=Victims(layout.dp * layout.pp - 1, victims, 0.31),
        candidates=(),
        next=(drain("node-0001", "smon_slow_gpu"),),
    )


def workers_parquet(layout: Layout, steps: range, slowdown: float) -> bytes:
    """Every worker in every step, as the worker writes it."""
    shape = (len(steps), layout.dp, layout.pp)
    step, dp, stage = (index.ravel() for index in np.indices(shape))
    slow = np.where((dp == 1) & (stage == 0), slowdown, 1.01).astype(np.float32)
    table = pa.table(
        {
            "step": step + steps[0],
            "dp": dp.astype(np.int32),
            "stage": stage.astype(np.int32),
            "slowdown": slow,
            "compute_s": np.full(step.shape, 1.2, np.float32),
            "wait_s": np.full(step.shape, 0.3, np.float32),
        }
    )
    sink = io.BytesIO()
    rows = layout.dp * layout.pp
    pq.write_table(table, sink, compression="zstd", row_group_size=max(50_000 // rows, 1) * rows)
    return sink.getvalue()


# --- rows -------------------------------------------------------------------------------------


def fill(database: Database, objects: Objects, shape: Shape, now: int) -> Filled:
    """Put all jobs in."""
    with database.write() as session:
        session.execute(insert(Tenant), [{"id": "default", "name": "default", "created_ns": now}])
        healthy = report_of_shape(SMALL, range(WINDOW), 1.01, None)
        slow_id = ""
        for number in range(shape.jobs):
            report = healthy
            if number < shape.slow:
                cause = _CAUSES[number % len(_CAUSES)]
                report = report_of_shape(SMALL, range(WINDOW), 1.1 + number / 500, cause)
            job_id = add_job(session, f"job-{number:04d}", report, shape.windows, now)
            slow_id = slow_id or job_id
    with database.write() as session:
        wide_id, window_id = add_wide(session, objects, shape.windows, now)
    return Filled(slow_id, wide_id, window_id)


def add_job(
    session: Session,
    name: str,
    report: JobReport,
    windows: int,
    now: int,
    live_report: JobReport | None = None,
) -> str:
    """A live job with so many windows, the same report for each, and its finding.

    Parameters
    ----------
    live_report
        Of the running diagnosis, which is some steps ahead; by default that of the windows.
    """
    layout = report.job.layout
    job_id, attempt_id = new_id(), new_id()
    span = int(STEP_S * SECOND)
    begun = now - windows * WINDOW * span
    ids = {"tenant_id": "default", "job_id": job_id}
    last = windows * WINDOW - 1
    session.execute(
        insert(Job),
        [{"id": job_id, "tenant_id": "default", "name": name, "created_ns": begun,
          "last_data_ns": now, "pinned": False}],
    )  # fmt: skip
    live = {f"live_{key}": value for key, value in numbers_of(report).items()}
    sizes = {size: getattr(layout, size) for size in ("dp", "pp", "tp", "cp", "ep", "vpp")}
    session.execute(
        insert(Attempt),
        [{"id": attempt_id, **ids, "number": 0, **sizes, "mode": "live", "time_base": "unix",
          "window_steps": WINDOW, "notes": [], "created_ns": begun, "last_data_ns": now,
          "ended_ns": None, "revision": 1, "ready_step": last + AHEAD, "live_step": last + AHEAD,
          "live_analysed_ns": now, "live_report": packed(live_report or report), **live}],
    )  # fmt: skip
    _add_windows(session, {**ids, "attempt_id": attempt_id}, report, windows, begun)
    _add_streams(session, {**ids, "attempt_id": attempt_id}, name, last, now)
    for document in report.to_dict()["findings"]:
        _add_finding(session, {**ids, "attempt_id": attempt_id}, document, last, (begun, now))
    return job_id


def _add_windows(
    session: Session, ids: dict[str, str], report: JobReport, windows: int, begun: int
) -> None:
    body, numbers = packed(report), numbers_of(report)
    span = int(STEP_S * SECOND)
    ends = [begun + (number + 1) * WINDOW * span for number in range(windows)]
    names = [new_id() for _ in range(windows)]
    session.execute(
        insert(Window),
        [{"id": names[number], **ids, "number": number, "first_step": number * WINDOW,
          "last_step": (number + 1) * WINDOW - 1, "rows": 1000, "state": "done", "missing": [],
          "missing_count": 0, "opened_ns": ends[number] - WINDOW * span,
          "updated_ns": ends[number], "ready_ns": ends[number], "revision": 1,
          "analysed_revision": 1, "fence": 1, "lease_ns": 0, "tries": 1, "pinned": False}
         for number in range(windows)],
    )  # fmt: skip
    session.execute(
        insert(Result),
        [{"id": new_id(), **ids, "window_id": names[number], "code_version": "load",
          "revision": 1, "fence": 1, "created_ns": ends[number], "analysis_s": 0.5,
          "cause": report.findings[0].cause if report.findings else None,
          "coverage_ratio": 1.0, "report": body, "workers_path": None, **numbers}
         for number in range(windows)],
    )  # fmt: skip
    session.execute(
        insert(StepResult),
        [{**ids, "step": WINDOW * number + part.step, "recorded_s": part.recorded_s,
          "simulated_s": part.simulated_s, "ideal_s": part.ideal_s, "slowdown": part.slowdown,
          "skipped": None, "start_ns": begun + (WINDOW * number + part.step) * span,
          "analysed_ns": ends[number]}
         for number in range(windows)
         for part in report.per_step[:WINDOW]],
    )  # fmt: skip


def _add_streams(
    session: Session, ids: dict[str, str], name: str, last: int, now: int, hosts: int = 4
) -> None:
    session.execute(
        insert(Stream),
        [{"id": new_uuid(), **ids, "key": f"{name} {host}", "host": f"node-{host:04d}",
          "source": "recorder", "ranks": list(range(8 * host, 8 * host + 8)), "epoch": 0,
          "steps_done": last, "ended": False, "events": 10_000, "lost_events": 0,
          "created_ns": now - 3600 * SECOND, "last_data_ns": now, "heartbeat_ns": now,
          "heartbeat": {"spool_bytes": 0, "oldest_unsent_s": 0.0, "dropped": {}}}
         for host in range(hosts)],
    )  # fmt: skip


def _add_finding(
    session: Session,
    ids: dict[str, str],
    document: dict[str, Any],
    last: int,
    times: tuple[int, int],
) -> None:
    where, finding_id = document["where"], new_id()
    session.execute(
        insert(Finding),
        [{"id": finding_id, **ids, "key": f"{document['cause']} rank {where['rank']}",
          "state": "open", "host": where["node"], "gpu_uuid": where["gpu_uuid"],
          "onset_step": document["persistence"]["onset_step"], "opened_step": 0,
          "opened_ns": times[0], "last_step": last, "last_ns": times[1], "document": document,
          **{name: where[name] for name in ("rank", "dp", "stage")},
          **{name: document[name] for name in
             ("verdict", "cause", "scope", "severity", "excess_s", "excess_share")}}],
    )  # fmt: skip
    session.execute(
        insert(FindingEvent),
        [{"id": new_id(), "finding_id": finding_id, "tenant_id": ids["tenant_id"],
          "job_id": ids["job_id"], "at_ns": times[0], "step": 0, "event": "opened",
          "severity": document["severity"], "excess_s": document["excess_s"]}],
    )  # fmt: skip


def add_wide(session: Session, objects: Objects, windows: int, now: int) -> tuple[str, str]:
    """The live job of 16,384 ranks; its id, and that of its last window."""
    report, live = (
        report_of_shape(WIDE, range(steps), 1.18, "slow_gpu") for steps in (WINDOW, WIDE_STEPS)
    )
    job_id = add_job(session, "wide-job", report, windows, now, live)
    attempt = session.query(Attempt).filter_by(job_id=job_id).one()
    attempt.live_workers = workers_parquet(WIDE, range(WIDE_STEPS - WINDOW, WIDE_STEPS), 1.18)
    last = session.query(Window).filter_by(job_id=job_id).order_by(Window.number.desc()).first()
    if last is None:
        raise ValueError("expected at least one window")
    result = session.query(Result).filter_by(window_id=last.id).one()
    result.workers_path = f"results/job={job_id}/{result.id}-workers.parquet"
    body = workers_parquet(WIDE, range(last.first_step, last.last_step + 1), 1.18)
    objects.put(result.workers_path, body)
    return job_id, last.id


# --- measuring --------------------------------------------------------------------------------


def timed(port: int, path: str, count: int) -> list[float]:
    """Seconds of so many requests, one after the other, of which the first is left out."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = []
    for _ in range(count + 1):
        began = time.perf_counter()
        connection.request("GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        times.append(time.perf_counter() - began)
        if answer.status != http.client.OK:
            raise ValueError(f"{path} answers {answer.status}: {body[:200]!r}")
    connection.close()
    return times[1:]


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and longest, ms."""
    ordered = sorted(times)
    place = max(-(-95 * len(ordered) // 100) - 1, 0)
    found = {"p50": statistics.median(ordered), "p95": ordered[place], "max": ordered[-1]}
    return {name: round(1e3 * value, 1) for name, value in found.items()}


def pages_of(filled: Filled) -> dict[str, str]:
    """The address of each page that is measured."""
    return {
        "fleet": "/",
        "fleet by name": "/?q=job-00&sort=name&page=1",
        "fleet report": "/fleet",
        "slow job": f"/jobs/{filled.slow_id}",
        "wide job": f"/jobs/{filled.wide_id}",
        "wide window": f"/jobs/{filled.wide_id}/windows/{filled.wide_window_id}",
        "hosts": "/hosts",
    }


def measure(folder: Path, filled: Filled, count: int) -> dict[str, Any]:
    """Ask a server process for each page."""
    command = [sys.executable, "-m", "tests.load.server", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # our own
    try:
        if server.stdout is None:
            raise ValueError("expected the server's output")
        port = int(server.stdout.readline())
        before = memory(server.pid)
        pages = {}
        for name, path in pages_of(filled).items():
            spent = cpu_s(server.pid)
            pages[name] = quantiles(timed(port, path, count))
            spent = (cpu_s(server.pid) - spent) / (count + 1)
            pages[name]["cpu"] = round(1e3 * spent, 1)
        return {"pages_ms": pages, "rss_mib": {"before": before["now"], **memory(server.pid)}}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    """Fill, measure, print."""
    usual = Shape()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=usual.jobs)
    parser.add_argument("--slow", type=int, default=usual.slow)
    parser.add_argument("--windows", type=int, default=usual.windows)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="fill this folder, and leave it")
    given = parser.parse_args()
    shape = Shape(given.jobs, given.slow, given.windows)
    with tempfile.TemporaryDirectory(prefix="smon-pages-") as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(data_dir=folder)
        database, objects = Database(settings.database), Objects(settings.traces)
        upgrade(database)
        began = time.perf_counter()
        filled = fill(database, objects, shape, time.time_ns())
        database.close()
        filling = round(time.perf_counter() - began, 1)
        found = measure(folder, filled, given.requests)
    print(json.dumps({"jobs": shape.jobs, "windows": shape.windows, "fill_s": filling, **found}))  # noqa: T201


if __name__ == "__main__":
    main()
