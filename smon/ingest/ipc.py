"""The Arrow body of an ops batch: looked at before Arrow itself may read it.

Flow: `smon.ingest.encodings` → **here** → `smon.ingest.values`. A stream of 480 bytes can claim
2³¹ rows, and Arrow believes it. So the messages are walked by hand first: one schema that is
known, one dictionary, one record batch whose rows, nulls and buffers fit together, the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from smon.errors import WireError
from smon.ingest.limits import Limits
from smon.wire.arrow import SCHEMA
from smon.wire.columns import COLUMNS, OPTYPE
from smon.wire.problems import Problem

_CONTINUATION: Final = 0xFFFFFFFF

# Kinds of messages (Arrow's format/Message.fbs).
_SCHEMA: Final = 1
_DICTIONARY: Final = 2
_RECORDS: Final = 3

#: Entries of a dictionary with int8 indices.
MAX_LABELS: Final = 128

_WIDTHS: Final = tuple(
    1 if column.name == OPTYPE else int(column.type.removeprefix("int")) // 8 for column in COLUMNS
)

_U8: Final = struct.Struct("<B").unpack_from
_U16: Final = struct.Struct("<H").unpack_from
_U32: Final = struct.Struct("<I").unpack_from
_I32: Final = struct.Struct("<i").unpack_from
_I64: Final = struct.Struct("<q").unpack_from
_PREFIX: Final = struct.Struct("<Ii").unpack_from

_NODES: Final = struct.Struct(f"<{2 * len(COLUMNS)}q")
_BUFFERS: Final = struct.Struct(f"<{4 * len(COLUMNS)}q")
_LABEL_NODE: Final = struct.Struct("<2q")
_LABEL_BUFFERS: Final = struct.Struct("<6q")

#: Schema messages that were found to be right, so that each sender's is read once.
_right_schemas: Final[set[bytes]] = set()
_MAX_RIGHT: Final = 64


class _Table:
    """A table of a flatbuffer; reading outside of it raises `struct.error`."""

    __slots__ = ("at", "data", "slots", "vtable")

    def __init__(self, data: memoryview, at: int) -> None:
        vtable = at - _I32(data, at)[0]
        if vtable < 0:
            raise struct.error("before the beginning")
        self.data = data
        self.at = at
        self.vtable = vtable
        self.slots = _U16(data, vtable)[0]

    def field(self, index: int) -> int:
        """Place of a field; 0 if it is left out."""
        slot = 4 + 2 * index
        if slot + 2 > self.slots:
            return 0
        offset: int = _U16(self.data, self.vtable + slot)[0]
        return self.at + offset if offset else 0

    def number(self, index: int) -> int:
        """An int64; 0 if it is left out."""
        at = self.field(index)
        return int(_I64(self.data, at)[0]) if at else 0

    def byte(self, index: int) -> int:
        """A byte; 0 if it is left out."""
        at = self.field(index)
        return int(_U8(self.data, at)[0]) if at else 0

    def table(self, index: int) -> _Table:
        """The table that a field points to."""
        at = self.field(index)
        if not at:
            raise struct.error("no table")
        return _Table(self.data, at + _U32(self.data, at)[0])

    def numbers(self, index: int, form: struct.Struct) -> tuple[int, ...]:
        """The numbers of a vector of pairs of int64, if it holds as many as `form` does."""
        at = self.field(index)
        at += _U32(self.data, at)[0] if at else 0
        if not at or _U32(self.data, at)[0] * 16 != form.size:
            raise struct.error("another count")
        return form.unpack_from(self.data, at + 4)


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    table: _Table
    metadata: memoryview
    body_bytes: int


def read_ipc(raw: bytes, rows: int, limits: Limits) -> pa.RecordBatch:
    """The record batch of an Arrow body, of the schema of the wire, without nulls, validated.

    Parameters
    ----------
    rows
        How many there must be.

    Raises
    ------
    WireError
        It is malformed, or has other columns or more rows.
    """
    try:
        _check_messages(raw, rows, limits)
        with pa.ipc.open_stream(pa.py_buffer(raw)) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)
    except (struct.error, pa.ArrowException, OSError) as error:
        raise _malformed() from error
    if batch.num_rows != rows or not batch.schema.equals(SCHEMA, check_metadata=True):
        raise _wrong_schema()
    return batch


def _check_messages(raw: bytes, rows: int, limits: Limits) -> None:
    messages = _messages(memoryview(raw))
    if [message.kind for message in messages] != [_SCHEMA, _DICTIONARY, _RECORDS]:
        raise _malformed()
    schema, labels, records = messages
    _check_schema(bytes(schema.metadata))
    if labels.table.byte(2):
        raise _malformed()
    _check_labels(labels.table.table(1), labels.body_bytes)
    _check_records(records.table, records.body_bytes, rows, limits)


def _messages(view: memoryview) -> list[_Message]:
    """The messages of a stream; never more than one too many."""
    found: list[_Message] = []
    at = 0
    while at < len(view) and len(found) <= _RECORDS:
        marker, size = _PREFIX(view, at)
        at += 8
        if marker != _CONTINUATION or size < 0:
            raise _malformed()
        if size == 0:
            if at != len(view):
                raise _malformed()
            break
        metadata = view[at : at + size]
        message = _message(metadata)
        at += size + message.body_bytes
        if message.body_bytes < 0 or at > len(view):
            raise _malformed()
        found.append(message)
    return found


def _message(metadata: memoryview) -> _Message:
    table = _Table(metadata, _U32(metadata, 0)[0])
    if table.field(4):
        # Custom metadata: nothing that is part of the protocol.
        raise _malformed()
    return _Message(table.byte(1), table.table(2), metadata, table.number(3))


def _check_schema(metadata: bytes) -> None:
    if metadata in _right_schemas:
        return
    framed = struct.pack("<Ii", _CONTINUATION, len(metadata)) + metadata
    schema = pa.ipc.read_schema(pa.py_buffer(framed))
    if not schema.equals(SCHEMA, check_metadata=True):
        raise _wrong_schema()
    if len(_right_schemas) < _MAX_RIGHT:
        _right_schemas.add(metadata)


def _check_records(table: _Table, body_bytes: int, rows: int, limits: Limits) -> None:
    claimed = table.number(0)
    if claimed > limits.events:
        raise WireError(
            Problem.TOO_MANY_EVENTS, f"expected at most {limits.events} events in a batch"
        )
    if claimed != rows:
        raise WireError(
            Problem.MALFORMED_BODY, f"expected the {rows} events of the header, found {claimed}"
        )
    if table.field(3):
        raise WireError(
            Problem.UNSUPPORTED_ENCODING, "expected no compression inside the Arrow stream"
        )
    nodes = table.numbers(1, _NODES)
    if any(length != rows for length in nodes[::2]) or any(nodes[1::2]):
        raise _wrong_schema()
    buffers = table.numbers(2, _BUFFERS)
    _check_buffers(buffers, body_bytes)
    for width, size in zip(_WIDTHS, buffers[3::4], strict=True):
        if size < width * rows:
            raise _malformed()


def _check_labels(table: _Table, body_bytes: int) -> None:
    """The dictionary of op types: short, without nulls or compression."""
    count = table.number(0)
    if not 0 <= count <= MAX_LABELS or table.field(3):
        raise _malformed()
    if table.numbers(1, _LABEL_NODE) != (count, 0):
        raise _malformed()
    buffers = table.numbers(2, _LABEL_BUFFERS)
    _check_buffers(buffers, body_bytes)
    if buffers[3] < (count + 1) * 4 and count:
        raise _malformed()


def _check_buffers(buffers: tuple[int, ...], body_bytes: int) -> None:
    for offset, size in zip(buffers[::2], buffers[1::2], strict=True):
        if offset < 0 or size < 0 or offset + size > body_bytes:
            raise _malformed()


def _malformed() -> WireError:
    return WireError(
        Problem.MALFORMED_BODY,
        "expected an Arrow stream of one schema, one dictionary, one record batch and the end",
    )


def _wrong_schema() -> WireError:
    return WireError(
        Problem.WRONG_SCHEMA,
        "expected exactly the columns and types of smon.ops/1, in their order, without nulls or "
        "metadata",
    )
