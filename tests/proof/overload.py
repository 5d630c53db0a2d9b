"""Ten times more than a server is to take: what it takes all the same, and what others notice.

Twice, on a server each, which has but one limit: where there were two, the first would answer for
the second. First it is a tenant's number of requests a second, and its agents come again without
waiting; a real agent of that tenant is watched. Then it is the memory for bodies on their way:
these are large and slow, there is room for six at a time, and the agents wait when they are told
to. Another tenant sends a little all the while.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from smon.store.database import Database, now_ns
from smon.store.tokens import create
from tests.faults.events import Appended
from tests.faults.outside import number
from tests.faults.processes import AgentProcess, unsent
from tests.faults.producers import Load, Producer
from tests.load.agents import Manners, Timing, requests_of
from tests.load.crowds import Crowd, Played, Told, Watched, play
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.service import sqlite_url
from tests.system.server import ServerProcess
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Plan:
    """An overload.

    Attributes
    ----------
    per_s
        Requests of a tenant per second that the server is set to take.
    peak_s, overload_s
        How long as much is offered as the limit allows, and how long ten times as much.
    """

    per_s: float
    peak_s: float
    overload_s: float


_PLANS: Final = {
    Form.SHORT: Plan(per_s=20.0, peak_s=1.0, overload_s=2.0),
    Form.LONG: Plan(per_s=60.0, peak_s=20.0, overload_s=40.0),
}

#: What is offered in an overload, over the limit.
_TIMES: Final = 10

#: The first comes again until a real agent was told to wait, so often at most.
_MOST_OVERLOADS: Final = 5

#: Of what is taken in without an overload.
_GOODPUT: Final = 0.8

#: Agents of a crowd that offers as much as the limit allows; events of their batches.
_AGENTS: Final = 10
_SMALL: Final = 64

#: The other tenant offers a quarter of the limit.
_CALM_AGENTS: Final = 4
_CALM_SHARE: Final = 0.25

#: Large bodies take so long on their way, and there is room for so many at a time: a tenant may
#: hold three times what it leaves free, which is a half more.
_LARGE: Final = 8000
_UPLOAD_S: Final = 0.25
_ROOM: Final = 6

_P99_S: Final = 0.1
_REFUSAL_MS: Final = 0.5
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two overloads.

    Attributes
    ----------
    peak, overload
        Without and with an overload; the jobs of each begin with ``crowd`` and ``calm``.
    drained_s
        From the end of the overload until all that was acknowledged, and all that the real agent
        has, is stored.
    """

    name: str
    peak: Played
    overload: Played
    drained_s: float

    @property
    def goodput_ratio(self) -> float:
        """Batches of the crowded tenant per second, over those without an overload."""
        peak, over = self.crowd(self.peak), self.crowd(self.overload)
        rate = peak.batches / self.peak.seconds
        return over.batches / self.overload.seconds / max(rate, 1e-9)

    def crowd(self, played: Played) -> Told:
        """What the crowded tenant was told."""
        return next(told for job, told in played.told.items() if job.startswith("crowd"))

    def calm(self, played: Played) -> Told:
        """What the other tenant was told."""
        return next(told for job, told in played.told.items() if job.startswith("calm"))

    @property
    def batch_ms(self) -> float:
        """CPU that a batch takes that is taken in, with all that comes after it."""
        return 1000 * self.peak.cpu_s / max(self.peak.batches, 1)

    @property
    def refusal_ms(self) -> float:
        """CPU that a refusal takes: what the overload took beyond its batches."""
        spent_ms = 1000 * self.overload.cpu_s - self.batch_ms * self.overload.batches
        return max(spent_ms, 0.0) / max(self.overload.refused, 1)


