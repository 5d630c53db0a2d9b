"""When ops were: on which clock, in unix time, and where waiting is put.

Flow: `ingest_agents.recorder.recorder` → **here** (GPU: → `ingest_agents.recorder.pending`) →
`ingest_agents.recorder.journal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ingest_agents.recorder.device import DeviceClock, Mark, Runtime
from ingest_agents.recorder.journal import Done
from ingest_agents.recorder.pending import Open, Pending, Sink, Stamp, Timed
from smon.errors import ConfigError

#: Values of the setting ``recorder_clock``.
CLOCKS: Final = ("auto", "cuda", "host")

#: Ended while its stream was recorded into a graph: it has run later, or not only once.
CAPTURED: Final = "stream-capture"

#: A jump of the system's clock; its slewing moves the monotonic clock alike.
_MAX_STRAY_NS: Final = 1_000_000

_LOOK_S: Final = 0.005


class Host(NamedTuple):
    """Clocks and devices of this host.

    Attributes
    ----------
    wall, monotonic
        Unix time, and a clock that never goes back, ns.
    find_device
        Gives the runtime of the GPU that this process uses, or None.
    """

    wall: Callable[[], int]
    monotonic: Callable[[], int]
    find_device: Callable[[], Runtime | None]


class Placed(NamedTuple):
    """What becomes of what was timed.

    Attributes
    ----------
    op
        Of an op, start in unix time and duration, ns.
    done
        Of a step, when all its ops were given.
    lost
        Of an op without a time, its step and why.
    failed
        The GPU's runtime failed: nothing can be timed from here on.
    """

    op: Callable[[Open, int, int], None]
    done: Callable[[int], None]
    lost: Callable[[int, str], None]
    failed: Callable[[Exception], None]


class Times:
    """Times the ops of one process; the clock is chosen at the first of them.

    Parameters
    ----------
    host
        Its clocks.
    wanted
        One of `CLOCKS`.
    placed
        Gets the results: at once from the host's clock, steps later from the GPU's.

    Attributes
    ----------
    stamp
        Gives this moment, to be used once; None if it has no time.
    device
        The clock of the GPU, if that is used.
    """

    def __init__(self, host: Host, wanted: str, placed: Placed) -> None:
        if wanted not in CLOCKS:
            raise ConfigError(f"recorder_clock: expected {' or '.join(CLOCKS)}, found {wanted!r}")
        self.stamp: Callable[[], Stamp | None] = self._first
        self.device: DeviceClock | None = None
        self.monotonic = host.monotonic
        self._host, self._wanted, self._placed = host, wanted, placed
        self._pending: Pending | None = None
        self._debt_ns = 0
        self._rebase()

    def now(self) -> int:
        """Unix time, which goes on evenly within a step."""
        return self.monotonic() + self._ahead_ns

    def unix(self, monotonic_ns: int) -> int:
        """Unix time of a moment on the host's clock."""
        return monotonic_ns + self._ahead_ns

    def step_begins(self) -> None:
        """Put the clocks right, and read what the GPU has passed."""
        if abs(self._host.wall() - self.now()) > _MAX_STRAY_NS:
            self._rebase()
        self._resolve()

    def step_ends(self, step: int) -> None:
        """All ops of the step were given to `end`."""
        if self._pending is None:
            self._done(step)
            return
        self._pending.add(Done(step))
        self._resolve()

    def end(self, begun: Open, at: Stamp | None) -> None:
        """An op ends: now, or at a moment from `stamp`."""
        begin = begun.begin
        if isinstance(begin, Mark):
            self._end_on_device(begun, begin, self.stamp() if at is None else at)
            return
        end = self.monotonic() if at is None else at
        if isinstance(end, int):
            waited = _total(begun.waits) if begun.waits else 0
            self._place(begun, begin + self._ahead_ns, end - begin, waited)

    def _end_on_device(self, begun: Open, begin: Mark, end: Stamp | None) -> None:
        if self._pending is None:
            return
        if isinstance(end, Mark):
            waits = _marks(begun.waits) if begun.waits else []
            self._pending.add(Timed(begun, begun.step, begin, end, waits, self.monotonic()))
        else:
            self._placed.lost(begun.step, CAPTURED)

    def waited(self, step: int, begin: Stamp | None, end: Stamp | None) -> None:
        """Between two ops of a step, this rank waited for others."""
        if begin is None or end is None:
            return
        if isinstance(begin, int) and isinstance(end, int):
            self._owe(end - begin)
        elif isinstance(begin, Mark) and isinstance(end, Mark) and self._pending is not None:
            self._pending.add(Timed(None, step, begin, end, [], self.monotonic()))

    def drain(self, timeout_s: float) -> None:
        """Before the end, let the GPU finish what was begun; what it does not is lost."""
        for _ in range(round(timeout_s / _LOOK_S)):
            self._resolve()
            if not self._pending:
                return
            time.sleep(_LOOK_S)
        self.abandon()

    def abandon(self) -> None:
        """Nothing is timed any more; what the GPU has not finished is lost."""
        self.stamp, self.device = _never, None
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.give_up()

    # --- the clock --------------------------------------------------------------------------------

    def _first(self) -> Stamp | None:
        """Choose the clock: by now the trainer uses its GPU, if it has one."""
        try:
            runtime = None if self._wanted == "host" else self._host.find_device()
            if runtime is not None:
                self._use(runtime)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)
            return None
        if self.device is None:
            self.stamp = self.monotonic
            if self._wanted == "cuda":
                self._fail(ConfigError("recorder_clock: expected a process that uses CUDA"))
        return self.stamp()

    def _use(self, runtime: Runtime) -> None:
        self.device = DeviceClock(runtime, self.monotonic, self._ahead_ns)
        sink = Sink(self._place, self._owe, self._done, self._placed.lost)
        self._pending = Pending(self.device, sink)
        self.stamp = self._mark

    def _mark(self) -> Stamp | None:
        try:
            return None if self.device is None else self.device.mark()
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)
            return None

    def _resolve(self) -> None:
        """Only at cheap moments, between two steps."""
        if self.device is None or self._pending is None:
            return
        try:
            if not self.device.capturing():
                self.device.anchor(self._ahead_ns)
                self._pending.resolve(self.monotonic())
        except Exception as error:  # noqa: BLE001  # whatever a driver raises
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.abandon()
        self._placed.failed(error)

    def _rebase(self) -> None:
        """Unix time is the monotonic clock, put right once, and again after a jump."""
        self._ahead_ns = self._host.wall() - self.monotonic()

    # --- waiting ----------------------------------------------------------------------------------

    def _place(self, begun: Open, start_ns: int, duration_ns: int, waited_ns: int) -> None:
        """Hand on an op, earlier by what was waited before it in its step."""
        debt = self._debt_ns
        if begun.settles:
            self._debt_ns = 0
            self._placed.op(begun, start_ns - debt, duration_ns + debt)
        else:
            self._debt_ns = debt + waited_ns
            self._placed.op(begun, start_ns - debt, duration_ns - waited_ns)

    def _owe(self, waited_ns: int) -> None:
        self._debt_ns += waited_ns

    def _done(self, step: int) -> None:
        self._debt_ns = 0
        self._placed.done(step)


def _marks(waits: list[tuple[Stamp, Stamp]]) -> list[tuple[Mark, Mark]]:
    """Of waits on the GPU's clock."""
    return [(a, b) for a, b in waits if isinstance(a, Mark) and isinstance(b, Mark)]


def _total(waits: list[tuple[Stamp, Stamp]]) -> int:
    """Of waits on the host's clock."""
    return sum(b - a for a, b in waits if isinstance(a, int) and isinstance(b, int))


def _never() -> None:
    """No moment has a time."""
