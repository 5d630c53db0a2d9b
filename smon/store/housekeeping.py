"""One round of housekeeping: compaction, retention, and what a crash has left behind.

Flow: the loop of `smon.worker` → **here**, every ``SMON_MAINTENANCE_INTERVAL_S``. One process at a
time does it; each part is safe to be done twice, and to be cut off anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from sqlalchemy import exists, select, text
from sqlalchemy.exc import SQLAlchemyError

from smon.config import Settings
from smon.errors import StoreError
from smon.store import compaction, reconcile, retention
from smon.store.database import Database
from smon.store.models import Node
from smon.store.objects import Objects

#: Role of the row in ``nodes`` that a backup keeps while it runs: until then, no file is removed.
BACKUP_ROLE: Final = "backup"

#: A backup that was not seen for so long has died.
BACKUP_NS: Final = 600 * 10**9

#: A crash leaves files behind only where data came lately: only there it is looked every round.
RECENT_NS: Final = 86_400 * 10**9

#: Names the lock of PostgreSQL under which one process keeps house; any number.
_LOCK: Final = 0x534D6F6F

_LOG: Final = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HousekeepingReport:
    """What one round did.

    Attributes
    ----------
    alone
        False: another process is at it, so nothing was done.
    backup
        A backup is running, so no file was removed.
    compacted
        Windows whose files became one.
    doomed
        Replaced files that were removed, and their bytes in `doomed_bytes`.
    expired
        Event files that retention removed, and their bytes.
    trimmed
        Rows of other tables that retention removed.
    errors
        One sentence for each part that could not be done.
    """

    alone: bool = True
    backup: bool = False
    compacted: int = 0
    doomed: int = 0
    doomed_bytes: int = 0
    expired: retention.Removed = field(default_factory=retention.Removed)
    trimmed: retention.Removed = field(default_factory=retention.Removed)
    reconciled: reconcile.Reconciled = field(default_factory=reconcile.Reconciled)
    errors: tuple[str, ...] = ()


def housekeep_once(
    database: Database, objects: Objects, settings: Settings, now: int, *, thorough: bool = False
) -> HousekeepingReport:
    """Do one round; what fails is logged, reported, and tried again in the next.

    Parameters
    ----------
    thorough
        Compare all files and rows, not only those of jobs with data of the last day. At start.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    with _alone(database) as alone:
        if not alone:
            return HousekeepingReport(alone=False)
        return _round(database, objects, settings, now, thorough=thorough)


def _round(
    database: Database, objects: Objects, settings: Settings, now: int, *, thorough: bool
) -> HousekeepingReport:
    errors: list[str] = []
    nothing = retention.Removed()
    compacted = _tried(errors, lambda: compaction.compact(database, objects, settings, now), 0)

    def removing(part: Callable[[Database, Objects, Settings, int], _T], otherwise: _T) -> _T:
        # Asked anew each time: a backup may have begun since.
        if backup_runs(database, now):
            return otherwise
        return _tried(errors, lambda: part(database, objects, settings, now), otherwise)

    doomed = removing(compaction.remove_doomed, (0, 0))
    expired = removing(retention.expire, nothing)
    trimmed = removing(retention.trim, nothing)
    since = None if thorough else now - RECENT_NS
    reconciled = _tried(
        errors,
        lambda: reconcile.reconcile(database, objects, now, since),
        reconcile.Reconciled(),
    )
    return HousekeepingReport(
        backup=backup_runs(database, now),
        compacted=compacted,
        doomed=doomed[0],
        doomed_bytes=doomed[1],
        expired=expired,
        trimmed=trimmed,
        reconciled=reconciled,
        errors=tuple(errors),
    )


def backup_runs(database: Database, now: int) -> bool:
    """Whether a backup is copying files, which must stay until it is done."""
    running = select(Node.id).where(Node.role == BACKUP_ROLE, Node.seen_ns > now - BACKUP_NS)
    with database.read() as session:
        return bool(session.scalar(select(exists(running))))


def _tried(errors: list[str], part: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return part()
    except StoreError as error:
        _LOG.warning("housekeeping: %s", error)
        errors.append(str(error))
        return otherwise


@contextmanager
def _alone(database: Database) -> Iterator[bool]:
    """Whether no other process keeps house; on SQLite it may, which costs work and nothing else."""
    if database.is_sqlite:
        yield True
        return
    try:
        with database.engine.connect() as connection:
            query = text("SELECT pg_try_advisory_xact_lock(:key)")
            alone = bool(connection.execute(query, {"key": _LOCK}).scalar())
            yield alone
    except SQLAlchemyError as error:
        raise StoreError("the database cannot be used for housekeeping") from error
