"""Clocks of hosts that are set and that drift, while a job runs that nobody slows down."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from smon.ops import LABELS
from tests.chain.trainer import Host, Trainer
from tests.faults.clocks import HostClock
from tests.faults.outside import epochs, lost_events, number, query
from tests.faults.processes import AgentProcess, FaultServer
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.waiting import wait_until

_JOB: Final = "clocks"
_HOUR_S: Final = 3600.0

#: Housekeeping and heartbeats are frequent; a busy machine may be late with a rank, but not by an
#: hour; what ends a silent job is what it is by default.
_SETTINGS: Final = {
    "step_timeout_s": 120.0,
    "maintenance_interval_s": 0.5,
    "heartbeat_interval_s": 0.5,
    "flush_interval_s": 0.1,
    "window_steps": 20,
}

#: What is done to whose clock, how far it is ahead then, s, and what it gains per second.
_HOST: Final = "host"
_SERVER: Final = "server"
_PHASES: Final = (
    ("a host is set ahead by an hour", _HOST, _HOUR_S, 0.0),
    ("a host is set back by an hour", _HOST, -_HOUR_S, 0.0),
    ("a host gains 2 %", _HOST, 0.0, 0.02),
    ("the server is set back by an hour", _SERVER, -_HOUR_S, 0.0),
    ("the server is set ahead by an hour", _SERVER, _HOUR_S, 0.0),
    ("the server is set ahead by 40 days", _SERVER, 40 * 24 * _HOUR_S, 0.0),
)

#: The short form leaves out what takes a round of clock probes each.
_COUNT: Final = {Form.SHORT: 4, Form.LONG: len(_PHASES)}

#: How long each lasts, and the pause with right clocks after it, s; and the speed of the steps.
_PHASE_S: Final = {Form.SHORT: 0.8, Form.LONG: 20.0}
_SPEED: Final = {Form.SHORT: 2.0, Form.LONG: 1.0}

_STEPS_BEFORE: Final = 4
_PATIENCE_S: Final = 240.0

#: What the agent's offset may be wrong by, s: probes on a busy machine.
_OFFSET_S: Final = 1.0

_COLUMNS: Final = ("step", "dp", "stage", "rank", "seq", "microbatch", "start_ns", "duration_ns")


def prove(form: Form, folder: Path) -> Line:
    """Set clocks, one after the other, and each right again."""
    begin = time.monotonic()
    with _site(form, folder) as site:
        site.wait_for_steps(_STEPS_BEFORE)
        for phase in _PHASES[: _COUNT[form]]:
            site.phase(*phase, seconds=_PHASE_S[form])
        lost = site.ended_early
        site.trainer.stop()
        site.drain()
        assert site.trainer.error is None
        goals = _goals(site, lost)
        figures = {
            "ops": site.written,
            "steps": site.trainer.step + 1,
            "refused_for_their_times_and_sent_again": site.refused,
            "phases": site.phases,
            "findings": site.findings,
        }
    return Line("clocks", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _goals(site: _Site, lost: int) -> list[Goal]:
    stored, written = site.stored_rows(), site.written_rows()
    missing = len(np.setdiff1d(written, stored))
    more = len(stored) - len(np.intersect1d(stored, written))
    offsets = max(float(one["offset_wrong_by_s"]) for one in site.phases)
    known = max(float(one["offset_known_after_s"]) for one in site.phases)
    return [
        exactly("ops lost or changed", missing, 0),
        exactly("ops doubled or made up", more, 0),
        exactly("ops given up, and epochs begun anew", site.given_up, 0),
        exactly("findings about a job that nobody slows down", len(site.findings), 0),
        exactly("times that the job was taken for over", lost, 0),
        exactly("event files removed", site.expired, 0),
        at_least("housekeeping rounds per phase, at least",
                 min(int(one["rounds"]) for one in site.phases), 1),
        at_most("clock offset as agents tell it, wrong by at most, s", offsets, _OFFSET_S),
        at_most("until an offset is known, s", known, 15.0, timed=True),
        at_most("until agents have caught up, s",
                max(float(one["caught_up_after_s"]) for one in site.phases), 15.0, timed=True),
    ]  # fmt: skip


@dataclass(slots=True)
class _Site:
    """A server, two hosts with an agent each, and a trainer on both; one host's clock is set."""

    server: FaultServer
    clocks: Mapping[str, HostClock]
    trainer: Trainer
    phases: list[dict[str, Any]] = field(default_factory=list)
    ended_early: int = 0

    @property
    def url(self) -> str:
        """Of the database."""
        return f"sqlite:///{self.server.data / 'smon.db'}"

    @property
    def written(self) -> int:
        """Ops that the trainer has written."""
        return sum(map(len, list(self.trainer.written)))

    @property
    def stored(self) -> int:
        """Ops that are in files."""
        return number(self.url, "SELECT sum(rows) FROM event_files WHERE kind = 'ops' "
                                "AND doomed_ns IS NULL")  # fmt: skip

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Everything that was ever found about the job."""
        found = query(self.url, "SELECT cause, rank, opened_step, last_step FROM findings")
        names = ("cause", "rank", "opened_step", "last_step")
        return [dict(zip(names, row, strict=True)) for row in found]

    @property
    def expired(self) -> int:
        """Windows whose files were removed for their age."""
        return number(self.url, "SELECT count(*) FROM windows WHERE expired_ns IS NOT NULL")

    @property
    def given_up(self) -> int:
        """Events that agents or server have given up, and epochs beyond the first."""
        return lost_events(self.url) + epochs(self.url)

    @property
    def refused(self) -> int:
        """Batches that the server refused at first."""
        metrics = self.server.metrics()
        return int(metrics.get('smon_ingest_refused_total{problem="wrong-values"}', 0))

    @property
    def rounds(self) -> int:
        """When the worker last kept house, by the clock of that moment."""
        return number(self.url, "SELECT max(seen_ns) FROM nodes WHERE role = 'worker'")

    def wait_for_steps(self, more: int) -> None:
        """Wait until so many more were written."""
        goal = self.trainer.step + more
        wait_until(lambda: self.trainer.step >= goal, f"{more} steps", _PATIENCE_S)

    def drain(self) -> float:
        """Wait until all that was written is stored, or given up; s that it took."""
        goal, begin = self.written, time.monotonic()
        wait_until(lambda: self.stored + self.given_up >= goal, "ops to be stored", _PATIENCE_S)
        return round(time.monotonic() - begin, 1)

    def phase(self, what: str, whose: str, ahead_s: float, gain: float, seconds: float) -> None:
        """Set a clock, look, and set it right."""
        clock, rounds, seen, step = self.clocks[whose], 0, self.rounds, self.trainer.step
        clock.set(ahead_s, gain)
        begin = time.monotonic()
        wait_until(lambda: self._wrong_by_s() < _OFFSET_S, f"an offset: {what}", _PATIENCE_S)
        known = round(time.monotonic() - begin, 1)
        while time.monotonic() - begin < seconds or not rounds:
            time.sleep(0.1)
            now = self.rounds
            rounds, seen = rounds + (now != seen), now
            assert time.monotonic() - begin < _PATIENCE_S, f"no housekeeping: {what}"
        self.wait_for_steps(2)
        caught_up, wrong_by = self.drain(), self._wrong_by_s()
        self.ended_early += number(self.url, "SELECT count(*) FROM attempts "
                                             "WHERE ended_ns IS NOT NULL")  # fmt: skip
        clock.set(0.0)
        self.wait_for_steps(2)
        self.phases.append(
            {
                "what": what,
                "steps_before": step,
                "offset_known_after_s": known,
                "offset_wrong_by_s": round(wrong_by, 3),
                "caught_up_after_s": caught_up,
                "rounds": rounds,
            }
        )

    def _wrong_by_s(self) -> float:
        """The largest error of an offset in the latest heartbeats; many if one has none."""
        found = query(self.url, "SELECT host, json_extract(heartbeat, '$.clock.offset_ns') "
                                "FROM streams WHERE source = 'recorder'")  # fmt: skip
        ahead = {"node-1": self.clocks[_HOST].ahead_ns()}
        server = self.clocks[_SERVER].ahead_ns()
        return max(
            (
                abs(int(offset) - (server - ahead.get(host, 0))) / 1e9
                if offset is not None
                else 1e9
                for host, offset in found
            ),
            default=1e9,
        )

    def stored_rows(self) -> np.ndarray[Any, Any]:
        """Ops as they are stored, in order."""
        paths = query(self.url, "SELECT path FROM event_files WHERE kind = 'ops' "
                                "AND doomed_ns IS NULL")  # fmt: skip
        tables = [pq.ParquetFile(self.server.data / "objects" / path).read() for (path,) in paths]
        number_of = {label: code for code, label in enumerate(LABELS)}
        parts = []
        for table in tables:
            columns = [np.asarray(table[name].to_pylist(), np.int64) for name in _COLUMNS]
            labels = table["optype"].to_pylist()
            columns.append(np.asarray([number_of[label] for label in labels], np.int64))
            parts.append(np.stack(columns, axis=1))
        return _rows(np.concatenate(parts))

    def written_rows(self) -> np.ndarray[Any, Any]:
        """Ops as they were written, in order."""
        parts = [
            np.stack([getattr(table, name).astype(np.int64) for name in (*_COLUMNS, "optype")],
                     axis=1)
            for table in self.trainer.written
        ]  # fmt: skip
        return _rows(np.concatenate(parts))


def _rows(columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whole rows as values that can be compared."""
    width = columns.shape[1] * columns.itemsize
    return np.sort(np.ascontiguousarray(columns).view(f"V{width}").ravel())


