"""Files of ops (Parquet) and of side evidence (JSON lines in zstd), below the root of the events.

Flow: `smon.ingest`, `smon.store.compaction` → **here** → `smon.worker`. A row group holds one step,
or several small ones, so that a reader that wants some steps reads little else.
``docs/reference/store.md`` describes the files.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from smon.errors import MetaError, StoreError, TraceError
from smon.store.objects import Objects
from smon.trace.context import Context, merge, parse_context
from smon.trace.formats.parquet import STEP_RELATIVE_KEY, read_open
from smon.trace.schema import NAMES
from smon.trace.table import OpTable, concat

#: Value of the metadata key ``smon.schema``.
SCHEMA: Final = b"smon.ops/1"
SCHEMA_KEY: Final = b"smon.schema"

#: Smaller steps share a row group: its cost is some 2 KB in the footer and a seek.
GROUP_ROWS: Final = 5_000

#: Times grow slowly from row to row within a rank; durations share their high bytes.
_ENCODINGS: Final = {"start_ns": "DELTA_BINARY_PACKED", "duration_ns": "BYTE_STREAM_SPLIT"}
_LEVEL: Final = 3

#: Labels stay text, also those that SMon does not know. Wide enough for any number of them.
_OPTYPE: Final = pa.field("optype", pa.dictionary(pa.int32(), pa.utf8()), nullable=False)

#: What is unpacked of one file of side evidence: damage must not fill the memory.
MAX_CONTEXT_BYTES: Final = 1 << 30

_DAY_S: Final = 86_400


def ops_path(job_id: str, day_ns: int, window_number: int, file_id: str) -> str:
    """Where a file of ops lies: ``events/job=…/day=YYYY-MM-DD/w<window>-<id>.parquet``."""
    return f"{_folder('events', job_id, day_ns)}/w{window_number}-{file_id}.parquet"


def context_path(job_id: str, day_ns: int, window_number: int | None, file_id: str) -> str:
    """Where a file of side evidence lies; without a window it belongs to the whole attempt."""
    window = "all" if window_number is None else f"w{window_number}"
    return f"{_folder('events', job_id, day_ns)}/{window}-{file_id}.jsonl.zst"


def part_path(job_id: str, day_ns: int, file_id: str) -> str:
    """Where a part of a file of a rank lies."""
    return f"{_folder('events', job_id, day_ns)}/part-{file_id}.bin"


def _folder(root: str, job_id: str, day_ns: int) -> str:
    day = datetime.fromtimestamp(day_ns // 10**9 // _DAY_S * _DAY_S, UTC).date()
    return f"{root}/job={job_id}/day={day.isoformat()}"


# --- writing ops ------------------------------------------------------------------------------


def write_ops(
    objects: Objects, path: str, batch: pa.Table | pa.RecordBatch, *, step_relative: bool
) -> int:
    """Write ops in the wire's columns, in any order; afterwards the file is durable.

    Returns
    -------
    int
        Its size in bytes.

    Raises
    ------
    StoreError
        It cannot be written, or there are no ops.
    """
    if not batch.num_rows:
        raise StoreError(f"expected ops for {path}, found none: leave the file out")
    sink = pa.BufferOutputStream()
    with ops_writer(sink, batch.schema, step_relative=step_relative) as writer:
        writer.add(batch)
    return objects.put(path, sink.getvalue())


@contextmanager
def ops_writer(sink: Any, schema: pa.Schema, *, step_relative: bool) -> Iterator[OpsWriter]:  # noqa: ANN401  # any output of pyarrow
    """A writer of one file of ops to an open sink."""
    metadata = {SCHEMA_KEY: SCHEMA, STEP_RELATIVE_KEY: b"true" if step_relative else b"false"}
    fields = [_OPTYPE if name == _OPTYPE.name else schema.field(name) for name in NAMES]
    named = pa.schema(fields, metadata=metadata)
    try:
        with pq.ParquetWriter(
            sink,
            named,
            compression="zstd",
            compression_level=_LEVEL,
            use_dictionary=[name for name in NAMES if name not in _ENCODINGS],
            column_encoding=_ENCODINGS,
            write_statistics=["step"],
        ) as file:
            writer = OpsWriter(file, named)
            yield writer
            writer.flush()
    except pa.ArrowException as error:
        raise StoreError(f"cannot write ops: {error}") from error


class OpsWriter:
    """Row groups of one file; steps must come in ascending order from one `add` to the next."""

    __slots__ = ("_file", "_schema", "_waiting", "_waiting_rows", "rows")

    def __init__(self, file: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self.rows = 0

    def add(self, batch: pa.Table | pa.RecordBatch) -> None:
        """Add all ops of some steps, in any order."""
        table = _sorted(_as_table(batch).select(NAMES).cast(self._schema))
        for first, end in _steps_within(table):
            self._waiting.append(table.slice(first, end - first))
            self._waiting_rows += end - first
            if self._waiting_rows >= GROUP_ROWS:
                self.flush()

    def flush(self) -> None:
        """Write what waits as one row group."""
        if self._waiting_rows:
            group = pa.concat_tables(self._waiting).combine_chunks()
            self._file.write_table(group, row_group_size=self._waiting_rows)
            self.rows += self._waiting_rows
            self._waiting, self._waiting_rows = [], 0


def _as_table(batch: pa.Table | pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch


def _numbers(table: pa.Table, name: str) -> NDArray[Any]:
    """A column without nulls. By DLPack: ``to_numpy`` of pyarrow would import pandas."""
    parts = [np.from_dlpack(chunk) for chunk in table.column(name).chunks if len(chunk)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _sorted(table: pa.Table) -> pa.Table:
    """By step, rank, start; by worker instead where ranks are not known."""
    names = ("start_ns", "stage", "dp", "rank", "step")
    keys = [_numbers(table, name) for name in names]
    if _in_order(keys[::-1]):
        return table
    # A key that is the same everywhere costs as much to sort by as any other.
    telling = [key for key in keys if key[0] != key[-1] or (key != key[0]).any()]
    return table.take(pa.array(np.lexsort(telling)))


def _in_order(keys: Sequence[NDArray[Any]]) -> bool:
    """Whether rows are in the order of these keys, the most significant first."""
    tied = np.ones(len(keys[0]) - 1, bool)
    for key in keys:
        if (tied & (key[1:] < key[:-1])).any():
            return False
        tied &= key[1:] == key[:-1]
    return True


def _steps_within(table: pa.Table) -> Iterator[tuple[int, int]]:
    """First row and end of each step of a sorted table."""
    step = _numbers(table, "step")
    begins = np.flatnonzero(step[1:] != step[:-1]) + 1
    bounds = [0, *begins.tolist(), len(step)]
    yield from pairwise(bounds)


# --- reading ops ------------------------------------------------------------------------------


def read_ops(
    objects: Objects,
    paths: Sequence[str],
    *,
    steps: tuple[int, int] | None = None,
    only: Collection[int] | None = None,
) -> OpTable:
    """Ops of several files as one table; only row groups with wanted steps are read.

    Parameters
    ----------
    steps
        First and last step that are wanted.
    only
        Steps that are wanted.

    Raises
    ------
    StoreError
        A file is missing or damaged, or there is none.
    """
    if not paths:
        raise StoreError("expected files of ops, found none")
    wanted = _Wanted(steps, None if only is None else frozenset(only))
    parts = [_read_one(objects, path, wanted) for path in paths]
    filled = [part for part in parts if len(part)] or parts[:1]
    try:
        return concat(filled)
    except TraceError as error:
        raise StoreError(f"files of one window do not fit together: {error}") from error


def steps_of(objects: Objects, path: str) -> dict[int, int]:
    """Rows of each step of a file of ops, by step, ascending.

    Raises
    ------
    StoreError
        The file is missing or damaged.
    """
    counts: Counter[int] = Counter()
    with open_ops(objects, path) as file:
        for group in range(file.metadata.num_row_groups):
            low, high = step_range(file, group)
            if low == high:
                counts[low] += file.metadata.row_group(group).num_rows
                continue
            column = _numbers(file.read_row_group(group, ["step"]), "step")
            steps, rows = np.unique(column, return_counts=True)
            counts.update(dict(zip(steps.tolist(), rows.tolist(), strict=True)))
    return dict(sorted(counts.items()))


@contextmanager
def open_ops(objects: Objects, path: str) -> Iterator[pq.ParquetFile]:
    """A file of ops, open (`pyarrow.parquet.ParquetFile`).

    Raises
    ------
    StoreError
        It is missing or damaged; also from what is done with it.
    """
    try:
        with (
            objects.open(path) as handle,
            pq.ParquetFile(handle, read_dictionary=["optype"], pre_buffer=True) as file,
        ):
            yield file
    except (pa.ArrowException, TraceError, OSError, ValueError, LookupError) as error:
        raise StoreError(f"{path}: damaged, or no file of ops: {error}") from error


def step_range(file: pq.ParquetFile, group: int) -> tuple[int, int]:
    """Lowest and highest step of a row group; of its values, if nothing is written about them."""
    row_group = file.metadata.row_group(group)
    statistics = row_group.column(file.schema_arrow.names.index("step")).statistics
    if statistics is not None and statistics.has_min_max:
        return int(statistics.min), int(statistics.max)
    column = _numbers(file.read_row_group(group, ["step"]), "step")
    return int(column.min()), int(column.max())


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which steps to read."""

    steps: tuple[int, int] | None
    only: frozenset[int] | None

    def overlaps(self, low: int, high: int) -> bool:
        if self.steps is not None and (high < self.steps[0] or low > self.steps[1]):
            return False
        return self.only is None or any(low <= step <= high for step in self.only)

    def rows_of(self, table: OpTable) -> OpTable:
        keep = np.ones(len(table), bool)
        if self.steps is not None:
            keep &= (table.step >= self.steps[0]) & (table.step <= self.steps[1])
        if self.only is not None:
            keep &= np.isin(table.step, list(self.only))
        return table if keep.all() else table.take(keep)


