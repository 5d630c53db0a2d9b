"""Backups that any database can be restored from: tables as JSON lines, event files, the log.

Flow: ``smon backup`` → **here**, while the server runs. The log is copied first and the tables are
read in one unchanging view after it, so what is in both is only found to be stored already when the
log is replayed. ``docs/reference/store.md`` describes the folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import zstandard
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

import smon
from smon.errors import ConfigError, StoreError
from smon.store import schema
from smon.store.database import Database, now_ns
from smon.store.housekeeping import BACKUP_NS, BACKUP_ROLE
from smon.store.manifest import (
    BYTES,
    MANIFEST,
    PIECE,
    ROWS,
    SEGMENTS,
    Manifest,
    Part,
    hash_of,
    kept_tables,
)
from smon.store.models import EventFile, Node, Result, Task, new_uuid
from smon.store.objects import Objects, sync_folder

_LEVEL: Final = 3

_LOG: Final = logging.getLogger(__name__)


def create(
    database: Database, objects: Objects, wal: Path, folder: Path, now: int | None = None
) -> Manifest:
    """Write a backup into a new or empty folder.

    Parameters
    ----------
    wal
        Folder of the write-ahead log of the server on this machine; it may be missing.

    Raises
    ------
    ConfigError
        The folder is not empty.
    StoreError
        Something cannot be read or written.
    """
    if not schema.is_current(database):
        raise StoreError("expected a database of this version of SMon: run smon db upgrade first")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_empty(folder)
        with _announced(database):
            segments = tuple(_copy_wal(wal, folder / "wal"))
            with database.read() as session:
                tables = tuple(_dump(session, folder / "tables"))
                paths = _paths(session)
            copied, missing = _copy_objects(objects, paths, folder)
        manifest = Manifest(
            revision=schema.newest(),
            created_ns=now_ns() if now is None else now,
            version=smon.__version__,
            tables=tables,
            objects=copied,
            wal=segments,
            missing=missing,
        )
        _write_durably(folder / MANIFEST, manifest.to_json())
    return manifest


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write the backup to {folder}: {error.strerror}") from error


def _check_empty(folder: Path) -> None:
    if any(folder.iterdir()):
        raise ConfigError(f"expected a new or empty folder for the backup, found files in {folder}")


@contextmanager
def _announced(database: Database) -> Iterator[None]:
    """While it runs, housekeeping removes no file (`smon.store.housekeeping`)."""
    node_id = f"backup-{new_uuid()}"
    stop = threading.Event()
    with database.write() as session:
        now = now_ns()
        session.add(
            Node(
                id=node_id,
                role=BACKUP_ROLE,
                host=platform.node(),
                started_ns=now,
                seen_ns=now,
                version=smon.__version__,
            )
        )

    def remind() -> None:
        while not stop.wait(BACKUP_NS / 1e9 / 5):
            try:
                with database.write() as session:
                    session.execute(update(Node).where(Node.id == node_id).values(seen_ns=now_ns()))
            except StoreError as error:
                _LOG.warning("cannot say that a backup is running: %s", error)

    reminder = threading.Thread(target=remind, name="smon-backup", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        stop.set()
        reminder.join()
        with database.write() as session:
            session.execute(delete(Node).where(Node.id == node_id))


def _copy_wal(source: Path, target: Path) -> Iterator[Part]:
    if not source.is_dir():
        return
    target.mkdir(exist_ok=True)
    for path in sorted(source.glob(SEGMENTS)):
        try:
            with path.open("rb") as file:
                copied = copy_durably(file, target / path.name)
        except FileNotFoundError:
            continue  # stored meanwhile: the tables, which are read later, have it
        yield Part(f"wal/{path.name}", *copied)


def copy_durably(source: BinaryIO, target: Path) -> tuple[int, str]:
    """Copy an open file to a new one; (bytes, SHA-256)."""
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as out:
        while piece := source.read(PIECE):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


def _dump(session: Session, folder: Path) -> Iterator[Part]:
    """Write each table; replaced event files are left out, their successors are there."""
    folder.mkdir()
    for table in kept_tables():
        wanted = select(table).order_by(*table.primary_key.columns)
        if table.name == EventFile.__tablename__:
            wanted = wanted.where(table.c.doomed_ns.is_(None))
        path = folder / f"{table.name}.jsonl.zst"
        rows = session.execute(wanted.execution_options(yield_per=ROWS)).mappings()
        count = _write_lines(path, (_encoded(dict(row)) for row in rows))
        yield Part(f"tables/{path.name}", path.stat().st_size, hash_of(path), count)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("xb") as file:
        with zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as packed:
            for row in rows:
                packed.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _encoded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: BYTES + base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in row.items()
    }


def _paths(session: Session) -> list[str]:
    """All files that rows name."""
    found = set(session.scalars(select(EventFile.path).where(EventFile.doomed_ns.is_(None))))
    for column in (Result.workers_path, Task.path):
        found |= {str(path) for path in session.scalars(select(column)) if path}
    return sorted(found)


def _copy_objects(
    objects: Objects, paths: Iterable[str], folder: Path
) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    parts, missing = [], []
    for path in paths:
        if objects.size(path) is None:
            _LOG.warning("the file %s is not there, so it is not in the backup", path)
            missing.append(path)
            continue
        target = folder / "objects" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with objects.open(path) as file:
            parts.append(Part(f"objects/{path}", *copy_durably(file, target)))
    return tuple(parts), tuple(missing)


def _write_durably(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    with aside.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)
