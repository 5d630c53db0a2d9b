"""What ingest asks of the store, and the store that answers: database and object store.

Flow: `smon.ingest.service`, `smon.ingest.drain` → **here** → `smon.store`. A seam: tests put a
store here whose database is down, or which fails between file and commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Protocol

import pyarrow as pa
from sqlalchemy import text

from smon.errors import StoreError
from smon.store import commit, events, streams
from smon.store.commit import BatchNote, Key, NewFile, NewParts
from smon.store.database import Database
from smon.store.files import Dropped
from smon.store.objects import Objects
from smon.store.streams import StreamInfo


class Tenancy(Protocol):
    """Whose request it is (`smon.api.access.Access`)."""

    @property
    def tenant_id(self) -> str:
        """Id of the tenant."""


class Store(Protocol):
    """Where batches end up. Every method may raise StoreError."""

    def ping(self) -> None:
        """See whether the database answers."""

    def find(self, tenant_id: str, stream_id: str) -> StreamInfo | None:
        """A stream of this tenant; None if there is none."""

    def stored_among(self, keys: Collection[Key]) -> frozenset[Key]:
        """Those of the batches that are stored already."""

    def write_ops(self, path: str, table: pa.Table, *, step_relative: bool) -> int:
        """Write a file of ops; returns bytes."""

    def write_context(self, path: str, documents: Sequence[bytes]) -> int:
        """Write a file of side evidence; returns bytes."""

    def write_part(self, path: str, content: bytes) -> int:
        """Write a part of a file of a rank; returns bytes."""

    def delete(self, path: str) -> None:
        """Remove a file that no row refers to."""

    def commit(
        self,
        notes: Sequence[BatchNote],
        files: Sequence[NewFile],
        now_ns: int,
        sent: NewParts,
    ) -> Sequence[Dropped]:
        """Make batches, files and parts part of the store, all or none; files that were dropped."""


class SqlStore:
    """The real one."""

    __slots__ = ("_database", "_objects")

    def __init__(self, database: Database, objects: Objects) -> None:
        self._database = database
        self._objects = objects

    def ping(self) -> None:
        """See whether the database answers.

        Raises
        ------
        StoreError
            It does not.
        """
        with self._database.read() as session:
            session.execute(text("SELECT 1"))

    def find(self, tenant_id: str, stream_id: str) -> StreamInfo | None:
        """A stream of this tenant; None if there is none.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        with self._database.read() as session:
            return streams.find(session, tenant_id, stream_id)

    def stored_among(self, keys: Collection[Key]) -> frozenset[Key]:
        """Those of the batches that are stored already.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        with self._database.read() as session:
            return commit.stored_among(session, keys)

    def write_ops(self, path: str, table: pa.Table, *, step_relative: bool) -> int:
        """Write a file of ops; returns bytes.

        Raises
        ------
        StoreError
            It cannot be written.
        """
        return events.write_ops(self._objects, path, table, step_relative=step_relative)

    def write_context(self, path: str, documents: Sequence[bytes]) -> int:
        """Write a file of side evidence; returns bytes.

        Raises
        ------
        StoreError
            It cannot be written.
        """
        return events.write_context(self._objects, path, documents)

    def write_part(self, path: str, content: bytes) -> int:
        """Write a part of a file of a rank; returns bytes.

        Raises
        ------
        StoreError
            It cannot be written.
        """
        return self._objects.put(path, content)

    def delete(self, path: str) -> None:
        """Remove a file that no row refers to.

        Raises
        ------
        StoreError
            It cannot be removed.
        """
        self._objects.delete(path)

    def commit(
        self,
        notes: Sequence[BatchNote],
        files: Sequence[NewFile],
        now_ns: int,
        sent: NewParts,
    ) -> Sequence[Dropped]:
        """Make batches, files and parts part of the store, all or none.

        Returns
        -------
        sequence of Dropped
            Why files of ranks were not taken.

        Raises
        ------
        AlreadyStored
            Some of the batches are.
        MissingError
            A stream is not there any more.
        StoreError
            The database cannot be used.
        """
        with self._database.write() as session:
            taken = commit.commit(session, notes, files, now_ns, sent)
        # A path that stays is a file without a row, which is found and set aside.
        for path in taken.spare:
            with contextlib.suppress(StoreError):
                self._objects.delete(path)
        return taken.dropped
