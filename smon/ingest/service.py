"""Taking batches in, from admission to acknowledgement.

Flow: `smon.api.ingest` → **here**: limits → digest → is it new? → decode and check → log → answer.
A batch is acknowledged when it is durable in the log; `smon.ingest.drain` moves it on from there.
All methods of `IngestService` belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry

from smon.config import Settings
from smon.errors import SMonError, StoreError, WireError
from smon.ingest.agents import AgentFigures
from smon.ingest.decode import Content, check_digest
from smon.ingest.decoding import Decoder, Here
from smon.ingest.disk import Disk
from smon.ingest.drain import Clocks, Drain
from smon.ingest.fence import Fence
from smon.ingest.limits import MAX_LOST, MAX_STEP, MAX_VALUES, Limits
from smon.ingest.metrics import DecoderMetrics, IngestMetrics
from smon.ingest.parcels import Parcel
from smon.ingest.ports import SqlStore, Store, Tenancy
from smon.ingest.rates import InFlight, TenantRates
from smon.ingest.records import Origin, Record, RecordHead
from smon.ingest.streams import (
    MAX_AHEAD,
    Deduplication,
    Digests,
    StreamState,
    StreamTable,
)
from smon.ingest.values import Producer
from smon.ingest.wal import Seams, Wal, settle_here
from smon.store.commit import Key
from smon.store.database import Database
from smon.store.models import Mode, TimeBase
from smon.store.objects import Objects
from smon.store.streams import StreamInfo
from smon.wire import STEPS_DONE_HEADER, BatchHead, BatchKind
from smon.wire.problems import Problem

_NS: Final = 10**9

#: A clock that is farther off than fifty years says nothing, and its times would not fit.
_MAX_BEHIND_S: Final = 50 * 366 * 86_400

#: Threads for the database; and as many for large bodies, where no process is there for them.
_THREADS: Final = 4

#: A stream that is ahead of what is known here is looked up again, but not more often, and its
#: batch does not wait longer for the answer.
_ASK_AGAIN_NS: Final = 2 * 10**9
_CATCH_UP_S: Final = 0.25

_BUSY_RETRY_S: Final = 5.0

#: Pauses between tries at a body of the log that decoders died of.
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 5.0

#: Longest that a thread keeps the interpreter while others want it. With the 5 ms that Python has
#: by default, the loop loses it to the drain at every system call: a third less gets through.
_SWITCH_S: Final = 0.0002


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a batch: ``stored`` or ``duplicate``, and what is expected next."""

    status: str
    next_seq: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What a test replaces; None: the real one."""

    store: Store | None = None
    disk: Disk = field(default_factory=Disk)
    wal: type[Wal] = Wal
    decoder: Callable[[Settings, DecoderMetrics], Decoder] | None = None
    deduplication: Deduplication = field(default_factory=Deduplication)
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch between arrival and outcome; `outcome` yields the error, or None."""

    digest: str
    outcome: asyncio.Future[SMonError | None]


@dataclass(frozen=True, slots=True)
class _Place:
    """What the path of a request says."""

    state: StreamState
    epoch: int
    seq: int

    @property
    def key(self) -> Key:
        return self.state.info.id, self.epoch, self.seq

    @property
    def next_seq(self) -> int:
        return self.state.ranges(self.epoch).next_seq