class Scene:
    """A server with two tenants and one limit, which is given as a setting."""

    def __init__(self, folder: Path, plan: Plan, stack: ExitStack, limit: dict[str, Any]) -> None:
        self.plan = plan
        self.url = sqlite_url(folder / "data")
        self.crowd_token, self.calm_token = _tokens(self.url)
        self.server = stack.enter_context(
            ServerProcess(
                folder,
                role="api",
                data_dir=folder / "data",
                max_connections_per_address=1024,
                min_free_bytes=0,
                drain_interval_s=0.1,
                flush_interval_s=0.1,
                **limit,
            )
        )

    def crowd(self, job: str, agents: int, rows: int, timing: Timing) -> Crowd:
        """Of the tenant that offers too much."""
        return Crowd(f"crowd {job}", self.crowd_token, agents, rows, timing)

    def calm(self, job: str) -> Crowd:
        """Of the one that does not."""
        pause_s = _CALM_AGENTS / (_CALM_SHARE * self.plan.per_s)
        return Crowd(f"calm {job}", self.calm_token, _CALM_AGENTS, _SMALL, Timing(pause_s))

    def is_drained(self) -> bool:
        """Whether there is nothing in the log."""
        return not self.server.metrics()["smon_wal_records"]

    def stored(self, job: str) -> int:
        """Events of a job."""
        statement = "SELECT sum(events) FROM streams JOIN jobs ON jobs.id = job_id WHERE jobs.name"
        return number(self.url, f"{statement} = '{job}'")

    def wrong(self, *all_played: Played) -> int:
        """Events that were acknowledged and are not stored, or stored twice."""
        return sum(
            abs(self.stored(job) - told.events)
            for played in all_played
            for job, told in played.told.items()
        )


class RealAgent:
    """A real agent of the crowded tenant, and a relay that watches what it is told."""

    def __init__(self, folder: Path, scene: Scene, stack: ExitStack) -> None:
        self._scene = scene
        self.relay = stack.enter_context(Watched(scene.server.port))
        self.appended = Appended(now_ns() - 3600 * 10**9)
        self._spool = folder / "spool"
        load = Load(hosts=1, batch_events=50, pause_s=0.25, job="agent")
        self._producer = Producer(0, self._spool, load, self.appended)
        self._agent = AgentProcess(
            self.relay.url, self._spool, "agent", {"token": scene.crowd_token, "senders": 1}
        )
        stack.callback(self._agent.kill)

    def start(self) -> None:
        """Until a first batch of it is acknowledged."""
        self._agent.start()
        self._producer.start()
        wait_until(lambda: self.relay.counts.acknowledged, "an agent at work", _PATIENCE_S)

    def finish(self) -> None:
        """Until all that it has is acknowledged."""
        self._producer.finish()
        wait_until(lambda: not unsent(self._spool), "an empty spool", _PATIENCE_S)
        self._agent.kill()

    def wrong(self) -> int:
        """Events that it had and that are not stored, or stored twice."""
        return abs(self._scene.stored("agent") - self.appended.events)


def prove(form: Form, folder: Path) -> Line:
    """Twice as much as can be had, and what comes of it."""
    begin = time.monotonic()
    plan = _PLANS[form]
    rate, agent, lost_at_rate = _too_many(folder / "rate", plan)
    memory, lost_of_large = _too_large(folder / "memory", plan)
    runs = (rate, memory)
    goals = (*_kept(runs, agent, lost_at_rate + lost_of_large), *_quick(runs))
    figures = {
        "runs": [_figures(run) for run in runs],
        "crowds": [
            {"run": run.name, "what": what, **_row(told)}
            for run in runs
            for what, played in (("peak", run.peak), ("overload", run.overload))
            for told in played.told.values()
        ],
        "waits_of_the_real_agent": agent.relay.told,
        "events_of_the_real_agent": agent.appended.events,
    }
    return Line("overload", form, goals, figures, round(time.monotonic() - begin, 1))


def _too_many(folder: Path, plan: Plan) -> tuple[Run, RealAgent, int]:
    """More requests a second than a tenant may send; refused agents come again at once.

    Returns
    -------
    tuple
        The run, the real agent, and events lost or stored twice.
    """
    folder.mkdir()
    with ExitStack() as stack:
        scene = Scene(folder, plan, stack, {"tenant_requests_per_s": plan.per_s})
        agent = RealAgent(folder, scene, stack)
        pause = Timing(_AGENTS / plan.per_s)
        usual = [scene.crowd("rate peak", _AGENTS, _SMALL, pause), scene.calm("rate peak")]
        peak = play(scene.server, usual, plan.peak_s)
        agent.start()
        overloads: list[Played] = []
        # A short one may be over before a real agent on a busy machine has sent anything.
        while not agent.relay.told and len(overloads) < _MOST_OVERLOADS:
            job = f"rate overload {len(overloads)}"
            many = scene.crowd(job, _TIMES * _AGENTS, _SMALL, pause)
            overloads.append(play(scene.server, [many, scene.calm(job)], plan.overload_s))
        ended = time.monotonic()
        agent.finish()
        wait_until(scene.is_drained, "an empty log", _PATIENCE_S)
        run = Run("requests a second", peak, overloads[-1], time.monotonic() - ended)
        return run, agent, scene.wrong(peak, *overloads) + agent.wrong()


