"""Clients that hold connections and send next to nothing, while agents go on sending."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.faults.outside import number
from tests.faults.processes import FaultServer
from tests.load.agents import EVENTS
from tests.load.ingest import generate
from tests.proof.child import ROOT
from tests.proof.line import Form, Goal, Line, at_most, exactly
from tests.service import run_aside
from tests.system.server import request
from tests.waiting import wait_until

#: Of the short form: the documented times, made short.
_SETTINGS: Final[dict[Form, dict[str, object]]] = {
    Form.SHORT: {"receive_timeout_s": 2.0, "keep_alive_s": 3.0},
    Form.LONG: {},
}
_RECEIVE_S: Final = {Form.SHORT: 2.0, Form.LONG: 15.0}
_KEEP_ALIVE_S: Final = {Form.SHORT: 3.0, Form.LONG: 75.0}

_SLOW: Final = {Form.SHORT: 150, Form.LONG: 1000}

#: Seconds without slow clients, and with them.
_ALONE_S: Final = {Form.SHORT: 1.0, Form.LONG: 15.0}
_TOGETHER_S: Final = {Form.SHORT: 3.0, Form.LONG: 60.0}

#: Agents, and batches of 1,584 events that they send per second, all together.
_AGENTS: Final = 16
_RATE: Final = {Form.SHORT: 16.0, Form.LONG: 64.0}

#: What a deadline may come late by.
_SLACK_S: Final = 1.0

_P99_S: Final = 0.1
_PROBE_S: Final = 0.25

#: A socket that is being closed is gone within one look; for more, it is waited so long.
_LOOK_S: Final = 0.3
_REST_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """What agents have sent, and how long acknowledgements took, s."""

    batches: int
    refused: int
    p50_s: float
    p99_s: float


def prove(form: Form, folder: Path) -> Line:
    """Agents alone, then among slow clients; then the server is as before."""
    begin = time.monotonic()
    with FaultServer(folder / "alone", _SETTINGS[form]) as server:
        alone = _send(server, form, _ALONE_S[form])
    with FaultServer(folder / "server", _SETTINGS[form]) as server:
        before = _descriptors_at_rest(server)
        with _probes(server) as health, _slow(server, form) as slow:
            together = _send(server, form, _TOGETHER_S[form])
            held = slow()
        wait_until(lambda: _connections(server) == 0, "connections to be closed")
        wait_until(lambda: not server.wal_records, "an empty log")
        after = _descriptors_at_rest(server)
        stored = _stored(server)
        limits = server.metrics()
    refused = sum(
        int(value)
        for name, value in limits.items()
        if name.startswith("smon_ingest_connections_refused_total")
    )
    goals = [
        exactly("batches of healthy agents refused", together.refused, 0),
        exactly("events acknowledged and not stored, or stored twice",
                abs(together.batches * EVENTS - stored), 0),
        exactly("slow connections that the server never closed",
                sum(one["open"] for one in held), 0),
        exactly("connections refused", refused + sum(one["refused"] for one in held), 0),
        exactly("health checks that failed", health["failed"], 0),
        at_most("sockets of the server more than before", max(after[0] - before[0], 0), 0),
        *_timed(form, held, together),
    ]  # fmt: skip
    figures = {
        "slow_clients": _SLOW[form],
        "agents": _AGENTS,
        "batches_among_slow_clients": together.batches,
        "p50_alone_s": alone.p50_s,
        "p99_alone_s": alone.p99_s,
        "p50_among_slow_clients_s": together.p50_s,
        "descriptors_before": before[1],
        "descriptors_after": after[1],
        "health_checks": health["asked"],
        "connections_held": held,
    }
    return Line("clients", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _timed(form: Form, held: list[dict[str, Any]], sent: _Sent) -> list[Goal]:
    """Goals that depend on how busy the machine is."""
    longest = {one["kind"]: one["longest_s"] for one in held}
    idle_s = longest.pop("idle")
    receive_s, keep_s = _RECEIVE_S[form] + _SLACK_S, _KEEP_ALIVE_S[form] + _SLACK_S
    return [
        at_most("a slow request until it is cut off, s",
                max(longest.values()), receive_s, timed=True),
        at_most("an idle connection until it is closed, s", idle_s, keep_s, timed=True),
        at_most("99th percentile of the acknowledgement among slow clients, s",
                sent.p99_s, _P99_S, timed=True),
    ]  # fmt: skip


def _send(server: FaultServer, form: Form, seconds: float) -> _Sent:
    senders = run_aside(lambda: generate(server.port, _AGENTS, seconds, _RATE[form]))
    times = np.concatenate([sender.times for sender in senders])
    p50, p99 = np.quantile(times, (0.5, 0.99))
    refused = sum(sender.refused for sender in senders)
    return _Sent(len(times), refused, round(float(p50), 4), round(float(p99), 4))


@contextmanager
def _slow(server: FaultServer, form: Form) -> Iterator[Any]:
    """Slow clients in a process of their own; what they say in the end."""
    options = [str(server.port), str(_SLOW[form]), str(_TOGETHER_S[form])]
    command = [sys.executable, "-m", "tests.faults.slow_clients", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: _connections(server) >= _SLOW[form] // 2, "slow clients")
            yield lambda: json.loads(process.communicate()[0])
        finally:
            process.kill()


@contextmanager
def _probes(server: FaultServer) -> Iterator[dict[str, int]]:
    """Ask all the time whether the server is ready; counts of questions and of failures."""
    counts, stop = {"asked": 0, "failed": 0}, threading.Event()

    def probe() -> None:
        while not stop.wait(_PROBE_S):
            counts["asked"] += 1
            counts["failed"] += not _is_ready(server)

    thread = threading.Thread(target=probe, name="probe")
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def _is_ready(server: FaultServer) -> bool:
    try:
        return request(server.ops_port, "GET", "/readyz")[0] == 200
    except (OSError, HTTPException):
        return False


def _connections(server: FaultServer) -> int:
    return int(server.metrics()["smon_ingest_connections"])


def _descriptors_at_rest(server: FaultServer) -> tuple[int, int]:
    """Once they stay the same: who asked last has only just hung up."""
    end, found = time.monotonic() + _REST_S, _descriptors(server)
    while time.monotonic() < end:
        last, found = found, _descriptors(server)
        if found == last:
            break
    return found


def _descriptors(server: FaultServer) -> tuple[int, int]:
    """Sockets, and all descriptors, of the server once nobody is connected."""
    wait_until(lambda: _connections(server) == 0, "connections to be closed")
    # The question came over a connection, too.
    time.sleep(_LOOK_S)
    assert server.process is not None
    targets = [_target(path) for path in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    return sum(each.startswith("socket:") for each in targets), len(targets)


def _target(path: Path) -> str:
    """What a descriptor is; empty: it was closed just now."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _stored(server: FaultServer) -> int:
    url = f"sqlite:///{server.data / 'smon.db'}"
    return number(url, "SELECT sum(rows) FROM event_files WHERE kind = 'ops'")