class IngestService:
    """The way in.

    Parameters
    ----------
    server_id
        Name of this process, for agents; empty: its host and a random number.
    registry
        Gets the metrics.
    clock
        Unix time, ns.

    Raises
    ------
    ConfigError
        The limits contradict each other.
    """

    def __init__(  # noqa: PLR0913  # the seams of a whole process
        self,
        settings: Settings,
        database: Database,
        objects: Objects,
        *,
        registry: CollectorRegistry,
        server_id: str = "",
        clock: Callable[[], int] = time.time_ns,
        parts: Parts | None = None,
    ) -> None:
        self.settings = settings
        self.server_id = server_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.metrics = IngestMetrics(registry)
        self.agents = AgentFigures(self.metrics, settings.agent_down_s, clock)
        self.clock = clock
        self.database = database
        self._parts = parts or Parts()
        self._limits = Limits.of(settings)
        self._store: Store = self._parts.store or SqlStore(database, objects)
        seams = Seams(self._parts.disk, self._settle, self._parts.monotonic)
        self._wal = self._parts.wal(settings, self.metrics.wal, seams)
        self._decoder = (self._parts.decoder or decoder_for)(settings, self.metrics.decoder)
        clocks = Clocks(clock, self._parts.monotonic)
        self._drain = Drain(
            self._wal, self._store, settings, self.metrics, self._forget_soon, clocks,
            decode_logged=self._decode_logged,
        )  # fmt: skip
        self._streams = StreamTable()
        self._digests = Digests()
        self._in_flight = InFlight(settings.max_in_flight_bytes, self.metrics.in_flight)
        self._rates = TenantRates(settings, self._parts.monotonic)
        self._flights: dict[Key, _Flight] = {}
        self._lookups: dict[tuple[str, str], asyncio.Task[StreamState | None]] = {}
        self._askers = ThreadPoolExecutor(_THREADS, "smon-ask")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False
        self._switch_s = _SWITCH_S
        self._state = "not started"
        self.metrics.wal.bytes.set_function(lambda: self._wal.pending_bytes)
        self.metrics.wal.records.set_function(lambda: self._wal.pending_records)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Recover the log and begin to move it on. Call it where the event loop runs.

        Raises
        ------
        ConfigError
            Another process has the log, or it cannot be read.
        """
        self._loop = asyncio.get_running_loop()
        self._tune()
        self._wal.open()
        self._decoder.start()
        self._wal.start()
        self._drain.start()
        self._state = ""

    async def stop(self) -> None:
        """Take nothing more, finish what is in flight, move the log on, close it."""
        if self._loop is None:
            return
        self._state = "stopping"
        loop = self._loop
        outcomes = [flight.outcome for flight in self._flights.values()]
        if outcomes:
            await asyncio.wait(outcomes, timeout=self.settings.stop_timeout_s)
        await loop.run_in_executor(None, self._drain.stop, self.settings.stop_timeout_s)
        await loop.run_in_executor(None, self._wal.close)
        await self._decoder.stop()
        # Outcomes of the last group are on their way to this loop.
        await asyncio.sleep(0)
        self._loop = None
        sys.setswitchinterval(self._switch_s)
        gc.unfreeze()
        self._askers.shutdown(wait=True, cancel_futures=True)

    def _tune(self) -> None:
        """Settle the interpreter for a process that answers; `stop` takes it back."""
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        # Modules and their classes are for ever: looking through them for garbage takes a tenth of
        # a second each time, in which nothing is acknowledged.
        gc.collect()
        gc.freeze()

    def ready(self) -> list[str]:
        """Why batches are not taken or not stored; empty if they are. From any thread."""
        reasons = [self._state] if self._state else []
        if read_only := self._wal.read_only():
            reasons.append(read_only)
        if problem := self._decoder.problem():
            reasons.append(problem)
        return reasons + self._drain.problems()

    # --- admission ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admit(self, access: Tenancy, stream_id: str, head: BatchHead) -> Iterator[None]:
        """Room for a batch, while the context lasts; to be asked for before its body is read.

        Raises
        ------
        WireError
            It is too large, the tenant is over its limit, or the server has no room.
        """
        if self._state:
            raise WireError(Problem.OVERLOADED, f"the server is {self._state}", _BUSY_RETRY_S)
        if head.length > self._limits.encoded:
            raise WireError(
                Problem.TOO_LARGE,
                f"expected a body of at most {self._limits.encoded} bytes, found {head.length}: "
                "send smaller batches",
            )
        _check_counts(head, self._limits)
        self._wal.check_room(head.length)
        with self._in_flight.reserve(head.length, access.tenant_id, stream_id):
            self._rates.take(access.tenant_id, head.events if head.kind is BatchKind.OPS else 0)
            yield

    # --- one batch ------------------------------------------------------------------------------

    async def put(
        self,
        access: Tenancy,
        stream_id: str,
        epoch: int,
        seq: int,
        head: BatchHead,
        body: bytes,
    ) -> Ack:
        """Take a batch in; it is durable when this returns.

        Raises
        ------
        WireError
            It is malformed, contradicts what has come before, or cannot be taken now.
        StoreError
            The stream is not known here, and the database cannot be asked.
        """
        check_digest(head, body)
        place = await self._place(access.tenant_id, stream_id, epoch, seq)
        while (flight := self._flights.get(place.key)) is not None:
            error = await asyncio.shield(flight.outcome)
            if flight.digest == head.digest:
                # The same batch, sent again before the first answer: it gets the same outcome.
                if error is not None:
                    raise error
                break
        first = self._first_missing(place, head)
        if first is None:
            return self._duplicate(place, head)
        return await self._store_new(place, head, body, first)

    def _first_missing(self, place: _Place, head: BatchHead) -> int | None:
        """The sequence number from which the batch is new; None: it is a duplicate.

        Of a gap only the first number is known before its body is read; see `_store_new`.
        """
        missing = self._parts.deduplication.missing(place.state, place.epoch, place.seq, place.seq)
        if missing is None and head.kind is BatchKind.GAP:
            return place.seq
        return missing

    def _duplicate(self, place: _Place, head: BatchHead) -> Ack:
        known = self._wal.digest(place.key) or self._digests.get(place.key)
        if known and known != head.digest and head.kind is not BatchKind.GAP:
            raise WireError(
                Problem.KEY_CONFLICT,
                f"expected the batch that is known as epoch {place.epoch}, seq {place.seq}, found "
                "another body: begin a new epoch",
            )
        self.metrics.duplicate.inc()
        return Ack("duplicate", place.next_seq)

    async def _store_new(self, place: _Place, head: BatchHead, body: bytes, first: int) -> Ack:
        loop = asyncio.get_running_loop()
        flight = _Flight(head.digest, loop.create_future())
        self._flights[place.key] = flight
        now_ns = self.clock()
        try:
            content = await self._content(place, head, body, now_ns)
            last = place.seq if content.gap is None else content.gap.last_seq
            if content.gap is not None:
                missing = self._parts.deduplication.missing(
                    place.state, place.epoch, place.seq, last
                )
                if missing is None:
                    self._land(place.key, flight, None)
                    return self._duplicate(place, head)
                first = missing
            record = RecordHead(_origin(place.state.info), place.epoch, first, last, now_ns, head)
            self._append(place, record, body, content, flight)
        except BaseException as error:
            known = error if isinstance(error, SMonError) else _internal()
            self._land(place.key, flight, known)
            raise
        # Whoever waits may be cancelled; the batch is not.
        failure = await asyncio.shield(flight.outcome)
        if failure is not None:
            raise failure
        self.metrics.stored.inc()
        self.metrics.bytes.inc(len(body))
        if head.kind is BatchKind.OPS:
            self.metrics.events.inc(head.events)
        return Ack("stored", place.next_seq)

    async def _content(self, place: _Place, head: BatchHead, body: bytes, now_ns: int) -> Content:
        info = place.state.info
        live_unix = info.mode is Mode.LIVE and info.time_base is TimeBase.UNIX
        offset_ns = head.clock[0] if head.clock else 0
        behind_s = min(max(round(offset_ns / _NS), -_MAX_BEHIND_S), _MAX_BEHIND_S)
        producer = Producer(info.layout, live_unix, info.window_steps, behind_s)
        return await self._decoder.decode(Parcel(head, body, place.seq, producer, now_ns))

    def _decode_logged(self, parcels: Sequence[Parcel]) -> Sequence[Content | WireError]:
        """From the drain's thread: what is in bodies of the log."""
        loop = self._loop
        if loop is None:
            raise StoreError("the server is stopping")
        return asyncio.run_coroutine_threadsafe(self._decoded(parcels), loop).result()

    async def _decoded(self, parcels: Sequence[Parcel]) -> Sequence[Content | WireError]:
        return await asyncio.gather(*map(self._outcome, parcels))

    async def _outcome(self, parcel: Parcel) -> Content | WireError:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._decoder.decode(parcel)
            except WireError as error:
                # It was acknowledged: it is tried as often as it would be if it were sent again,
                # and as slowly. A host that is short of memory may have more in a minute.
                if error.problem != Problem.DECODER_DIED:
                    return error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _append(
        self, place: _Place, head: RecordHead, body: bytes, content: Content, flight: _Flight
    ) -> None:
        def settled(error: SMonError | None) -> None:
            if error is None:
                place.state.ranges(place.epoch).add(head.first_seq, head.last_seq)
                if head.batch.kind is not BatchKind.GAP:
                    self._digests.put(place.key, head.batch.digest)
            self._land(place.key, flight, error)

        self._wal.append(head, body, settled, content)
        if not self._flushing:
            # At the end of this turn of the loop: all batches of the turn share one sync.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._wal.flush()

    def _land(self, key: Key, flight: _Flight, error: SMonError | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.outcome.done():
            flight.outcome.set_result(error)

    def _settle(self, records: Sequence[Record], error: SMonError | None) -> None:
        """From the thread that writes the log to the event loop: one call for a whole group."""
        loop = self._loop
        if loop is None:
            return
        # A loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle_here, records, error)

    # --- streams --------------------------------------------------------------------------------

    async def _place(self, tenant_id: str, stream_id: str, epoch: int, seq: int) -> _Place:
        state = self._streams.get(tenant_id, stream_id)
        if state is None or epoch > state.info.epoch:
            state = await self._look_up(tenant_id, stream_id)
        elif state.ranges(state.info.epoch).holes:
            state = await self._catch_up(state)
        if state is None or epoch > state.info.epoch:
            raise WireError(
                Problem.NOT_FOUND,
                "expected a stream and epoch that are registered: send a hello first",
            )
        if epoch < state.info.epoch:
            raise WireError(
                Problem.STALE_EPOCH,
                f"expected epoch {state.info.epoch}, found {epoch}: another process sends this "
                "stream now",
            )
        ranges = state.ranges(epoch)
        if ranges.holes > MAX_AHEAD and ranges.leaves_hole(seq):
            raise WireError(
                Problem.OVERLOADED,
                f"expected seq {ranges.next_seq} first: too many batches are ahead of it",
                _BUSY_RETRY_S,
            )
        return _Place(state, epoch, seq)

    async def _catch_up(self, state: StreamState) -> StreamState:
        """Ask what other servers have stored, if batches are missing here; now and then."""
        if self.clock() - state.asked_ns < _ASK_AGAIN_NS:
            return state
        state.asked_ns = self.clock()
        with contextlib.suppress(SMonError, TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                return await self._look_up(state.info.tenant_id, state.info.id) or state
        return state

    async def _look_up(self, tenant_id: str, stream_id: str) -> StreamState | None:
        """Ask the database; one question at a time for each stream."""
        place = (tenant_id, stream_id)
        task = self._lookups.get(place)
        if task is None:
            task = asyncio.create_task(self._ask(tenant_id, stream_id))
            self._lookups[place] = task
            task.add_done_callback(lambda done: self._looked_up(place, done))
        return await asyncio.shield(task)

    def _looked_up(self, place: tuple[str, str], task: asyncio.Task[StreamState | None]) -> None:
        del self._lookups[place]
        if not task.cancelled():
            # Nobody may wait for it any more; then its failure is not news.
            task.exception()

    async def _ask(self, tenant_id: str, stream_id: str) -> StreamState | None:
        logged = self._wal.logged(stream_id)
        loop = asyncio.get_running_loop()
        info = await loop.run_in_executor(self._askers, self._store.find, tenant_id, stream_id)
        return None if info is None else self._streams.adopt(info, logged, self.clock())

    def adopt(self, info: StreamInfo) -> int:
        """Take over a stream that has just been registered; what is expected of it next."""
        logged = self._wal.logged(info.id)
        state = self._streams.adopt(info, logged, self.clock())
        return state.ranges(info.epoch).next_seq

    def _forget_soon(self, stream_id: str) -> None:
        """From the drain's thread: what is known of a stream is wrong."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._streams.forget, stream_id)


def decoder_for(settings: Settings, metrics: DecoderMetrics) -> Decoder:
    """Who decodes, by the settings."""
    if settings.decode_processes:
        return Fence(settings, metrics)
    return Here(Limits.of(settings), _THREADS)


def _check_counts(head: BatchHead, limits: Limits) -> None:
    most = {BatchKind.OPS: limits.events, BatchKind.GAP: MAX_LOST, BatchKind.FILE: 1}.get(
        head.kind, MAX_VALUES
    )
    if head.events > most:
        raise WireError(
            Problem.TOO_MANY_EVENTS, f"expected at most {most} events in a batch of this kind"
        )
    if head.steps_done is not None and head.steps_done > MAX_STEP:
        raise WireError(
            Problem.WRONG_VALUES, f"expected steps of at most {MAX_STEP} in {STEPS_DONE_HEADER}"
        )


def _origin(info: StreamInfo) -> Origin:
    return Origin(
        tenant_id=info.tenant_id,
        job_id=info.job_id,
        attempt_id=info.attempt_id,
        stream_id=info.id,
        window_steps=info.window_steps,
        step_relative=info.time_base is TimeBase.STEP,
    )


def _internal() -> SMonError:
    return WireError(Problem.INTERNAL, "the first try of this batch failed: send it again")