@contextmanager
def _site(form: Form, folder: Path) -> Iterator[_Site]:
    spools = [folder / "0", folder / "1"]
    for spool in spools:
        spool.mkdir()
    clocks = {name: HostClock(folder / f"{name}.clock") for name in (_HOST, _SERVER)}
    server = _ClockedServer(folder / "server", clocks[_SERVER])
    agents = [AgentProcess(server.url, spool, f"node-{spool.name}") for spool in spools]
    agents[1].environ = clocks[_HOST].environ
    hosts = [Host(spools[0], (0, 1, 2)), Host(spools[1], (3,), clocks[_HOST].ahead_ns)]
    # A pause of the machine is none of the job: it would be found, and rightly.
    trainer = Trainer(_JOB, hosts, speed=_SPEED[form], late_s=_PATIENCE_S)
    with ExitStack() as stack:
        stack.enter_context(server)
        for agent in agents:
            stack.enter_context(agent)
        stack.callback(trainer.stop)
        trainer.start()
        yield _Site(server, clocks, trainer)


class _ClockedServer(FaultServer):
    """A server, with its worker, on a host whose clock can be set."""

    def __init__(self, folder: Path, clock: HostClock) -> None:
        super().__init__(folder, _SETTINGS, role="all", warm=False)
        self._clock = clock

    @property
    def environ(self) -> Mapping[str, str]:
        """With the clock."""
        return {**super().environ, **self._clock.environ}
