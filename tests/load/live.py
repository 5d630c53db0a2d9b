"""From the last event of a step to its finding in REST: a live job of many workers.

``python -m tests.load.live --dp 128 --pp 8 --steps 100`` starts a real server, plays the agents of
the job over real HTTP, and asks REST for the running diagnosis as fast as it answers. With
``--stored`` the steps are stored as the server's drain stores them, without HTTP: what is left is
the running diagnosis alone, of jobs whose events this machine could not take in beside it. Prints
one JSON line: median, 90th percentile and worst of all steps, in seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from smon.config import Settings
from smon.store.database import Database
from smon.store.objects import Objects
from smon.store.tenants import default_tenant
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.trace.table import OpTable
from smon.wire import Batch
from tests.system.replay import ops_batch
from tests.system.server import ServerProcess
from tests.worker.feed import Clock, Store

JOB = "live-load"

#: DP rank and stage of the worker that becomes slow.
SLOW = (5, 2)

#: Questions for new steps for each one for the job.
_ROUNDS = 5

#: Until the server has looked at what it was sent.
_LAST_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """Of the job and of its agents.

    Attributes
    ----------
    stored
        Without HTTP.
    patient
        A step comes only when REST knows of the one before, however slow this machine is.
    """

    dp: int
    pp: int
    tp: int
    microbatches: int
    steps: int
    agents: int
    interval_s: float
    onset: int
    stored: bool
    patient: bool


@dataclass(slots=True)
class Times:
    """When the last batch of each step was acknowledged, and when REST knew of it.

    Attributes
    ----------
    seen
        When the step's times were there, and with them what was found.
    reported
        When the whole report was: ledger and shares of a large job follow.
    """

    sent: dict[int, float] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    reported: dict[int, float] = field(default_factory=dict)
    named_step: int | None = None

    def delays(self, known: Mapping[int, float]) -> np.ndarray:
        """Seconds of each step, the first one left out; of one that never came, since it was sent.

        The server's worker starts while it has the first step to look at.
        """
        now = time.monotonic()
        return np.array([known.get(step, now) - self.sent[step] for step in sorted(self.sent)[1:]])


#: Brings the rows of a step to the server, and comes back when they are stored.
Send = Callable[[int, OpTable], None]


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Run it; the figures."""
    made = _job(size)
    with ServerProcess(folder) as server:
        send = _to_store(server, made) if size.stored else _over_http(server, made, size)
        times, stop = Times(), threading.Event()
        watcher = threading.Thread(target=_watch, args=(server, times, stop))
        _send_all(made, send, size, times, watcher)
        _wait_for(size.steps - 1, times)
        stop.set()
        watcher.join()
        cpu_s, memory = _worker(server)
    delays, reports = times.delays(times.seen), times.delays(times.reported)
    return {
        "gpus": made.job.layout.world_size,
        "workers": size.dp * size.pp,
        "ops_per_step": len(made.table) // size.steps,
        "agents": 0 if size.stored else size.agents,
        "steps": size.steps,
        "interval_s": size.interval_s,
        "median_s": round(float(np.median(delays)), 3),
        "p90_s": round(float(np.quantile(delays, 0.9)), 3),
        "worst_s": round(float(delays.max()), 3),
        "report_median_s": round(float(np.median(reports)), 3),
        "report_worst_s": round(float(reports.max()), 3),
        "never_seen": size.steps - min(len(times.seen), len(times.reported)),
        "onset_step": size.onset,
        "named_at_step": times.named_step,
        "worker_cpu_us_per_event": round(1e6 * cpu_s / len(made.table), 2),
        "worker_mib": memory >> 20,
    }


def _worker(server: ServerProcess) -> tuple[float, int]:
    """CPU seconds of the worker beside the server, its start included, and bytes of memory."""
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    worker = next(one for one in family if "worker" in one.cmdline())
    times = worker.cpu_times()
    return float(times.user + times.system), int(worker.memory_info().rss)


def _job(size: Size) -> Synthetic:
    return generate(
        scenario(
            "slow-worker",
            dp=size.dp,
            pp=size.pp,
            tp=size.tp,
            microbatches=size.microbatches,
            steps=size.steps,
            start_unix_s=int(time.time()) - 3600,
            causes=(causes.slow_gpu(*SLOW, 1.5, first=size.onset, onset=True),),
        )
    )


def _to_store(server: ServerProcess, made: Synthetic) -> Send:
    """Files and rows as the drain writes them, by this process."""
    settings = Settings(data_dir=Path(str(server.settings["data_dir"])))
    database = Database(settings.database)
    with database.write() as session:
        tenant_id = default_tenant(session)
    store = Store(database, Objects(settings.traces), settings, tenant_id, clock=_UnixClock())
    stream = store.stream(made.job.layout, job=JOB)
    return lambda step, rows: store.send(stream, rows, steps_done=step)


