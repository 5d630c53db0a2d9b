"""Parquet: the public traces of straggler-analysis, and SMon's own (``docs/formats.md``).

The public form has float32 seconds that restart at 0 in every step; SMon's has the columns of
`smon.trace.schema` with int64 nanoseconds. The columns of a file say which form it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smon.errors import TraceError, UnknownFormatError
from smon.ops import BY_LABEL
from smon.trace.formats.reading import Reading, numbered, printable, quoted, reading_from
from smon.trace.schema import COLUMNS, INVALID_NS
from smon.trace.table import OpTable, make_table, seconds_to_ns

NAME: Final = "parquet"
LOOKS_FOR: Final = "columns step, dp_rank, stage, optype, start_ts, duration"
SELF_DESCRIBED: Final = False

MAGIC: Final = b"PAR1"

#: Key of the file's metadata that says whether times start at 0 in every step; ``true``, ``false``.
STEP_RELATIVE_KEY: Final = b"smon.step_relative"

#: Columns of the public form by their name in the schema.
PUBLIC: Final = {
    "step": "step",
    "dp": "dp_rank",
    "stage": "stage",
    "rank": "rank",
    "optype": "optype",
    "start_ns": "start_ts",
    "duration_ns": "duration",
    "seq": "seq_id",
    "chunk": "mc",
    "global_chunk": "gmc",
    "microbatch": "mb_id",
}
NATIVE: Final = {column.name: column.name for column in COLUMNS}

#: Times that restart in every step begin near 0; a first op may wait for data for this long.
MAX_FIRST_START_NS: Final = 60 * 10**9

#: Times coarser than a clock error can be (``docs/method.md`` section 3) say nothing. Float32
#: seconds get there at 131,072 s: unix time in float32 comes in steps of 128 s.
MAX_SPACING_S: Final = 0.01


#: A damaged footer can claim any size, type or name; numpy and pyarrow report that in many ways.
_DAMAGE: Final = (
    pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Form:
    """Which column of the file holds which column of the schema."""

    source: Mapping[str, str]
    seconds: bool

    @property
    def required(self) -> list[str]:
        """Names in the file that must be there; a lacking ``seq`` is counted by start."""
        names = [column.name for column in COLUMNS if column.default is None]
        return [self.source[name] for name in names if name != "seq"]


_FORMS: Final = (_Form(NATIVE, seconds=False), _Form(PUBLIC, seconds=True))


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file is Parquet."""
    return head.startswith(MAGIC)


def read(path: Path) -> Reading:
    """Read a Parquet file of either form.

    Raises
    ------
    UnknownFormatError
        It is Parquet, but not with the columns of a trace.
    TraceError
        The file cannot be read or is damaged, or a column has an unusable type.
    """
    name = printable(path)
    try:
        with reading_from(path), path.open("rb") as handle:
            return read_open(pq.ParquetFile(handle, read_dictionary=["optype"]), name)
    except _DAMAGE as error:
        raise TraceError(f"{name}: damaged or truncated Parquet: {quoted(error)}") from error


def read_open(file: pq.ParquetFile, name: str) -> Reading:
    """As `read`, of a file that is open already, wherever it lies; `name` is for messages.

    Raises
    ------
    UnknownFormatError
        It does not have the columns of a trace.
    TraceError
        A column has an unusable type.
    """
    form = _form(file.schema_arrow.names, name)
    columns = _columns(file, form, name)
    missing = frozenset({"seq"} - columns.keys())
    if missing:
        columns["seq"] = np.zeros(len(columns["step"]), np.int32)
    table = make_table(columns)
    del columns
    table = replace(table, step_relative=_is_relative(file, table))
    _check_spacing(file.schema_arrow.field(form.source["start_ns"]).type, table, name)
    return Reading(numbered(table, missing) if missing else table, unnumbered=missing)


def _form(names: list[str], path: str) -> _Form:
    for form in _FORMS:
        if not set(form.required) - set(names):
            return form
    closest = min(_FORMS, key=lambda form: len(set(form.required) - set(names)))
    lacking = ", ".join(sorted(set(closest.required) - set(names)))
    raise UnknownFormatError(
        f"{path}: Parquet, but no op-level trace: expected columns "
        f"{', '.join(closest.required)}; it lacks {lacking}"
    )


def _columns(file: pq.ParquetFile, form: _Form, name: str) -> dict[str, NDArray[Any]]:
    """The columns by schema name.

    Row group by row group into arrays of the final size: the peak is the table and one row group.
    """
    present = set(file.schema_arrow.names)
    wanted = [column for column in COLUMNS if form.source[column.name] in present]
    rows = file.metadata.num_rows
    columns = {column.name: np.empty(rows, column.dtype) for column in wanted}
    at = 0
    for group in range(file.metadata.num_row_groups):
        part = file.read_row_group(group, [form.source[column.name] for column in wanted])
        for column in wanted:
            field = form.source[column.name]
            target = columns[column.name][at : at + part.num_rows]
            where = f"{name}: column {field}"
            _fill(target, column.name, part.column(field), where, seconds=form.seconds)
        at += part.num_rows
    if at != rows:
        raise TraceError(f"{name}: damaged Parquet: the footer counts {rows} rows, {at} are there")
    return columns


def _fill(
    target: NDArray[Any], name: str, column: pa.ChunkedArray, where: str, *, seconds: bool
) -> None:
    """Copy a column of one row group into `target`, converted to what the schema wants."""
    at = 0
    for chunk in column.chunks:
        if name == "optype":
            values: NDArray[Any] = _codes(chunk, where)
        elif name.endswith("_ns"):
            values = _times(chunk, where, seconds=seconds)
        else:
            values = _integers(chunk, target.dtype, where)
        target[at : at + len(values)] = values
        at += len(values)


