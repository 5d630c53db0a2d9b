"""When steps and windows are complete, or have waited long enough.

Flow: `smon.store.commit` (who has sent what) → **here** → ``attempts.ready_step`` for the running
diagnosis and ``windows.state`` for analysis. Any number of workers may do this at the same time;
the rules stand in ``docs/reference/windows.md`` section 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from smon.config import Settings
from smon.errors import StoreError
from smon.store import windows as table
from smon.store.database import Database
from smon.store.models import Mode, WindowState
from smon.store.streams import count_open
from smon.store.windows import AttemptInfo, Ready, StreamState, WindowInfo
from smon.topology import Layout

#: Of the ranks that are missing, so many are named.
MAX_NAMED: Final = 64

#: Once all streams have ended, or the attempt has, ranks that nobody sends are waited for so long.
ENDED_WAIT_S: Final = 5.0

#: Attempts without an open window are looked at for so long after their last data.
RECENT_S: Final = 600.0

#: Silence says nothing before it is this many times as long as a step.
PATIENCE_STEPS: Final = 2.0

#: A complete step of some workers that others lack is remembered since when; at most so many.
MAX_FRONTS: Final = 256

#: What streams say of their ranks hardly ever changes, so it is not read more often.
RANKS_S: Final = 60.0

#: Streams of one tenant that bring the interval between two sends to one second, and its limits.
_STREAMS_PER_S: Final = 125
_FLUSH_S: Final = (1.0, 10.0)

#: An attempt that cannot be looked at is looked at again after so long, or with new data.
AFTER_DEFECT_S: Final = 30.0

_LOG: Final = logging.getLogger(__name__)

_NS: Final = 10**9
_NEVER: Final = 2**62
#: Progress of a worker that has sent nothing, and of one that sends nothing more.
NOTHING: Final = -(2**62)
EVERYTHING: Final = 2**62

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """How far an attempt has come.

    Attributes
    ----------
    progress
        (workers,) last step that each worker has delivered, by stage and DP rank; `NOTHING`,
        `EVERYTHING`.
    heard_ns
        (workers,) when each was heard last; 0 for one that nobody sends.
    all_ended
        There are streams, and all have ended.
    """

    layout: Layout
    progress: Ints
    heard_ns: Ints
    all_ended: bool

    def ready(self) -> int:
        """Last step that everybody has delivered."""
        return int(self.progress.min())

    def front(self) -> int:
        """Last step that anybody is known to have delivered; `NOTHING` if none."""
        sending = self.progress[self.progress < EVERYTHING]
        return int(sending.max(initial=NOTHING))

    def lacking(self, step: int) -> list[int]:
        """First rank of each worker that has not delivered a step."""
        workers = np.flatnonzero(self.progress < step).tolist()
        per_worker = self.layout.tp * self.layout.cp
        return [worker * per_worker for worker in workers]


def standing(layout: Layout, streams: Sequence[StreamState]) -> Standing:
    """Progress of every worker, from the streams that declare its ranks.

    Of several streams of one worker the farthest counts; that one has ended counts once all have.
    Workers that no stream declares have come as far as the slowest stream of unknown ranks.
    """
    count = layout.dp * layout.pp
    sizes = [len(stream.ranks) for stream in streams]
    flat = np.fromiter(chain.from_iterable(one.ranks for one in streams), np.int64, sum(sizes))
    worker, of = flat // (layout.tp * layout.cp), np.repeat(np.arange(len(streams)), sizes)
    known = (worker >= 0) & (worker < count)
    worker, of = worker[known], of[known]
    running = np.full(count, NOTHING)
    np.maximum.at(running, worker, np.array([_done(one) for one in streams], np.int64)[of])
    heard = np.zeros(count, np.int64)
    np.maximum.at(heard, worker, np.array([one.last_data_ns for one in streams], np.int64)[of])
    alive = np.zeros(count, bool)
    alive[worker[~np.array([one.ended for one in streams], bool)[of]]] = True
    declared = np.zeros(count, bool)
    declared[worker] = True
    progress = np.where(declared & ~alive, EVERYTHING, running)
    unknown = [stream for stream in streams if not stream.ranks]
    if unknown:
        progress[~declared] = min(
            EVERYTHING if stream.ended else _done(stream) for stream in unknown
        )
        heard[~declared] = max(stream.last_data_ns for stream in unknown)
    all_ended = bool(streams) and all(stream.ended for stream in streams)
    return Standing(layout, progress, heard, all_ended)


def _done(stream: StreamState) -> int:
    return NOTHING if stream.steps_done is None else stream.steps_done


@dataclass(slots=True)
class _Memory:
    """What a worker remembers of an attempt between two looks.

    Attributes
    ----------
    ranks, ranks_ns
        Of each stream, and when they were read.
    fronts
        (step, when somebody was first seen to have delivered it), ascending.
    given_up
        By worker that is not waited for any more: when it was heard last.
    """

    revision: int = -1
    due_ns: int = 0
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranks_ns: int = 0
    fronts: list[tuple[int, int]] = field(default_factory=list)
    given_up: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Decision:
    """What is to be written about one attempt, and when to look again if nothing comes."""

    ready_step: int | None = None
    ready: list[Ready] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    due_ns: int = _NEVER

    def look_at(self, when_ns: float) -> None:
        self.due_ns = min(self.due_ns, int(when_ns))


class Assembly:
    """Decides what is ready; asks again only about attempts in which something has changed.

    Parameters
    ----------
    settings, database
        Of the server.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._memory: dict[str, _Memory] = {}
        #: How many attempts have been looked at closely.
        self.looks = 0

    def run(self, now: int) -> int:
        """Look once at all that may have changed.

        Parameters
        ----------
        now
            Unix time, ns.

        Returns
        -------
        int
            How many steps' ends and windows became ready.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        with self._database.read() as session:
            found = table.attempts_under_way(session, now - int(RECENT_S * _NS))
        self._forget({attempt_id for attempt_id, _ in found})
        return sum(self._try(attempt_id, revision, now) for attempt_id, revision in found)

    def _forget(self, known: set[str]) -> None:
        for attempt_id in self._memory.keys() - known:
            del self._memory[attempt_id]

    def _try(self, attempt_id: str, revision: int, now: int) -> int:
        try:
            return self._look(attempt_id, revision, now)
        except StoreError:
            raise
        except Exception:  # noqa: BLE001  # a defect in one attempt must not hold up all others
            _LOG.exception("attempt %s cannot be assembled", attempt_id)
            memory = self._memory.setdefault(attempt_id, _Memory())
            memory.revision, memory.due_ns = revision, now + int(AFTER_DEFECT_S * _NS)
            return 0

    def _look(self, attempt_id: str, revision: int, now: int) -> int:
        memory = self._memory.setdefault(attempt_id, _Memory())
        if memory.revision == revision and now < memory.due_ns:
            return 0
        self.looks += 1
        with self._database.read() as session:
            attempt = table.attempt(session, attempt_id)
            if attempt is None:
                return 0
            decision = self._decide(session, attempt, memory, now)
        changed = self._write(attempt_id, decision, now)
        memory.revision, memory.due_ns = attempt.revision, decision.due_ns
        return changed

    def _write(self, attempt_id: str, decision: _Decision, now: int) -> int:
        if decision.ready_step is None and not decision.ready and not decision.complete:
            return 0
        changed = 0
        with self._database.write() as session:
            if decision.ready_step is not None:
                changed += table.set_ready_step(session, attempt_id, decision.ready_step)
            for ready in decision.ready:
                changed += table.set_ready(session, ready, now)
            for window_id in decision.complete:
                table.set_complete(session, window_id)
        return changed

    def _decide(
        self, session: Session, attempt: AttemptInfo, memory: _Memory, now: int
    ) -> _Decision:
        fresh = now < memory.ranks_ns + int(RANKS_S * _NS)
        streams = table.streams(session, attempt.id, memory.ranks if fresh else {})
        memory.ranks = {stream.id: stream.ranks for stream in streams if stream.ranks}
        memory.ranks_ns = memory.ranks_ns if fresh else now
        stand = standing(attempt.layout, streams)
        decision = _Decision()
        pace_s = table.longest_step_s(session, attempt.id) if attempt.mode is Mode.LIVE else 0.0
        if attempt.mode is Mode.LIVE:
            seen = table.last_step_seen(session, attempt.id)
            if seen is not None:
                waits = self._waits(session, attempt, stand, pace_s)
                step = _ready_step(attempt, stand, memory, _Clock(now, *waits, seen), decision)
                if step is not None and step > _or_nothing(attempt.ready_step):
                    decision.ready_step = step
        for window in table.undecided(session, attempt.id):
            self._window(attempt, stand, window, _Look(now, pace_s), decision)
        return decision

    # --- steps --------------------------------------------------------------------------------

    def _waits(
        self, session: Session, attempt: AttemptInfo, stand: Standing, pace_s: float
    ) -> tuple[int, int]:
        """How long to wait for workers that lag, and for the rest of a step; ns."""
        lag_s = self._settings.step_timeout_s
        if stand.front() > stand.ready():
            # A stream that sends every so often has not fallen silent before that.
            lag_s += self._flush_s(session, attempt.tenant_id)
        silence_s = max(self._settings.step_timeout_s, PATIENCE_STEPS * pace_s)
        return int(lag_s * _NS), int(silence_s * _NS)

    def _flush_s(self, session: Session, tenant_id: str) -> float:
        if self._settings.flush_interval_s:
            return self._settings.flush_interval_s
        low, high = _FLUSH_S
        crowd = count_open(session, tenant_id) / _STREAMS_PER_S
        # Up to one a second they send at their own pace, which is within the wait itself.
        return 0.0 if crowd <= low else min(crowd, high)

    # --- windows ------------------------------------------------------------------------------

    def _window(
        self,
        attempt: AttemptInfo,
        stand: Standing,
        window: WindowInfo,
        look: _Look,
        decision: _Decision,
    ) -> None:
        last = _last_step_of(attempt, window)
        lacking = stand.lacking(last)
        complete = not lacking if attempt.mode is Mode.LIVE else stand.all_ended and not lacking
        if window.state is not WindowState.OPEN:
            if complete:
                decision.complete.append(window.id)
            return
        if complete:
            decision.ready.append(Ready(window.id))
            return
        wait_s = self._window_wait_s(attempt, stand, look.pace_s)
        since_ns = max(window.updated_ns, attempt.ended_ns or 0)
        if since_ns + wait_s * _NS > look.now:
            decision.look_at(since_ns + wait_s * _NS)
            return
        reason = _reason(attempt, stand, lacking)
        named = tuple(lacking[:MAX_NAMED])
        decision.ready.append(Ready(window.id, reason, named, len(lacking)))

    def _window_wait_s(self, attempt: AttemptInfo, stand: Standing, pace_s: float) -> float:
        if stand.all_ended or attempt.ended_ns is not None:
            return min(ENDED_WAIT_S, self._settings.window_timeout_s)
        return max(self._settings.window_timeout_s, PATIENCE_STEPS * pace_s)


@dataclass(frozen=True, slots=True)
class _Look:
    """When somebody looks at an attempt, and how long its steps take."""

    now: int
    pace_s: float


def _last_step_of(attempt: AttemptInfo, window: WindowInfo) -> int:
    """Step after which the window is over; of a whole attempt or a recorded one, its end."""
    if attempt.window_steps == 0 or attempt.mode is Mode.RECORDED:
        return EVERYTHING
    return (window.number + 1) * attempt.window_steps - 1


def _reason(attempt: AttemptInfo, stand: Standing, lacking: Sequence[int]) -> str:
    workers = attempt.layout.dp * attempt.layout.pp
    over = stand.all_ended or attempt.ended_ns is not None
    why = "the attempt has ended" if over else "nothing came any more"
    if not lacking:
        return f"{why}, but not all streams have"
    return f"{why}: {len(lacking)} of {workers} workers are not complete"


@dataclass(frozen=True, slots=True)
class _Clock:
    """Now, the waits for laggards and for silence (ns), and the last step with any op."""

    now: int
    lag_ns: int
    silence_ns: int
    seen: int


def _ready_step(
    attempt: AttemptInfo, stand: Standing, memory: _Memory, clock: _Clock, decision: _Decision
) -> int | None:
    """Last step of a live attempt that is ready; None if none is."""
    _note_front(memory, min(stand.front(), clock.seen), clock.now)
    progress = _without_given_up(stand, memory)
    ready = min(int(progress.min()), clock.seen)
    overdue = _overdue(memory, clock, ready)
    if overdue > ready:
        for worker in np.flatnonzero(progress < overdue).tolist():
            if int(stand.heard_ns[worker]) + clock.lag_ns <= clock.now:
                memory.given_up[worker] = int(stand.heard_ns[worker])
        progress = _without_given_up(stand, memory)
        # Those that still send are late, and are not waited for in these steps either.
        ready = max(ready, overdue, min(int(progress.min()), clock.seen))
    memory.fronts = [one for one in memory.fronts if one[0] > ready]
    if memory.fronts:
        decision.look_at(memory.fronts[0][1] + clock.lag_ns)
    if ready < clock.seen:
        quiet_ns = attempt.last_data_ns + clock.silence_ns
        if quiet_ns <= clock.now or attempt.ended_ns is not None:
            ready = clock.seen
        else:
            decision.look_at(quiet_ns)
    return ready if ready > NOTHING else None


def _note_front(memory: _Memory, front: int, now: int) -> None:
    """Remember since when a step has been complete somewhere."""
    latest = memory.fronts[-1][0] if memory.fronts else NOTHING
    if front > latest and len(memory.fronts) < MAX_FRONTS:
        memory.fronts.append((front, now))


def _overdue(memory: _Memory, clock: _Clock, ready: int) -> int:
    """Last step that others have waited for long enough."""
    due = [step for step, since in memory.fronts if since + clock.lag_ns <= clock.now]
    return max(due, default=ready)


def _without_given_up(stand: Standing, memory: _Memory) -> Ints:
    """Progress, in which workers that nobody waits for are through; those that are back are not."""
    back = [
        worker for worker, heard in memory.given_up.items() if int(stand.heard_ns[worker]) > heard
    ]
    for worker in back:
        del memory.given_up[worker]
    progress = stand.progress.copy()
    progress[list(memory.given_up)] = EVERYTHING
    return progress


def _or_nothing(step: int | None) -> int:
    return NOTHING if step is None else step
