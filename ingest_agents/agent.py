"""The agent: one loop from sources over the spool to the server.

Flow: `ingest_agents.sources` → spool → **here**: what is due? → `ingest_agents.sender`. A round
never waits for the server's pauses; heartbeats go on while batches are sent.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ingest_agents.clock import ROUND_S, ClockWatch
from ingest_agents.config import AgentSettings
from ingest_agents.link import Link
from ingest_agents.pace import Pace, retry_after_s
from ingest_agents.sender import Crew, Say, Sender, named
from ingest_agents.shipping import Shipper
from ingest_agents.spool.eviction import evict
from ingest_agents.spool.folder import (
    AGENT_LOCK_NAME,
    FLUSH_NAME,
    GONE,
    Lock,
    spool_bytes,
    streams_in,
    write_json,
)
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from ingest_agents.transport import Response, TransportError
from smon.errors import StoreError
from smon.wire import COUNTERS_SOURCE

_OK: Final = 200
_TOKEN: Final = frozenset({401, 403})
_CONFLICT: Final = 409
_STALE: Final = "urn:smon:problem:stale-epoch"

#: Streams of one hello: each takes up to some 10 kB, and a request 1 MiB.
_HELLO_STREAMS: Final = 64
_HELLO_RANKS: Final = 50_000

#: Epochs to try in one round, where somebody has used them.
_HELLO_TRIES: Final = 8

#: Without an answer of the server.
_HEARTBEAT_S: Final = 15.0
_FLUSH_S: Final = 1.0

#: The size of the spool is looked at so often.
_EVICT_S: Final = 5.0

#: So long eviction waits for senders; streams that are still being sent are left alone.
_REST_S: Final = 5.0

#: What a server does not take at all is offered again after so long.
_BLOCKED_S: Final = 60.0

#: Larger numbers in answers are nonsense.
_HIGHEST: Final = 1e9

#: A batch that is sent so often may have been recorded before this host's clock was set.
_OLD_OFFSET: Final = 3

_LOCK_TRIES: Final = 40
_LOCK_PAUSE_S: Final = 0.05

#: Sources whose streams another process writes, or an agent before this one: if that is gone, the
#: agent ends them.
_FOREIGN: Final = frozenset({"recorder", COUNTERS_SOURCE})


class Source(Protocol):
    """Something the agent reads itself, and writes to the spool."""

    def poll(self) -> None:
        """Take in what is new."""

    def close(self) -> None:
        """Take in what is left, and let go of the spool."""


@dataclass(slots=True)
class _Due:
    """When things are to be done next, on the agent's clock."""

    heartbeat: float = 0.0
    clock: float = 0.0
    flush: float = 0.0
    evict: float = 0.0
    blocked: float = 0.0


@dataclass(slots=True)
class _Server:
    """What the server said it wants."""

    #: Of all its processes so far: behind a load balancer they take turns.
    ids: set[str] = field(default_factory=set)
    heartbeat_s: float = _HEARTBEAT_S
    flush_s: float = _FLUSH_S
    phase_s: float = 0.0


