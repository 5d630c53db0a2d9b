"""Windows on PostgreSQL, analysed by several workers, of which some are killed in mid-window."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.faults.outside import number, query
from tests.faults.postgres import postgres
from tests.faults.processes import FaultServer, WorkerProcess
from tests.proof.line import Form, Goal, Line, at_least, exactly
from tests.proof.windows import (
    WAIT_S,
    Backlog,
    done_of,
    doubled,
    same_reports,
    send_job,
    wait_for,
)
from tests.waiting import wait_until

#: Windows of each of the jobs, kills, and workers of the runs that are timed.
_WINDOWS: Final = {Form.SHORT: 30, Form.LONG: 1000}
_KILLS: Final = {Form.SHORT: 3, Form.LONG: 50}
_WORKERS: Final = {Form.SHORT: (1,), Form.LONG: (1, 2)}

#: Reports that are compared with those of this process.
_COMPARED: Final = {Form.SHORT: 5, Form.LONG: 100}

_CLAIMED: Final = "SELECT owner FROM windows WHERE state = 'claimed'"


def prove(form: Form, folder: Path) -> Line:
    """Drain backlogs with more and more workers, then with workers that are killed."""
    begin, windows = time.monotonic(), _WINDOWS[form]
    with ExitStack() as stack:
        database = stack.enter_context(postgres())
        url = database.new("workers")
        shared = {
            "database_url": url,
            "trace_url": folder / "objects",
            "lease_s": 1.0,
            # The next worker takes what the killed one had, and is killed at it in turn.
            "max_tries": 2 * _KILLS[form],
        }
        server = stack.enter_context(FaultServer(folder / "server", shared))
        rates = []
        for count in _WORKERS[form]:
            send_job(server, f"backlog-{count}", windows)
            rates.append({"workers": count, "windows_per_s": _drain(server, url, count, windows)})
        backlog = Backlog(server, url, "killed", windows)
        kills = _killed(server, url, _KILLS[form], backlog, stack.callback)
        wait_until(backlog.is_done, "all windows", WAIT_S)
        total = windows * len(rates) + backlog.total
        goals = tuple(_goals(server, url, form, backlog, total, kills))
    figures = {"windows": total, "kills": kills, "throughput": rates}
    return Line("workers", form, goals, figures, round(time.monotonic() - begin, 1))


def _goals(
    server: FaultServer, url: str, form: Form, backlog: Backlog, total: int, kills: int
) -> Iterator[Goal]:
    done = number(url, "SELECT count(*) FROM windows WHERE state = 'done'")
    yield exactly("windows analysed", done, total)
    yield exactly("windows with more than one result", doubled(url), 0)
    yield at_least("workers killed while they had a window", kills, _KILLS[form])
    compared = _COMPARED[form]
    same = same_reports(server, url, backlog.made, _WINDOWS[form], compared)
    yield exactly("reports that are those of one process, of those compared", same, compared)


def _drain(server: FaultServer, url: str, count: int, windows: int) -> float:
    """Windows per second that so many workers analyse, from the first result to the last."""
    name = f"backlog-{count}"
    workers = [WorkerProcess(server, f"{name}-{place}").start() for place in range(count)]
    try:
        wait_until(lambda: done_of(url, name), "a first result", WAIT_S)
        begin, first = time.monotonic(), done_of(url, name)
        wait_for(url, name, windows)
        seconds = time.monotonic() - begin
    finally:
        for worker in workers:
            worker.kill()
    return round((windows - first) / max(seconds, 1e-9), 1)


def _killed(
    server: FaultServer,
    url: str,
    kills: int,
    backlog: Backlog,
    at_end: Callable[..., Any],
) -> int:
    """Kill workers while they have a window; each is followed by another. How many were killed."""
    names = (f"victim-{place}" for place in itertools.count())
    workers = {name: WorkerProcess(server, name).start() for name in itertools.islice(names, 2)}
    done, deadline = 0, time.monotonic() + WAIT_S
    while done < kills and time.monotonic() < deadline:
        backlog.refill()
        # Only one that was seen at work is stopped: stopping a worker that still starts would
        # leave all windows to the other.
        for name in _owners(url) & workers.keys():
            if done < kills and _caught(url, workers[name]):
                workers.pop(name).kill()
                new = next(names)
                workers[new] = WorkerProcess(server, new).start()
                done += 1
    for worker in workers.values():
        at_end(worker.kill)
    return done


def _owners(url: str) -> set[str]:
    return {str(owner) for (owner,) in query(url, _CLAIMED)}


def _caught(url: str, worker: WorkerProcess) -> bool:
    """Whether a worker, stopped now, has a window; it stays stopped if it has."""
    worker.send(signal.SIGSTOP)
    if worker.name in _owners(url):
        return True
    worker.send(signal.SIGCONT)
    return False
