"""An alert across crashes of the server: its time goes on, and it is taken back only once."""

from __future__ import annotations

import calendar
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Final

from tests.chain.programs import (
    Hurry,
    Receiver,
    alertmanager,
    alerts,
    is_scraped,
    prometheus,
    receiving,
)
from tests.chain.trainer import Host, Trainer
from tests.faults.processes import AgentProcess, FaultServer
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.waiting import wait_until

_JOB: Final = "alerts"
_ALERT: Final = "SMonSlowRank"

#: The long form has the times of the project's files, steps of 0.6 s, and the real Alertmanager.
_HURRY: Final = {Form.SHORT: Hurry("500ms", "8s"), Form.LONG: None}
_SPEED: Final = {Form.SHORT: 4.0, Form.LONG: 1.0}

#: How long an alert is pending, s, and how often Prometheus looks.
_PENDING_S: Final = {Form.SHORT: 8.0, Form.LONG: 10.0}
_INTERVAL_S: Final = {Form.SHORT: 0.5, Form.LONG: 5.0}

#: Kills of the server while the alert fires; one more comes before, while it is pending.
_KILLS: Final = {Form.SHORT: 0, Form.LONG: 4}

_HEALTHY_STEPS: Final = 8
_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 180.0


def lacks() -> str:
    """What is missing; empty: nothing."""
    names = ("prometheus", "prometheus-alertmanager")
    missing = [name for name in names if shutil.which(name) is None]
    return f"NO PROMETHEUS: expected {' and '.join(missing)}" if missing else ""


@dataclass(slots=True)
class _Seen:
    """What Prometheus has said of one alert, looked at all the time.

    Attributes
    ----------
    began
        When it became active, as Prometheus says; more than one: its time began anew.
    fired, gone
        How often it began to fire, and to be gone after that.
    fired_at
        When it was seen firing first.
    """

    state: str = ""
    began: set[str] = field(default_factory=set)
    fired: int = 0
    gone: int = 0
    fired_at: float = 0.0

    def look(self, state: str, began: str) -> None:
        """Take in what it is now; empty: it is not there."""
        if state:
            self.began.add(began)
        elif self.state:
            self.gone += 1
        if state == "firing" != self.state:
            self.fired += 1
            self.fired_at = self.fired_at or time.time()
        self.state = state


@dataclass(frozen=True, slots=True)
class _Kill:
    """One kill of the server.

    Attributes
    ----------
    state
        Of the alert when the server was killed.
    away_s
        From the kill to its first answer.
    complete
        Whether that answer already had the job's figures.
    """

    state: str
    away_s: float
    complete: bool


