"""Time the ops of a training process, and write them to the spool in the background.

Flow: trainer → **here** → `ingest_agents.recorder.times` → `ingest_agents.recorder.journal` →
spool → agent. Nothing raises into the trainer, waits for anything, or imports more than the
standard library and zstandard.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

from ingest_agents.config import AgentSettings, configure
from ingest_agents.identity import Identity, coordinates, identify
from ingest_agents.payload import OpRow, context_batch
from ingest_agents.recorder.device import Runtime, find_cuda
from ingest_agents.recorder.journal import Done, Happened, Journal, Tokens
from ingest_agents.recorder.pending import Open, Stamp
from ingest_agents.recorder.times import CAPTURED, Host, Placed, Times
from ingest_agents.spool.folder import FLUSH_NAME, StreamSpec, key_of, read_json
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import ConfigError, SMonError
from smon.ops import BY_LABEL, OpType
from smon.topology import Layout

__all__ = ["Open", "Recorder"]

_LOG: Final = logging.getLogger("smon.recorder")

#: What the protocol knows as events.
EVENT_KINDS: Final = frozenset({"gc", "checkpoint", "logging", "evaluation", "restart", "compile"})

#: Shorter collections of the young generations happen all the time, and matter to nobody.
_MIN_GC_NS: Final = 1_000_000
_OLDEST_GENERATION: Final = 2

#: What a server takes.
_MAX_SUM: Final = 1e300
_MAX_EVENT_S: Final = 1e9

_FLUSH_S: Final = 1.0
_MAX_FLUSH_S: Final = 60.0
_CLOSE_S: Final = 5.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _guarded(
    method: Callable[Concatenate[Recorder, _P], _R],
) -> Callable[Concatenate[Recorder, _P], _R | None]:
    """The method, but it does nothing when the recorder is off, and never raises."""

    @wraps(method)
    def guarded(self: Recorder, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if not self.on:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self.failed(error)
            return None

    return guarded


class Recorder:
    """Records one process of a training job. A recorder that cannot work is off, and says so once.

    Parameters
    ----------
    identity
        Who this process is; it must have a rank and a layout, and a job unless it is alone.
    settings
        Of the spool and the queue. With ``enable`` false everything does nothing.
    wall, monotonic
        Unix time and a clock that never goes back, ns.
    find_device
        Gives the runtime of the GPU that this process uses, or None; asked at the first op, unless
        ``recorder_clock`` is ``host``.

    Attributes
    ----------
    on
        Whether it records.
    errors
        Exceptions that were kept from the trainer.
    model_chunks
        Where in the model the chunks of this process are; without, they are dealt round robin.
    """

    def __init__(
        self,
        identity: Identity,
        settings: AgentSettings,
        *,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
        find_device: Callable[[], Runtime | None] = find_cuda,
    ) -> None:
        self.on, self.errors = False, 0
        self.model_chunks: dict[int, int] = {}
        self._host = Host(wall, monotonic, find_device)
        self._settings = settings
        self._wake = threading.Event()
        self._closing = False
        self._counts: dict[str, Iterator[int]] = {}
        self._step: int | None = None
        self._last_step = -1
        self._gc_began = 0
        if not settings.enable:
            return
        try:
            self._start(identity)
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self.failed(error)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, layout: Layout | None = None
    ) -> Recorder:
        """A recorder of this process, as its environment says.

        Parameters
        ----------
        environ
            By default, that of the process.
        layout
            If ``SMON_LAYOUT`` does not say; without both, every rank is a DP rank.
        """
        variables = os.environ if environ is None else environ
        try:
            settings = configure(variables).settings
            identity = identify(variables, settings)
        except SMonError as error:
            return cls.off(error)
        if layout is not None and not settings.layout:
            identity = replace(identity, layout=layout)
        return cls(identity, settings)

    @classmethod
    def off(cls, reason: Exception) -> Recorder:
        """A recorder that does nothing, and has said why."""
        off = cls(_NOBODY, AgentSettings(enable=False))
        off.failed(reason)
        return off

    def _start(self, identity: Identity) -> None:
        spec = _spec(identity, self._settings, f"{os.getpid()}-{self._host.wall()}")
        layout, rank = spec.layout, spec.ranks[0]
        self._rank = rank
        self._dp, self._stage = coordinates(layout, rank)
        limits = SpoolLimits(
            self._settings.segment_bytes, self._settings.segment_s, self._settings.cap_bytes
        )
        self._root = Path(self._settings.spool_dir)
        placed = Placed(self._add, self._done, self._lost, self._give_up)
        self._times = Times(self._host, self._settings.recorder_clock, placed)
        writer = SpoolWriter(self._root, spec, limits)
        self._writer = writer
        self._journal = Journal(writer, self._settings.queue_events, dict(BY_LABEL))
        writer.append(context_batch({"hosts": {str(rank): spec.host}}, rows=0))
        self._thread = threading.Thread(target=self._run, name="smon-recorder", daemon=True)
        self.on = True
        self._thread.start()
        gc.callbacks.append(self._collected)
        atexit.register(self.close)
        _after_fork(self)

    @property
    def open_step(self) -> int | None:
        """The step that is open."""
        return self._step

    @property
    def next_step(self) -> int:
        """The number after that of the last step; 0 before the first."""
        return self._last_step + 1

    # --- what the trainer calls ---------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A training step; ops are recorded inside it only.

        Parameters
        ----------
        number
            Of the job: goes on after a restart from a checkpoint.
        """
        self.begin_step(number)
        try:
            yield
        finally:
            self.end_step()

    @_guarded
    def begin_step(self, number: int) -> None:
        """A step begins; one that is still open ends."""
        step = int(number)
        if self._step is not None:
            self.end_step()
        self._times.step_begins()
        self._counts = {}
        self._step = self._last_step = step

    @_guarded
    def end_step(self) -> None:
        """The open step ends: all its ops have been recorded."""
        step, self._step = self._step, None
        if step is None:
            return
        self._times.step_ends(step)
        if len(self._journal) * 2 > self._settings.queue_events:
            self._wake.set()

    def _done(self, step: int) -> None:
        self._journal.add(Done(step))

    @contextmanager
    def op(self, op_type: OpType, *, microbatch: int = -1, chunk: int = -1) -> Iterator[None]:
        """An op of this process, from here to the end of the block."""
        begun = self.begin(op_type, microbatch=microbatch, chunk=chunk)
        try:
            yield
        finally:
            self.end(begun)

    @_guarded
    def begin(
        self,
        op_type: OpType,
        *,
        microbatch: int = -1,
        chunk: int = -1,
        at: Stamp | None = None,
    ) -> Open | None:
        """An op begins: now, or at a moment from `stamp`.

        Returns
        -------
        Open | None
            For `end`; None outside of a step, or if the recorder is off.
        """
        step = self._step
        if step is None:
            return None
        # A collection is work of the host.
        look = self._times.monotonic if op_type is OpType.GC else self._times.stamp
        stamp = look() if at is None else at
        if stamp is None:
            self._lost(step, CAPTURED)
            return None
        label = _LABELS[op_type]
        numbers = self._counts.get(label)
        if numbers is None:
            numbers = self._counts.setdefault(label, count())
        begun = Open(label, step, next(numbers), microbatch, chunk)
        begun.begin = stamp
        return begun

    @_guarded
    def end(self, begun: Open | None, at: Stamp | None = None) -> None:
        """An op ends: now, or at a moment from `stamp`."""
        if begun is not None:
            self._times.end(begun, at)

    @_guarded
    def measured(self, begun: Open | None, start_ns: int, duration_ns: int) -> None:
        """An op whose times come from elsewhere, e.g. from the GPU; unix time, ns."""
        if begun is not None:
            self._add(begun, int(start_ns), int(duration_ns))

    @_guarded
    def stamp(self) -> Stamp | None:
        """The present moment on the recorder's clock, to be used once; None if it has no time."""
        return self._times.stamp()

    @_guarded
    def waited(self, begin: Stamp | None, end: Stamp | None) -> None:
        """Between two ops, this rank only waited for others: from one `stamp` to another.

        Later ops of the step are put earlier by as much, until one that ``settles``: that one
        begins earlier, too, but ends when it does, so it has all the waiting. What a rank waits
        somewhere inside its step is found at one op at the end of it.
        """
        if self._step is not None:
            self._times.waited(self._step, begin, end)

    def _add(self, begun: Open, start_ns: int, duration_ns: int) -> None:
        self._journal.add(
            OpRow(
                begun.step,
                self._dp,
                self._stage,
                self._rank,
                begun.label,
                start_ns,
                duration_ns,
                begun.seq,
                begun.chunk,
                self.model_chunks.get(begun.chunk, -1),
                begun.microbatch,
            )
        )

    @_guarded
    def tokens(self, microbatch: int, tokens: int, sum_len2: float) -> None:
        """What is in a microbatch of the open step: tokens, and sum of squared sequence lengths."""
        if self._step is not None:
            entry = Tokens(self._step, self._dp, int(microbatch), int(tokens), float(sum_len2))
            if min(entry.microbatch, entry.tokens) < 0 or not 0 <= entry.sum_len2 <= _MAX_SUM:
                raise ConfigError("expected counts of a microbatch from 0, found others")
            self._journal.add(entry)

    @_guarded
    def event(self, kind: str, duration_s: float, start_ns: int | None = None) -> None:
        """Something besides computing that took time, in the open step or before the next.

        Parameters
        ----------
        kind
            ``checkpoint``, ``logging``, ``evaluation``, ``restart``, ``compile`` or ``gc``.
        start_ns
            Unix time; by default, it has just ended.
        """
        if kind not in EVENT_KINDS:
            raise ConfigError(f"expected an event of {', '.join(sorted(EVENT_KINDS))}")
        if not 0 <= duration_s <= _MAX_EVENT_S:
            raise ConfigError(f"expected the seconds of an event, found {duration_s!r}")
        begin = self._times.now() - round(duration_s * 1e9) if start_ns is None else int(start_ns)
        self._happened(kind, begin, float(duration_s))

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """An event that lasts as long as the block."""
        begin = self._host.monotonic()
        try:
            yield
        finally:
            self.event(kind, (self._host.monotonic() - begin) / 1e9)

    @_guarded
    def flush(self) -> None:
        """Ask the recorder's thread to write now; does not wait."""
        self._wake.set()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what is left and end the stream; takes no longer than `timeout_s`."""
        if not self.on:
            return
        self.on = False
        try:
            gc.callbacks.remove(self._collected)
            atexit.unregister(self.close)
            self._times.drain(timeout_s / 2)
            self._closing = True
            self._wake.set()
            self._thread.join(timeout_s)
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self.failed(error)

    # --- garbage collection -----------------------------------------------------------------------

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by the interpreter around every collection.

        It becomes an event and no op: an op ``gc`` stands at a fixed place in the graph of a step,
        and a collection comes when it likes. One that is planned can be recorded with `op`.
        """
        if phase == "start":
            self._gc_began = self._host.monotonic()
            return
        began, self._gc_began = self._gc_began, 0
        elapsed = self._host.monotonic() - began
        old = info.get("generation") == _OLDEST_GENERATION
        if began and (old or elapsed >= _MIN_GC_NS):
            self._collection(self._times.unix(began), elapsed)

    @_guarded
    def _collection(self, start_ns: int, elapsed_ns: int) -> None:
        self._happened("gc", start_ns, elapsed_ns / 1e9)

    def _happened(self, kind: str, start_ns: int, duration_s: float) -> None:
        # What happens between two steps belongs to the one before.
        step = max(self._last_step, 0) if self._step is None else self._step
        self._journal.add(Happened(kind, step, self._rank, start_ns, duration_s))

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._interval())
            self._wake.clear()
            self._write()
        self._write()
        try:
            self._writer.end("closed")
            self._writer.close()
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self.failed(error)

    def _write(self) -> None:
        try:
            self._journal.write()
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self.failed(error)

    def _interval(self) -> float:
        """Seconds between two writes: as often as the agent sends, if nobody says otherwise."""
        if self._settings.flush_s:
            return self._settings.flush_s
        try:
            wanted = float(read_json(self._root / FLUSH_NAME)["interval_s"])
        except (SMonError, KeyError, TypeError, ValueError):
            return _FLUSH_S
        return min(max(wanted, 0.1), _MAX_FLUSH_S) if wanted == wanted else _FLUSH_S  # noqa: PLR0124  # NaN

    # --- trouble ----------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Count what was kept from the trainer, and say so once."""
        self.errors += 1
        if self.errors == 1:
            _LOG.warning("SMon: the recorder failed, training goes on without it: %s", error)

    def _lost(self, step: int, reason: str) -> None:
        self._journal.lose(step, reason)

    def _give_up(self, error: Exception) -> None:
        """Nothing can be timed any more: write what there is, and stay off."""
        self.failed(error)
        if self.on:
            self.on = False
            gc.callbacks.remove(self._collected)
            self._closing = True
            self._wake.set()

    def forked(self) -> None:
        """In a child: the stream is the parent's."""
        if self.on:
            self.on = False
            self._writer.abandon()


