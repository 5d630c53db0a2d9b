"""Kills everything at random under load, and counts from outside what is stored.

``python -m tests.faults.harness --agents 8 --agent-kills 100 --server-kills 30 --json``. Producers
write known events to spools, agents ship them over HTTP, the server stores them; agents and server
are killed, PostgreSQL crashes, connections are cut. In the end each event must be stored exactly
once. ``docs/faults.md`` says what that proves.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults.events import Appended, Verdict, compare
from tests.faults.outside import epochs, lost_events, read_stored
from tests.faults.postgres import Postgres, postgres
from tests.faults.processes import AgentProcess, FaultServer, unsent
from tests.faults.producers import Load, Producer
from tests.faults.proxy import Proxy
from tests.system.server import START_S

_NS = 10**9
_POLL_S = 0.05
_PROGRESS_S = 0.002


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to whom.

    Attributes
    ----------
    power_cut
        Whether the server loses what it has not synced, each time it is killed.
    cut_ratio
        Share of requests with batches, and of answers to them, that are lost on the way.
    agent_pause_s, server_pause_s, postgres_pause_s
        Longest pause between two kills of one kind; each is drawn. Of a server it begins when it
        is ready.
    settings, agent_settings
        Besides the usual ones.
    plant, agent_module
        Bug of the server, and what is run as agent.
    drain_s, quiet_s
        How long everything may take to come to rest afterwards, and after how long without news it
        is taken to be at rest although spools are not empty, as with a bug.
    """

    load: Load = field(default_factory=Load)
    role: str = "api"
    agent_kills: int = 0
    server_kills: int = 0
    postgres_restarts: int = 0
    power_cut: bool = False
    cut_ratio: float = 0.02
    agent_pause_s: float = 0.2
    server_pause_s: float = 0.5
    postgres_pause_s: float = 1.0
    seconds: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)
    agent_settings: Mapping[str, object] = field(default_factory=dict)
    plant: str = ""
    agent_module: str = "ingest_agents.cli"
    warm: bool = True
    drain_s: float = 60.0
    quiet_s: float = math.inf
    seed: int = 0


@dataclass(slots=True)
class Figures:
    """What a run did and found.

    Attributes
    ----------
    failed_starts
        Starts of the server that failed because the database was down, and were repeated.
    unacknowledged_at_kills
        Batches in spools that nobody had acknowledged, summed over the kills of the server.
    in_flight_at_kills
        Requests that the server had and had not answered, summed over its kills.
    resent, duplicates
        Requests that repeated a batch, and those of them that were answered ``duplicate``.
    gaps, lost_events, epochs
        Losses that agents have told, events in them, epochs beyond the first: none are expected.
    drained
        Whether every spool and the log were empty in the end.
    """

    events: int = 0
    batches: int = 0
    agent_kills: int = 0
    server_kills: int = 0
    postgres_restarts: int = 0
    failed_starts: int = 0
    unacknowledged_at_kills: int = 0
    in_flight_at_kills: int = 0
    resent: int = 0
    duplicates: int = 0
    cut: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    truncated_files: int = 0
    removed_files: int = 0
    returned_files: int = 0
    gaps: int = 0
    lost_events: int = 0
    epochs: int = 0
    orphans: int = 0
    drained: bool = False
    load_s: float = 0.0
    seconds: float = 0.0
    verdict: Verdict | None = None

    @property
    def good(self) -> bool:
        """Whether every event is stored exactly once, and nobody gave anything up."""
        clean = not (self.gaps or self.lost_events or self.epochs)
        return self.drained and clean and self.verdict is not None and self.verdict.good

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "good": self.good})