class _UnixClock(Clock):
    """Unix time as it is."""

    def __call__(self) -> int:
        """Unix time, ns."""
        return time.time_ns()


def _over_http(server: ServerProcess, made: Synthetic, size: Size) -> Send:
    """Batches of all agents, on four connections."""
    streams, local = _register(server, made, size), threading.local()
    owner = np.empty(int(made.table.rank.max()) + 1, np.int64)
    for number, ranks in enumerate(_ranks(made, size)):
        owner[ranks] = number

    def put(stream: str, batch: Batch) -> None:
        if not hasattr(local, "connection"):
            local.connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        path = f"/api/v1/ingest/{stream}/0/{batch.seq}"
        local.connection.request("PUT", path, batch.body, batch.headers())
        answer = local.connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (answer.status, body)

    pool = ThreadPoolExecutor(4)

    def send(step: int, rows: OpTable) -> None:
        mine = owner[rows.rank]
        batches = [
            ops_batch(step, rows.take(mine == number), steps_done=step)
            for number in range(size.agents)
        ]
        list(pool.map(put, streams, batches))

    return send


def _register(server: ServerProcess, made: Synthetic, size: Size) -> list[str]:
    layout = made.job.layout
    sizes = {name: getattr(layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")}
    streams = [
        {
            "key": f"{JOB}-{number}",
            "job": JOB,
            "attempt": 0,
            "layout": sizes,
            "mode": "live",
            "time": "unix",
            "window_steps": None,
            "host": f"node{number}",
            "source": "load",
            "ranks": ranks.tolist(),
            "epoch": 0,
            "notes": [],
        }
        for number, ranks in enumerate(_ranks(made, size))
    ]
    agent = {"version": "0", "host": "load", "pid": 1}
    answer = server.post("agents/hello", {"protocol": 1, "agent": agent, "streams": streams})
    return [stream["stream_id"] for stream in answer["streams"]]


def _ranks(made: Synthetic, size: Size) -> list[np.ndarray]:
    return np.array_split(np.unique(made.table.rank), size.agents)


def _send_all(
    made: Synthetic, send: Send, size: Size, times: Times, watcher: threading.Thread
) -> None:
    bounds = np.searchsorted(made.table.step, np.arange(size.steps + 1))
    begun = time.monotonic()
    for step in range(size.steps):
        rows = made.table.take(np.arange(bounds[step], bounds[step + 1]))
        if step == 1 or (step and size.patient):
            _wait_for(step - 1, times)
        if step == 1:
            begun = time.monotonic() - size.interval_s
        time.sleep(max(begun + step * size.interval_s - time.monotonic(), 0))
        send(step, rows)
        times.sent[step] = time.monotonic()
        if step == 0:
            watcher.start()


def _wait_for(step: int, times: Times) -> None:
    """Until REST knows of a step, or it is clear that it never will."""
    end = time.monotonic() + _LAST_S
    while step not in times.reported and time.monotonic() < end:
        time.sleep(0.02)


def _watch(server: ServerProcess, times: Times, stop: threading.Event) -> None:
    """Ask for what is new: for steps and findings all the time, now and then for the report."""
    job_id, rounds, newest = None, 0, -1
    while not stop.is_set():
        if job_id is None:
            items = server.get(f"jobs?name={JOB}")["items"]
            job_id = items[0]["id"] if items else None
            continue
        path = f"jobs/{job_id}/history?metric=slowdown&from_step={newest + 1}"
        new = server.get(path)["step"]
        now = time.monotonic()
        times.seen.update(dict.fromkeys(new, now))
        newest = max([newest, *new])
        if new or rounds % _ROUNDS == 0:
            job = server.get(f"jobs/{job_id}")
            _look(job, newest, times)
        rounds += 1
        time.sleep(0.05)


def _look(job: dict[str, Any], newest: int, times: Times) -> None:
    """Note of which step there is a report, and whether the slow worker is named."""
    now, step = time.monotonic(), job["attempts"][0]["live_step"]
    if step is not None:
        for each in range(step, -1, -1):
            if times.reported.setdefault(each, now) != now:
                break
    right = [
        finding
        for finding in job["findings"]
        if (finding["cause"], finding["dp"], finding["stage"]) == ("slow_gpu", *SLOW)
    ]
    if right and times.named_step is None:
        times.named_step = newest


def main() -> None:
    """Read the size from the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=128)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--interval", type=float, default=3.0)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--patient", action="store_true")
    given = vars(parser.parse_args())
    interval_s = given.pop("interval")
    size = Size(**given, interval_s=interval_s, onset=given["steps"] // 5)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(size, Path(name))), flush=True)  # noqa: T201  # the result


if __name__ == "__main__":
    main()