def prove(form: Form, folder: Path) -> Line:
    """A rank becomes slow; the server is killed and started again; the rank is well again."""
    begin = time.monotonic()
    with _site(form, folder) as (server, port, trainer, receiver):
        wait_until(lambda: trainer.step >= _HEALTHY_STEPS, "healthy steps", _PATIENCE_S)
        with _watching(port) as seen:
            trainer.slow_down()
            wait_until(lambda: seen.state == "pending", "a pending alert", _PATIENCE_S)
            kills = [_kill(server, port, seen)]
            wait_until(lambda: seen.state == "firing", "a firing alert", _PATIENCE_S)
            for _ in range(_KILLS[form]):
                wait_until(lambda: is_scraped(port, server.ops_port), "a scrape", _PATIENCE_S)
                kills.append(_kill(server, port, seen))
                time.sleep(2 * _INTERVAL_S[form])
            wait_until(lambda: is_scraped(port, server.ops_port), "a scrape", _PATIENCE_S)
            early, taken_back = seen.gone, _told(receiver, "resolved") if receiver else 0
            trainer.cure()
            wait_until(lambda: seen.gone > early, "the alert to end", _PATIENCE_S)
            time.sleep(2 * _INTERVAL_S[form])
        if receiver is not None:
            wait_until(partial(_told, receiver, "resolved"), "it to be taken back", _PATIENCE_S)
        assert trainer.error is None
    goals = [*_goals(form, seen, kills, early)]
    if receiver is not None:
        goals += [
            at_least("messages that it fires", _told(receiver, "firing"), 1),
            exactly("messages that it is over while the rank was slow", taken_back, 0),
            exactly("messages that it is over", _told(receiver, "resolved"), 1),
        ]
    figures = {
        "pending_s": round(_pending_s(seen), 1),
        "kills": [
            {"while": kill.state, "away_s": round(kill.away_s, 1)} for kill in kills
        ],
    }  # fmt: skip
    return Line("alerts", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _goals(form: Form, seen: _Seen, kills: list[_Kill], early: int) -> list[Goal]:
    on_time = _PENDING_S[form] + 2 * _INTERVAL_S[form]
    return [
        exactly("kills while it was pending", sum(one.state == "pending" for one in kills), 1),
        exactly("times that it became pending", len(seen.began), 1),
        exactly("times that it fired", seen.fired, 1),
        exactly("times that it was gone while the rank was slow", early, 0),
        exactly("times that it was gone", seen.gone, 1),
        exactly("first answers of a server without the job's figures",
                sum(not kill.complete for kill in kills), 0),
        at_least("from pending to firing, s", _pending_s(seen), _PENDING_S[form]),
        at_most("from pending to firing, s, at most", _pending_s(seen), on_time, timed=True),
    ]  # fmt: skip


def _pending_s(seen: _Seen) -> float:
    return seen.fired_at - min(map(_unix, seen.began))


def _unix(text: str) -> float:
    """Seconds of a time as Prometheus writes it, with nanoseconds."""
    whole, _, part = text.rstrip("Z").partition(".")
    moment = time.strptime(f"{whole} UTC", "%Y-%m-%dT%H:%M:%S %Z")
    return float(calendar.timegm(moment)) + float(f"0.{part or 0}")


def _told(receiver: Receiver, status: str) -> int:
    return sum(one.name == _ALERT for one in receiver.of(_JOB, status))


@contextmanager
def _site(form: Form, folder: Path) -> Iterator[tuple[FaultServer, int, Trainer, Receiver | None]]:
    """Server with worker, Prometheus, agents and a trainer; in the long form Alertmanager too."""
    spool = folder / "spool"
    spool.mkdir()
    server = FaultServer(folder / "server", role="all")
    with ExitStack() as stack:
        stack.enter_context(server)
        receiver, alertmanager_port = None, 9
        if form is Form.LONG:
            receiver, receiver_port = stack.enter_context(receiving())
            alertmanager_port = stack.enter_context(alertmanager(folder, receiver_port))
        ports = [server.ops_port]
        port = stack.enter_context(prometheus(folder, ports, alertmanager_port, _HURRY[form]))
        stack.enter_context(AgentProcess(server.url, spool, "host"))
        trainer = Trainer(_JOB, [Host(spool, (0, 1, 2, 3))], speed=_SPEED[form])
        stack.callback(trainer.stop)
        trainer.start()
        yield server, port, trainer, receiver


@contextmanager
def _watching(port: int) -> Iterator[_Seen]:
    """Look at the alert all the time."""
    seen, stop = _Seen(), threading.Event()

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            found = [one for one in alerts(port, _JOB) if one["labels"]["alertname"] == _ALERT]
            states = sorted(str(one["state"]) for one in found)
            began = "".join(sorted(str(one["activeAt"]) for one in found))
            seen.look(states[0] if states else "", began)

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _kill(server: FaultServer, port: int, seen: _Seen) -> _Kill:
    """Kill the server until Prometheus has missed it, and start it again."""
    state, begin = seen.state, time.monotonic()
    server.kill()
    wait_until(lambda: not is_scraped(port, server.ops_port), "a missed scrape", _PATIENCE_S)
    server.start(wait=False)
    found: list[bool] = []
    wait_until(lambda: _answers(server, found), "an answer", _PATIENCE_S)
    away_s = time.monotonic() - begin
    server.wait_ready()
    return _Kill(state, away_s, found[0])


def _answers(server: FaultServer, found: list[bool]) -> bool:
    """Whether the server gives its metrics; adds whether those of the job are among them."""
    try:
        metrics = server.metrics()
    except (OSError, HTTPException):
        return False
    mine = [name for name in metrics if f'train_job="{_JOB}"' in name]
    wanted = ("smon_job_info", "smon_job_excess_ratio", "smon_finding_active")
    found.append(all(any(name.startswith(each) for name in mine) for each in wanted))
    return True
