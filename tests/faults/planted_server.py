"""A server with a bug planted in it, and with notes of its syncs: both if the environment asks.

``FAULTS_PLANT`` names the bug (`PLANTS`), ``FAULTS_SYNCED`` the file of notes and the data folder
that a power cut concerns (`tests.faults.synced`). Otherwise it is `smon.cli`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

import smon.api.serve
import smon.cli
import smon.ingest.service
import smon.store.commit
import smon.store.objects
from smon.ingest.disk import Disk
from smon.ingest.drain import Drain
from smon.ingest.records import Record
from smon.ingest.service import IngestService, Parts
from smon.ingest.streams import Deduplication, StreamState
from smon.store.objects import PARTIAL
from tests.faults import synced

VARIABLE: Final = "FAULTS_PLANT"


class _NoSync(Disk):
    """Says that all is durable, and never syncs."""

    __slots__ = ()

    def sync(self, descriptor: int) -> None:
        pass


def acknowledge_before_sync() -> None:
    """The log says that a batch is durable before the disk does."""
    _with(Parts(disk=_NoSync()))


class _Forgetful(Deduplication):
    """Everything is new."""

    __slots__ = ()

    def missing(self, state: StreamState, epoch: int, first: int, last: int) -> int | None:
        return first


def no_deduplication() -> None:
    """A batch that comes again is taken again, by the service and by the commit."""
    _with(Parts(deduplication=_Forgetful()))
    commit: Any = smon.store.commit
    commit.covers = _never


def _never(_ranges: object, _seq: int) -> bool:
    return False


def rows_before_files() -> None:
    """The row of a file is committed although the file was never synced."""
    smon.store.objects._written_durably = _written_somehow


@contextmanager
def _written_somehow(target: Path, opened: Callable[[Path], int]) -> Iterator[BinaryIO]:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{uuid4().hex}{PARTIAL}")
    with aside.open("wb") as file:
        yield file
    aside.replace(target)


class _Hasty(Drain):
    """Lets the log forget batches before they are stored."""

    def _move(self, records: Sequence[Record]) -> None:
        items = self._items(records)
        self._wal.release(records)
        # As slow as a busy database.
        time.sleep(0.2)
        self._store_all(items)


def forget_before_commit() -> None:
    """The drain removes segments of the log before their batches are stored."""
    service: Any = smon.ingest.service
    service.Drain = _Hasty


def _with(parts: Parts) -> None:
    serve: Any = smon.api.serve
    serve.IngestService = partial(IngestService, parts=parts)


PLANTS: Final[dict[str, Callable[[], None]]] = {
    "acknowledge-before-sync": acknowledge_before_sync,
    "no-deduplication": no_deduplication,
    "rows-before-files": rows_before_files,
    "forget-before-commit": forget_before_commit,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as the environment asks, then as `smon.cli`."""
    if notes := os.environ.get(synced.VARIABLE):
        path, data = notes.split(os.pathsep)
        synced.record(Path(path), Path(data))
    if plant := os.environ.get(VARIABLE):
        PLANTS[plant]()
    return smon.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
