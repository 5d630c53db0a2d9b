"""Batches and stores for tests of ingest."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from smon.config import Settings
from smon.errors import StoreError
from smon.ingest.disk import Disk
from smon.ingest.limits import Limits
from smon.ingest.metrics import IngestMetrics
from smon.ingest.ports import Store
from smon.ingest.records import Origin, RecordHead
from smon.store.commit import AlreadyStored, BatchNote, Key, NewFile, NewParts
from smon.store.files import Dropped, NewPart
from smon.store.models import Mode, TimeBase
from smon.store.streams import StreamInfo
from smon.topology import Layout
from smon.wire import TYPE_ARROW, TYPE_JSON, Batch, BatchHead, BatchKind, parse_headers
from smon.wire.arrow import SCHEMA, encoded, ipc_body
from smon.wire.columns import json_body

NOW = 1_700_000_000 * 10**9
LAYOUT = Layout(dp=4, pp=2)
STREAM = "11111111-1111-4111-8111-111111111111"
LABELS = ("forward-compute", "backward-compute", "gc")
LIMITS = Limits.of(Settings())

#: Values of a column.
Values = Sequence[Any] | NDArray[Any]


def columns(rows: int = 12, **changed: Values) -> dict[str, Any]:
    """Columns of a sound batch of worker (1, 0), two steps, sorted by start."""
    made = {
        "step": np.repeat([7, 8], [rows // 2, rows - rows // 2]),
        "dp": np.full(rows, 1),
        "stage": np.zeros(rows),
        "rank": np.full(rows, 1),
        "optype": [LABELS[row % len(LABELS)] for row in range(rows)],
        "start_ns": NOW + 1000 * np.arange(rows),
        "duration_ns": 500 + np.arange(rows),
        "seq": np.arange(rows),
        "chunk": np.full(rows, -1),
        "global_chunk": np.full(rows, -1),
        "microbatch": np.arange(rows) % 4,
    }
    return {**made, **changed}


def record_batch(columns: dict[str, Any]) -> pa.RecordBatch:
    """As Arrow."""
    arrays = []
    for field in SCHEMA:
        values = columns[field.name]
        if field.name == "optype":
            labels = list(dict.fromkeys(values))
            codes = pa.array([labels.index(label) for label in values], pa.int8())
            arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(labels, pa.utf8())))
        else:
            numbers = [int(value) for value in values]
            arrays.append(pa.array(numbers, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def plain(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """As JSON can write it."""
    return {
        name: [value if isinstance(value, str) else int(value) for value in values]
        for name, values in columns.items()
    }


def ops(
    number: int = 0, rows: int = 12, *, steps_done: int | None = None, **changed: Values
) -> Batch:
    """A batch of ops as an agent with Arrow sends it."""
    raw = ipc_body(record_batch(columns(rows, **changed)))
    return Batch(number, BatchKind.OPS, TYPE_ARROW, "zstd", rows, encoded(raw), steps_done)


def json_ops(number: int = 0, rows: int = 12, **changed: Values) -> Batch:
    """The same as JSON columns."""
    body = json_body(plain(columns(rows, **changed)))
    return Batch(number, BatchKind.OPS, TYPE_JSON, "identity", rows, body)


def document(kind: BatchKind, parsed: object, *, seq: int = 0, events: int = 0) -> Batch:
    """A batch of another kind."""
    return Batch(seq, kind, TYPE_JSON, "identity", events, json.dumps(parsed).encode())


def gap(first: int, last: int, events: int = 5, reason: str = "spool-full") -> Batch:
    """A GAP."""
    parsed = {
        "first_seq": first,
        "last_seq": last,
        "events": events,
        "reason": reason,
        "first_step": None,
        "last_step": None,
    }
    return document(BatchKind.GAP, parsed, seq=first, events=events)


def end(seq: int) -> Batch:
    """An END."""
    return document(BatchKind.END, {"reason": "finished"}, seq=seq)


def head_of(batch: Batch, **changed: Any) -> BatchHead:  # noqa: ANN401  # fields of many types
    """What the headers of its request say."""
    headers = {name.lower(): value for name, value in batch.headers().items()}
    return dataclasses.replace(parse_headers(headers), **changed)


def info(stream_id: str = STREAM, **changed: Any) -> StreamInfo:  # noqa: ANN401  # fields of many types
    """A stream that has sent nothing."""
    made = StreamInfo(
        id=stream_id,
        tenant_id="default",
        job_id="job1",
        attempt_id="attempt1",
        host="host1",
        epoch=0,
        layout=LAYOUT,
        mode=Mode.LIVE,
        time_base=TimeBase.UNIX,
        window_steps=10,
        ranks=(1,),
        ended=False,
        covered={},
        next_seq=0,
    )
    return dataclasses.replace(made, **changed)


def origin(stream_id: str = STREAM, window_steps: int = 10) -> Origin:
    """Whose batch it is."""
    return Origin("default", "job1", "attempt1", stream_id, window_steps, step_relative=False)


def record_head(batch: Batch, stream_id: str = STREAM, epoch: int = 0) -> RecordHead:
    """The head of its record in the log."""
    last = batch.seq
    if batch.kind is BatchKind.GAP:
        last = json.loads(batch.body)["last_seq"]
    return RecordHead(origin(stream_id), epoch, batch.seq, last, NOW, head_of(batch))


def settings(folder: Path, **changed: Any) -> Settings:  # noqa: ANN401  # fields of many types
    """Settings of a server with its data in this folder, whatever disk that is on.

    It decodes in its own process: `tests.ingest.test_fence` is about the others.
    """
    usual = {"min_free_bytes": 0, "drain_interval_s": 0.01, "decode_processes": 0}
    return Settings(data_dir=folder, **{**usual, **changed})


def metrics() -> IngestMetrics:
    """Metrics of their own registry."""
    return IngestMetrics(CollectorRegistry())


class FakeStore:
    """A store in memory, which fails when it is told to.

    Attributes
    ----------
    down
        Every call fails.
    fails
        Names of calls that fail, each once.
    """

    def __init__(self, *streams: StreamInfo) -> None:
        self.streams = {(each.tenant_id, each.id): each for each in streams}
        self.notes: list[BatchNote] = []
        self.files: list[NewFile] = []
        self.parts: list[NewPart] = []
        self.written: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.calls: list[str] = []
        self.stored: set[Key] = set()
        self.down = False
        self.fails: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.down or name in self.fails:
            if name in self.fails:
                self.fails.remove(name)
            raise StoreError(f"{name} fails")

    def ping(self) -> None:
        """See whether the store answers."""
        self._called("ping")

    def find(self, tenant_id: str, stream_id: str) -> StreamInfo | None:
        """A stream."""
        self._called("find")
        return self.streams.get((tenant_id, stream_id))

    def stored_among(self, keys: Collection[Key]) -> frozenset[Key]:
        """Those that are stored."""
        return frozenset(self.stored & set(keys))

    def write_ops(self, path: str, table: pa.Table, *, step_relative: bool) -> int:
        """Keep a file."""
        self._called("write_ops")
        self.written[path] = table
        return int(table.nbytes)

    def write_context(self, path: str, documents: Sequence[bytes]) -> int:
        """Keep a file."""
        self._called("write_context")
        self.written[path] = list(documents)
        return sum(map(len, documents))

    def write_part(self, path: str, content: bytes) -> int:
        """Keep a file."""
        self._called("write_part")
        self.written[path] = content
        return len(content)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self._called("delete")
        self.deleted.append(path)
        del self.written[path]

    def commit(
        self,
        notes: Sequence[BatchNote],
        files: Sequence[NewFile],
        now_ns: int,
        sent: NewParts,
    ) -> Sequence[Dropped]:
        """Make it stored."""
        self._called("commit")
        known = self.stored & {note.key for note in notes}
        if known:
            raise AlreadyStored(frozenset(known))
        self.stored |= {note.key for note in notes}
        self.notes.extend(notes)
        self.files.extend(files)
        self.parts.extend(sent.parts)
        return ()

    @property
    def rows(self) -> int:
        """Rows of ops in files that are part of the store."""
        return sum(file.rows for file in self.files if file.kind == "ops")


def _is_store(store: FakeStore) -> Store:
    """The fake has all that ingest asks for; the type checker says so."""
    return store


class FaultyDisk(Disk):
    """A disk that fails when it is told to.

    Attributes
    ----------
    short
        Bytes of the next write that are taken; None: all of them.
    errors
        (call, error): the next such call fails.
    free
        Free bytes; None: as the real one says.
    synced
        Bytes of each open file that were there at its last sync.
    """

    __slots__ = ("errors", "free", "short", "synced", "written")

    def __init__(self) -> None:
        self.short: int | None = None
        self.errors: list[tuple[str, OSError]] = []
        self.free: int | None = None
        self.written: dict[int, int] = {}
        self.synced: dict[int, int] = {}

    def _fail(self, call: str) -> None:
        for entry in self.errors:
            if entry[0] == call:
                self.errors.remove(entry)
                raise entry[1]

    def create(self, path: Path) -> int:
        """A new file."""
        self._fail("create")
        descriptor = super().create(path)
        self.written[descriptor] = self.synced[descriptor] = 0
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[bytes]) -> int:
        """Append, perhaps in part."""
        self._fail("write")
        if self.short is not None:
            buffers, self.short = [b"".join(buffers)[: self.short]], None
        count = super().write(descriptor, buffers)
        self.written[descriptor] += count
        return count

    def sync(self, descriptor: int) -> None:
        """Sync, or not."""
        self._fail("sync")
        super().sync(descriptor)
        self.synced[descriptor] = self.written[descriptor]

    def cut(self, descriptor: int, size: int) -> None:
        """Cut, or not."""
        self._fail("cut")
        super().cut(descriptor, size)
        self.written[descriptor] = size

    def free_bytes(self, folder: Path) -> int:
        """As told."""
        return super().free_bytes(folder) if self.free is None else self.free


def bomb(size: int) -> bytes:
    """A zstd frame of zeros that states its size."""
    return encoded(bytes(size))


def ipc_claiming(rows: int) -> bytes:
    """A sound Arrow stream whose record batch claims another number of rows, everywhere."""
    honest = 12
    raw = bytearray(ipc_body(record_batch(columns(honest))))
    needle = struct.pack("<q", honest)
    for at in _places(bytes(raw), needle):
        raw[at : at + 8] = struct.pack("<q", rows)
    return bytes(raw)


def _places(raw: bytes, needle: bytes) -> Iterable[int]:
    at = raw.find(needle)
    while at >= 0:
        # Values of the columns lie behind the last message's head; they stay.
        if at < raw.find(struct.pack("<q", NOW)):
            yield at
        at = raw.find(needle, at + 1)
