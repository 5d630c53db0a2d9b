"""Jobs of many small windows, sent to a server, and what became of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from http.client import HTTPConnection
from typing import Any, Final

import numpy as np

from smon.analysis import analyze
from smon.synth import causes
from smon.synth.scenario import Synthetic, generate
from smon.synth.spec import Scenario
from tests.faults.outside import number, query
from tests.faults.processes import FaultServer
from tests.system.replay import end_batch, ops_batch
from tests.waiting import wait_until

WINDOW_STEPS: Final = 2

WAIT_S: Final = 1800.0

#: After so many a backlog grows no more.
_MOST_JOBS: Final = 20

#: Steps of a batch.
_TOGETHER: Final = 10

#: What a report says of the job, not of when and where it was made.
_PARTS: Final = (
    "window", "quality", "step_time", "slowdown", "per_step", "by_optype", "workers", "ledger",
    "verdict", "findings", "fixes",
)  # fmt: skip


def send_job(server: FaultServer, name: str, windows: int) -> Synthetic:
    """A job of so many windows, sent whole; nobody analyses it yet."""
    made = generate(
        Scenario(
            name=name,
            dp=2,
            pp=2,
            microbatches=4,
            steps=windows * WINDOW_STEPS,
            causes=(causes.slow_gpu(1, 0, 1.3),),
        )
    )
    stream = {
        "key": name, "job": name, "attempt": 0, "layout": {"dp": 2, "pp": 2}, "mode": "recorded",
        "time": "unix", "window_steps": WINDOW_STEPS, "host": "host", "source": "proof",
        "ranks": [0, 1, 2, 3], "epoch": 0, "notes": [],
    }  # fmt: skip
    agent = {"version": "0", "host": "host", "pid": 1}
    answer = server.post("agents/hello", {"protocol": 1, "agent": agent, "streams": [stream]})
    path = f"/api/v1/ingest/{answer['streams'][0]['stream_id']}/0"
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    # Steps of a table are in order: cut where another begins, some at a time.
    steps = np.arange(0, windows * WINDOW_STEPS + _TOGETHER, _TOGETHER)
    edges = np.searchsorted(made.table.step, steps)
    parts = [made.table.take(np.arange(*edge)) for edge in itertools.pairwise(edges.tolist())]
    batches = [ops_batch(seq, part) for seq, part in enumerate(part for part in parts if len(part))]
    for batch in (*batches, end_batch(len(batches))):
        connection.request("PUT", f"{path}/{batch.seq}", batch.body, batch.headers())
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"a batch was answered with {response.status}: {body[:300]!r}")
    connection.close()
    return made


def done_of(url: str, job: str) -> int:
    """Windows of a job that have been analysed."""
    statement = (
        "SELECT count(*) FROM windows JOIN jobs ON jobs.id = windows.job_id "  # noqa: S608  # a name of ours
        f"WHERE windows.state = 'done' AND jobs.name = '{job}'"
    )
    return number(url, statement)


def is_done(url: str, job: str, windows: int) -> bool:
    """Whether that many have been."""
    return done_of(url, job) >= windows


def wait_for(url: str, job: str, windows: int) -> None:
    """Wait until that many have been."""
    wait_until(partial(is_done, url, job, windows), f"{windows} windows of {job}", WAIT_S)


class Backlog:
    """Jobs sent one after the other, so that somebody is at work for as long as is needed.

    Attributes
    ----------
    made
        The first job.
    windows
        Of each of them.
    """

    def __init__(self, server: FaultServer, url: str, name: str, windows: int) -> None:
        self.windows = windows
        self._server, self._url = server, url
        self._names = [name]
        self.made = send_job(server, name, windows)

    @property
    def total(self) -> int:
        """Windows of all that was sent."""
        return self.windows * len(self._names)

    def is_done(self) -> bool:
        """Whether all that was sent has been analysed."""
        return all(is_done(self._url, name, self.windows) for name in self._names)

    def refill(self) -> None:
        """Send one more if all that was sent has been analysed.

        Raises
        ------
        RuntimeError
            So many were sent that it cannot be by chance.
        """
        if not self.is_done():
            return
        if len(self._names) > _MOST_JOBS:
            raise RuntimeError(f"{self.total} windows were analysed, and nobody was seen at work")
        name = f"{self._names[0]}-{len(self._names)}"
        send_job(self._server, name, self.windows)
        self._names.append(name)


def doubled(url: str) -> int:
    """Windows with more than one result."""
    statement = "SELECT window_id FROM results GROUP BY window_id HAVING count(*) > 1"
    return len(query(url, statement))


def same_reports(
    server: FaultServer, url: str, made: Synthetic, windows: int, compared: int
) -> int:
    """How many of some reports are what this process makes of the same steps."""
    ids = _ids(url, made.job.job_id)
    chosen = [round(place) for place in np.linspace(0, windows - 1, compared).tolist()]
    return sum(_is_same(server, made, ids[window * WINDOW_STEPS], window) for window in chosen)


def _ids(url: str, name: str) -> dict[int, tuple[str, str]]:
    """(job, window) by first step."""
    statement = (
        "SELECT windows.first_step, jobs.id, windows.id FROM windows "  # noqa: S608  # a name of ours
        f"JOIN jobs ON jobs.id = windows.job_id WHERE jobs.name = '{name}'"
    )
    return {int(first): (str(job), str(window)) for first, job, window in query(url, statement)}


def _is_same(server: FaultServer, made: Synthetic, ids: tuple[str, str], window: int) -> bool:
    job, stored = ids
    theirs = server.get(f"jobs/{job}/windows/{stored}")
    first = window * WINDOW_STEPS
    table = made.table.between(first, first + WINDOW_STEPS - 1)
    mine = json.loads(analyze(table, made.job).to_json())
    report = theirs.get("report", theirs)
    return _of(report, _PARTS) == _of(mine, _PARTS)


def _of(report: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    return {part: report[part] for part in parts}
