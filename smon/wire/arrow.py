"""The Arrow body of an ops batch: one IPC stream of one record batch, inside one zstd frame.

Flow: a source that has columns as arrays → **here** → `smon.wire.Batch`. Imports pyarrow: for
senders that have it; the recorder's plain form is `smon.wire.columns.json_body`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from smon.wire.columns import COLUMNS, OPTYPE

_TYPES: Final = {"int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64()}

SCHEMA: Final = pa.schema(
    [
        pa.field(
            column.name,
            pa.dictionary(pa.int8(), pa.utf8()) if column.name == OPTYPE else _TYPES[column.type],
            nullable=False,
        )
        for column in COLUMNS
    ]
)

#: Level 1: higher ones save a tenth and cost three times the time.
_LEVEL: Final = 1


def record_batch(columns: Mapping[str, NDArray[Any]], labels: Sequence[str]) -> pa.RecordBatch:
    """Ops in the columns of the wire.

    Parameters
    ----------
    columns
        Arrays of one length, by name; op types as codes.
    labels
        Names of the op types, by code.
    """
    names = pa.array(labels, pa.utf8())
    arrays = [
        pa.DictionaryArray.from_arrays(pa.array(columns[OPTYPE].astype(np.int8)), names)
        if field.name == OPTYPE
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def ipc_body(batch: pa.RecordBatch) -> bytes:
    """The body of a record batch of `SCHEMA`, not compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def encoded(body: bytes) -> bytes:
    """A body in one zstd frame that states its size."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(body)
