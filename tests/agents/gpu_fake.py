"""A GPU whose time tests set: streams that work, events that are passed in their order."""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
S = 1_000_000_000

#: Number of the stream of anchors.
ASIDE = -1


class GpuError(RuntimeError):
    """What a driver raises."""


@dataclass
class Gpu:
    """Host and GPU in one; its methods are those of `ingest_agents.recorder.device.Runtime`.

    Attributes
    ----------
    now
        Time on the host, ns; tests move it.
    drift
        The GPU's clock runs faster by this.
    stream
        The current stream.
    latency
        From recording an event to passing it on an idle stream, ns.
    failing
        Methods that raise.
    """

    now: int = 10 * S
    drift: float = 0.0
    stream: int = 7
    latency: int = 5_000
    captures: bool = False
    failing: set[str] = field(default_factory=set)
    events: int = 0
    busy: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    # --- what tests do ------------------------------------------------------------------------

    def work(self, duration: int) -> None:
        """Give the current stream something to do; the host goes on."""
        self.busy[self.stream] = max(self.now, self.busy[self.stream]) + duration

    def finish(self) -> None:
        """Wait for all streams."""
        self.now = max([self.now, *self.busy.values()]) + 10 * self.latency

    def fail(self, method: str) -> None:
        """Raise if it shall."""
        if method in self.failing:
            raise GpuError(method)

    # --- what a host has ----------------------------------------------------------------------

    def monotonic(self) -> int:
        """A clock that never goes back."""
        return self.now

    def wall(self) -> int:
        """Unix time."""
        return self.now + START_NS

    # --- what a runtime has -------------------------------------------------------------------

    def event(self) -> FakeEvent:
        """A new event."""
        self.fail("event")
        self.events += 1
        return FakeEvent(self)

    def record(self, event: Any) -> int:  # noqa: ANN401  # its own
        """Put an event on the current stream."""
        self.fail("record")
        assert not self.captures, "an event in a graph has no time"
        event.put(self.stream)
        return self.stream

    def anchor(self, event: Any) -> None:  # noqa: ANN401  # its own
        """Put an event aside."""
        self.fail("anchor")
        event.put(ASIDE)

    def capturing(self) -> bool:
        """Whether the current stream is recorded into a graph."""
        return self.captures

    def device_ms(self, host_ns: int) -> float:
        """A time on the GPU's clock."""
        return (host_ns * (1 + self.drift) + 12_345_678_901) / MS


class FakeEvent:
    """A moment on a stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.at = 0

    def put(self, stream: int) -> None:
        """After all work of the stream, and never before it gets to the GPU."""
        self.at = max(self._gpu.now + self._gpu.latency, self._gpu.busy[stream])

    def query(self) -> bool:
        """Whether it was passed."""
        self._gpu.fail("query")
        assert not self._gpu.captures, "a look at an event breaks a graph that is captured"
        return self._gpu.now >= self.at

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401  # its own
        """Milliseconds, as precise as CUDA's."""
        self._gpu.fail("elapsed_time")
        assert self.query(), "both must be passed"
        assert end_event.query(), "both must be passed"
        exact = self._gpu.device_ms(end_event.at) - self._gpu.device_ms(self.at)
        (rounded,) = struct.unpack("f", struct.pack("f", exact))
        return float(rounded)
