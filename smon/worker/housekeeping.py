"""What a worker does every now and then: the store's housekeeping, its own row, old uploads.

Flow: `smon.worker.loop` → **here** → `smon.store.housekeeping`, table ``nodes``, ``imports/``.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from sqlalchemy import select, update

from smon import __version__
from smon.errors import StoreError
from smon.store.housekeeping import backup_runs, housekeep_once
from smon.store.models import Import, Node, Result, Task, WorkState
from smon.store.streams import chunks
from smon.worker.imports import object_path
from smon.worker.service import Service

_LOG: Final = logging.getLogger(__name__)

ROLE: Final = "worker"

#: Files of an import that failed, or whose upload nobody finished, stay for so long.
KEEP_UPLOADS_S: Final = 86_400.0

#: Files of results that a dead worker left without a row are looked for so often, once so old.
STRAYS_S: Final = 86_400.0

#: Imports that one round looks at.
_MOST: Final = 100
_REMOVED: Final = "files removed"
_NS: Final = 10**9


class Housekeeping:
    """Keeps house at intervals.

    Parameters
    ----------
    service
        Of the worker.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_ns = service.clock()
        self._due_ns = 0
        self._strays_ns = 0
        self._first = True

    def run(self) -> bool:
        """Do a round if one is due; whether it was.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service, now = self._service, self._service.clock()
        if now < self._due_ns:
            return False
        self._due_ns = now + int(service.settings.maintenance_interval_s * _NS)
        self.heartbeat(now)
        report = housekeep_once(
            service.database, service.objects, service.settings, now, thorough=self._first
        )
        if self._first or now >= self._strays_ns:
            self._strays_ns = now + int(STRAYS_S * _NS)
            remove_strays(service, now)
        self._first = False
        for error in report.errors:
            _LOG.warning("housekeeping: %s", error)
        remove_uploads(service, now)
        return True

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