def _too_large(folder: Path, plan: Plan) -> tuple[Run, int]:
    """More bodies on their way than there is memory for; refused agents wait as they are told.

    Returns
    -------
    tuple
        The run, and events lost or stored twice.
    """
    folder.mkdir()
    body = max(len(each) for _, _, each in requests_of(0, rows=_LARGE))
    with ExitStack() as stack:
        scene = Scene(folder, plan, stack, {"max_in_flight_bytes": _ROOM * body * 3 // 2})
        slow = Timing(upload_s=_UPLOAD_S, manners=Manners.POLITE)
        usual = [scene.crowd("memory peak", _ROOM, _LARGE, slow), scene.calm("memory peak")]
        peak = play(scene.server, usual, plan.peak_s)
        many = scene.crowd("memory overload", _TIMES * _ROOM, _LARGE, slow)
        overload = play(scene.server, [many, scene.calm("memory overload")], plan.overload_s)
        ended = time.monotonic()
        wait_until(scene.is_drained, "an empty log", _PATIENCE_S)
        run = Run("memory for bodies", peak, overload, time.monotonic() - ended)
        return run, scene.wrong(peak, overload)


def _tokens(url: str) -> tuple[str, str]:
    """Of the crowded tenant and of the calm one."""
    database = Database(url)
    try:
        with database.write() as session:
            crowd, calm = (
                create(session, tenant, "overload", ["ingest"], None, now_ns())
                for tenant in ("crowded", "calm")
            )
    finally:
        database.close()
    return crowd, calm


# --- goals and figures ------------------------------------------------------------------------


def _kept(runs: tuple[Run, ...], agent: RealAgent, wrong: int) -> Iterator[Goal]:
    yield exactly("events lost or stored twice", wrong, 0)
    silent = sum(played.silent for run in runs for played in (run.peak, run.overload))
    yield exactly("refusals that do not say when to come again", silent, 0)
    for run, status in zip(runs, (429, 503), strict=True):
        name = run.name
        crowd, calm = run.crowd(run.overload), run.calm(run.overload)
        others = [each for each in crowd.statuses if each != status]
        yield exactly(f"answers other than 200 and {status}, {name}", len(others), 0)
        yield at_least(f"refusals of the crowded tenant, {name}", crowd.refused, 1)
        refused = calm.refused + run.calm(run.peak).refused
        yield exactly(f"refusals of the other tenant, {name}", refused, 0)
    yield at_least("times that a real agent was told to wait", agent.relay.told, 1)
    yield exactly("times that it did not", agent.relay.impatient, 0)


def _quick(runs: tuple[Run, ...]) -> Iterator[Goal]:
    for run in runs:
        name, calm = run.name, run.calm(run.overload)
        yield at_least(
            f"taken in, over that without an overload, {name}",
            run.goodput_ratio,
            _GOODPUT,
            timed=True,
        )
        yield at_most(
            f"99th percentile of the other tenant's acknowledgement, s, {name}",
            calm.p99_s,
            _P99_S,
            timed=True,
        )
        yield at_most(f"until all is stored, over the time of the overload, {name}",
                      run.drained_s / run.overload.seconds, 2, timed=True)  # fmt: skip
    # Of the other run there are too few refusals to tell their CPU from that of the batches.
    yield at_most(f"CPU of a refusal, ms, {runs[0].name}",
                  runs[0].refusal_ms, _REFUSAL_MS, timed=True)  # fmt: skip


def _figures(run: Run) -> dict[str, Any]:
    return {
        "limit": run.name,
        "peak_s": run.peak.seconds,
        "overload_s": run.overload.seconds,
        "goodput_ratio": round(run.goodput_ratio, 3),
        "cpu_of_a_batch_ms": round(run.batch_ms, 3),
        "cpu_of_a_refusal_ms": round(run.refusal_ms, 3),
        "drained_s": round(run.drained_s, 2),
    }


def _row(told: Told) -> dict[str, Any]:
    record = asdict(told)
    record["statuses"] = ", ".join(map(str, told.statuses))
    return record
