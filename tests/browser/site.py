"""A server filled with real reports: production traces, C01 to C14, hostile names, a live job."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from smon.cli import main as smon
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.synth.write import write_synthetic, write_trace
from smon.wire import Batch
from tests.browser.names import HOSTILE
from tests.system.replay import end_batch, ops_batch
from tests.system.server import ServerProcess, request

#: Production traces, with the worst worker (dp, stage) that was published, if there is one.
TRACES: Final = ("AR", "SE", "ST")

#: With the answers of their makers.
SCENARIOS: Final = tuple(f"C{n:02}" if n != 7 else "C07a" for n in range(1, 15))

LIVE: Final = "live-job"
#: Slow from step 12 on.
LIVE_SLOW: Final = (2, 1)
_ONSET: Final = 12

#: Of an hour of a GPU.
PRICE: Final = 2.0

_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Site:
    """The server, and what is on it.

    Attributes
    ----------
    jobs
        Ids by name.
    truths
        Of the synthetic jobs, as `smon synth` writes them.
    """

    server: ServerProcess
    jobs: Mapping[str, str]
    truths: Mapping[str, dict[str, Any]]

    @property
    def url(self) -> str:
        """Of the first page."""
        return self.server.url

    def job(self, name: str, rest: str = "") -> str:
        """Path of a page of a job."""
        return f"/jobs/{self.jobs[name]}{rest}"

    def report(self, name: str) -> dict[str, Any]:
        """The newest report of a job, from REST."""
        job = self.jobs[name]
        windows = self.server.get(f"jobs/{job}/windows")["items"]
        report: dict[str, Any] = self.server.get(f"jobs/{job}/windows/{windows[0]['id']}")
        return report


def fill(server: ServerProcess, traces: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Bring everything in and wait for the reports; the truths of the synthetic jobs."""
    for name in TRACES:
        place = traces / "straggler-analysis"
        path, meta = place / f"trace-{name}.parquet", place / f"meta-{name}.yaml"
        imported(server, [str(path), "--meta", str(meta), "--job", name])
    truths = {}
    for name in SCENARIOS:
        made = generate(scenario(name))
        write_synthetic(made, folder / name)
        imported(server, [str(folder / name), "--job", name])
        truths[name] = json.loads(made.truth.to_json())
    _fill_hostile(server, folder)
    wait_analysed(server, len(TRACES) + len(SCENARIOS) + len(HOSTILE))
    return truths


