"""The JSON body of an ops batch: columns as lists, made into the same record batch as Arrow's.

Flow: `smon.ingest.encodings` → **here** → `smon.ingest.values`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from smon.errors import WireError
from smon.ingest.ipc import MAX_LABELS
from smon.ingest.limits import Limits
from smon.ingest.plain import numbers, texts
from smon.wire.arrow import SCHEMA
from smon.wire.columns import COLUMNS, OPTYPE, WireColumn
from smon.wire.problems import Problem

_SLACK: Final = 64


def read_columns(raw: bytes, rows: int, limits: Limits) -> pa.RecordBatch:
    """The record batch of a JSON body.

    Parameters
    ----------
    rows
        How many there must be.

    Raises
    ------
    WireError
        It is malformed, or has other columns or more rows.
    """
    if rows > limits.events:
        raise WireError(
            Problem.TOO_MANY_EVENTS, f"expected at most {limits.events} events in a batch"
        )
    # Every value but the first follows a comma: so many values are parsed, and no more.
    if raw.count(b",") > rows * len(COLUMNS) + _SLACK:
        raise _wrong(f"expected {rows} values in each of {len(COLUMNS)} columns, found more")
    columns = _parsed(raw)
    unknown = columns.keys() - {column.name for column in COLUMNS}
    if unknown:
        raise WireError(
            Problem.WRONG_SCHEMA,
            f"expected no columns besides {', '.join(each.name for each in COLUMNS)}",
        )
    arrays = [_array(column, columns, rows) for column in COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(raw)
    except ValueError as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a body of JSON") from error
    columns = document.get("columns") if isinstance(document, dict) else None
    if not isinstance(columns, dict):
        raise _wrong('expected {"columns": {name: [values]}}')
    return columns


def _array(column: WireColumn, columns: dict[str, Any], rows: int) -> pa.Array:
    values = columns.get(column.name)
    if values is None and column.default is not None and column.name not in columns:
        return numbers(np.full(rows, column.default, column.type))
    if not isinstance(values, list) or len(values) != rows:
        raise _wrong(f"expected {rows} values in the column {column.name}")
    if column.name == OPTYPE:
        return _labels(values)
    if set(map(type, values)) - {int}:
        raise _wrong(f"expected whole numbers in the column {column.name}")
    try:
        return numbers(np.array(values, column.type))
    except OverflowError as error:
        raise WireError(
            Problem.WRONG_VALUES, f"expected {column.type} numbers in the column {column.name}"
        ) from error


def _labels(values: list[Any]) -> pa.Array:
    if set(map(type, values)) - {str}:
        raise _wrong(f"expected strings in the column {OPTYPE}")
    codes = {label: code for code, label in enumerate(dict.fromkeys(values))}
    if len(codes) > MAX_LABELS:
        raise WireError(Problem.WRONG_VALUES, f"expected at most {MAX_LABELS} op types in a batch")
    try:
        labels = texts(list(codes))
    except UnicodeEncodeError as error:
        raise _wrong(f"expected text in the column {OPTYPE}") from error
    indices = np.fromiter((codes[label] for label in values), np.int8, len(values))
    return pa.DictionaryArray.from_arrays(numbers(indices), labels)


def _wrong(message: str) -> WireError:
    return WireError(Problem.WRONG_SCHEMA, message)
