"""What a worker does every now and then: the store's housekeeping, its own row, old uploads.

Flow: `smon.worker.loop` → **here** → `smon.store.housekeeping`, table ``nodes``, ``imports/``.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import select, update

from smon import __version__
from smon.errors import StoreError
from smon.store.housekeeping import backup_runs, housekeep_once
from smon.store.models import Import, Node, Result, Task, WorkState
from smon.store.streams import chunks, end_lost
from smon.worker.imports import object_path
from smon.worker.service import Service

_LOG: Final = logging.getLogger(__name__)

ROLE: Final = "worker"

#: Files of an import that failed, or whose upload nobody finished, stay for so long.
KEEP_UPLOADS_S: Final = 86_400.0

#: Files of results that a dead worker left without a row are looked for so often, once so old.
STRAYS_S: Final = 86_400.0

#: A clock that goes on by so much more or less than the monotonic one was set.
JUMP_S: Final = 60.0

#: Then nothing is removed for so long: a clock that is wrong is put right before.
HOLD_S: Final = 3600.0

#: By then, whoever is still there has been heard: since a start, or by the new time.
HEARD_S: Final = 300.0

#: Imports that one round looks at.
_MOST: Final = 100
_REMOVED: Final = "files removed"
_NS: Final = 10**9


class Housekeeping:
    """Keeps house at intervals. One jump of the clock removes nothing, and ends no job.

    Parameters
    ----------
    service
        Of the worker.
    monotonic
        Seconds that nobody sets.
    """

    def __init__(self, service: Service, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._service, self._monotonic = service, monotonic
        self._started_ns = service.clock()
        self._ahead_s = self._started_ns / _NS - monotonic()
        self._due_s = self._strays_s = self._removes_s = 0.0
        self._heard_s = monotonic() + HEARD_S
        self._first = True

    def run(self) -> bool:
        """Do a round if one is due; whether it was.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service, now, steady_s = self._service, self._service.clock(), self._monotonic()
        if steady_s < self._due_s:
            return False
        self._due_s = steady_s + service.settings.maintenance_interval_s
        self._look_at_clock(now, steady_s)
        self.heartbeat(now)
        if steady_s >= self._removes_s:
            self._remove(now, steady_s)
        if steady_s >= self._heard_s:
            end_lost_attempts(service, now)
        return True

    def _look_at_clock(self, now: int, steady_s: float) -> None:
        """Wait before anything is done that rests on ages, if the clock was set."""
        jump_s = now / _NS - steady_s - self._ahead_s
        if abs(jump_s) <= JUMP_S:
            return
        self._ahead_s += jump_s
        self._removes_s, self._heard_s = steady_s + HOLD_S, steady_s + HEARD_S
        _LOG.warning(
            "this host's clock was set %+.0f s: nothing is removed for %.0f s", jump_s, HOLD_S
        )

    def _remove(self, now: int, steady_s: float) -> None:
        """What is old, and what a crash has left behind."""
        service = self._service
        report = housekeep_once(
            service.database, service.objects, service.settings, now, thorough=self._first
        )
        if self._first or steady_s >= self._strays_s:
            self._strays_s = steady_s + STRAYS_S
            remove_strays(service, now)
        self._first = False
        for error in report.errors:
            _LOG.warning("housekeeping: %s", error)
        remove_uploads(service, now)

    def heartbeat(self, now: int) -> None:
        """Say that this worker is alive.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service = self._service
        with service.database.write() as session:
            session.merge(
                Node(
                    id=service.name,
                    role=ROLE,
                    host=socket.gethostname(),
                    started_ns=self._started_ns,
                    seen_ns=now,
                    version=__version__,
                )
            )


def end_lost_attempts(service: Service, now: int) -> int:
    """End the live jobs of which nothing is heard any more; how many.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    silent_s = service.settings.lost_after_s
    with service.database.write() as session:
        ended = end_lost(session, now - int(silent_s * _NS), now)
    for attempt_id in ended:
        _LOG.warning(
            "attempt %s: nothing is heard of it for %g s: it is over", attempt_id, silent_s
        )
    return len(ended)


def remove_uploads(service: Service, now: int) -> int:
    """Remove uploaded files that nobody will read any more; of how many imports.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    before = now - int(KEEP_UPLOADS_S * _NS)
    with service.database.write() as session:
        session.execute(
            update(Import)
            .where(Import.state == WorkState.UPLOADING, Import.created_ns < before)
            .values(
                state=WorkState.FAILED.value,
                error="the upload was not finished within a day: make a new import",
                finished_ns=before - 1,
            )
        )
        found = session.execute(
            select(Import.id, Import.files)
            .where(
                Import.state == WorkState.FAILED,
                Import.finished_ns < before,
                Import.phase.is_distinct_from(_REMOVED),
            )
            .limit(_MOST)
        ).all()
    done = [row.id for row in found if _removed(service, row.id, row.files)]
    with service.database.write() as session:
        session.execute(update(Import).where(Import.id.in_(done)).values(phase=_REMOVED))
    return len(done)


def remove_strays(service: Service, now: int) -> int:
    """Remove files that a worker wrote and then died, before anything referred to them; how many.

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    if backup_runs(service.database, now):
        return 0
    removed = 0
    before = now - int(STRAYS_S * _NS)
    for folder, column in (("results", Result.workers_path), ("tasks", Task.path)):
        old = [file.path for file in service.objects.list(folder) if file.modified_ns < before]
        for part in chunks(old):
            with service.database.read() as session:
                known = set(session.scalars(select(column).where(column.in_(part))))
            for path in set(part) - known:
                removed += service.objects.delete(path)
    return removed


def _removed(service: Service, import_id: str, files: list[dict[str, int]]) -> bool:
    try:
        for place, file in enumerate(files):
            service.objects.delete(object_path(import_id, int(file.get("n", place))))
    except StoreError as error:
        _LOG.warning("files of import %s cannot be removed: %s", import_id, error)
        return False
    return True
