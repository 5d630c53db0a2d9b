"""What goes between a server and a process that decodes: bodies to it, contents back.

Flow: `smon.ingest.fence` → **here** → `smon.ingest.decoder` → **here** → `smon.ingest.fence`.
Bytes lie in the arena as they are, columns of ops one behind the other; the rest is JSON. What
comes back becomes Arrow arrays by address and length: no format is parsed a second time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Final

import orjson
import pyarrow as pa

from smon.errors import WireError
from smon.ingest.arena import Arena
from smon.ingest.decode import Content
from smon.ingest.documents import Evidence, Gap
from smon.ingest.plain import texts
from smon.ingest.values import COLUMN_OF_OPTYPE, Producer
from smon.topology import Layout
from smon.wire import BatchHead, BatchKind
from smon.wire.arrow import SCHEMA
from smon.wire.columns import COLUMNS, OPTYPE
from smon.wire.parts import FileFormat, FilePart

_TYPES: Final = tuple(
    pa.int8() if column.name == OPTYPE else SCHEMA.field(column.name).type for column in COLUMNS
)
_WIDTHS: Final = tuple(kind.bit_width // 8 for kind in _TYPES)
_LAYOUT: Final = tuple(each.name for each in fields(Layout))
_PART: Final = tuple(each.name for each in fields(FilePart) if each.name != "content")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A body to be decoded.

    Attributes
    ----------
    producer
        Who sent it; None: it was checked before, and comes from the log.
    """

    head: BatchHead
    body: bytes
    seq: int
    producer: Producer | None
    now_ns: int

    @property
    def digest(self) -> str:
        """Of the body."""
        return self.head.digest


def pack(parcel: Parcel, arena: Arena) -> list[Any]:
    """Put a parcel into the arena; what is to be said of it."""
    head, producer = parcel.head, parcel.producer
    at = arena.put(parcel.body, len(parcel.body))
    told = None
    if producer is not None:
        layout = [getattr(producer.layout, name) for name in _LAYOUT]
        told = [layout, producer.live_unix, producer.window_steps, producer.behind_s]
    form = [int(head.kind), head.content_type, head.encoding, head.events]
    return [at, len(parcel.body), parcel.seq, parcel.now_ns, form, told]


def unpack(said: list[Any], arena: Arena) -> Parcel:
    """The parcel of which this was said."""
    at, length, seq, now_ns, (kind, content_type, encoding, events), told = said
    head = BatchHead(
        kind=BatchKind(kind),
        content_type=content_type,
        encoding=encoding,
        length=length,
        digest="",
        events=events,
        steps_done=None,
        attempt=1,
        clock=None,
    )
    producer = None if told is None else _producer(tuple(told[0]), *told[1:])
    return Parcel(head, arena.take(at, length), seq, producer, now_ns)


@lru_cache(maxsize=256)
def _producer(
    sizes: tuple[int, ...],
    live_unix: bool,  # noqa: FBT001  # of JSON
    window_steps: int,
    behind_s: int,
) -> Producer:
    """Whose body it is: the same few again and again."""
    return Producer(Layout(*sizes), live_unix, window_steps, behind_s)


def refused(error: WireError) -> list[Any]:
    """What is said of a body that is refused."""
    return ["refused", str(error.problem), str(error)]


def answer(content: Content, arena: Arena) -> list[Any]:
    """Put a content into the arena; what is to be said of it.

    Raises
    ------
    ValueError
        It does not fit.
    """
    if content.ops is not None:
        return _answer_ops(content.ops, arena)
    if content.evidence is not None:
        found = content.evidence
        at = arena.put(found.document, len(found.document))
        return ["evidence", at, len(found.document), found.first_step, found.last_step]
    if content.gap is not None:
        return ["gap", asdict(content.gap)]
    if content.part is not None:
        at = arena.put(content.part.content, len(content.part.content))
        head = {name: getattr(content.part, name) for name in _PART}
        return ["part", at, len(content.part.content), head]
    return ["end", content.end_reason]


def _answer_ops(batch: pa.RecordBatch, arena: Arena) -> list[Any]:
    """Columns one behind the other; each begins where `_padded` says."""
    rows = batch.num_rows
    columns = batch.columns
    labels = columns[COLUMN_OF_OPTYPE].dictionary.to_pylist()
    columns[COLUMN_OF_OPTYPE] = columns[COLUMN_OF_OPTYPE].indices
    places = []
    for column, width in zip(columns if rows else (), _WIDTHS, strict=rows > 0):
        size = rows * width
        first = column.offset * width
        values = memoryview(column.buffers()[1])[first : first + size]
        places.append(arena.put(values, size))
    return ["ops", places[0] if places else 0, rows, labels]


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def content_of(said: list[Any], arena: Arena) -> Content:
    """The content of which this was said.

    Raises
    ------
    WireError
        The body was refused.
    """
    match said:
        case ["refused", problem, message]:
            raise WireError(problem, message)
        case ["ops", at, rows, labels]:
            return Content(ops=_ops(arena, at, rows, labels))
        case ["evidence", at, size, first, last]:
            return Content(evidence=Evidence(arena.take(at, size), first, last))
        case ["gap", values]:
            return Content(gap=Gap(**values))
        case ["part", at, size, head]:
            form = FileFormat(head.pop("format"))
            return Content(part=FilePart(**head, format=form, content=arena.take(at, size)))
        case ["end", reason]:
            return Content(end_reason=reason)
    raise ValueError("expected an answer of a decoder")


def _ops(arena: Arena, at: int, rows: int, labels: list[str]) -> pa.RecordBatch:
    sizes = [rows * width for width in _WIDTHS]
    raw = pa.py_buffer(arena.take(at, sum(map(_padded, sizes[:-1])) + sizes[-1]))
    arrays, start = [], 0
    for kind, size in zip(_TYPES, sizes, strict=True):
        arrays.append(pa.Array.from_buffers(kind, rows, [None, raw.slice(start, size)]))
        start += _padded(size)
    codes = arrays[COLUMN_OF_OPTYPE]
    arrays[COLUMN_OF_OPTYPE] = pa.DictionaryArray.from_arrays(codes, _texts(tuple(labels)))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@lru_cache(maxsize=64)
def _texts(labels: tuple[str, ...]) -> pa.Array:
    """Op types of a batch: those of a job are the same each time."""
    return texts(labels)


def encode(said: list[list[Any]]) -> bytes:
    """As it lies in the arena."""
    return orjson.dumps(said)


def parsed(data: bytes) -> list[list[Any]]:
    """What was encoded."""
    found: list[list[Any]] = orjson.loads(data)
    return found
