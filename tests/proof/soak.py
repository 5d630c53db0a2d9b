"""An hour of mixed work on one server: what grows that should not.

Jobs begin and end, live and recorded; real agents come, are killed and go; people read; Prometheus
scrapes. Retention and compaction are so short that all that is kept for a while has gone again many
times within the hour. What grows, grows after the first quarter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from tests.faults.outside import number, query
from tests.load.client import Tally
from tests.load.samples import BOUNDED, KEPT, Sample, Series, slope_per_min
from tests.load.traffic import WINDOW_STEPS, Pace, Traffic
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.system.server import ServerProcess, free_port, request
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Plan:
    """A soak.

    Attributes
    ----------
    seconds
        Of work, before all that was begun is ended.
    sample_s
        Between two looks.
    """

    seconds: float
    sample_s: float
    pace: Pace


_SHORT: Final = Plan(
    seconds=6.0,
    sample_s=0.5,
    pace=Pace(
        live=2, step_s=0.25, steps=(5, 12), recorded_s=1.0, agents=1, agent_s=2.5, read_s=0.1,
        scrape_s=0.5, heartbeat_s=1.0,
    ),
)  # fmt: skip
_LONG: Final = Plan(
    seconds=3600.0,
    sample_s=10.0,
    pace=Pace(
        live=2, step_s=1.0, steps=(40, 120), recorded_s=15.0, agents=1, agent_s=60.0, read_s=0.25,
        scrape_s=5.0,
    ),
)  # fmt: skip

#: Five minutes: what is kept has come and gone three times within the first quarter of an hour.
_DAYS: Final = 300 / 86_400

_SETTINGS: Final[dict[str, object]] = {
    "retention_days": _DAYS,
    "report_days": _DAYS,
    "window_steps": WINDOW_STEPS,
    "window_timeout_s": 10.0,
    "compact_after_s": 5.0,
    "doomed_grace_s": 10.0,
    "maintenance_interval_s": 2.0,
    "metrics_silent_s": 30.0,
    "agent_down_s": 15.0,
    "heartbeat_interval_s": 5.0,
    "wal_segment_bytes": 1 << 20,
    "min_free_bytes": 0,
}

#: From here on, a steady state is expected.
_SETTLED: Final = 0.25

#: Growth per minute that is still none. A leak of a mebibyte, a descriptor, a thread or a file a
#: minute is far above.
_MIB_PER_MIN: Final = 0.2
_PIECES_PER_MIN: Final = 0.1
_FILES_PER_MIN: Final = 0.3

#: Of the rows of all tables that retention keeps small together: a tenth of what one table takes
#: in a minute is more.
_ROWS_PER_MIN: Final = 1.0

_PATIENCE_S: Final = 120.0

_WAITING: Final = "SELECT count(*) FROM windows WHERE state NOT IN ('done', 'failed')"
_FAILED: Final = "SELECT id, reason FROM windows WHERE state = 'failed'"
_STORED: Final = (
    "SELECT jobs.name, sum(streams.events), sum(streams.lost_events) FROM streams "
    "JOIN jobs ON jobs.id = streams.job_id GROUP BY jobs.name"
)


@dataclass(slots=True)
class Outcome:
    """What a soak has shown.

    Attributes
    ----------
    failed
        Windows that could not be analysed, and why.
    stored
        Events and losses by job, as the database has them in the end.
    metrics
        Of the server, at the end.
    complaints
        Lines of the server's log that tell of a failure.
    """

    series: Series = field(default_factory=Series)
    tally: Tally = field(default_factory=Tally)
    failed: dict[str, str] = field(default_factory=dict)
    stored: dict[str, tuple[int, int]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0


def prove(form: Form, folder: Path) -> Line:
    """Let it work, and look at it."""
    begin = time.monotonic()
    outcome = soak(_SHORT if form is Form.SHORT else _LONG, folder)
    goals = (*_kept(outcome), *_flat(outcome, timed=form is Form.SHORT))
    return Line("soak", form, goals, _figures(outcome), round(time.monotonic() - begin, 1))


def soak(plan: Plan, folder: Path) -> Outcome:
    """Run a server under traffic for as long as planned, and until all is stored and analysed."""
    outcome = Outcome()
    worker_port = free_port()
    settings = {**_SETTINGS, "worker_ops_port": worker_port}
    with ServerProcess(folder, role="all", module="smon.cli", **settings) as server:
        spools = folder / "spools"
        spools.mkdir()
        wait_until(partial(_is_up, worker_port), "a worker", _PATIENCE_S)
        traffic = Traffic(server.port, (server.ops_port, worker_port), spools, plan.pace)
        outcome.tally = traffic.tally
        begin = time.monotonic()
        traffic.start()
        try:
            _watch(server, outcome, begin, plan)
            outcome.seconds = time.monotonic() - begin
        finally:
            traffic.stop()
        _settle(server, outcome)
    return outcome


def _is_up(ops_port: int) -> bool:
    try:
        return request(ops_port, "GET", "/healthz")[0] == 200
    except (OSError, HTTPException):
        return False


def _watch(server: ServerProcess, outcome: Outcome, begin: float, plan: Plan) -> None:
    assert server.process is not None
    for look in range(1, int(plan.seconds / plan.sample_s) + 1):
        time.sleep(max(begin + look * plan.sample_s - time.monotonic(), 0))
        outcome.series.take(server.process.pid, _data(server), _url(server))
        outcome.failed.update({str(row[0]): str(row[1]) for row in query(_url(server), _FAILED)})


def _settle(server: ServerProcess, outcome: Outcome) -> None:
    """Wait until everything that was taken in is stored and analysed."""
    url = _url(server)
    wait_until(lambda: not server.metrics()["smon_wal_records"], "an empty log", _PATIENCE_S)
    wait_until(lambda: not number(url, _WAITING), "windows that wait", _PATIENCE_S)
    outcome.failed.update({str(row[0]): str(row[1]) for row in query(url, _FAILED)})
    outcome.stored = {str(job): (int(e), int(lost)) for job, e, lost in query(url, _STORED)}
    outcome.metrics = server.metrics()
    signs = (" ERROR ", " CRITICAL ", "Traceback")
    lines = server.log.read_text("utf-8").splitlines()
    outcome.complaints = [line for line in lines if any(sign in line for sign in signs)]


def _data(server: ServerProcess) -> Path:
    return Path(str(server.settings["data_dir"]))


def _url(server: ServerProcess) -> str:
    return f"sqlite:///{_data(server) / 'smon.db'}"


# --- goals ------------------------------------------------------------------------------------


def _kept(outcome: Outcome) -> Iterator[Goal]:
    """What holds for every request and event."""
    tally, stored = outcome.tally, outcome.stored
    missing = sum(abs(events - stored.get(job, (0, 0))[0]) for job, events in tally.events.items())
    yield exactly("answers 5xx", tally.server_errors, 0)
    yield exactly("events lost, or stored twice", missing, 0)
    yield exactly("events that agents or server gave up", sum(x for _, x in stored.values()), 0)
    yield exactly("windows that were not analysed", len(outcome.failed), 0)
    yield exactly("failures of those who send and read", len(tally.errors), 0)
    yield exactly("failures in the server's log", len(outcome.complaints), 0)
    yield exactly("processes started again", outcome.series.restarts(("server", "worker")), 0)
    yield at_least("events", sum(tally.events.values()), 1)


def _flat(outcome: Outcome, *, timed: bool) -> Iterator[Goal]:
    """What does not grow any more after the first quarter.

    In a few seconds nothing is steady: then these goals only show what is looked at.
    """
    series = outcome.series
    samples = series.after(_SETTLED)
    for role in series.roles():
        slopes = slopes_of(samples, role)
        limits = zip(slopes.items(), (_MIB_PER_MIN, _PIECES_PER_MIN, _PIECES_PER_MIN), strict=True)
        for (what, slope), limit in limits:
            yield at_most(f"{what} of the {role}, more per minute", slope, limit, timed=timed)
    files = [sum(each.files.values()) for each in samples]
    slope = slope_per_min([each.at_s for each in samples], files)
    yield at_most("files and folders, more per minute", slope, _FILES_PER_MIN, timed=timed)
    rows = [sum(each.rows[table] for table in BOUNDED) for each in samples]
    slope = slope_per_min([each.at_s for each in samples], rows)
    yield at_most("rows that retention bounds, more per minute", slope, _ROWS_PER_MIN, timed=timed)


def slopes_of(samples: Sequence[Sample], role: str) -> dict[str, float]:
    """Growth per minute of the processes of one role: MiB of memory, descriptors, threads."""
    at_s = [each.at_s for each in samples]
    found = [each.processes[role] for each in samples]
    columns: dict[str, Sequence[float]] = {
        "MiB of memory": [each.rss_mib for each in found],
        "descriptors": [each.descriptors for each in found],
        "threads": [each.threads for each in found],
    }
    return {name: slope_per_min(at_s, column) for name, column in columns.items()}


# --- figures ----------------------------------------------------------------------------------


def _figures(outcome: Outcome) -> dict[str, Any]:
    tally, samples = outcome.tally, outcome.series.after(_SETTLED)
    first, last = samples[0], samples[-1]
    return {
        "samples": len(outcome.series.samples),
        "requests": tally.requests,
        "requests_per_s": round(tally.requests / max(outcome.seconds, 1e-9), 1),
        "events": sum(tally.events.values()),
        "jobs": len(tally.events),
        "connections_that_broke": tally.reconnects,
        "files_per_million_events": _per_million(last.files["events"], outcome),
        "what_failed": "; ".join(
            (*tally.errors[:3], *outcome.complaints[:3], *sorted(set(outcome.failed.values()))[:3])
        ) or "nothing",
        "answers": _answers(tally),
        "processes": [_process(samples, role) for role in outcome.series.roles()],
        "files_and_rows": [
            {"what": name, "after_the_first_quarter": here[name], "at_the_end": there[name]}
            for here, there in ((first.files, last.files), (first.rows, last.rows))
            for name in (*first.files, *BOUNDED, *KEPT)
            if name in here
        ],
    }  # fmt: skip


def _per_million(files: int, outcome: Outcome) -> float:
    return round(files / max(sum(outcome.tally.events.values()), 1) * 1e6, 2)


def _answers(tally: Tally) -> list[dict[str, Any]]:
    kinds = sorted({kind for kind, _ in tally.answers})
    return [
        {
            "to": kind,
            "ok": sum(n for (what, status), n in tally.answers.items()
                      if what == kind and status < 400),
            "4xx": sum(n for (what, status), n in tally.answers.items()
                       if what == kind and 400 <= status < 500),
        }
        for kind in kinds
    ]  # fmt: skip


def _process(samples: Sequence[Sample], role: str) -> dict[str, Any]:
    found = [each.processes[role] for each in samples]
    return {
        "process": role,
        "mib_after_the_first_quarter": round(found[0].rss_mib, 1),
        "mib_at_the_end": round(found[-1].rss_mib, 1),
        "most_mib": round(max(each.rss_mib for each in found), 1),
        "most_descriptors": max(each.descriptors for each in found),
        "most_threads": max(each.threads for each in found),
    }
