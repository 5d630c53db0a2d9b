"""From the last event of a step to its finding in REST: a live job of many workers.

``python -m tests.load.live --workers 1024 --steps 100`` starts a real server, plays the agents of
the job over real HTTP, and asks REST for the running diagnosis as fast as it answers. Prints one
JSON line: median, 90th percentile and worst of all steps, in seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.wire import Batch
from tests.system.replay import ops_batch
from tests.system.server import ServerProcess

JOB = "live-load"
SLOW = (5, 2)


@dataclass(frozen=True, slots=True)
class Size:
    """Of the job and of its agents."""

    dp: int
    pp: int
    microbatches: int
    steps: int
    agents: int
    interval_s: float
    onset: int


@dataclass(slots=True)
class Times:
    """When the last batch of each step was acknowledged, and when REST knew of it."""

    sent: dict[int, float] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    named_step: int | None = None

    def delays(self) -> list[float]:
        """Seconds of each step."""
        return [self.seen[step] - self.sent[step] for step in sorted(self.sent)]


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Run it; the figures."""
    made = _job(size)
    with ServerProcess(folder) as server:
        streams = _register(server, made, size)
        job = server.get(f"jobs?name={JOB}")["items"]
        times, stop = Times(), threading.Event()
        watcher = threading.Thread(target=_watch, args=(server, times, stop, size))
        _send_all(server, made, streams, size, times, watcher)
        end = time.monotonic() + 60
        while len(times.seen) < size.steps and time.monotonic() < end:
            time.sleep(0.05)
        stop.set()
        watcher.join()
    delays = np.array(times.delays())
    return {
        "workers": size.dp * size.pp,
        "ops_per_step": len(made.table) // size.steps,
        "agents": size.agents,
        "steps": size.steps,
        "interval_s": size.interval_s,
        "median_s": round(float(np.median(delays)), 3),
        "p90_s": round(float(np.quantile(delays, 0.9)), 3),
        "worst_s": round(float(delays.max()), 3),
        "onset_step": size.onset,
        "named_at_step": times.named_step,
        "job_known_before": bool(job),
    }


def _job(size: Size) -> Synthetic:
    return generate(
        scenario(
            "slow-worker",
            dp=size.dp,
            pp=size.pp,
            tp=1,
            microbatches=size.microbatches,
            steps=size.steps,
            start_unix_s=int(time.time()) - 3600,
            causes=(causes.slow_gpu(*SLOW, 1.5, first=size.onset, onset=True),),
        )
    )


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
    server: ServerProcess,
    made: Synthetic,
    streams: list[str],
    size: Size,
    times: Times,
    watcher: threading.Thread,
) -> None:
    local = threading.local()
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

    bounds = np.searchsorted(made.table.step, np.arange(size.steps + 1))
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for step in range(size.steps):
            rows = made.table.take(np.arange(bounds[step], bounds[step + 1]))
            mine = owner[rows.rank]
            batches = [
                ops_batch(step, rows.take(mine == number), steps_done=step)
                for number in range(size.agents)
            ]
            time.sleep(max(begun + step * size.interval_s - time.monotonic(), 0))
            list(pool.map(put, streams, batches))
            times.sent[step] = time.monotonic()
            if step == 0:
                watcher.start()


def _watch(server: ServerProcess, times: Times, stop: threading.Event, size: Size) -> None:
    job_id = None
    while not stop.is_set():
        if job_id is None:
            items = server.get(f"jobs?name={JOB}")["items"]
            job_id = items[0]["id"] if items else None
            continue
        job = server.get(f"jobs/{job_id}")
        now, step = time.monotonic(), job["attempts"][0]["live_step"]
        if step is not None:
            for each in range(step, -1, -1):
                if times.seen.setdefault(each, now) != now:
                    break
        right = [
            finding
            for finding in job["findings"]
            if (finding["cause"], finding["dp"], finding["stage"]) == ("slow_gpu", *SLOW)
        ]
        if right and times.named_step is None:
            times.named_step = step
        time.sleep(0.05)


def main() -> None:
    """Read the size from the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--interval", type=float, default=3.0)
    given = parser.parse_args()
    size = Size(
        dp=given.workers // 8,
        pp=8,
        microbatches=given.microbatches,
        steps=given.steps,
        agents=given.agents,
        interval_s=given.interval,
        onset=given.steps // 5,
    )
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(size, Path(name))), flush=True)  # noqa: T201  # the result


if __name__ == "__main__":
    main()
