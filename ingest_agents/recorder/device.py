"""The clock of a GPU: moments on its streams, read later, and never waited for.

Flow: `ingest_agents.recorder.recorder` marks a moment → **here**: an event on the current stream →
`ingest_agents.recorder.pending` asks for its time when the GPU has passed it.

**Unix time.** Events tell durations between each other only. An *anchor* is an event on a stream of
its own, where nothing else runs, recorded next to a look at the host's clock. The GPU cannot pass
it before that look, and has passed it when a later look finds it done, so each anchor bounds the
difference of the two clocks from both sides. The lower bound is the difference that is used: it is
off by the time from recording to passing, microseconds on a stream where nothing else runs. A
bound of an earlier anchor stays good, minus what the clocks may have drifted since; so one late
anchor does no harm. `DeviceClock.error_ns` is the distance of both bounds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

#: Between two anchors. Events keep times as float32 milliseconds: 0.06 µs steps at 1 s, 4 µs at 60.
ANCHOR_NS: Final = 1_000_000_000

#: Two quartz clocks; GPUs and hosts are specified within 50 parts per million each.
DRIFT: Final = 1e-4


class Event(Protocol):
    """A moment on a stream; as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401  # its own type
        """Milliseconds from here to a later event, when both were passed."""


class Runtime(Protocol):
    """What is needed of a GPU's runtime."""

    def event(self) -> Event:
        """A new event that keeps time."""

    def record(self, event: Event) -> int:
        """Put an event on the current stream; gives a number of that stream."""

    def anchor(self, event: Event) -> None:
        """Put an event on a stream where nothing else runs."""

    def capturing(self) -> bool:
        """Whether the current stream is recorded into a graph: no event has a time then."""


class Cuda:
    """CUDA, or ROCm, as torch has it.

    Parameters
    ----------
    cuda
        The module ``torch.cuda``, initialised.
    """

    def __init__(self, cuda: Any) -> None:  # noqa: ANN401  # torch is not installed everywhere
        self._cuda = cuda
        # Of high priority: few programs use these, and none of their streams is shared with it.
        self._aside = cuda.Stream(priority=-1)

    def event(self) -> Event:
        """A new event that keeps time."""
        event: Event = self._cuda.Event(enable_timing=True)
        return event

    def record(self, event: Any) -> int:  # noqa: ANN401  # torch's
        """Put an event on the current stream; gives a number of that stream."""
        stream = self._cuda.current_stream()
        event.record(stream)
        return int(stream.cuda_stream)

    def anchor(self, event: Any) -> None:  # noqa: ANN401  # torch's
        """Put an event on a stream where nothing else runs."""
        event.record(self._aside)

    def capturing(self) -> bool:
        """Whether the current stream is recorded into a graph."""
        return bool(self._cuda.is_current_stream_capturing())


def find_cuda() -> Runtime | None:
    """CUDA, if this process uses it already; nothing is imported or initialised for it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return Cuda(cuda) if cuda is not None and cuda.is_initialized() else None


class Mark:
    """A moment on a stream. Used again once it was read."""

    __slots__ = ("anchor", "event", "stream")

    def __init__(self, event: Event, anchor: _Anchor) -> None:
        self.event, self.anchor, self.stream = event, anchor, 0


class _Anchor:
    """An event next to a look at the host's clock."""

    __slots__ = ("ahead_ns", "device_ns", "event", "high_ns", "host_ns", "offset_ns", "settled")

    def __init__(self, event: Event, host_ns: int, ahead_ns: int) -> None:
        self.event, self.host_ns, self.ahead_ns = event, host_ns, ahead_ns
        #: On the GPU's clock, from the first anchor; host's minus GPU's clock, and its upper bound.
        self.device_ns, self.offset_ns, self.high_ns = 0, 0, 0
        self.settled = False


class DeviceClock:
    """Moments on the streams of one GPU, as unix time.

    Parameters
    ----------
    runtime
        Of the GPU.
    monotonic
        The host's clock, ns.
    ahead_ns
        Unix time minus the host's clock.

    Attributes
    ----------
    error_ns
        How far times may be off; None before the first anchor was read.
    """

    def __init__(self, runtime: Runtime, monotonic: Callable[[], int], ahead_ns: int) -> None:
        self.error_ns: int | None = None
        self._runtime, self._monotonic = runtime, monotonic
        self._free: deque[Mark] = deque()
        self._newest = self._anchored(ahead_ns)
        self._unsettled = deque([self._newest])
        self._settled: _Anchor | None = None
        self._last: dict[int, int] = {}

    def capturing(self) -> bool:
        """Whether the current stream is recorded into a graph: nothing can be marked or read."""
        return self._runtime.capturing()

    def mark(self) -> Mark | None:
        """A moment on the current stream: now. None while that is recorded into a graph."""
        if self._runtime.capturing():
            return None
        try:
            mark = self._free.pop()
        except IndexError:
            mark = Mark(self._runtime.event(), self._newest)
        mark.anchor = self._newest
        mark.stream = self._runtime.record(mark.event)
        return mark

    def free(self, mark: Mark) -> None:
        """A mark that was read is not needed any more."""
        self._free.append(mark)

    def anchor(self, ahead_ns: int) -> None:
        """Compare the clocks again, if it is time to."""
        newest = self._newest
        recent = self._monotonic() - newest.host_ns < ANCHOR_NS
        if recent and newest.ahead_ns == ahead_ns:
            return
        self._newest = self._anchored(ahead_ns)
        self._unsettled.append(self._newest)

    def passed(self, mark: Mark) -> bool:
        """Whether the GPU has passed this moment, and its anchor."""
        return mark.event.query() and (mark.anchor.settled or self._settle(mark.anchor))

    def unix_ns(self, mark: Mark) -> int:
        """Unix time of a moment that was passed; never goes back on one stream."""
        anchor = mark.anchor
        since = _ns(anchor.event.elapsed_time(mark.event))
        time_ns = anchor.device_ns + since + anchor.offset_ns + anchor.ahead_ns
        time_ns = max(time_ns, self._last.get(mark.stream, time_ns))
        self._last[mark.stream] = time_ns
        return time_ns

    def _anchored(self, ahead_ns: int) -> _Anchor:
        event = self._runtime.event()
        host_ns = self._monotonic()
        self._runtime.anchor(event)
        return _Anchor(event, host_ns, ahead_ns)

    def _settle(self, wanted: _Anchor) -> bool:
        """Read anchors in order, up to this one."""
        while self._unsettled:
            anchor = self._unsettled[0]
            if not anchor.event.query():
                return False
            self._bound(anchor, self._monotonic())
            self._unsettled.popleft()
            if anchor is wanted:
                break
        return wanted.settled

    def _bound(self, anchor: _Anchor, seen_ns: int) -> None:
        before = self._settled
        drift = 0.0
        if before is not None:
            since = _ns(before.event.elapsed_time(anchor.event))
            anchor.device_ns = before.device_ns + since
            drift = abs(since) * DRIFT
        low, high = anchor.host_ns - anchor.device_ns, seen_ns - anchor.device_ns
        anchor.offset_ns, anchor.high_ns = low, high
        if before is not None:
            kept = max(low, round(before.offset_ns - drift))
            bound = min(high, round(before.high_ns + drift))
            # Otherwise a clock was set or stopped: what was known is of no use.
            if kept <= bound:
                anchor.offset_ns, anchor.high_ns = kept, bound
        anchor.settled, self._settled = True, anchor
        self.error_ns = anchor.high_ns - anchor.offset_ns


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
