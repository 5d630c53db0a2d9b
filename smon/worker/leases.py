"""Leases of what a worker has under way: renewed while it works, noticed when they are lost.

Flow: `smon.worker.loop` → **here** → `smon.store.work`, `smon.store.windows`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from smon.errors import FencedError, StoreError
from smon.store import windows, work
from smon.store.windows import Follow
from smon.store.work import Claim
from smon.worker.service import Service

_LOG: Final = logging.getLogger(__name__)

#: Renewals within one lease: two may fail before it runs out.
RENEWALS: Final = 3

_NS: Final = 10**9


class Lease:
    """One thing that is being worked on."""

    __slots__ = ("_lost", "held")

    def __init__(self, held: Claim | Follow) -> None:
        self.held = held
        self._lost = threading.Event()

    def lose(self) -> None:
        """Somebody else has it, or it has been given back."""
        self._lost.set()

    def check(self, *_progress: object) -> None:
        """Stop the work that this belongs to, if it is lost; called as the work goes on.

        Raises
        ------
        FencedError
            It is lost.
        """
        if self._lost.is_set():
            raise FencedError("the lease is lost, so the work is given up")


class Leases:
    """All leases of a worker."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._held: set[Lease] = set()

    @contextmanager
    def holding(self, held: Claim | Follow) -> Iterator[Lease]:
        """Renew a lease while something is done."""
        lease = self.take(held)
        try:
            yield lease
        finally:
            self.drop(lease)

    def take(self, held: Claim | Follow) -> Lease:
        """Renew a lease from now on, until it is dropped."""
        lease = Lease(held)
        with self._lock:
            self._held.add(lease)
        return lease

    def drop(self, lease: Lease) -> None:
        """Renew it no more: what it was for is over."""
        with self._lock:
            self._held.discard(lease)

    def current(self) -> list[Lease]:
        """What is under way."""
        with self._lock:
            return list(self._held)

    def renew(self) -> None:
        """Renew all leases once; one that is lost says so to its work.

        A database that cannot be reached is no loss yet: the lease may run out, and then the
        fence decides.
        """
        for lease in self.current():
            try:
                self._renew(lease.held)
            except FencedError:
                lease.lose()
            except StoreError as error:
                _LOG.warning("a lease cannot be renewed: %s", error)

    def _renew(self, held: Claim | Follow) -> None:
        service = self._service
        now, lease_s = service.clock(), service.settings.lease_s
        with service.database.write() as session:
            if isinstance(held, Claim):
                work.renew(session, held, now, lease_s)
            else:
                windows.live_update(session, held, {"live_lease_ns": now + int(lease_s * _NS)})

    def give_back(self) -> None:
        """Release everything, so that others take it over at once."""
        for lease in self.current():
            lease.lose()
            try:
                with self._service.database.write() as session:
                    if isinstance(lease.held, Claim):
                        work.release(session, lease.held, not_before_ns=0, counts=False)
                    else:
                        windows.live_update(session, lease.held, {"live_lease_ns": 0})
            except StoreError as error:
                _LOG.warning("work cannot be given back, its lease will run out: %s", error)
