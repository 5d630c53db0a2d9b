"""The worker: follows live jobs, gathers files, analyses windows, draws timelines, reads imports.

Flow: `smon worker` → **here** → the other modules of `smon.worker`, `smon.notify`. Two loops, so
that a long window does not hold up the running diagnosis: one decides what is ready and follows
live jobs, the other does everything else. A third thread renews leases, and one for each channel
tells it what was found: a receiver that is slow holds up nobody else. Where windows are analysed in
other processes, a thread of its own sends them off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from smon.config import Settings
from smon.errors import StoreError
from smon.executors import Executor
from smon.notify.metrics import NotifyMetrics
from smon.notify.notifier import Notifier, Surroundings, channels_of, poster
from smon.store import work
from smon.store.database import Database
from smon.store.models import Import, Task, Window, WindowState, WorkState
from smon.store.objects import Objects
from smon.store.work import Claim, Work
from smon.worker.analyse import analyse
from smon.worker.assembly import Assembly
from smon.worker.clock import SharedClock
from smon.worker.flight import Flight
from smon.worker.housekeeping import Housekeeping
from smon.worker.imports import run_import
from smon.worker.intake import Intake
from smon.worker.leases import RENEWALS, Leases
from smon.worker.live import Live
from smon.worker.service import Metrics, Service
from smon.worker.tasks import run_task
from smon.worker.tries import Tries
from smon.worker.windows import Check

_LOG: Final = logging.getLogger(__name__)

#: While the database or the objects cannot be used, rounds come at these intervals.
FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of work, and who does it."""

    work: Work
    do: Callable[[Service, Claim, Check], WindowState | WorkState]


#: In the order in which they are done.
_KINDS: Final = (
    _Kind(Window, analyse),
    _Kind(Task, run_task),
    _Kind(Import, run_import),
)


#: While a job runs, a worker looks so many times as often, until so many pauses of an idle one have
#: brought no step: a tenth of a second instead of a quarter, until there was none for a minute.
SOONER: Final = 2.5
SOON_POLLS: Final = 240


