"""Data of jobs as ingest stores them: streams, files, commits; without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.config import Settings
from smon.store.commit import BatchNote, NewFile, commit
from smon.store.database import Database
from smon.store.events import context_path, ops_path, write_context, write_ops
from smon.store.models import Attempt, Base, Mode, TimeBase, Window, new_uuid
from smon.store.objects import Objects
from smon.store.streams import StreamInfo, StreamRequest, register
from smon.topology import Layout
from smon.trace.table import OpTable, concat
from smon.wire import BatchKind
from smon.worker.loop import Worker
from tests.service import add_tenant, record_batch

S = 10**9

#: Where the clock of the tests begins.
START_NS = 1_800_000_000 * S


class Clock:
    """Unix time that the test sets.

    Attributes
    ----------
    set_by_s
        What of it is no time that has passed.
    """

    def __init__(self, now: int = START_NS) -> None:
        self.now, self.set_by_s = now, 0.0

    def __call__(self) -> int:
        """Unix time, ns."""
        return self.now

    def go_on(self, seconds: float) -> int:
        """Let time pass."""
        self.now += int(seconds * S)
        return self.now

    def set(self, seconds: float) -> None:
        """Set it: no time passes."""
        self.set_by_s += seconds
        self.go_on(seconds)


@dataclass(slots=True, eq=False)
class Store:
    """A database, a root of files, and a tenant."""

    database: Database
    objects: Objects
    settings: Settings
    tenant_id: str
    clock: Clock = field(default_factory=Clock)
    seqs: dict[str, int] = field(default_factory=dict)

    def stream(
        self,
        layout: Layout,
        *,
        job: str = "job",
        mode: Mode = Mode.LIVE,
        key: str = "",
        ranks: Sequence[int] | None = None,
        attempt: int = 0,
        **more: Any,  # noqa: ANN401  # fields of StreamRequest
    ) -> StreamInfo:
        """A stream of all ranks of a job, unless others are given."""
        given = {
            "key": key or f"{job}-{attempt}",
            "job": job,
            "attempt": attempt,
            "layout": layout,
            "mode": mode,
            "time_base": TimeBase.UNIX,
            "window_steps": None,
            "host": "host-0",
            "source": "test",
            "ranks": tuple(first_ranks(layout) if ranks is None else ranks),
            "epoch": 0,
        }
        request = StreamRequest(**{**given, **more})
        with self.database.write() as session:
            return register(session, self.tenant_id, request, self.settings, self.clock())

    def send(
        self,
        stream: StreamInfo,
        table: OpTable | None = None,
        *,
        steps_done: int | None = None,
        context: bytes | None = None,
        end: bool = False,
    ) -> None:
        """Commit ops of a stream, one file for each window, as the drain does."""
        now = self.clock()
        files = [] if table is None else self._ops(stream, table)
        notes = []
        if table is not None or steps_done is not None:
            rows = 0 if table is None else len(table)
            notes.append(self.note(stream, BatchKind.OPS, rows, steps_done))
        if context is not None:
            files.append(self._context(stream, context))
            notes.append(self.note(stream, BatchKind.CONTEXT, 1, None))
        if end:
            notes.append(self.note(stream, BatchKind.END, 0, None))
        with self.database.write() as session:
            commit(session, notes, files, now)

    def note(
        self, stream: StreamInfo, kind: BatchKind, events: int = 0, steps_done: int | None = None
    ) -> BatchNote:
        """What the tables keep of the next batch of a stream."""
        seq = self.seqs.get(stream.id, 0)
        self.seqs[stream.id] = seq + 1
        return BatchNote(
            stream_id=stream.id,
            tenant_id=stream.tenant_id,
            attempt_id=stream.attempt_id,
            epoch=stream.epoch,
            seq=seq,
            last_seq=seq,
            kind=kind,
            events=events,
            steps_done=steps_done,
            received_ns=self.clock(),
        )

    def _ops(self, stream: StreamInfo, table: OpTable) -> list[NewFile]:
        size = stream.window_steps
        window = table.step // size if size else np.zeros(len(table), np.int64)
        return [
            self._file(stream, int(number), table.take(window == number))
            for number in np.unique(window)
        ]

    def _file(self, stream: StreamInfo, number: int, table: OpTable) -> NewFile:
        path = ops_path(stream.job_id, self.clock(), number, new_uuid())
        batch = record_batch(table)
        size = write_ops(self.objects, path, batch, step_relative=table.step_relative)
        bounds = int(table.step.min()), int(table.step.max())
        return self._new(stream, number, "ops", path, (len(table), size, *bounds))

    def _context(self, stream: StreamInfo, document: bytes) -> NewFile:
        path = context_path(stream.job_id, self.clock(), None, new_uuid())
        size = write_context(self.objects, path, [document])
        return self._new(stream, None, "context", path, (1, size, -1, -1))

    def _new(
        self,
        stream: StreamInfo,
        number: int | None,
        kind: str,
        path: str,
        sizes: tuple[int, int, int, int],
    ) -> NewFile:
        return NewFile(
            id=new_uuid(),
            tenant_id=stream.tenant_id,
            job_id=stream.job_id,
            attempt_id=stream.attempt_id,
            window_number=number,
            kind=kind,
            path=path,
            rows=sizes[0],
            bytes=sizes[1],
            first_step=sizes[2],
            last_step=sizes[3],
        )

    def worker(self, name: str = "worker", **settings: Any) -> Worker:  # noqa: ANN401  # of Settings
        """A worker on this store."""
        chosen = replace(self.settings, **settings)
        return Worker(
            chosen,
            self.database,
            self.objects,
            name=name,
            clock=self.clock,
            monotonic=lambda: self.clock() / 1e9 - self.clock.set_by_s,
        )

    def all(self, model: type[Base]) -> list[Any]:
        """All rows of a table."""
        with self.database.read() as session:
            return list(session.scalars(select(model)))

    def window(self, number: int = 0) -> Window:
        """The window with this number."""
        (found,) = [one for one in self.all(Window) if one.number == number]
        assert isinstance(found, Window)
        return found

    def attempt(self) -> Attempt:
        """The only attempt."""
        (found,) = self.all(Attempt)
        assert isinstance(found, Attempt)
        return found

    def write(self, change: Any) -> None:  # noqa: ANN401  # Callable[[Session], object]
        """Run a change in one transaction."""
        with self.database.write() as session:
            change(session)


def make_store(database: Database, folder: Path, **settings: Any) -> Store:  # noqa: ANN401
    """A store on a database, with its files in a folder."""
    data = folder / "data"
    chosen = Settings(data_dir=data, **settings)
    return Store(database, Objects(str(folder / "objects")), chosen, add_tenant(database))


def first_ranks(layout: Layout) -> list[int]:
    """One rank of each worker."""
    return list(range(0, layout.world_size, layout.tp * layout.cp))


def of_steps(table: OpTable, first: int, last: int | None = None) -> OpTable:
    """Rows of some steps."""
    return table.between(first, first if last is None else last)


def one_after_another(parts: Iterable[OpTable], begin_ns: int = START_NS) -> OpTable:
    """Steps that follow each other in time, whatever their times were; numbers stay."""
    moved, at = [], begin_ns
    for part in parts:
        begin = int(part.start_ns.min())
        shifted = replace(part, start_ns=part.start_ns - begin + at)
        at = int((shifted.start_ns + shifted.duration_ns).max()) + 2_000_000
        moved.append(shifted)
    return concat(moved)


def renumbered(table: OpTable, step: int) -> OpTable:
    """One step under another number."""
    return replace(table, step=np.full(len(table), step, np.int64))


def plain(session: Session, model: type[Base], **values: Any) -> Any:  # noqa: ANN401
    """A row, added."""
    row = model(**values)
    session.add(row)
    session.flush()
    return row


def document(text: bytes) -> Any:  # noqa: ANN401  # JSON
    """Parsed JSON."""
    return json.loads(text)
