"""What is stored, seen from outside: rows by a plain driver, files by plain pyarrow.

Nothing of `smon` is used here: a defect in how SMon reads must not hide one in how it writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.faults.events import LABELS, Keys, Stored, joined, key_of_columns

_FILES = "SELECT path, rows FROM event_files WHERE kind = 'ops' AND doomed_ns IS NULL"


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Rows of a database by its URL."""
    if url.startswith("sqlite:///"):
        connection = sqlite3.connect(f"file:{url.removeprefix('sqlite:///')}?mode=ro", uri=True)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()
    with psycopg.connect(url.replace("+psycopg", "")) as session:
        return session.execute(statement.encode()).fetchall()


def number(url: str, statement: str) -> int:
    """The one number that a query answers; 0 for none."""
    return int(query(url, statement)[0][0] or 0)


def read_stored(url: str, objects: Path) -> Stored:
    """All events that count, and what does not fit together."""
    parts: list[tuple[Keys, Keys, Keys]] = []
    unreadable: list[str] = []
    known = query(url, _FILES)
    for path, rows in known:
        try:
            table = pq.ParquetFile(objects / path).read()
        except (OSError, pa.ArrowException):
            unreadable.append(path)
            continue
        if table.num_rows != rows:
            unreadable.append(path)
        parts.append(_columns(table))
    keys, starts, durations = joined(parts)
    sums = {
        "event_files": sum(rows for _, rows in known),
        "windows": number(url, "SELECT sum(rows) FROM windows"),
        "streams": number(url, "SELECT sum(events) FROM streams"),
    }
    return Stored(keys, starts, durations, tuple(unreadable), orphans(url, objects), sums)


def orphans(url: str, objects: Path) -> tuple[str, ...]:
    """Files of ops without a row."""
    named = {path for (path,) in query(url, "SELECT path FROM event_files")}
    found = (str(path.relative_to(objects)) for path in objects.glob("events/**/*.parquet"))
    return tuple(sorted(path for path in found if path not in named))


def _columns(table: pa.Table) -> tuple[Keys, Keys, Keys]:
    columns = {name: _numbers(table, name) for name in ("rank", "step", "seq")}
    labels = pc.index_in(table["optype"].cast(pa.utf8()), pa.array(LABELS))
    label = np.asarray(labels.to_pylist(), np.int64)
    keys = key_of_columns(columns["rank"], columns["step"], label, columns["seq"])
    return keys, _numbers(table, "start_ns"), _numbers(table, "duration_ns")


def _numbers(table: pa.Table, name: str) -> Keys:
    chunks: Sequence[Any] = table[name].chunks
    parts = [np.from_dlpack(chunk).astype(np.int64) for chunk in chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def lost_events(url: str) -> int:
    """Events that agents or the server have given up."""
    return number(url, "SELECT sum(lost_events) FROM streams")


def epochs(url: str) -> int:
    """Epochs beyond the first, of all streams: nobody should have needed one."""
    return number(url, "SELECT sum(epoch) FROM streams")
