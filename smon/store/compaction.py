"""Many small files of a finished window become one, sorted; the old ones go a while later.

Flow: `smon.store.housekeeping` → **here**. The new file is written first; one transaction puts its
row in the place of the others. A crash before it leaves a file without a row
(`smon.store.reconcile` finds it), a crash after it nothing at all: no op is lost or counted twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from sqlalchemy import delete, func, insert, select, update

from smon.config import Settings
from smon.errors import StoreError
from smon.store.commit import OPS, for_change
from smon.store.database import Database
from smon.store.events import open_ops, ops_path, ops_writer, step_range, steps_of
from smon.store.models import EventFile, Window, WindowState, new_uuid
from smon.store.objects import Objects
from smon.store.streams import chunks
from smon.trace.formats.parquet import STEP_RELATIVE_KEY
from smon.trace.schema import NAMES

#: Windows that one round takes: the others wait for the next.
MAX_WINDOWS: Final = 50

#: Ops that are in memory at a time: some 120 MB.
MAX_ROWS: Final = 2_000_000

_LOG: Final = logging.getLogger(__name__)

#: Called before each step with its name: a seam for tests of crashes.
Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _File:
    id: str
    path: str
    rows: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class _Rested:
    """A window that is to be compacted."""

    id: str
    tenant_id: str
    job_id: str
    attempt_id: str
    number: int
    revision: int
    opened_ns: int
    files: tuple[_File, ...]


def compact(
    database: Database,
    objects: Objects,
    settings: Settings,
    now: int,
    watch: Watch = lambda _step: None,
) -> int:
    """Compact windows that have rested long enough, at most `MAX_WINDOWS`; how many were.

    A window that cannot be compacted, say because a file is damaged, stays as it is.

    Raises
    ------
    StoreError
        The database cannot be used, or no file can be written.
    """
    count = 0
    for window in _rested(database, settings, now):
        if len(window.files) > 1:
            watch("write")
            new = _write(objects, window, now)
            watch("commit")
        else:
            new = None
        if not _replace(database, window, new, now):
            if new is not None:
                objects.delete(new["path"])
            continue
        count += new is not None
    return count


def remove_doomed(
    database: Database, objects: Objects, settings: Settings, now: int
) -> tuple[int, int]:
    """Remove files that were replaced so long ago that nobody reads them; (files, bytes).

    Raises
    ------
    StoreError
        The database or the root cannot be used.
    """
    before = now - int(settings.doomed_grace_s * 1e9)
    with database.write() as session:
        doomed = session.execute(
            select(EventFile.id, EventFile.path, EventFile.bytes)
            .where(EventFile.doomed_ns <= before)
            .order_by(EventFile.doomed_ns)
            .limit(5 * MAX_WINDOWS)
        ).all()
        for part in chunks([row.id for row in doomed]):
            session.execute(
                delete(EventFile)
                .where(EventFile.id.in_(part))
                .execution_options(synchronize_session=False)
            )
    # The rows first: a file without a row is found and set aside, a row without a file is an alarm.
    for row in doomed:
        objects.delete(row.path)
    return len(doomed), sum(row.bytes for row in doomed)


def _rested(database: Database, settings: Settings, now: int) -> list[_Rested]:
    before = now - int(settings.compact_after_s * 1e9)
    with database.read() as session:
        windows = session.execute(
            select(
                *(Window.id, Window.tenant_id, Window.job_id, Window.attempt_id, Window.number),
                *(Window.revision, Window.opened_ns),
            )
            .where(
                Window.state.in_((WindowState.DONE.value, WindowState.FAILED.value)),
                Window.updated_ns <= before,
                Window.compacted_ns.is_(None),
                Window.expired_ns.is_(None),
            )
            .order_by(Window.updated_ns)
            .limit(MAX_WINDOWS)
        ).all()
        files: dict[str, list[_File]] = {window.id: [] for window in windows}
        rows = session.execute(
            select(
                *(EventFile.window_id, EventFile.id, EventFile.path, EventFile.rows),
                *(EventFile.first_step, EventFile.last_step),
            )
            .where(
                EventFile.window_id.in_(list(files)),
                EventFile.kind == OPS,
                EventFile.doomed_ns.is_(None),
            )
            .order_by(EventFile.created_ns, EventFile.id)
        )
        for row in rows:
            file = _File(row.id, row.path, row.rows, row.first_step, row.last_step)
            files[str(row.window_id)].append(file)
    return [_Rested(*window, tuple(files[window.id])) for window in windows]


def _write(objects: Objects, window: _Rested, now: int) -> dict[str, Any] | None:
    """Write the one file; the row for it, or None if the old ones cannot be read."""
    file_id = new_uuid()
    path = ops_path(window.job_id, window.opened_ns, window.number, file_id)
    try:
        rows, size = _copy(objects, window.files, path)
    except _UnreadableError as error:
        _LOG.warning("window %s cannot be compacted, and stays as it is: %s", window.id, error)
        return None
    return {
        "id": file_id,
        "tenant_id": window.tenant_id,
        "job_id": window.job_id,
        "attempt_id": window.attempt_id,
        "window_id": window.id,
        "kind": OPS,
        "path": path,
        "rows": rows,
        "bytes": size,
        "first_step": min(file.first_step for file in window.files),
        "last_step": max(file.last_step for file in window.files),
        "created_ns": now,
    }


def _copy(objects: Objects, files: Sequence[_File], path: str) -> tuple[int, int]:
    """All ops of the files, sorted, in one; (rows, bytes)."""
    counts: Counter[int] = Counter()
    with _reading():
        for file in files:
            counts.update(steps_of(objects, file.path))
        with open_ops(objects, files[0].path) as first:
            schema = first.schema_arrow
    expected = sum(file.rows for file in files)
    if counts.total() != expected:
        raise _UnreadableError(
            f"expected {expected} ops in {len(files)} files, found {counts.total()}"
        )
    relative = (schema.metadata or {}).get(STEP_RELATIVE_KEY) == b"true"
    with (
        objects.create(path) as sink,
        ops_writer(sink, schema, step_relative=relative) as writer,
    ):
        for low, high in spans(counts):
            with _reading():
                parts = [
                    part
                    for file in files
                    if file.first_step <= high and file.last_step >= low
                    for part in _steps_of_file(objects, file.path, low, high)
                ]
                table = pa.concat_tables(parts)
            writer.add(table)
        writer.flush()
        if writer.rows != expected:
            raise _UnreadableError(f"expected {expected} ops, found {writer.rows}")
    return expected, objects.size(path) or 0


class _UnreadableError(StoreError):
    """A file that is to be compacted is missing or damaged."""


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (StoreError, pa.ArrowException) as error:
        raise _UnreadableError(str(error)) from error


def spans(counts: Mapping[int, int], most: int = MAX_ROWS) -> Iterator[tuple[int, int]]:
    """Runs of the steps that occur, one at least each, of at most so many ops together."""
    held: list[int] = []
    rows = 0
    for step in sorted(counts):
        if held and rows + counts[step] > most:
            yield held[0], held[-1]
            held, rows = [], 0
        held.append(step)
        rows += counts[step]
    if held:
        yield held[0], held[-1]


def _steps_of_file(objects: Objects, path: str, low: int, high: int) -> Iterator[pa.Table]:
    """Ops of these steps, one table per row group that has any."""
    with open_ops(objects, path) as file:
        for group in range(file.metadata.num_row_groups):
            first, last = step_range(file, group)
            if last < low or first > high:
                continue
            table = file.read_row_group(group, list(NAMES))
            if first < low or last > high:
                step = np.concatenate([np.from_dlpack(c) for c in table.column("step").chunks])
                table = table.take(pa.array(np.flatnonzero((step >= low) & (step <= high))))
            yield table


def _replace(database: Database, window: _Rested, new: dict[str, Any] | None, now: int) -> bool:
    """Put the new file in the place of the old ones, unless the window has changed meanwhile."""
    old = [file.id for file in window.files]
    with database.write() as session:
        revision = session.execute(
            for_change(session, select(Window.revision).where(Window.id == window.id))
        ).scalar_one_or_none()
        alive = session.scalar(
            select(func.count())
            .select_from(EventFile)
            .where(
                EventFile.window_id == window.id,
                EventFile.kind == OPS,
                EventFile.doomed_ns.is_(None),
            )
        )
        if revision != window.revision or alive != len(old):
            return False
        session.execute(
            update(Window)
            .where(Window.id == window.id)
            .values(compacted_ns=now)
            .execution_options(synchronize_session=False)
        )
        if new is not None:
            session.execute(insert(EventFile), [new])
            for part in chunks(old):
                session.execute(
                    update(EventFile)
                    .where(EventFile.id.in_(part))
                    .values(doomed_ns=now)
                    .execution_options(synchronize_session=False)
                )
    return True