class Worker:
    """One worker process.

    Parameters
    ----------
    settings, database, objects
        Of the server.
    name
        Of this worker; no two that run at the same time may share one.
    clock, monotonic
        Unix time, ns, by default the database's; and seconds that nobody sets.
    registry
        Where its metrics are collected; by default nowhere.
    """

    def __init__(  # noqa: PLR0913  # the seams of a whole process
        self,
        settings: Settings,
        database: Database,
        objects: Objects,
        *,
        name: str,
        clock: Callable[[], int] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
    ) -> None:
        registry = registry or CollectorRegistry()
        self._clock = SharedClock(database, monotonic=monotonic)
        time_ns = clock or self._clock
        self.service = Service(settings, database, objects, name, time_ns, Metrics(registry))
        self.leases = Leases(self.service)
        self.assembly = Assembly(settings, database)
        self.live = Live(self.service, self.leases)
        self.notifiers = _notifiers(self.service, registry)
        self._intake = Intake(self.service)
        self._housekeeping = Housekeeping(self.service, monotonic)
        self._tries = Tries(self.service)
        self._flight: Flight | None = None
        self._stop = threading.Event()

    def analyse_with(self, executor: Executor) -> None:
        """Let an executor analyse windows, instead of this process; before it runs."""
        self._flight = Flight(self.service, self.leases, executor)

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`; a database or store that is away is waited for, however long.

        What is under way when it is stopped gets ``stop_timeout_s`` to finish; then it is given
        back, so that another worker takes it over at once.
        """
        loops = [
            threading.Thread(target=self._loop, args=(one,), name=name, daemon=True)
            for name, one in (
                ("live", self._live_round),
                ("rest", self._rest_round),
                *((("windows", self._flight.round),) if self._flight else ()),
                *((f"notify-{one.channel.name}", one.run) for one in self.notifiers),
            )
        ]
        self._clock.adjust()
        renewing = threading.Thread(target=self._renew, name="leases", daemon=True)
        renewing.start()
        for loop in loops:
            loop.start()
        self._stop.wait()
        deadline = time.monotonic() + self.service.settings.stop_timeout_s
        for loop in loops:
            loop.join(max(deadline - time.monotonic(), 0.0))
        if self._flight:
            self._flight.finish(deadline - time.monotonic())
        self.leases.give_back()
        renewing.join(1.0)

    def stop(self) -> None:
        """Let `run` come to its end; may be called from anywhere, more than once."""
        self._stop.set()

    def tick(self) -> bool:
        """Do one round of everything; whether there was work.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        live = self._live_round()
        busy = self._rest_round() or live
        if self._flight:
            busy = self._flight.round() or busy
        for notifier in self.notifiers:
            busy = notifier.run() or busy
        return busy

    def drain(self) -> int:
        """Work until nothing is ready any more; how many rounds that took.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        self._clock.adjust()
        renewing = threading.Thread(target=self._renew, name="leases", daemon=True)
        renewing.start()
        rounds = 0
        try:
            while not self._stop.is_set() and self.tick():
                rounds += 1
            if self._flight:
                self._flight.finish(self.service.settings.stop_timeout_s)
        finally:
            self._stop.set()
            self.leases.give_back()
            renewing.join(1.0)
        return rounds

    def _loop(self, one_round: Callable[[], bool]) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                busy = one_round()
            except StoreError as error:
                _LOG.warning("waiting %.1f s: %s", pause_s, error)
                self._stop.wait(pause_s)
                pause_s = min(pause_s * 2, LAST_PAUSE_S)
                continue
            except Exception:  # noqa: BLE001  # a defect must not end the worker
                self.service.metrics.errors.labels("loop").inc()
                _LOG.exception("the worker goes on after a failure")
                self._stop.wait(pause_s)
                pause_s = min(pause_s * 2, LAST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            if not busy:
                self._stop.wait(self._idle_s(one_round))

    def _idle_s(self, one_round: Callable[[], bool]) -> float:
        """Pause of a loop that has nothing to do; steps of jobs that run are not kept waiting."""
        pause_s = self.service.settings.poll_interval_s
        soon = one_round == self._live_round and self.live.follows(pause_s * SOON_POLLS)
        return pause_s / SOONER if soon else pause_s

    def _renew(self) -> None:
        while not self._stop.wait(self.service.settings.lease_s / RENEWALS):
            self._clock.adjust()
            self.leases.renew()

    # --- rounds -------------------------------------------------------------------------------

    def _live_round(self) -> bool:
        ready = self.assembly.run(self.service.clock())
        return self.live.run() or ready > 0

    def _rest_round(self) -> bool:
        # One of each, so that whoever waits for a timeline does not wait for all windows.
        kinds = [kind for kind in _KINDS if kind.work is not Window or self._flight is None]
        busy = [self._intake.run(), *(self._one(kind) for kind in kinds)]
        self._housekeeping.run()
        return any(busy)

    def _one(self, kind: _Kind) -> bool:
        """Do one piece of work of a kind; False if there is none."""
        service = self.service
        with service.database.write() as session:
            now = service.clock()
            claim = work.claim(session, kind.work, service.name, now, service.terms)
        if claim is None:
            return False
        with self.leases.holding(claim) as lease:
            state = self._tries.result(claim, lambda: kind.do(service, claim, lease.check))
        if kind.work is Window:
            service.metrics.windows.labels(state).inc()
        return True


def _notifiers(service: Service, registry: CollectorRegistry) -> list[Notifier]:
    """One for each channel of the settings."""
    channels = channels_of(service.settings)
    if not channels:
        return []
    around = Surroundings(
        settings=service.settings,
        database=service.database,
        name=service.name,
        clock=service.clock,
        metrics=NotifyMetrics(registry),
        post=poster(service.settings),
    )
    return [Notifier(channel, around) for channel in channels]