def _codes(chunk: pa.Array, where: str) -> NDArray[np.int8]:
    """Op type codes; -1 for a null or a name that SMon does not know."""
    if not pa.types.is_dictionary(chunk.type):
        names = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
        if not any(is_name(chunk.type) for is_name in names):
            raise TraceError(f"{where}: expected names of op types, found {chunk.type}")
        chunk = chunk.dictionary_encode()
    # The last code is that of a null: as an index, -1 is the last.
    codes = np.array([*map(_code, chunk.dictionary.to_pylist()), -1], np.int8)
    result: NDArray[np.int8] = codes[_numbers(chunk.indices, -1)]
    return result


def _code(label: object) -> int:
    name = label.decode("utf-8", "replace") if isinstance(label, bytes) else label
    return int(BY_LABEL[name]) if isinstance(name, str) and name in BY_LABEL else -1


def _times(chunk: pa.Array, where: str, *, seconds: bool) -> NDArray[np.int64]:
    """Nanoseconds, `INVALID_NS` where there is no number."""
    if pa.types.is_integer(chunk.type) and not seconds:
        return np.asarray(_numbers(chunk.cast(pa.int64()), INVALID_NS))
    if not (seconds and _is_number(chunk.type)):
        unit = "a number of seconds" if seconds else "whole nanoseconds"
        raise TraceError(f"{where}: expected {unit}, found {chunk.type}")
    return seconds_to_ns(_numbers(chunk.cast(pa.float64()), float("nan")))


def _numbers(chunk: pa.Array, missing: float) -> NDArray[Any]:
    """The numbers of an array, `missing` where there is none.

    By DLPack, without a copy: ``to_numpy`` and ``fill_null`` of pyarrow import pandas, which takes
    a second.
    """
    if not len(chunk):
        return np.empty(0, np.int64)
    if not chunk.null_count:
        return np.from_dlpack(chunk)
    bits, content = chunk.buffers()
    bare = pa.Array.from_buffers(chunk.type, len(chunk), [None, content], 0, chunk.offset)
    valid = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    values = np.from_dlpack(bare)
    wide = np.float64 if values.dtype.kind == "f" else np.int64
    there = valid[chunk.offset : chunk.offset + len(chunk)].astype(bool)
    return np.where(there, values, wide(missing))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _integers(chunk: pa.Array, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Whole numbers that fit `dtype`; -1 where there is none."""
    if not _is_number(chunk.type):
        raise TraceError(f"{where}: expected whole numbers, found {chunk.type}")
    values = _numbers(chunk, -1)
    if values.dtype.kind == "f":
        # pandas turns whole numbers with gaps into floats.
        values = np.where(np.isnan(values), -1, values)
    if len(values) and not np.can_cast(values.dtype, dtype, "safe"):
        _check_range(values, dtype, where)
    return values.astype(dtype, copy=False)


def _check_range(values: NDArray[Any], dtype: np.dtype[Any], where: str) -> None:
    limits = np.iinfo(dtype)
    low, high = values.min(), values.max()
    if low < limits.min or high > limits.max:
        raise TraceError(
            f"{where}: expected numbers from {limits.min} to {limits.max}, found {low} to {high}"
        )


def _check_spacing(kind: pa.DataType, table: OpTable, name: str) -> None:
    if not len(table) or not (pa.types.is_float32(kind) or pa.types.is_float16(kind)):
        return
    # A typical start, from a sample: single garbage values must not decide.
    typical = np.median(np.abs(table.start_ns[:: len(table) // 1000 + 1])) / 1e9
    precision = np.float32 if pa.types.is_float32(kind) else np.float16
    spacing = float(np.spacing(precision(typical)))
    if not spacing <= MAX_SPACING_S:
        raise TraceError(
            f"{name}: start times are {kind} seconds around {typical:.0f}, where neighbouring "
            f"values are {spacing:g} s apart: write them as float64, or as int64 start_ns"
        )


def _is_relative(file: pq.ParquetFile, table: OpTable) -> bool:
    declared = (file.schema_arrow.metadata or {}).get(STEP_RELATIVE_KEY)
    if declared is not None:
        return bool(declared.strip().lower() in (b"true", b"1"))
    return restarts_in_every_step(table.step, table.start_ns)


def restarts_in_every_step(step: NDArray[np.int64], start_ns: NDArray[np.int64]) -> bool:
    """Whether times start at 0 in every step, as in the public traces, for lack of a mark.

    They do if every step begins within the first minute and all steps lie over each other: their
    beginnings differ by less than half the usual length of a step. Consecutive steps in absolute
    time begin a whole step apart.
    """
    if not len(step):
        return False
    first, last = _spans(step, start_ns)
    if first.min() < 0 or first.max() >= MAX_FIRST_START_NS:
        return False
    spread = int(first.max() - first.min())
    return len(first) == 1 or spread * 2 < float(np.median(last - first))


def _spans(
    step: NDArray[np.int64], start_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Earliest and latest start of every step.

    Rows mostly come in runs of one step, so runs are reduced first: no sort over all rows.
    """
    begin = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1])))
    first = np.minimum.reduceat(start_ns, begin)
    last = np.maximum.reduceat(start_ns, begin)
    steps, index = np.unique(step[begin], return_inverse=True)
    earliest = np.full(len(steps), np.iinfo(np.int64).max)
    latest = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(earliest, index, first)
    np.maximum.at(latest, index, last)
    return earliest, latest
