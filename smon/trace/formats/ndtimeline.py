"""ndtimeline: JSON records of veScale's profiler, one per metric and step (``docs/formats.md``).

A record has parallel arrays: ``start_ts`` (unix s) and ``duration`` (s). Records come as a JSON
array or as JSON lines, plain or gzipped; what is cut off, glued or malformed is counted. Unix
seconds in float64 come in steps of 238 ns: that is the resolution.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.ops import BY_LABEL, OpType
from smon.trace.formats.reading import (
    GZIP_MAGIC,
    Reading,
    inflated,
    numbered,
    printable,
    reading_from,
)
from smon.trace.table import make_table, seconds_to_ns

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

NAME: Final = "ndtimeline"
LOOKS_FOR: Final = 'JSON records with "metric", "step", "stage", "dp_rank", "start_ts", "duration"'
SELF_DESCRIBED: Final = True

#: Longest JSON line, and largest JSON array, that is read. A record has a few kilobytes; a gzip
#: of zeros would otherwise unpack to a thousand times its size.
MAX_LINE_BYTES: Final = 1 << 26
MAX_DOCUMENT_BYTES: Final = 1 << 30

#: So many failures end the reading of a line or array: each costs a count of the lines before it.
MAX_FAILURES: Final = 1000

_BUFFER_BYTES: Final = 1 << 20

#: White space, and the mark that some editors put at the start of UTF-8.
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"

#: Bytes of the unpacked head that are searched for the keys of a record.
_SEARCHED_BYTES: Final = 1 << 16

_SEND_RECV: Final = {
    "forward-send-backward-recv": (OpType.FORWARD_SEND, OpType.BACKWARD_RECV),
    "backward-send-forward-recv": (OpType.BACKWARD_SEND, OpType.FORWARD_RECV),
}

#: Op types by metric. A combined send and receive is two ops with the same times.
METRICS: Final[Mapping[str, tuple[OpType, ...]]] = {
    **{label: (op,) for label, op in BY_LABEL.items()},
    "grad-reduce-scatter": (OpType.GRADS_REDUCE_SCATTER,),
    "unshard-all-gather": (OpType.PARAMS_ALL_GATHER,),
    **_SEND_RECV,
}

_DERIVED: Final = frozenset({"seq", "microbatch"})

_INT32: Final = 2**31 - 1
_INT64: Final = 2**63 - 1
_INT16: Final = 2**15 - 1


@dataclass(frozen=True, slots=True)
class _Record:
    """A record that can be used: coordinates, and arrays of equal length, one op each."""

    step: int
    dp: int
    stage: int
    tp: int
    rank: int
    codes: tuple[int, ...]
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    chunk: NDArray[np.int16]
    combined: bool
    job_id: str | None


@dataclass(slots=True)
class _Records:
    """Usable records, and how many others there were, by reason."""

    usable: list[_Record] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


class _MalformedError(Exception):
    """Why a record cannot be used."""


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins with ndtimeline records."""
    text = inflated(head, _SEARCHED_BYTES)
    return b"\0" not in text and b'"metric"' in text and b'"start_ts"' in text


def read(path: Path) -> Reading:
    """Read a file of ndtimeline records.

    Raises
    ------
    TraceError
        The file cannot be read, or holds no usable record.
    """
    records = _Records()
    with reading_from(path):
        for value in _values(path, records.dropped):
            _add(value, records)
    name = printable(path)
    if not records.usable:
        raise TraceError(_nothing(name, records.dropped))
    table = make_table(_columns(records.usable), dropped=records.dropped)
    if not len(table):
        raise TraceError(_nothing(name, Counter(dict(table.dropped))))
    return Reading(
        numbered(table, _DERIVED),
        tp=1 + max(record.tp for record in records.usable),
        job_id=_job_id(records.usable, name),
        unnumbered=_DERIVED,
        notes=tuple(_notes(records, name)),
    )


def _nothing(name: str, dropped: Mapping[str, int]) -> str:
    found = ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
    return f"{name}: no usable ndtimeline record: looked for {LOOKS_FOR}; found {found or 'none'}"