class Agent:
    """Ships one spool to one server.

    Parameters
    ----------
    settings
        Of the agent.
    link
        To the server.
    sources
        What it reads itself.
    say
        For people.
    clock, wall
        Seconds that never go back, and unix seconds.

    Raises
    ------
    StoreError
        The spool cannot be written, or another agent ships it.
    """

    def __init__(
        self,
        settings: AgentSettings,
        link: Link,
        sources: Sequence[Source],
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.root = settings, Path(settings.spool_dir)
        self.shippers: dict[str, Shipper] = {}
        self._link, self._sources, self._say = link, sources, say
        self._clock, self._wall = clock, wall
        self.pace = self._new_pace()
        self.watch = ClockWatch(lambda: int(wall() * 1e9), lambda: int(clock() * 1e9))
        self.sender = Sender(link, self.pace, settings, say, self._clock_pair)
        self._due, self._server = _Due(), _Server()
        self._stopping = threading.Event()
        self._lock = _lock(self.root)
        self._crew = Crew(settings.senders, self._ship, self._failed)
        self._sweep()

    def _new_pace(self) -> Pace:
        return Pace(self.settings.retry_min_s, self.settings.retry_max_s, self._clock)

    def _clock_pair(self, tries: int) -> tuple[int, int] | None:
        """For a batch: every third time, the offset of before the clock was set."""
        state = self.watch.state() if tries % _OLD_OFFSET else self.watch.before()
        return None if state is None else (state.offset_ns, state.error_ns)

    def _ship(self, shipper: Shipper) -> bool:
        return self.sender.ship(shipper, lambda: not self._stopping.is_set())

    def _failed(self, error: Exception) -> None:
        self._say("failure", f"something failed: {type(error).__name__}: {error}; going on")

    def _sweep(self) -> None:
        """Remove what is left of folders that were being removed."""
        for path in self.root.glob(f"{GONE}*"):
            shutil.rmtree(path, ignore_errors=True)

    # --- the loop -------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Go on until `stop` is set; then send what is left, for a few seconds at most."""
        while not stop.is_set():
            try:
                self.round()
            except Exception as error:  # noqa: BLE001  # an agent outlives what a round meets
                self._failed(error)
                self.pace.failed()
            stop.wait(self.settings.poll_s)
        self.finish()

    def round(self) -> None:
        """Do what is due now."""
        for source in self._sources:
            source.poll()
        self.discover()
        now = self._clock()
        if now >= self._due.evict:
            self._due.evict = now + _EVICT_S
            self.make_room()
            self._save()
        if not self.pace.wait_s:
            self._talk(now)
        if now >= self._due.flush:
            self._due.flush = now + self._until_flush()
            self.send()

    def _talk(self, now: float) -> None:
        try:
            self._greet_unsure()
            if now >= self._due.clock or self.sender.wants_clock:
                self._due.clock, self.sender.wants_clock = now + ROUND_S, False
                self.watch.probe(self._link.time)
            if now >= self._due.heartbeat:
                self._due.heartbeat = now + self._server.heartbeat_s
                self.heartbeat()
                # Before this round sends: a stream that waits for its answer would send nothing.
                self._greet_unsure()
        except TransportError as error:
            self.pace.failed()
            self._say("server", f"the server cannot be reached: {error}; trying again")

    def _greet_unsure(self) -> None:
        if any(shipper.wants_hello for shipper in self.shippers.values()):
            self.hello()

    def _until_flush(self) -> float:
        """Seconds until this host sends again: hosts are spread over the interval."""
        interval = self._server.flush_s
        if interval <= self.settings.poll_s:
            return 0.0
        return interval - (self._wall() - self._server.phase_s) % interval

    def finish(self) -> None:
        """Send what is left, but for no longer than the settings say, and let go of the spool."""
        end = self._clock() + self.settings.stop_s
        for source in self._sources:
            source.close()
        self.discover()
        while (left := end - self._clock()) > 0 and not self.pace.wait_s:
            self._talk(self._clock())
            self.send()
            self._crew.wait_idle(left)
            if not self._unsent():
                break
            time.sleep(min(_LOCK_PAUSE_S, max(left, 0.0)))
        self._stopping.set()
        self._crew.wait_idle(max(end - self._clock(), 0.0))
        self.close()

    def _unsent(self) -> bool:
        """Whether something could be sent now."""
        return any(
            shipper.wants_hello or self._crew.is_busy(shipper) or shipper.waiting
            for shipper in self.shippers.values()
            if not (shipper.blocked or shipper.ended or shipper.pace.wait_s)
        )

    def close(self) -> None:
        """Let go of the spool; nothing is lost by that."""
        self._stopping.set()
        self._crew.close()
        for shipper in self.shippers.values():
            if not self._crew.is_busy(shipper):
                shipper.save()
                shipper.forget()
        self._lock.release()

    # --- streams --------------------------------------------------------------------------------

    def discover(self) -> None:
        """Find streams that are new in the spool, and forget those that are gone."""
        folders = streams_in(self.root)
        names = {folder.name for folder in folders}
        for folder in folders:
            if folder.name not in self.shippers:
                with contextlib.suppress(StoreError):
                    # Its description may just be being written.
                    self.shippers[folder.name] = Shipper(
                        folder,
                        self._new_pace(),
                        dead_bytes=self.settings.dead_bytes,
                        wall=self._wall,
                        clock=self._clock,
                    )
        for name in set(self.shippers) - names:
            if not self._crew.is_busy(self.shippers[name]):
                self.shippers.pop(name).forget()

    def send(self) -> None:
        """Give every stream that has something to a sender."""
        for shipper in list(self.shippers.values()):
            if self._crew.is_busy(shipper):
                continue
            if shipper.ended:
                if shipper.abandoned:
                    del self.shippers[shipper.folder.name]
                    shipper.remove()
                continue
            pausing = self.pace.wait_s or shipper.pace.wait_s
            if shipper.wants_hello or shipper.blocked or pausing:
                continue
            if shipper.waiting:
                self._crew.give(shipper)
            elif shipper.spec.source in _FOREIGN and shipper.abandoned and not shipper.closed:
                self._end(shipper)

    def _end(self, shipper: Shipper) -> None:
        """End a stream whose producer is gone without a word, e.g. killed."""
        limits = SpoolLimits(self.settings.segment_bytes, self.settings.segment_s, 0)
        try:
            writer = SpoolWriter(self.root, shipper.spec, limits)
        except StoreError:
            return
        if writer.torn_bytes:
            writer.lose(0, "torn")
        writer.end("producer-gone")
        writer.close()

    def _save(self) -> None:
        """Write checkpoints that have news."""
        for shipper in self.shippers.values():
            if not self._crew.is_busy(shipper):
                shipper.save()

    def make_room(self) -> None:
        """Drop the oldest steps if the spool has grown beyond its cap."""
        if spool_bytes(self.root) <= self.settings.cap_bytes:
            return
        with self._crew.rest(_REST_S):
            self._evict()

    def _evict(self) -> None:
        keep = {
            name: -1 if self._crew.is_busy(shipper) else shipper.keep
            for name, shipper in self.shippers.items()
        }
        dropped = evict(self.root, self.settings.cap_bytes, keep)
        for name, events in dropped.items():
            shipper = self.shippers.get(name)
            if shipper is not None:
                shipper.dropped["spool-full"] += events
                shipper.forget()
        if dropped:
            self._say("cap", f"the spool is full: the oldest {dropped.total()} events were dropped")

    # --- talking to the server ------------------------------------------------------------------

    def hello(self) -> None:
        """Ask where every stream that is unsure stands.

        Raises
        ------
        TransportError
            There is no answer.
        """
        for _ in range(_HELLO_TRIES):
            unsure = [
                shipper
                for shipper in self.shippers.values()
                if shipper.wants_hello and not self._crew.is_busy(shipper)
            ]
            unsure = [shipper for shipper in unsure if not (shipper.blocked or shipper.pace.wait_s)]
            if not unsure:
                return
            for some in _portions(unsure):
                if not self._greet(some):
                    return

    def _greet(self, shippers: Sequence[Shipper]) -> bool:
        response = self._link.hello([shipper.greeting() for shipper in shippers])
        if response.status != _OK:
            self._not_greeted(response)
            return False
        self.pace.succeeded()
        document = response.document()
        self._learn(document)
        answers = {
            str(each.get("key")): each
            for each in document.get("streams", [])
            if isinstance(each, dict)
        }
        for shipper in shippers:
            self._answered(shipper, answers.get(shipper.spec.key, {}))
        return True

    def _not_greeted(self, response: Response) -> None:
        if response.status in _TOKEN:
            self.sender.refused_token(response)
        else:
            self.pace.failed(retry_after_s(response.headers, 0.0))
            self._say("server", f"the server answers hello with {named(response)}; trying again")

    def _answered(self, shipper: Shipper, answer: Mapping[str, Any]) -> None:
        problem = answer.get("problem")
        if not isinstance(problem, dict):
            shipper.greeted(answer)
            return
        if problem.get("type") == _STALE:
            shipper.stale()
            return
        shipper.blocked = str(problem.get("detail") or problem.get("title") or "refused")
        self._say(
            f"blocked {shipper.folder.name}",
            f"the server does not take the stream of {shipper.spec.host}, job "
            f"{shipper.spec.job}: {shipper.blocked}; its data stay in the spool",
        )

    def _learn(self, document: Mapping[str, Any]) -> None:
        """Take in what the server wants; what it does not say stays as it is."""
        server = self._server
        server.ids.add(str(document.get("server_id", "")))
        server.heartbeat_s = _number(document, "heartbeat_s", server.heartbeat_s)
        limits = document.get("limits")
        if isinstance(limits, dict):
            limit = _number(limits, "body_bytes", self.sender.body_limit)
            self.sender.body_limit = int(limit)
        flush = document.get("flush")
        if isinstance(flush, dict):
            before = server.flush_s
            server.flush_s = _number(flush, "interval_s", server.flush_s)
            server.phase_s = _number(flush, "phase_s", server.phase_s)
            if server.flush_s != before:
                # Recorders write as often as the agent sends.
                with contextlib.suppress(OSError):
                    write_json(self.root / FLUSH_NAME, {"interval_s": server.flush_s})

    def heartbeat(self) -> None:
        """Say that the agent is there, and how full the spool is.

        Raises
        ------
        TransportError
            There is no answer.
        """
        state = self.watch.state()
        streams = [self._pulse(shipper) for shipper in self.shippers.values() if shipper.stream_id]
        response = self._link.heartbeat(streams, None if state is None else state.document())
        if response.status in _TOKEN:
            self.sender.refused_token(response)
            return
        if response.status != _OK:
            self.pace.failed(retry_after_s(response.headers, 0.0))
            return
        document = response.document()
        other = document.get("server_id", "") not in self._server.ids
        unknown = set(document.get("unknown_streams") or ())
        self._learn(document)
        self._reconsider(unknown, everything=other)

    def _reconsider(self, unknown: Iterable[object], *, everything: bool) -> None:
        """Say hello again for streams that the server does not know, or not as we do."""
        missing = set(unknown)
        now = self._clock()
        again = now >= self._due.blocked
        if again:
            self._due.blocked = now + _BLOCKED_S
        for shipper in self.shippers.values():
            if shipper.blocked and again:
                shipper.blocked, shipper.wants_hello = "", True
            if everything or shipper.stream_id in missing or shipper.lagging:
                shipper.wants_hello = True

    def _pulse(self, shipper: Shipper) -> dict[str, Any]:
        size, oldest = shipper.backlog()
        return {
            "stream_id": shipper.stream_id,
            "epoch": shipper.numbering.epoch,
            "next_seq": shipper.next_wire,
            "spool_bytes": size,
            "oldest_unsent_s": max(self._wall() - oldest, 0.0) if oldest else 0.0,
            "dropped": dict(shipper.dropped),
        }


def _portions(shippers: Sequence[Shipper]) -> Iterable[list[Shipper]]:
    """Streams in requests of a size that every server takes."""
    some: list[Shipper] = []
    ranks = 0
    for shipper in shippers:
        if some and (len(some) >= _HELLO_STREAMS or ranks >= _HELLO_RANKS):
            yield some
            some, ranks = [], 0
        some.append(shipper)
        ranks += len(shipper.spec.ranks)
    if some:
        yield some


def _number(document: Mapping[str, Any], name: str, default: float) -> float:
    value = document.get(name)
    sound = (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _HIGHEST
    )
    return float(value) if sound else default  # type: ignore[arg-type]  # sound: a number


def _lock(root: Path) -> Lock:
    try:
        root.mkdir(parents=True, exist_ok=True)
        for _ in range(_LOCK_TRIES):
            lock = Lock.take(root / AGENT_LOCK_NAME)
            if lock is not None:
                return lock
            time.sleep(_LOCK_PAUSE_S)
    except OSError as error:
        raise StoreError(f"spool {root}: cannot be written: {error.strerror}") from error
    raise StoreError(f"spool {root}: another agent ships it: stop one of them")
