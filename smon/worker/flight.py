"""Windows that are analysed elsewhere, several at a time.

Flow: `smon.worker.loop` → **here** (`smon.executors`) → `smon.worker.elsewhere`, on any machine.
This worker claims them, renews their leases, and sees to what became of them; what they give is
written where they are analysed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from smon.executors import Executor
from smon.store import work
from smon.store.models import Window
from smon.store.work import Claim
from smon.worker.elsewhere import Outcome, Reference, analyse_elsewhere, settings_elsewhere
from smon.worker.leases import Lease, Leases
from smon.worker.service import Service
from smon.worker.tries import Tries


class Flight:
    """All windows of a worker that are under way; for one thread.

    Parameters
    ----------
    executor
        Where they are analysed; it says how many at a time.
    do
        What is done with each.
    """

    def __init__(
        self,
        service: Service,
        leases: Leases,
        executor: Executor,
        do: Callable[[Reference], Outcome] = analyse_elsewhere,
    ) -> None:
        self._service, self._leases, self._executor, self._do = service, leases, executor, do
        self._settings = settings_elsewhere(service.settings)
        self._tries = Tries(service)
        self._under_way: dict[Future[Outcome], tuple[Claim, Lease]] = {}

    def round(self) -> bool:
        """Send off what is ready, and see to what has come back; whether there was any.

        Waits for the first to come back as long as an idle worker pauses.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        self._fill()
        return self._settle(self._service.settings.poll_interval_s)

    def finish(self, patience_s: float) -> None:
        """See to what comes back within a time, and send nothing off."""
        deadline = time.monotonic() + patience_s
        while self._under_way and (left := deadline - time.monotonic()) > 0:
            self._settle(left)

    def _fill(self) -> None:
        service = self._service
        while len(self._under_way) < self._executor.parallel:
            with service.database.write() as session:
                claim = work.claim(session, Window, service.name, service.clock(), service.terms)
            if claim is None:
                return
            # Renewed from here on: a place on the cluster may have to be waited for.
            lease = self._leases.take(claim)
            self._under_way[self._sent(claim)] = (claim, lease)

    def _sent(self, claim: Claim) -> Future[Outcome]:
        reference = Reference(self._settings, claim.id, claim.owner, claim.fence, claim.tries)
        try:
            return self._executor.submit(self._do, reference)
        except Exception as error:  # noqa: BLE001  # it is seen to like all other errors
            future: Future[Outcome] = Future()
            future.set_exception(error)
            return future

    def _settle(self, patience_s: float) -> bool:
        if not self._under_way:
            return False
        for future in wait(self._under_way, patience_s, FIRST_COMPLETED).done:
            claim, lease = self._under_way.pop(future)
            state = self._tries.result(claim, partial(self._counted, future))
            self._leases.drop(lease)
            self._service.metrics.windows.labels(state).inc()
        return True

    def _counted(self, done: Future[Outcome]) -> str:
        outcome = done.result()
        self._service.metrics.add(outcome.counts)
        return outcome.state
