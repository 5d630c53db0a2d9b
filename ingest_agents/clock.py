"""How far this host's clock is from the server's: probes as in NTP, and the drift.

Flow: ``GET /api/v1/time`` → **here** → headers of batches, heartbeat. Times of ops are never
rewritten: the offset goes beside them. What is measured is the server's clock against this host's
monotonic clock, which nobody sets: when the host's time of day is set, the offset is known at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

#: Probes of one round, of which the one with the shortest way counts.
PROBES: Final = 8
ROUND_S: Final = 10.0

#: Rounds over which the drift is fitted: 10 minutes.
ROUNDS: Final = 60

#: A time of day that goes on by so much more or less than the monotonic clock was set.
_SET_NS: Final = 10**9

#: So many of these are remembered.
_JUMPS: Final = 8

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
        This host's monotonic clock.
    offset_ns
        The server's clock minus that.
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
        self._ahead_ns = wall() - monotonic()
        self._before_ns: deque[int] = deque(maxlen=_JUMPS)

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
            sent = self._monotonic()
            answer = ask()
            if answer is None:
                return
            samples.append(sample_of(sent, self._monotonic() - sent, *answer))
        self.add(min(samples, key=lambda sample: sample.error_ns))

    def add(self, sample: Sample) -> None:
        """Take a round's best probe in. After a jump of the server's clock the past is void."""
        if self._best:
            known = self._at(sample.at_ns)
            allowed = known.error_ns + sample.error_ns + 1_000_000
            if abs(sample.offset_ns - known.offset_ns) > allowed:
                self._best.clear()
        self._best.append(sample)

    def state(self) -> ClockState | None:
        """The server's time of day minus this host's, now; None before the first round."""
        if not self._best:
            return None
        now, wall = self._monotonic(), self._wall()
        if abs(wall - now - self._ahead_ns) > _SET_NS:
            self._before_ns.append(self._ahead_ns)
        self._ahead_ns = wall - now
        known = self._at(now)
        return replace(known, offset_ns=known.offset_ns - self._ahead_ns)

    def before(self) -> ClockState | None:
        """The same for what was recorded before this host's clock was set, if it was.

        Of several times, the one at which it was farthest ahead: that is refused soonest.
        """
        state = self.state()
        if state is None:
            return None
        farthest = max(self._before_ns, default=self._ahead_ns)
        return replace(state, offset_ns=state.offset_ns + self._ahead_ns - farthest)

    def _at(self, now: int) -> ClockState:
        """The server's clock minus the monotonic one."""
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
