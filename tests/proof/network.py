"""Agents and server over a bad wire: packets lost, connections reset and torn, everything cut."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from ingest_agents.spool.folder import DEAD_NAME, QUARANTINE_NAME, spool_bytes
from smon.store.database import Database
from smon.store.schema import upgrade
from smon.store.tokens import create
from tests.faults.events import Appended, Verdict, compare
from tests.faults.outside import epochs, lost_events, read_stored
from tests.faults.processes import AgentProcess, FaultServer, unsent
from tests.faults.producers import Load, Producer
from tests.faults.site import Site
from tests.faults.wires import CUT, SERVER_ADDRESS, Trouble, Wire, lacks, loss, resets
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.waiting import wait_until

__all__ = ["lacks", "prove"]

_LOAD: Final = {
    Form.SHORT: Load(hosts=1, job="network"),
    Form.LONG: Load(hosts=4, job="network"),
}

#: What happens, and for how long.
_PHASES: Final[Mapping[str, tuple[Trouble | None, Mapping[Form, float]]]] = {
    "a sound wire": (None, {Form.SHORT: 0.5, Form.LONG: 20.0}),
    "5 % of packets lost": (loss(5), {Form.SHORT: 1.0, Form.LONG: 40.0}),
    "20 % of packets lost": (loss(20), {Form.SHORT: 1.0, Form.LONG: 40.0}),
    "2 % of packets answered with a reset": (resets(20), {Form.SHORT: 1.0, Form.LONG: 30.0}),
    "everything cut": (CUT, {Form.SHORT: 1.0, Form.LONG: 30.0}),
}

_TORN_FIGURES: Final = ("events", "torn", "sent_again", "duplicates")

#: With a relay that tears requests and answers: batches that get through, and the share of both
#: that does not.
_TORN_BATCHES: Final = {Form.SHORT: 60, Form.LONG: 2000}
_TORN_RATIO: Final = 0.2

#: Of an agent: an answer is waited for so long, pauses are short, the spool is bounded.
_CAP_BYTES: Final = 64 << 20
_AGENT: Final = {"timeout_s": 5.0, "retry_max_s": 1.0, "cap_bytes": _CAP_BYTES}

#: What the budget of an agent is.
_RSS_MIB: Final = 100

_LOOK_S: Final = 0.2

#: A phase goes on until so many packets were hit: a busy machine may send few.
_HITS: Final = 3
_PATIENCE_S: Final = 240.0


def prove(form: Form, folder: Path) -> Line:
    """Each trouble in turn, with a catch-up after it; then torn connections."""
    begin = time.monotonic()
    with Wire() as wire:
        wired = wire.server.run(partial(_wired, wire, form, folder / "wire"))
    torn = _tear(form, folder / "torn")
    goals = (*_goals(wired), *_torn_goals(torn))
    figures = {
        "events": wired.appended.events + torn.events,
        "answered_as_duplicates": wired.duplicates,
        "on_the_wire": wired.phases,
        "torn": {name: getattr(torn, name) for name in _TORN_FIGURES},
    }
    return Line("network", form, goals, figures, round(time.monotonic() - begin, 1))


def _goals(wired: _Wired) -> list[Goal]:
    wrong = compare(wired.appended, read_stored(wired.url, wired.server.data / "objects"))
    troubles = [one for one in wired.phases if one["what"] != "a sound wire"]
    return [
        exactly("events lost or changed on the wire", wrong.lost + wrong.changed, 0),
        exactly("events doubled or made up on the wire", wrong.doubled + wrong.invented, 0),
        exactly("sums of the database that differ", wrong.miscounted + wrong.unreadable, 0),
        exactly("events and batches given up", wired.given_up, 0),
        at_least("packets hit in the trouble that hit fewest",
                 min(int(one["packets_hit"]) for one in troubles), 1),
        at_most("largest memory of an agent, MiB", wired.rss_mib, _RSS_MIB),
        at_most("largest spool, MiB", wired.spool_bytes / (1 << 20), _CAP_BYTES >> 20),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Torn:
    """What became of events behind a relay that tears connections.

    Attributes
    ----------
    given_up
        Losses that agents have told.
    """

    events: int
    torn: int
    sent_again: int
    duplicates: int
    given_up: int
    wrong: Verdict


def _tear(form: Form, folder: Path) -> _Torn:
    """Send until so many batches got through although many broke off."""
    folder.mkdir()
    server = FaultServer(folder / "server")
    with Site(folder, [server], load=_LOAD[form]) as site:
        site.proxy.cut_ratio = _TORN_RATIO
        site.wait_for_batches(_TORN_BATCHES[form], _PATIENCE_S)
        site.proxy.cut_ratio = 0.0
        wrong = site.finish()
        counts = site.proxy.counts
        return _Torn(
            events=site.appended.events,
            torn=counts.cut,
            sent_again=counts.resent,
            duplicates=counts.answers["duplicate"],
            given_up=len(counts.gaps) + lost_events(site.url) + epochs(site.url),
            wrong=wrong,
        )


def _torn_goals(torn: _Torn) -> list[Goal]:
    wrong = torn.wrong
    return [
        exactly("events lost or changed over torn connections", wrong.lost + wrong.changed, 0),
        exactly("events doubled or made up over torn connections",
                wrong.doubled + wrong.invented, 0),
        exactly("losses told over torn connections", torn.given_up, 0),
        at_least("requests and answers torn", torn.torn, 10),
        at_least("batches sent again", torn.sent_again, 1),
    ]  # fmt: skip


@dataclass(slots=True)
class _Wired:
    """A server and agents at the two ends of a wire, and what was found.

    Attributes
    ----------
    rss_mib, spool_bytes
        The largest of any agent.
    given_up
        Events and batches that an agent or the server has given up; no epoch is begun anew either.
    """

    wire: Wire
    server: FaultServer
    agents: list[AgentProcess]
    producers: list[Producer]
    appended: Appended
    phases: list[dict[str, Any]] = field(default_factory=list)
    rss_mib: int = 0
    spool_bytes: int = 0
    duplicates: int = 0
    given_up: int = 0

    @property
    def url(self) -> str:
        """Of the database."""
        return f"sqlite:///{self.server.data / 'smon.db'}"


def _wired(wire: Wire, form: Form, folder: Path) -> _Wired:
    """All phases; called on the server's host."""
    with _site(wire, _LOAD[form], folder) as wired:
        wait_until(lambda: _acknowledged(wired), "agents to send", _PATIENCE_S)
        for what, (trouble, seconds) in _PHASES.items():
            _phase(wired, what, trouble, seconds[form])
        for producer in wired.producers:
            producer.finish()
        spools = [agent.spool for agent in wired.agents]
        wait_until(lambda: not any(map(unsent, spools)), "empty spools", _PATIENCE_S)
        wait_until(lambda: not wired.server.wal_records, "an empty log", _PATIENCE_S)
        _look(wired)
        metrics = wired.server.metrics()
        wired.duplicates = int(metrics['smon_ingest_batches_total{result="duplicate"}'])
        aside = [path for spool in spools for name in (DEAD_NAME, QUARANTINE_NAME)
                 for path in (spool / name).glob("*")]  # fmt: skip
        dropped = sum(producer.dropped for producer in wired.producers)
        wired.given_up = lost_events(wired.url) + epochs(wired.url) + len(aside) + dropped
    return wired