class Run:
    """One run of the harness."""

    def __init__(self, plan: Plan, folder: Path, database: Postgres | None = None) -> None:
        self.plan, self.folder, self.database = plan, folder, database
        self.figures = Figures()
        self.appended = Appended(time.time_ns() - 3600 * _NS)
        settings: dict[str, object] = {}
        if database is not None:
            settings["database_url"] = database.new(f"run_{plan.seed}")
        self.server = FaultServer(
            folder / "server",
            {**plan.settings, **settings},
            role=plan.role,
            plant=plan.plant,
            power_cut=plan.power_cut,
            warm=plan.warm,
        )
        self.proxy = Proxy([self.server.port], cut_ratio=plan.cut_ratio, seed=plan.seed)
        self._chance = random.Random(plan.seed)  # noqa: S311  # no secret
        self._failures: list[BaseException] = []
        spools = [folder / f"spool-{number}" for number in range(plan.load.hosts)]
        self.producers = [
            Producer(number, spool, plan.load, self.appended) for number, spool in enumerate(spools)
        ]
        self.agents = [
            AgentProcess(
                self.proxy.url,
                spool,
                f"host-{number}",
                plan.agent_settings,
                module=plan.agent_module,
            )
            for number, spool in enumerate(spools)
        ]

    @property
    def url(self) -> str:
        """Of the database."""
        given = self.server.settings.get("database_url")
        return str(given) if given else f"sqlite:///{self.server.data / 'smon.db'}"

    def go(self) -> Figures:
        """Do it all; what was found."""
        began = time.monotonic()
        try:
            self._load()
            self.figures.load_s = round(time.monotonic() - began, 2)
            self.figures.drained = self._drain()
            self._stop()
            self._count()
        finally:
            self._clean()
        self.figures.seconds = round(time.monotonic() - began, 2)
        return self.figures

    # --- under load -----------------------------------------------------------------------------

    def _load(self) -> None:
        self.server.start()
        for agent in self.agents:
            agent.start()
        for producer in self.producers:
            producer.start()
        plan = self.plan
        tasks = [
            (plan.agent_kills, self._kill_agent),
            (plan.server_kills, self._kill_server),
            (plan.postgres_restarts, self._crash_postgres),
        ]
        threads = [
            threading.Thread(target=self._repeat, args=task, name=task[1].__name__)
            for task in tasks
        ]
        for thread in threads:
            thread.start()
        time.sleep(plan.seconds)
        for thread in threads:
            thread.join()
        for producer in self.producers:
            producer.finish()
        if self._failures:
            raise self._failures[0]

    def _repeat(self, times: int, act: Callable[[], None]) -> None:
        try:
            for _ in range(times):
                act()
        except BaseException as error:  # noqa: BLE001  # raised where the run is waited for
            self._failures.append(error)

    def _wait_for_work(self, most_s: float) -> None:
        """Wait until something was acknowledged: to kill who has not begun yet proves little."""
        before, end = len(self.proxy.counts.acknowledged), time.monotonic() + most_s
        while len(self.proxy.counts.acknowledged) == before and time.monotonic() < end:
            time.sleep(_PROGRESS_S)

    def _kill_agent(self) -> None:
        self._wait_for_work(2.0)
        time.sleep(self._chance.random() * self.plan.agent_pause_s)
        agent = self._chance.choice(self.agents)
        agent.kill()
        agent.start()
        self.figures.agent_kills += 1

    def _wait_for_server(self) -> None:
        """Wait until it is ready; start it again if it ended, as a supervisor does."""
        end = time.monotonic() + START_S
        while not self.server.ready():
            assert time.monotonic() < end, self.server.log.read_text()[-3000:]
            process = self.server.process
            if process is not None and process.poll() is not None:
                self.figures.failed_starts += 1
                self.server.start(wait=False)
            time.sleep(_POLL_S)

    def _kill_server(self) -> None:
        self._wait_for_server()
        self._wait_for_work(10.0)
        time.sleep(self._chance.random() * self.plan.server_pause_s)
        figures, counts = self.figures, self.proxy.counts
        figures.in_flight_at_kills += self.proxy.in_flight
        written = sum(sum(each.next_seqs.values()) for each in self.producers)
        figures.unacknowledged_at_kills += written - len(counts.acknowledged)
        self.server.kill()
        self.server.start(wait=False)
        figures.server_kills += 1

    def _crash_postgres(self) -> None:
        time.sleep(self._chance.random() * self.plan.postgres_pause_s)
        assert self.database is not None
        self.database.crash()
        self.figures.postgres_restarts += 1

    # --- afterwards -----------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Wait until everything is stored; whether it is."""
        self.proxy.cut_ratio = 0.0
        self._wait_for_server()
        began = since = time.monotonic()
        before = (-1, -1)
        while (now := time.monotonic()) - began < self.plan.drain_s:
            news = len(self.proxy.counts.acknowledged), self.server.wal_records
            if news != before:
                before, since = news, now
            if now - since > self.plan.quiet_s:
                break
            empty = not any(unsent(agent.spool) for agent in self.agents)
            if empty and not news[1]:
                return True
            time.sleep(_POLL_S)
        return False

    def _stop(self) -> None:
        for agent in self.agents:
            agent.stop()
        self.server.stop()

    def _count(self) -> None:
        figures, counts, cut = self.figures, self.proxy.counts, self.server.cut
        stored = read_stored(self.url, self.server.data / "objects")
        figures.verdict = compare(self.appended, stored)
        figures.events, figures.batches = self.appended.events, self.appended.batches
        figures.resent, figures.cut = counts.resent, counts.cut
        figures.answers = dict(sorted(counts.answers.items()))
        figures.duplicates = counts.answers["duplicate"]
        figures.gaps, figures.lost_events = len(counts.gaps), lost_events(self.url)
        figures.epochs, figures.orphans = epochs(self.url), len(stored.orphans)
        figures.truncated_files, figures.removed_files = cut.truncated, cut.removed
        figures.returned_files = cut.returned

    def _clean(self) -> None:
        for agent in self.agents:
            agent.kill()
        for producer in self.producers:
            if producer.is_alive():
                producer.finish()
        self.server.kill()
        self.proxy.close()


