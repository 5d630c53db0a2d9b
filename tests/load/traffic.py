"""A site at work: jobs that begin and end, agents that come and go, people and Prometheus who read.

Each player is a thread that plays one thing over and over until it is told to stop, and then ends
what it has begun. What all of them were answered, and had taken in, stands in one `Tally`.
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from smon.synth import causes
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.trace.table import OpTable
from smon.wire import API, Batch
from tests.faults.events import Appended
from tests.faults.processes import AgentProcess, unsent
from tests.faults.producers import Load, Producer
from tests.load.client import Client, Tally
from tests.system.replay import end_batch, ops_batch

DP: Final = 8
PP: Final = 2

#: Steps of a window of these jobs.
WINDOW_STEPS: Final = 20

_NS: Final = 10**9

#: An agent has sent what is left within so long.
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How much goes on.

    Attributes
    ----------
    live
        Live jobs at a time, each of `DP` × `PP` streams; every other one has a slow worker.
    step_s
        Between two steps of a live job, and of what an agent sends.
    steps
        Fewest and most steps of a live job.
    recorded_s
        Between two recorded jobs.
    agents
        Real agents at a time, each with a spool; half way each is killed and started again.
    agent_s
        Life of one.
    read_s, scrape_s
        Between two things that people read, and between two scrapes.
    """

    live: int
    step_s: float
    steps: tuple[int, int]
    recorded_s: float
    agents: int
    agent_s: float
    read_s: float
    scrape_s: float
    heartbeat_s: float = 15.0