def imported(server: ServerProcess, arguments: Sequence[str]) -> None:
    """Run `smon import`; it must succeed."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = smon(["import", "--server", server.url, *arguments])
    assert code in {0, 3}, arguments


def _fill_hostile(server: ServerProcess, folder: Path) -> None:
    """A job of each name, on a host of that name; by import where the wire refuses the name."""
    made = small_job()
    write_trace(made.table, made.job, folder / "hostile")
    for name in HOSTILE:
        if name.isprintable():
            send(server, made, name)
        else:
            imported(server, [str(folder / "hostile"), f"--job={name}"])


def small_job(**fields: object) -> Synthetic:
    """Four workers, one of them slow."""
    given: dict[str, Any] = {
        "dp": 4, "pp": 1, "tp": 1, "microbatches": 2, "steps": 24,
        "start_unix_s": int(time.time()) - 3600, "causes": (causes.slow_gpu(2, 0, 1.5),),
    }  # fmt: skip
    return generate(scenario("slow-worker", **{**given, **fields}))


def hello(server: ServerProcess, made: Synthetic, job: str, host: str, mode: str) -> dict[str, Any]:
    """What the server says to the one agent of a job."""
    sizes = {name: getattr(made.job.layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")}
    stream = {
        "key": f"browser-{len(job)}-{job}"[:256].strip(), "job": job, "attempt": 0,
        "layout": sizes, "mode": mode, "time": "unix", "window_steps": None, "host": host,
        "source": "test", "ranks": np.unique(made.table.rank).tolist(), "epoch": 0, "notes": [],
    }  # fmt: skip
    agent = {"version": "0", "host": "test", "pid": 1}
    body = {"protocol": 1, "agent": agent, "streams": [stream]}
    status, answer = request(
        server.port, "POST", "/api/v1/agents/hello", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(answer)
    assert status in {200, 207, 400, 422}, (status, answer)
    return found["streams"][0] if status == 200 else {"refused": found}


def send(server: ServerProcess, made: Synthetic, name: str) -> None:
    """A whole job from one agent, on a host of the same name; only a live one names its hosts."""
    stream = hello(server, made, name, name, "live")
    assert "stream_id" in stream, (name, stream)
    put(server, stream["stream_id"], ops_batch(0, made.table))
    put(server, stream["stream_id"], end_batch(1))


def put(server: ServerProcess, stream: str, batch: Batch) -> None:
    """Send one batch; it must be stored."""
    path = f"/api/v1/ingest/{stream}/0/{batch.seq}"
    status, body = request(server.port, "PUT", path, batch.body, batch.headers())
    assert status == 200, (status, body)


def all_jobs(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """Jobs by name, from REST."""
    return {job["name"]: job for job in server.get("jobs?limit=500")["items"]}


def wait_analysed(server: ServerProcess, count: int) -> None:
    """Wait until there are so many jobs, and each has reports of all its windows."""
    end = time.monotonic() + _PATIENCE_S
    waiting: list[str] = []
    while time.monotonic() < end:
        jobs = all_jobs(server)
        waiting = [name for name, job in jobs.items() if not _analysed(server, job["id"])]
        if len(jobs) == count and not waiting:
            return
        time.sleep(0.5)
    raise AssertionError(f"no report of {waiting}: {server.log.read_text()[-3000:]}")


def _analysed(server: ServerProcess, job_id: str) -> bool:
    windows = server.get(f"jobs/{job_id}/windows")["items"]
    return bool(windows) and all(window["state"] == "done" for window in windows)


@dataclass(slots=True)
class LiveJob:
    """A job that runs as far as the test lets it."""

    server: ServerProcess
    made: Synthetic
    stream: str
    job_id: str
    sent: int = 0
    _bounds: Any = field(init=False)

    def __post_init__(self) -> None:
        """Find the rows of each step."""
        steps = int(self.made.table.step.max()) + 1
        self._bounds = np.searchsorted(self.made.table.step, np.arange(steps + 1))

    def advance(self, steps: int) -> None:
        """Send so many more steps."""
        for step in range(self.sent, self.sent + steps):
            rows = self.made.table.take(np.arange(self._bounds[step], self._bounds[step + 1]))
            put(self.server, self.stream, ops_batch(step, rows, steps_done=step))
        self.sent += steps

    def wait_seen(self) -> None:
        """Wait until the running diagnosis knows of the last step that was sent."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            job = self.server.get(f"jobs/{self.job_id}")
            if (job["attempts"][0]["live_step"] or 0) >= self.sent - 1:
                return
            time.sleep(0.1)
        raise AssertionError(f"step {self.sent - 1} is not seen")


def start_live(server: ServerProcess, name: str = LIVE) -> LiveJob:
    """A live job of eight workers that has not sent anything yet."""
    cause = causes.slow_gpu(*LIVE_SLOW, 1.5, first=_ONSET, onset=True)
    made = small_job(pp=2, steps=80, causes=(cause,))
    made = replace(made, job=replace(made.job, job_id=name))
    stream = hello(server, made, name, "node-live", "live")
    return LiveJob(server, made, stream["stream_id"], all_jobs(server)[name]["id"])


def served(folder: Path, truths: Mapping[str, dict[str, Any]]) -> Iterator[Site]:
    """A server over a filled folder."""
    with ServerProcess(folder, price_per_gpu_hour=PRICE) as server:
        jobs = {name: job["id"] for name, job in all_jobs(server).items()}
        yield Site(server, jobs, truths)
