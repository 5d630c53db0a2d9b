"""How far this host's clock is from the server's: probes as in NTP, and the drift.

Flow: ``GET /api/v1/time`` → **here** → headers of batches, heartbeat. Times of ops are never
rewritten: the offset goes beside them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Probes of one round, of which the one with the shortest way counts.
PROBES: Final = 8
ROUND_S: Final = 10.0

#: Rounds over which the drift is fitted: 10 minutes.
ROUNDS: Final = 60

#: What an offset may change unnoticed; NTP assumes the same of quartz.
_WANDER_PPM: Final = 15.0

#: A line through fewer or closer points says nothing.
_MIN_ROUNDS: Final = 6
_MIN_SPAN_NS: Final = 50 * 10**9


@dataclass(frozen=True, slots=True)
class Sample:
    """One probe.

    Attributes
    ----------
    at_ns
        This host's clock.
    offset_ns
        The server's clock minus this host's.
    error_ns
        Half of the way to the server and back.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, slots=True)
class ClockState:
    """The offset now, how wrong it may be, and how it changes."""

    offset_ns: int
    error_ns: int
    drift_ppm: float

    def document(self) -> dict[str, int | float]:
        """As it stands in a heartbeat."""
        return {
            "offset_ns": self.offset_ns,
            "error_ns": self.error_ns,
            "drift_ppm": round(self.drift_ppm, 3),
        }


def sample_of(sent_ns: int, elapsed_ns: int, server_in_ns: int, server_out_ns: int) -> Sample:
    """A probe that left at `sent_ns` and was back `elapsed_ns` later."""
    back_ns = sent_ns + elapsed_ns
    offset = ((server_in_ns - sent_ns) + (server_out_ns - back_ns)) // 2
    way = max(elapsed_ns - (server_out_ns - server_in_ns), 0)
    return Sample(back_ns, offset, way // 2)


class ClockWatch:
    """Offsets of the last ten minutes.

    Parameters
    ----------
    wall, monotonic
        This host's time, ns.
    """

    def __init__(self, wall: Callable[[], int], monotonic: Callable[[], int]) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._best: deque[Sample] = deque(maxlen=ROUNDS)

    def probe(self, ask: Callable[[], tuple[int, int] | None], probes: int = PROBES) -> None:
        """Ask the server so often, and keep the answer that came fastest.

        Parameters
        ----------
        ask
            Server's clock when it got the request and when it answered; None if it does not say.
            Whatever it raises ends the round.
        """
        samples = []
        for _ in range(probes):
            sent, begin = self._wall(), self._monotonic()
            answer = ask()
            if answer is None:
                return
            samples.append(sample_of(sent, self._monotonic() - begin, *answer))
        self.add(min(samples, key=lambda sample: sample.error_ns))

    def add(self, sample: Sample) -> None:
        """Take a round's best probe in. After a jump of this host's clock the past is void."""
        state = self.state(sample.at_ns)
        if state is not None:
            allowed = state.error_ns + sample.error_ns + 1_000_000
            if abs(sample.offset_ns - state.offset_ns) > allowed:
                self._best.clear()
        self._best.append(sample)

    def state(self, now_ns: int | None = None) -> ClockState | None:
        """The offset now; None before the first round."""
        if not self._best:
            return None
        now = self._wall() if now_ns is None else now_ns
        drift = self._drift()

        def error_of(sample: Sample) -> float:
            return sample.error_ns + abs(now - sample.at_ns) * _WANDER_PPM * 1e-6

        best = min(self._best, key=error_of)
        offset = best.offset_ns + round((now - best.at_ns) * drift)
        return ClockState(offset, round(error_of(best)), drift * 1e6)

    def _drift(self) -> float:
        """Slope of the offset: ns per ns, 0 as long as it cannot be told."""
        first, last = self._best[0], self._best[-1]
        if len(self._best) < _MIN_ROUNDS or last.at_ns - first.at_ns < _MIN_SPAN_NS:
            return 0.0
        times = [float(sample.at_ns - first.at_ns) for sample in self._best]
        offsets = [float(sample.offset_ns - first.offset_ns) for sample in self._best]
        mean_time, mean_offset = sum(times) / len(times), sum(offsets) / len(offsets)
        spread = sum((time - mean_time) ** 2 for time in times)
        if spread == 0.0:
            return 0.0
        both = zip(times, offsets, strict=True)
        return sum((time - mean_time) * (offset - mean_offset) for time, offset in both) / spread
