"""Bring a backup back, into an empty database of either kind, an empty root and an empty log.

Flow: a folder of `smon.store.backup` → **here** → `smon serve`, which replays the log.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zstandard
from sqlalchemy import JSON, Connection, LargeBinary, MetaData, Table, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from smon.errors import ConfigError, StoreError
from smon.store import schema
from smon.store.backup import copy_durably
from smon.store.database import Database
from smon.store.manifest import (
    BYTES,
    LEFT_OUT,
    PIECE,
    ROWS,
    SEGMENT,
    SEGMENTS,
    Manifest,
    kept_tables,
    read_manifest,
    verify,
)
from smon.store.objects import Objects, sync_folder


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored."""

    rows: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    segments: int = 0


def restore(
    database: Database,
    objects: Objects,
    wal: Path,
    folder: Path,
    watch: Callable[[str], None] = lambda _step: None,
) -> Restored:
    """Bring back a backup, into a database, a root and a log that are empty.

    Event files come first, the log second, all rows last in one transaction: what was cut off is
    no server that lacks something, but an empty one.

    Raises
    ------
    ConfigError
        There is something already, or the folder holds no complete and sound backup.
    StoreError
        Something cannot be written.
    """
    problems = verify(folder)
    if problems:
        raise ConfigError(f"expected a sound backup, found {len(problems)} faults: {problems[0]}")
    manifest = read_manifest(folder)
    schema.upgrade(database, _known_revision(manifest.revision))
    _check_nothing_there(database, objects, wal)
    for part in manifest.objects:
        watch("object")
        _put(objects, part.path.removeprefix("objects/"), folder / part.path)
    with _restoring_wal(wal):
        for part in manifest.wal:
            _restore_segment(folder / part.path, wal)
    watch("rows")
    rows = _load(database, manifest, folder)
    schema.upgrade(database)
    return Restored(rows, len(manifest.objects), len(manifest.wal))


def _known_revision(revision: str) -> str:
    if not schema.is_known(revision):
        raise ConfigError(
            f"the backup is of a newer version of SMon (schema {revision[:40]!a}): restore it with "
            "that version"
        )
    return revision


def _check_nothing_there(database: Database, objects: Objects, wal: Path) -> None:
    with database.read() as session:
        filled = [
            table.name
            for table in kept_tables()
            if session.scalar(select(func.count()).select_from(table))
        ]
    if filled:
        raise ConfigError(f"expected an empty database, found rows in {', '.join(filled)}")
    if any(True for _ in objects.list("events")):
        raise ConfigError("expected an empty root of event files, found files: name another one")
    if wal.is_dir() and any(wal.glob(SEGMENTS)):
        raise ConfigError(f"expected an empty log, found files in {wal}: name another folder")


def _put(objects: Objects, path: str, source: Path) -> None:
    with source.open("rb") as file, objects.create(path) as out:
        shutil.copyfileobj(file, out, PIECE)


@contextmanager
def _restoring_wal(wal: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write the log to {wal}: {error.strerror}") from error


def _restore_segment(source: Path, wal: Path) -> None:
    wal.mkdir(parents=True, exist_ok=True)
    if not SEGMENT.fullmatch(source.name):
        raise ConfigError(f"expected a plain name of a log segment, found {source.name!a}")
    with source.open("rb") as file:
        copy_durably(file, wal / source.name)
    sync_folder(wal)


def _load(database: Database, manifest: Manifest, folder: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    files = {Path(part.path).name.removesuffix(".jsonl.zst"): part for part in manifest.tables}
    with database.write() as session:
        connection = session.connection()
        for table in _reflected(connection):
            part = files.pop(table.name, None)
            if part is None:
                continue
            counts[table.name] = _load_table(connection, table, folder / part.path)
            if counts[table.name] != part.rows:
                raise ConfigError(
                    f"{part.path}: expected {part.rows} rows, found {counts[table.name]}"
                )
    if files:
        raise ConfigError(f"the backup has tables that are not known: {', '.join(sorted(files))}")
    return counts


def _reflected(connection: Connection) -> list[Table]:
    """The tables as they are at the revision of the backup."""
    found = MetaData()
    try:
        found.reflect(connection)
    except SQLAlchemyError as error:
        raise StoreError("the database cannot be read") from error
    return [table for table in found.sorted_tables if table.name not in LEFT_OUT]


def _load_table(connection: Connection, table: Table, path: Path) -> int:
    bytes_ = {column.name for column in table.columns if isinstance(column.type, LargeBinary)}
    for column in table.columns:
        if isinstance(column.type, JSON):
            # Otherwise None becomes the JSON text null, which is not the NULL of SQL.
            column.type.none_as_null = True
    count, waiting = 0, []
    for line in _lines(path):
        row = json.loads(line)
        for name in bytes_:
            if row[name] is not None:
                row[name] = base64.b64decode(row[name].removeprefix(BYTES))
        waiting.append(row)
        if len(waiting) == ROWS:
            connection.execute(insert(table), waiting)
            count, waiting = count + len(waiting), []
    if waiting:
        connection.execute(insert(table), waiting)
    return count + len(waiting)


def _lines(path: Path) -> Iterator[str]:
    with (
        path.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text,
    ):
        yield from text