def _notes(records: _Records, name: str) -> Iterator[str]:
    if any(record.combined for record in records.usable):
        yield (
            f"{name}: combined send-recv records became two ops with the same times: "
            "their durations include waiting for both peers"
        )


def _job_id(records: Sequence[_Record], name: str) -> str | None:
    names = sorted({record.job_id for record in records if record.job_id is not None})
    if len(names) > 1:
        shown = ", ".join(repr(trial) for trial in names[:3])
        raise TraceError(f"{name}: expected one job, found {len(names)} trials: {shown}")
    return names[0] if names else None


# --- bytes to JSON values -------------------------------------------------------------------


def _values(path: Path, dropped: Counter[str]) -> Iterator[object]:
    """The JSON objects of a file. What is not JSON is added to `dropped`."""
    with path.open("rb") as raw:
        unpacked = _Unpacked(raw)
        lines = _lines(io.BufferedReader(unpacked, _BUFFER_BYTES))
        first = next(lines, b"")
        if _opens_document(first):
            yield from _scan(_document(first, lines, path), dropped)
        else:
            for line in itertools.chain((first,), lines):
                if b"{" not in line:
                    dropped["line that holds no record"] += 1
                yield from _scan(line.decode("utf-8", "replace"), dropped)
    if unpacked.cut_off:
        dropped["end of a damaged gzip"] += 1


class _Unpacked(io.RawIOBase):
    """Bytes of a file that may be gzipped; ends where a gzip is cut off or damaged."""

    def __init__(self, raw: io.BufferedReader) -> None:
        packed = raw.peek(2)[:2] == GZIP_MAGIC
        self._file = gzip.GzipFile(fileobj=raw) if packed else raw
        self.cut_off = False

    def readable(self) -> bool:
        """Required by `io.BufferedReader`."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer` with what there is; 0 at the end."""
        view = memoryview(buffer)
        try:
            data = self._file.read1(len(view))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.cut_off = True
            return 0
        view[: len(data)] = data
        return len(data)


def _lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Lines that hold anything; one over `MAX_LINE_BYTES` comes in pieces."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.strip(_BLANK):
            yield line


def _opens_document(line: bytes) -> bool:
    """Whether a first line begins a JSON array, or an object that goes on in the next lines."""
    beginning = line.lstrip(_BLANK)[:1]
    return beginning == b"[" or (
        beginning == b"{" and not _scan(line.decode("utf-8", "replace"), Counter())
    )


def _document(first: bytes, lines: Iterator[bytes], path: Path) -> str:
    """The text of the whole file."""
    parts, size = [first], len(first)
    for line in lines:
        parts.append(line)
        size += len(line)
        if size > MAX_DOCUMENT_BYTES:
            raise TraceError(
                f"{printable(path)}: a JSON array of more than {MAX_DOCUMENT_BYTES >> 20} MiB: "
                "write the records as JSON lines"
            )
    return b"".join(parts).decode("utf-8", "replace")


def _scan(text: str, dropped: Counter[str]) -> list[object]:
    """JSON objects in `text`, whatever stands between them: commas, brackets, nothing."""
    decoder = json.JSONDecoder()
    values: list[object] = []
    failures = 0
    at = text.find("{")
    while at >= 0 and failures < MAX_FAILURES:
        try:
            value, end = decoder.raw_decode(text, at)
            values.append(value)
            at = text.find("{", end)
        # ValueError: also numbers of thousands of digits. RecursionError: nested a thousand deep.
        except (ValueError, RecursionError) as error:
            dropped["record that is not JSON, or is cut off"] += 1
            failures += 1
            at = _after(error, text, at)
    if at >= 0:
        dropped[f"rest of a line or array after {MAX_FAILURES} records that are not JSON"] += 1
    return values


def _after(error: Exception, text: str, at: int) -> int:
    """Where to go on after a failure at `at`: the next place where an object may begin; or -1."""
    if not isinstance(error, json.JSONDecodeError):
        line = text.find("\n", at)
        return -1 if line < 0 else text.find("{", line)
    # A record cut off in a string swallows the brace of the one glued to it.
    glued = text.rfind("{", at + 1, error.pos)
    return glued if glued >= 0 else text.find("{", max(error.pos, at + 1))


# --- JSON values to records -----------------------------------------------------------------


