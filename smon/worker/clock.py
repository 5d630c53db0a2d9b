"""The time that all workers of one database agree on: the database's own.

Flow: `smon.store.database` → **here** → `smon.worker.loop`. Leases are compared with the clocks of
other workers; where two clocks are further apart than a lease is long, each would take the other's
work away, until it is given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from smon.errors import StoreError
from smon.store.database import Database

_LOG: Final = logging.getLogger(__name__)

#: The database is asked again after so long: clocks drift, and are set.
_FRESH_S: Final = 30.0

#: A clock that is off by more is worth a line in the log.
_TELL_NS: Final = 2 * 10**9


class SharedClock:
    """Unix time in ns, by this machine's clock, put right by what the database says.

    Parameters
    ----------
    own, monotonic
        This machine's clock, ns; and seconds that nobody sets.
    """

    __slots__ = ("_asked_s", "_database", "_monotonic", "_offset_ns", "_own")

    def __init__(
        self,
        database: Database,
        own: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._own, self._monotonic = database, own, monotonic
        self._offset_ns = 0
        self._asked_s = -_FRESH_S

    def __call__(self) -> int:
        """Unix time, ns."""
        return self._own() + self._offset_ns

    def adjust(self) -> None:
        """Ask the database, if that was some time ago; one that is away is asked the next time."""
        now_s = self._monotonic()
        if now_s - self._asked_s < _FRESH_S:
            return
        try:
            offset_ns = self._database.ahead_ns(self._own)
        except StoreError:
            return
        if abs(offset_ns - self._offset_ns) > _TELL_NS:
            _LOG.warning(
                "this machine's clock is %.1f s behind the database's, by which leases go; "
                "synchronise both",
                offset_ns / 1e9,
            )
        self._offset_ns, self._asked_s = offset_ns, now_s