@contextmanager
def _site(wire: Wire, load: Load, folder: Path) -> Iterator[_Wired]:
    server = FaultServer(
        folder / "server", {"host": SERVER_ADDRESS, "ops_host": "127.0.0.1"}, warm=False
    )
    agent = {**_AGENT, "token": _token(server)}
    url = f"http://{SERVER_ADDRESS}:{server.port}"
    appended = Appended(time.time_ns() - 3600 * 10**9)
    spools = [folder / f"spool-{number}" for number in range(load.hosts)]
    wired = _Wired(
        wire,
        server,
        [AgentProcess(url, spool, spool.name, agent) for spool in spools],
        [Producer(number, spool, load, appended) for number, spool in enumerate(spools)],
        appended,
    )
    try:
        server.start()
        for each in wired.agents:
            wire.agents.run(each.start)
        for producer in wired.producers:
            producer.start()
        yield wired
    finally:
        for each in wired.agents:
            each.kill()
        for producer in wired.producers:
            if producer.is_alive():
                producer.finish()
        server.kill()


def _token(server: FaultServer) -> str:
    """A new token: a server that others can reach wants one."""
    server.data.mkdir(parents=True)
    database = Database(f"sqlite:///{server.data / 'smon.db'}")
    try:
        upgrade(database)
        with database.write() as session:
            return create(session, "default", "agents", ["ingest"], None, time.time_ns())
    finally:
        database.close()


def _phase(wired: _Wired, what: str, trouble: Trouble | None, seconds: float) -> None:
    """Let it happen for a while; then wait until agents have caught up."""
    hits, stored = wired.wire.hits, _acknowledged(wired)
    written = wired.appended.events
    wired.wire.suffer(trouble)
    begin, enough = time.monotonic(), hits + (_HITS if trouble else 0)
    while (took := time.monotonic() - begin) < seconds or wired.wire.hits < enough:
        assert took < _PATIENCE_S, f"waited in vain: packets hit by {what}"
        time.sleep(_LOOK_S)
        _look(wired)
    hits, stored = wired.wire.hits - hits, _acknowledged(wired) - stored
    wired.wire.suffer(None)
    goal, since = wired.appended.events, time.monotonic()
    wait_until(lambda: _acknowledged(wired) >= goal, f"to catch up after {what}", _PATIENCE_S)
    _look(wired)
    wired.phases.append(
        {
            "what": what,
            "s": round(took, 1),
            "written_per_s": round((goal - written) / took),
            "acknowledged_per_s": round(stored / took),
            "packets_hit": hits,
            "caught_up_after_s": round(time.monotonic() - since, 1),
        }
    )


def _acknowledged(wired: _Wired) -> int:
    return int(wired.server.metrics()["smon_ingest_events_total"])


def _look(wired: _Wired) -> None:
    """Note how large agents and spools are."""
    for agent in wired.agents:
        wired.spool_bytes = max(wired.spool_bytes, spool_bytes(agent.spool))
        assert agent.process is not None
        status = Path(f"/proc/{agent.process.pid}/status").read_text(encoding="ascii")
        kib = next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]
        wired.rss_mib = max(wired.rss_mib, int(kib) >> 10)