def _add(value: object, records: _Records) -> None:
    try:
        records.usable.append(_record(value))
    except _MalformedError as error:
        records.dropped[f"record {error}"] += 1


def _record(value: object) -> _Record:
    if not isinstance(value, dict):
        raise _MalformedError("that is no object")
    metric = value.get("metric")
    if not isinstance(metric, str):
        raise _MalformedError("without metric")
    start, duration, chunk = _arrays(value)
    trial = value.get("trial")
    return _Record(
        step=_step(value),
        dp=_number(value, "dp_rank", None, _INT32),
        stage=_number(value, "stage", None, _INT32),
        tp=_number(value, "tp_rank", 0, _INT32),
        rank=_number(value, "rank", -1, _INT32),
        codes=METRICS.get(metric, (-1,)),
        start_s=start,
        duration_s=duration,
        chunk=chunk,
        combined=metric in _SEND_RECV,
        job_id=printable(trial) if isinstance(trial, str | int) and trial != "" else None,
    )


def _number(record: Mapping[str, object], key: str, default: int | None, limit: int) -> int:
    """A whole number from 0 to `limit`; `default` where the key is absent or says "none"."""
    value = record.get(key)
    if value is None or value == "None":
        if default is None:
            raise _MalformedError(f"without {key}")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise _MalformedError(f"whose {key} is not a number from 0 to {limit}")
    return value


def _step(record: Mapping[str, object]) -> int:
    """``step``, or ``iteration`` where that is absent."""
    key = "step" if record.get("step") is not None else "iteration"
    return _number(record, key, None, _INT64)


def _arrays(
    record: Mapping[str, object],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int16]]:
    """Starts (s), durations (s) and model chunks, of equal length."""
    start = _floats(record.get("start_ts"), "start_ts")
    duration = _floats(record.get("duration"), "duration")
    if len(start) != len(duration):
        raise _MalformedError("whose start_ts and duration differ in length")
    return start, duration, _chunks(record.get("model_chunk"), len(start))


def _floats(value: object, key: str) -> NDArray[np.float64]:
    """Numbers of a list, or one number; NaN for what is none, such as ``"nan"`` or null."""
    if value is None:
        raise _MalformedError(f"without {key}")
    items = value if isinstance(value, list) else [value]
    if all(type(item) is float for item in items):
        return np.array(items, np.float64)
    return np.array([_float(item) for item in items], np.float64)


def _float(value: object) -> float:
    if not isinstance(value, str | int | float):
        return float("nan")
    try:
        return float(value)
    except (ValueError, OverflowError):
        return float("nan")


def _chunks(value: object, length: int) -> NDArray[np.int16]:
    """Model chunks, -1 where there is none; a single one holds for all ops of the record."""
    items = value if isinstance(value, list) else [value]
    chunks = [_chunk(item) for item in items]
    if len(chunks) == 1:
        return np.full(length, chunks[0], np.int16)
    if len(chunks) != length:
        raise _MalformedError("whose model_chunk and start_ts differ in length")
    return np.array(chunks, np.int16)


def _chunk(value: object) -> int:
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT16
    return int(value) if usable else -1  # type: ignore[call-overload]  # `usable` says it is int


def _columns(records: Sequence[_Record]) -> dict[str, NDArray[np.generic]]:
    """The op table's columns; a record gives one row per op type and array element."""
    rows = [(record, code) for record in records for code in record.codes]
    sizes = [len(record.start_s) for record, _ in rows]

    def each(values: Sequence[int]) -> NDArray[np.int64]:
        return np.repeat(np.array(values, np.int64), sizes)

    return {
        "step": each([record.step for record, _ in rows]),
        "dp": each([record.dp for record, _ in rows]),
        "stage": each([record.stage for record, _ in rows]),
        "rank": each([record.rank for record, _ in rows]),
        "optype": each([code for _, code in rows]),
        "start_ns": seconds_to_ns(np.concatenate([record.start_s for record, _ in rows])),
        "duration_ns": seconds_to_ns(np.concatenate([record.duration_s for record, _ in rows])),
        "seq": each([0] * len(rows)),
        "chunk": np.concatenate([record.chunk for record, _ in rows]),
    }