def run(plan: Plan, folder: Path, database: Postgres | None = None) -> Figures:
    """Run a plan, and print a line of JSON with its figures."""
    figures = Run(plan, folder, database).go()
    print(figures.line(), flush=True)  # noqa: T201  # for whoever measures
    return figures


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness", description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--agent-kills", type=int, default=100)
    parser.add_argument("--server-kills", type=int, default=30)
    parser.add_argument("--postgres-restarts", type=int, default=0)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--role", choices=["api", "all"], default="api")
    parser.add_argument("--power-cut", action="store_true", help="a kill of the server is one")
    parser.add_argument("--plant", default="", help="bug of the server; see planted_server")
    parser.add_argument("--batch-events", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.1, help="s between batches of a stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    parser.add_argument("--json", action="store_true", help="print nothing but one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; 1 if something was lost or doubled."""
    parsed = _parsed(arguments)
    load = Load(parsed.agents, parsed.batch_events, parsed.pause)
    plan = replace(
        Plan(load=load),
        role=parsed.role,
        agent_kills=parsed.agent_kills,
        server_kills=parsed.server_kills,
        postgres_restarts=parsed.postgres_restarts,
        power_cut=parsed.power_cut,
        plant=parsed.plant,
        seed=parsed.seed,
    )
    with ExitStack() as stack:
        folder = parsed.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        database = stack.enter_context(postgres()) if parsed.database == "postgres" else None
        figures = run(plan, folder, database)
    if not parsed.json:
        _explain(figures)
    return 0 if figures.good else 1


def _explain(figures: Figures) -> None:
    verdict: Any = figures.verdict
    state = "each event exactly once" if figures.good else f"WRONG: {verdict}"
    print(f"{figures.events} events, {figures.batches} batches: {state}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