class Player(threading.Thread):
    """Plays over and over until it is stopped.

    Parameters
    ----------
    play
        Called again and again with the event that says when to stop.
    """

    def __init__(self, name: str, tally: Tally, play: Callable[[threading.Event], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._tally, self._play = tally, play
        self.stopping = threading.Event()

    def run(self) -> None:
        """Until it is told to stop; what fails is noted, and it goes on."""
        while not self.stopping.is_set():
            try:
                self._play(self.stopping)
            except Exception as error:  # noqa: BLE001  # noted, and asserted at the end
                self._tally.failed(self.name, error)
                self.stopping.wait(1.0)


class Traffic:
    """All players of one server.

    Parameters
    ----------
    ops_ports
        Of the processes that are scraped.
    folder
        For spools and logs of agents.
    """

    def __init__(self, port: int, ops_ports: Sequence[int], folder: Path, pace: Pace) -> None:
        self.tally = Tally()
        self._port = port
        self._clients: list[Client] = []
        jobs = [
            (f"live-{place}", _live(self._client(), self.tally, place, pace))
            for place in range(pace.live)
        ]
        agents = [
            (f"agent-{place}", _agent(port, folder, self.tally, place, pace))
            for place in range(pace.agents)
        ]
        plays = [
            *jobs,
            *agents,
            ("recorded", _recorded(self._client(), self.tally, pace)),
            ("reader", _reader(self._client(), pace)),
            ("scraper", _scraper([self._client(each) for each in ops_ports], pace)),
        ]
        self.players = [Player(name, self.tally, play) for name, play in plays]

    def _client(self, port: int | None = None) -> Client:
        client = Client(self._port if port is None else port, self.tally)
        self._clients.append(client)
        return client

    def start(self) -> None:
        """Begin."""
        for player in self.players:
            player.start()

    def stop(self) -> None:
        """Begin nothing more, and wait until all that was begun has ended."""
        for player in self.players:
            player.stopping.set()
        for player in self.players:
            player.join()
        for client in self._clients:
            client.close()


# --- jobs -------------------------------------------------------------------------------------


@cache
def _ops(steps: int, *, slow: bool) -> OpTable:
    """A job of so many steps, with unix times that begin at 0."""
    spec = Scenario(
        dp=DP,
        pp=PP,
        microbatches=4,
        steps=steps,
        causes=(causes.slow_gpu(1, 0, 1.5),) if slow else (),
    )
    table = generate(spec).table
    return replace(table, start_ns=table.start_ns - table.start_ns.min())


def _stream(job: str, number: int, ranks: Sequence[int], mode: str) -> dict[str, Any]:
    return {
        "key": f"{job}/{number}", "job": job, "attempt": 0, "layout": {"dp": DP, "pp": PP},
        "mode": mode, "time": "unix", "window_steps": WINDOW_STEPS, "host": f"node-{number}",
        "source": "soak", "ranks": list(ranks), "epoch": 0, "notes": [],
    }  # fmt: skip


_AGENT: Final = {"version": "0", "host": "soak", "pid": 1}


def _hello(client: Client, streams: Sequence[Mapping[str, Any]]) -> list[str]:
    said = {"protocol": 1, "agent": _AGENT, "streams": list(streams)}
    answer = client.document("hello", "agents/hello", said)
    return [str(each["stream_id"]) for each in answer["streams"]]


def _put(client: Client, stream_id: str, batch: Batch) -> None:
    path = f"{API}/ingest/{stream_id}/0/{batch.seq}"
    status, answer = client.ask("batch", "PUT", path, batch.body, batch.headers(clock=(1000, 500)))
    if status != 200:
        raise ValueError(f"a batch was answered with {status}: {answer[:200]!r}")


def _live(
    client: Client, tally: Tally, place: int, pace: Pace
) -> Callable[[threading.Event], None]:
    """One live job after the other."""
    names = (f"live-{place}-{number}" for number in itertools.count())
    chance = random.Random(place)  # noqa: S311  # no secret

    def play(stopping: threading.Event) -> None:
        steps = chance.randint(*pace.steps)
        table = _ops(pace.steps[1], slow=place % 2 == 1).between(0, steps - 1)
        # The last step ends now: nothing lies in the future.
        ends = int((table.start_ns + table.duration_ns).max())
        table = replace(table, start_ns=table.start_ns + time.time_ns() - ends)
        _play_job(client, tally, next(names), table, pace, stopping)

    return play


def _play_job(
    client: Client,
    tally: Tally,
    job: str,
    table: OpTable,
    pace: Pace,
    stopping: threading.Event,
) -> None:
    ranks = np.unique(table.rank).tolist()
    streams = [_stream(job, number, [rank], "live") for number, rank in enumerate(ranks)]
    ids = _hello(client, streams)
    beat_at, seq = time.monotonic(), 0
    for step in range(int(table.step.max()) + 1):
        now = table.between(step, step)
        for rank, stream_id in zip(ranks, ids, strict=True):
            mine = now.take(now.rank == rank)
            _put(client, stream_id, ops_batch(step, mine, steps_done=step))
            tally.taken(job, len(mine))
        seq = step + 1
        if time.monotonic() >= beat_at:
            beat_at = time.monotonic() + pace.heartbeat_s
            _beat(client, ids, seq)
        if stopping.wait(pace.step_s):
            break
    for stream_id in ids:
        _put(client, stream_id, end_batch(seq))


def _beat(client: Client, ids: Sequence[str], seq: int) -> None:
    streams: list[dict[str, Any]] = [
        {"stream_id": each, "epoch": 0, "next_seq": seq, "spool_bytes": 0, "dropped": {},
         "oldest_unsent_s": None}
        for each in ids
    ]  # fmt: skip
    said = {
        "agent": _AGENT,
        "clock": {"offset_ns": 1000, "error_ns": 500, "drift_ppm": 0.0},
        "streams": streams,
    }
    client.document("heartbeat", "agents/heartbeat", said)


def _recorded(client: Client, tally: Tally, pace: Pace) -> Callable[[threading.Event], None]:
    """One recorded job after the other, each sent whole by one agent."""
    names = (f"recorded-{number}" for number in itertools.count())

    def play(stopping: threading.Event) -> None:
        if stopping.wait(pace.recorded_s):
            return
        job, table = next(names), _ops(2 * WINDOW_STEPS, slow=True)
        table = replace(table, start_ns=table.start_ns + time.time_ns() - 3600 * _NS)
        (stream_id,) = _hello(client, [_stream(job, 0, range(DP * PP), "recorded")])
        _put(client, stream_id, ops_batch(0, table))
        tally.taken(job, len(table))
        _put(client, stream_id, end_batch(1))

    return play


# --- agents -----------------------------------------------------------------------------------


def _agent(
    port: int, folder: Path, tally: Tally, place: int, pace: Pace
) -> Callable[[threading.Event], None]:
    """One real agent after the other: it is killed, comes back, and ends when all is sent."""
    names = (f"agent-{place}-{number}" for number in itertools.count())

    def play(stopping: threading.Event) -> None:
        job = next(names)
        spool = folder / job
        load = Load(
            hosts=1, batch_events=100, pause_s=pace.step_s, job=job, window_steps=WINDOW_STEPS
        )
        appended = Appended(time.time_ns() - 3600 * _NS)
        producer = Producer(0, spool, load, appended)
        agent = AgentProcess(f"http://127.0.0.1:{port}", spool, "agent", log_folder=folder)
        producer.start()
        try:
            for _ in range(2):
                agent.kill()
                agent.start()
                stopping.wait(pace.agent_s / 2)
        finally:
            producer.finish()
        tally.taken(job, appended.events)
        _finish(agent, spool)

    return play


def _finish(agent: AgentProcess, spool: Path) -> None:
    """Wait until a spool is empty, and end its agent."""
    end = time.monotonic() + _PATIENCE_S
    try:
        while unsent(spool):
            if time.monotonic() > end:
                raise TimeoutError(f"{spool.name}: batches stay in the spool")
            time.sleep(0.1)
        agent.stop()
    finally:
        agent.kill()
    shutil.rmtree(spool, ignore_errors=True)


# --- readers ----------------------------------------------------------------------------------


def _reader(client: Client, pace: Pace) -> Callable[[threading.Event], None]:
    """Somebody who looks at the fleet, and then at the job that had data last."""
    pages = itertools.cycle(("/", "/fleet", "/hosts", "/jobs.csv"))

    def play(stopping: threading.Event) -> None:
        jobs = client.document("rest", "jobs?limit=20")["items"]
        looks: list[Callable[[], object]] = [partial(_page, client, next(pages))]
        if jobs:
            looks += _looks(client, jobs[0]["id"])
        for look in looks:
            if stopping.wait(pace.read_s):
                return
            look()

    return play


def _looks(client: Client, job_id: str) -> list[Callable[[], object]]:
    """What is to be seen of one job."""
    parts = ("", "/windows", "/windows/live", "/findings", "/history", "/workers", "/plan")
    return [
        partial(_page, client, f"/jobs/{job_id}"),
        *(partial(_read, client, f"jobs/{job_id}{part}") for part in parts),
    ]


def _read(client: Client, path: str) -> None:
    # What is not there yet answers 404, or 503 with the reason `not-ready`.
    client.ask("rest", "GET", f"{API}/{path}")


def _page(client: Client, path: str) -> None:
    client.ask("page", "GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"})


def _scraper(clients: Sequence[Client], pace: Pace) -> Callable[[threading.Event], None]:
    """Prometheus, whose alerts are made of this, and whoever asks for the health."""

    def play(stopping: threading.Event) -> None:
        for client in clients:
            for path in ("/metrics", "/readyz", "/healthz"):
                client.ask(f"ops {path}", "GET", path)
        stopping.wait(pace.scrape_s)

    return play
