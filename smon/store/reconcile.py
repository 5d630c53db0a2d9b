"""Event files and their rows, compared: what a crash has left behind is set aside, loss is told.

Flow: `smon.store.housekeeping` → **here**. A file without a row is what a crash between writing and
committing leaves; it holds nothing that is not written anew, and goes to ``quarantine/``. A row
without a file should never be: it is logged, counted, and noted at its window.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select, update

from smon.store.database import Database, now_ns
from smon.store.models import EventFile, Job, Result, Window
from smon.store.objects import PARTIAL, Objects, StoredObject
from smon.store.streams import chunks

#: Folders whose files all have a row: ops and side evidence, and what workers were like.
FOLDERS: Final = ("events", "results")
QUARANTINE: Final = "quarantine"

#: A younger file without a row may be about to get one.
ORPHAN_NS: Final = 3600 * 10**9

#: What is set aside goes for good after so long.
QUARANTINE_NS: Final = 7 * 86_400 * 10**9

#: Note at a window whose file is lost.
LOST: Final = "event files are lost"

#: Losses that are named in the log; the others are counted.
_MAX_NAMED: Final = 20

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What was found.

    Attributes
    ----------
    quarantined
        Files without a row that were set aside now.
    restored
        Files that were in quarantine although they have a row, and are back.
    lost
        Rows whose file is not there.
    partial
        Half-written files that were removed.
    purged
        Files that had been set aside long ago and were removed for good.
    """

    quarantined: int = 0
    restored: int = 0
    lost: int = 0
    partial: int = 0
    purged: int = 0


def reconcile(
    database: Database, objects: Objects, now: int, since_ns: int | None = None
) -> Reconciled:
    """Compare files and rows.

    Parameters
    ----------
    since_ns
        Look only at jobs with data since then: a crash leaves nothing behind elsewhere. None: all.

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    # Files first, rows after: a file that comes meanwhile is not looked at, and never one too few.
    stored = [file for folder in _folders(database, since_ns) for file in objects.list(folder)]
    partial = [file for file in stored if file.path.endswith(PARTIAL)]
    whole = {file.path: file for file in stored if not file.path.endswith(PARTIAL)}
    known = _known(database, since_ns)
    aside = [whole[path] for path in sorted(set(whole) - set(known)) if _is_old(whole[path], now)]
    quarantined = sum(objects.move(file.path, f"{QUARANTINE}/{file.path}") for file in aside)
    if quarantined:
        _LOG.warning("%d event files without a row were set aside in %s/", quarantined, QUARANTINE)
    restored, lost = _look_for(database, objects, sorted(set(known) - set(whole)))
    removed = sum(objects.delete(file.path) for file in partial if _is_old(file, now))
    purged = sum(
        objects.delete(file.path)
        for file in objects.list(QUARANTINE)
        if file.modified_ns < now - QUARANTINE_NS
    )
    return Reconciled(quarantined, restored, lost, removed, purged)


def compare(database: Database, objects: Objects) -> tuple[list[str], list[str]]:
    """(files without a row, rows without a file), without changing anything.

    Files that are younger than an hour may be about to get a row, and are passed over.

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    now = now_ns()
    stored = {file.path: file for folder in FOLDERS for file in objects.list(folder)}
    known = _known(database, None)
    orphans = [path for path in sorted(set(stored) - known) if _is_old(stored[path], now)]
    gone = [path for path in sorted(known - set(stored)) if objects.size(path) is None]
    return orphans, _still_known(database, gone)


def _is_old(file: StoredObject, now: int) -> bool:
    return file.modified_ns < now - ORPHAN_NS


def _folders(database: Database, since_ns: int | None) -> list[str]:
    if since_ns is None:
        return list(FOLDERS)
    with database.read() as session:
        jobs = session.scalars(select(Job.id).where(Job.last_data_ns >= since_ns)).all()
    return [f"{folder}/job={job}" for job in jobs for folder in FOLDERS]


#: Columns that name files, and the job of each.
_NAMED: Final = ((EventFile.path, EventFile.job_id), (Result.workers_path, Result.job_id))


def _known(database: Database, since_ns: int | None) -> set[str]:
    found: set[str] = set()
    with database.read() as session:
        for path, job_id in _NAMED:
            wanted = select(path).where(path.is_not(None))
            if since_ns is not None:
                wanted = wanted.join(Job, Job.id == job_id).where(Job.last_data_ns >= since_ns)
            found.update(map(str, session.scalars(wanted.execution_options(yield_per=10_000))))
    return found


def _look_for(database: Database, objects: Objects, paths: Sequence[str]) -> tuple[int, int]:
    """Files that were not in the list: (back from quarantine, lost)."""
    restored, lost = 0, []
    for path in paths:
        if objects.size(path) is not None:
            continue
        if objects.size(f"{QUARANTINE}/{path}") is not None:
            restored += objects.move(f"{QUARANTINE}/{path}", path)
        else:
            lost.append(path)
    # Retention may have removed row and file since.
    lost = _still_known(database, lost)
    for path in lost[:_MAX_NAMED]:
        _LOG.error("the event file %s is lost: restore it from a backup", path)
    _note(database, lost)
    return restored, len(lost)


def _still_known(database: Database, paths: Iterable[str]) -> list[str]:
    found: set[str] = set()
    with database.read() as session:
        for part in chunks(paths):
            for path, _ in _NAMED:
                found.update(map(str, session.scalars(select(path).where(path.in_(part)))))
    return sorted(found)


def _note(database: Database, lost: Sequence[str]) -> None:
    """Write at each window that files of it are lost."""
    if not lost:
        return
    with database.write() as session:
        for part in chunks(lost):
            windows = select(EventFile.window_id).where(EventFile.path.in_(part))
            session.execute(
                update(Window)
                .where(Window.id.in_(windows))
                .values(reason=LOST)
                .execution_options(synchronize_session=False)
            )
