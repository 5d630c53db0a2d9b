"""A job in the store, as ingest would leave it: streams, batches, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from sqlalchemy import insert, select, update

from smon.config import Settings
from smon.store.commit import BatchNote, NewFile, commit
from smon.store.database import Database
from smon.store.events import ops_path, write_ops
from smon.store.models import Base, EventFile, Mode, TimeBase, Window, WindowState
from smon.store.objects import Objects
from smon.store.streams import StreamInfo, StreamRequest, register
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.wire import BatchKind
from tests.service import add_tenant, record_batch

DAY_NS = 86_400 * 10**9

#: A time in 2026, ns.
NOW = 1_790_000_000 * 10**9

LAYOUT = Layout(dp=2, pp=2)


def request(key: str = "k0", **changes: Any) -> StreamRequest:  # noqa: ANN401  # fields of many types
    """A stream of a live job, as a producer asks for it."""
    plain = StreamRequest(
        key=key,
        job="pretrain",
        attempt=1,
        layout=LAYOUT,
        mode=Mode.LIVE,
        time_base=TimeBase.UNIX,
        window_steps=None,
        host="node-1",
        source="recorder",
        ranks=(0, 1),
        epoch=0,
    )
    return replace(plain, **changes)


def open_stream(
    database: Database,
    tenant: str,
    asked: StreamRequest | None = None,
    now: int = NOW,
    settings: Settings | None = None,
) -> StreamInfo:
    """Register a stream."""
    with database.write() as session:
        return register(session, tenant, asked or request(), settings or Settings(), now)


def note(stream: StreamInfo, seq: int, **changes: Any) -> BatchNote:  # noqa: ANN401  # fields of many types
    """A batch of ops."""
    plain = BatchNote(
        stream_id=stream.id,
        tenant_id=stream.tenant_id,
        attempt_id=stream.attempt_id,
        epoch=stream.epoch,
        seq=seq,
        last_seq=seq,
        kind=BatchKind.OPS,
        events=10,
        steps_done=None,
        received_ns=NOW,
    )
    return replace(plain, **changes)


def store(
    database: Database,
    notes: Sequence[BatchNote],
    files: Sequence[NewFile] = (),
    now: int = NOW,
) -> None:
    """Commit in a transaction of its own."""
    with database.write() as session:
        commit(session, notes, files, now)


def file_of(stream: StreamInfo, window: int | None = 0, **changes: Any) -> NewFile:  # noqa: ANN401  # fields of many types
    """The row of a file of ops that lies nowhere."""
    file_id = str(uuid4())
    plain = NewFile(
        id=file_id,
        tenant_id=stream.tenant_id,
        job_id=stream.job_id,
        attempt_id=stream.attempt_id,
        window_number=window,
        kind="ops",
        path=f"events/job={stream.job_id}/day=2026-09-21/w{window}-{file_id}.parquet",
        rows=10,
        bytes=100,
        first_step=0,
        last_step=0,
    )
    return replace(plain, **changes)


def put_ops(
    objects: Objects, stream: StreamInfo, table: OpTable, window: int = 0, now: int = NOW
) -> NewFile:
    """Write ops to a file; its row, not yet committed."""
    file_id = str(uuid4())
    path = ops_path(stream.job_id, now, window, file_id)
    size = write_ops(objects, path, record_batch(table), step_relative=table.step_relative)
    return file_of(
        stream,
        window,
        id=file_id,
        path=path,
        rows=len(table),
        bytes=size,
        first_step=int(table.step.min()),
        last_step=int(table.step.max()),
    )


def ops(steps: int = 4, **sizes: int) -> OpTable:
    """Ops of a small synthetic job."""
    plain = {"dp": 2, "pp": 2, "microbatches": 2, "steps": steps}
    return generate(scenario("1f1b", **(plain | sizes))).table


@dataclass(frozen=True, slots=True)
class Stored:
    """A job with windows of ops."""

    tenant: str
    stream: StreamInfo
    tables: tuple[OpTable, ...]


def stored_job(
    database: Database,
    objects: Objects,
    *,
    windows: int = 1,
    files: int = 1,
    now: int = NOW,
    tenant: str | None = None,
) -> Stored:
    """A job of a live attempt whose windows have so many files each, and are done."""
    tenant = tenant or add_tenant(database)
    stream = open_stream(database, tenant, now=now)
    tables = []
    for window in range(windows):
        table = ops(steps=4)
        table = replace(table, step=table.step + 40 * window)
        tables.append(table)
        for part in range(files):
            rows = [row for row in range(len(table)) if row % files == part]
            file = put_ops(objects, stream, table.take(np_rows(rows)), window, now)
            store(database, [note(stream, window * files + part)], [file], now)
    finish(database)
    return Stored(tenant, stream, tuple(tables))


def np_rows(rows: Sequence[int]) -> Any:  # noqa: ANN401  # an index array
    """Indices of rows."""
    import numpy as np

    return np.array(rows, np.intp)


def finish(database: Database, state: WindowState = WindowState.DONE) -> None:
    """Give all windows a state."""
    with database.write() as session:
        session.execute(update(Window).values(state=state.value))


def all_rows(database: Database, table: type[Base]) -> list[dict[str, Any]]:
    """All rows of a table, by primary key."""
    of = Base.metadata.tables[table.__tablename__]
    with database.read() as session:
        found = session.execute(select(of).order_by(*of.primary_key.columns)).mappings()
        return [dict(row) for row in found]


def add_row(database: Database, table: type[Base], **values: Any) -> None:  # noqa: ANN401  # any column
    """Insert one row."""
    with database.write() as session:
        session.execute(insert(table), [values])


def only(database: Database, table: type[Base]) -> dict[str, Any]:
    """The only row of a table."""
    (row,) = all_rows(database, table)
    return row


def live_paths(database: Database) -> list[str]:
    """Paths of event files that are not replaced."""
    rows = all_rows(database, EventFile)
    return sorted(row["path"] for row in rows if row["doomed_ns"] is None)