@dataclass(frozen=True, slots=True)
class _Size:
    """What a reader asks of the metadata."""

    num_rows: int
    num_row_groups: int


class _Pruned:
    """Some row groups of a file, as if it had no others."""

    __slots__ = ("_file", "_groups", "metadata", "schema_arrow")

    def __init__(self, file: pq.ParquetFile, groups: Sequence[int]) -> None:
        self._file = file
        self._groups = groups
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        self.metadata = _Size(rows, len(groups))
        self.schema_arrow = file.schema_arrow

    def read_row_group(self, group: int, columns: list[str]) -> pa.Table:
        return self._file.read_row_group(self._groups[group], columns)


def _read_one(objects: Objects, path: str, wanted: _Wanted) -> OpTable:
    with open_ops(objects, path) as file:
        groups = [
            group
            for group in range(file.metadata.num_row_groups)
            if wanted.overlaps(*step_range(file, group))
        ]
        return wanted.rows_of(read_open(_Pruned(file, groups), path).table)


# --- side evidence ----------------------------------------------------------------------------


def write_context(objects: Objects, path: str, documents: Sequence[bytes]) -> int:
    """Write documents of side evidence (``smon.context/1``), one a line; returns bytes.

    Raises
    ------
    StoreError
        It cannot be written.
    """
    # Line ends in JSON stand between tokens only: within a string they are escaped.
    lines = [document.replace(b"\r", b" ").replace(b"\n", b" ") for document in documents]
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(b"\n".join(lines) + b"\n")
    return objects.put(path, packed)


def read_context(objects: Objects, paths: Sequence[str]) -> Context:
    """The side evidence of several files as one; a document that is malformed is only counted.

    Raises
    ------
    StoreError
        A file is missing or damaged.
    """
    return merge(context for path in paths for context in _contexts(objects, path))


def _contexts(objects: Objects, path: str) -> Iterator[Context]:
    for line in _lines(objects, path):
        try:
            document = json.loads(line)
            yield parse_context(document if isinstance(document, dict) else {}, path)
        except (ValueError, RecursionError, MetaError):
            yield Context(ignored=1)


def _lines(objects: Objects, path: str) -> Iterable[bytes]:
    packed = objects.get(path)
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as stream:
            text = stream.read(MAX_CONTEXT_BYTES + 1)
    except zstandard.ZstdError as error:
        raise StoreError(f"{path}: damaged, or no file of side evidence: {error}") from error
    if len(text) > MAX_CONTEXT_BYTES:
        limit = MAX_CONTEXT_BYTES >> 20
        raise StoreError(f"{path}: expected at most {limit} MiB of side evidence, found more")
    return [line for line in text.split(b"\n") if line.strip()]
