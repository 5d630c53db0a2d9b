"""The worker: follows live jobs, analyses windows, draws timelines, reads imports, keeps house.

Flow: `smon worker` → **here** → the other modules of `smon.worker`. Two loops, so that a long
window does not hold up the running diagnosis: one decides what is ready and follows live jobs, the
other does everything else. A third thread renews leases.
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
from smon.errors import FencedError, MissingError, StoreError
from smon.store import work
from smon.store.database import Database
from smon.store.models import Import, Task, Window, WindowState, WorkState
from smon.store.objects import Objects
from smon.store.work import Claim, Work
from smon.worker.assembly import Assembly
from smon.worker.housekeeping import Housekeeping
from smon.worker.imports import run_import
from smon.worker.leases import RENEWALS, Leases
from smon.worker.live import Live
from smon.worker.service import Metrics, Service
from smon.worker.tasks import run_task
from smon.worker.windows import analyse_window

_LOG: Final = logging.getLogger(__name__)

_NS: Final = 10**9

#: While the database or the objects cannot be used, rounds come at these intervals.
FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 30.0

#: A try that failed unexpectedly is followed by the next one after so long, times the tries so far.
RETRY_S: Final = 1.0

#: Work that could not be done because the store was not there is tried again after so long.
STORE_RETRY_S: Final = 5.0

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of work, and who does it."""

    work: Work
    do: Callable[[Service, Claim, Check], WindowState | WorkState]


#: In the order in which they are done.
_KINDS: Final = (
    _Kind(Window, analyse_window),
    _Kind(Task, run_task),
    _Kind(Import, run_import),
)


class Worker:
    """One worker process.

    Parameters
    ----------
    settings, database, objects
        Of the server.
    name
        Of this worker; no two that run at the same time may share one.
    clock
        Unix time, ns.
    registry
        Where its metrics are collected; by default nowhere.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        objects: Objects,
        *,
        name: str,
        clock: Callable[[], int] = time.time_ns,
        registry: CollectorRegistry | None = None,
    ) -> None:
        metrics = Metrics(registry or CollectorRegistry())
        self.service = Service(settings, database, objects, name, clock, metrics)
        self.leases = Leases(self.service)
        self.assembly = Assembly(settings, database)
        self.live = Live(self.service, self.leases)
        self._housekeeping = Housekeeping(self.service)
        self._stop = threading.Event()

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`; a database or store that is away is waited for, however long.

        What is under way when it is stopped gets ``stop_timeout_s`` to finish; then it is given
        back, so that another worker takes it over at once.
        """
        loops = [
            threading.Thread(target=self._loop, args=(one,), name=name, daemon=True)
            for name, one in (("live", self._live_round), ("rest", self._rest_round))
        ]
        renewing = threading.Thread(target=self._renew, name="leases", daemon=True)
        renewing.start()
        for loop in loops:
            loop.start()
        self._stop.wait()
        deadline = time.monotonic() + self.service.settings.stop_timeout_s
        for loop in loops:
            loop.join(max(deadline - time.monotonic(), 0.0))
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
        return self._rest_round() or live

    def drain(self) -> int:
        """Work until nothing is ready any more; how many rounds that took.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        renewing = threading.Thread(target=self._renew, name="leases", daemon=True)
        renewing.start()
        rounds = 0
        try:
            while not self._stop.is_set() and self.tick():
                rounds += 1
        finally:
            self._stop.set()
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
                self._stop.wait(self.service.settings.poll_interval_s)

    def _renew(self) -> None:
        while not self._stop.wait(self.service.settings.lease_s / RENEWALS):
            self.leases.renew()

    # --- rounds -------------------------------------------------------------------------------

    def _live_round(self) -> bool:
        ready = self.assembly.run(self.service.clock())
        return self.live.run() or ready > 0

    def _rest_round(self) -> bool:
        # One of each, so that whoever waits for a timeline does not wait for all windows.
        busy = [self._one(kind) for kind in _KINDS]
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
            state = self._done(kind, claim, lease.check)
        if kind.work is Window:
            service.metrics.windows.labels(state).inc()
        return True

    def _done(self, kind: _Kind, claim: Claim, check: Check) -> str:
        """What became of a claim."""
        name = kind.work.__tablename__
        try:
            return str(kind.do(self.service, claim, check))
        except FencedError as error:
            _LOG.info("%s", error)
            return "fenced"
        except MissingError as error:
            _LOG.info("%s", error)
            return self._again(claim, str(error), counts=True)
        except StoreError as error:
            _LOG.warning("%s %s waits: %s", name, claim.id, error)
            return self._after_store_error(claim, error)
        except Exception as error:  # noqa: BLE001  # one piece of work must not end the others
            self.service.metrics.errors.labels(name).inc()
            _LOG.exception("%s %s failed, try %d", name, claim.id, claim.tries)
            reason = f"unexpected {type(error).__name__}: the log of worker {claim.owner} has more"
            return self._again(claim, reason, counts=True)

    def _after_store_error(self, claim: Claim, error: StoreError) -> str:
        """A store that is away is waited for; a file that is damaged or gone counts as a try."""
        return self._again(claim, str(error), counts=self._store_answers())

    def _store_answers(self) -> bool:
        try:
            self.service.objects.size("results/there-is-none")
        except StoreError:
            return False
        return True

    def _again(self, claim: Claim, reason: str, *, counts: bool) -> str:
        """Give a claim back for another try, or give it up after the last one."""
        service = self.service
        now = service.clock()
        try:
            with service.database.write() as session:
                if counts and claim.tries >= service.settings.max_tries:
                    work.fail(session, claim, reason, now)
                    return "failed"
                pause_s = RETRY_S * claim.tries if counts else STORE_RETRY_S
                later = now + int(pause_s * _NS)
                work.release(session, claim, not_before_ns=later, counts=counts)
        except FencedError:
            return "fenced"
        except StoreError as error:
            _LOG.warning("%s cannot be given back, its lease will run out: %s", claim.id, error)
        return "retried"