def _after_fork(recorder: Recorder) -> None:
    reference = weakref.ref(recorder)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive.forked()

    os.register_at_fork(after_in_child=in_child)


_LABELS: Final = {op: op.label for op in OpType}

_NOBODY: Final = Identity(None, 0, "unknown", None, None, None, {})


def _spec(identity: Identity, settings: AgentSettings, process: str) -> StreamSpec:
    """The stream of this process.

    Raises
    ------
    ConfigError
        Nothing says which job this is, or which rank of it.
    """
    alone = identity.world_size in (None, 1)
    job = identity.job or (f"local-{identity.host}" if alone else None)
    rank = identity.rank if identity.rank is not None else (0 if alone else None)
    if job is None or rank is None:
        missing = "SMON_JOB_ID" if job is None else "SMON_RANK"
        raise ConfigError(f"expected {missing} to be set, found no launcher's variable either")
    layout = identity.layout or Layout(dp=1, pp=1)
    coordinates(layout, rank)
    return StreamSpec(
        key=key_of("recorder", job, identity.attempt, identity.host, rank, process),
        job=job,
        attempt=identity.attempt,
        layout=layout,
        mode="live",
        time="unix",
        host=identity.host,
        source="recorder",
        ranks=(rank,),
        window_steps=settings.window_steps or None,
    )
