"""Batches before they have a place in a stream: ops, side evidence, losses, the end.

Flow: recorder or source → **here** → `ingest_agents.spool.writer`, which numbers them. Standard
library, and zstandard where it is installed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from smon.errors import WireError
from smon.wire import TYPE_JSON, Batch, BatchKind
from smon.wire.columns import COLUMNS, OPTYPE, TEXT_EXTRA, json_body
from smon.wire.frames import HEAD_BYTES, encode_frame
from smon.wire.problems import Problem

#: Number of a batch that has no place in a stream yet.
UNNUMBERED: Final = 0

#: Ops of one batch of JSON columns: about 50 kB once compressed, far below every limit.
MAX_ROWS: Final = 4096

#: A server refuses an op that is longer, and the whole batch with it.
MAX_DURATION_NS: Final = 3600 * 10**9

CONTEXT_SCHEMA: Final = "smon.context/1"

#: Servers refuse more than 20:1 above 64 KiB, as a bomb; bodies near that go as they are.
_MAX_RATIO: Final = 15
_SMALL_BYTES: Final = 64 << 10

_ZSTD_LEVEL: Final = 3

#: Flags of a frame have 16 bits.
MAX_FLAG: Final = 2**16 - 1

#: Names of jobs and hosts.
MAX_NAME: Final = 200


class OpRow(NamedTuple):
    """One op as it goes over the wire; fields as in `smon.wire.columns.COLUMNS`."""

    step: int
    dp: int
    stage: int
    rank: int
    optype: str
    start_ns: int
    duration_ns: int
    seq: int
    chunk: int = -1
    global_chunk: int = -1
    microbatch: int = -1


@dataclass(frozen=True, slots=True)
class Gap:
    """What a GAP batch says: these numbers of the stream are lost, or stand for lost events.

    Attributes
    ----------
    events
        Events that are lost; 0 where nobody can know.
    reason
        A word, e.g. ``spool-full``.
    first_step, last_step
        Steps that lack them, if known.
    """

    first_seq: int
    last_seq: int
    events: int
    reason: str
    first_step: int | None = None
    last_step: int | None = None

    def batch(self) -> Batch:
        """The batch that says so."""
        document = {
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "events": self.events,
            "reason": self.reason,
            "first_step": self.first_step,
            "last_step": self.last_step,
        }
        return Batch(
            seq=self.first_seq,
            kind=BatchKind.GAP,
            content_type=TYPE_JSON,
            encoding="identity",
            events=self.events,
            body=_json(document),
            first_step=self.first_step,
            last_step=self.last_step,
        )

    def shifted(self, by: int) -> Gap:
        """The same in another numbering."""
        return replace(self, first_seq=self.first_seq + by, last_seq=self.last_seq + by)

    def after(self, seq: int) -> Gap:
        """What it says of the numbers from `seq` on; how many events these had nobody knows."""
        return self if seq <= self.first_seq else replace(self, first_seq=seq, events=0)

    def meets(self, other: Gap) -> bool:
        """Whether the other begins where this one ends, for the same reason."""
        return self.last_seq + 1 == other.first_seq and self.reason == other.reason

    def joined(self, other: Gap) -> Gap:
        """Both in one; `other` begins where this one ends."""
        return replace(
            self,
            last_seq=other.last_seq,
            events=self.events + other.events,
            first_step=_extreme(min, self.first_step, other.first_step),
            last_step=_extreme(max, self.last_step, other.last_step),
        )


def _extreme(choose: Any, one: int | None, other: int | None) -> int | None:  # noqa: ANN401  # min or max
    known = [step for step in (one, other) if step is not None]
    return choose(known) if known else None


def gap_of(batch: Batch) -> Gap:
    """What a GAP batch says.

    Raises
    ------
    WireError
        It is not well formed.
    """
    try:
        document = json.loads(batch.body)
        first, last = int(document["first_seq"]), int(document["last_seq"])
        events, reason = int(document["events"]), str(document["reason"])
        steps = document.get("first_step"), document.get("last_step")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a GAP with its numbers") from error
    if not 0 <= first <= last:
        raise WireError(Problem.MALFORMED_BODY, f"expected first ≤ last, found {first}, {last}")
    return Gap(first, last, events, reason, *steps)


def last_seq(batch: Batch) -> int:
    """Last number that a batch takes: its own, but for a GAP.

    Raises
    ------
    WireError
        It is a GAP that is not well formed.
    """
    return gap_of(batch).last_seq if batch.kind is BatchKind.GAP else batch.seq


def frame_of(batch: Batch) -> bytes:
    """The frame of a batch in the spool; its flags repeat the number of events.

    So a reader knows what a damaged record held, if both are still the same.
    """
    body = batch.to_frame()[HEAD_BYTES:]
    return encode_frame(batch.seq, int(batch.kind), body, flags=min(batch.events, MAX_FLAG))


def ops_batch(rows: Sequence[OpRow], *, steps_done: int | None = None) -> Batch:
    """Ops as JSON columns; columns that only have their default are left out.

    Parameters
    ----------
    rows
        At least one.
    steps_done
        See `smon.wire.Batch`.
    """
    columns: dict[str, Sequence[Any]] = {}
    for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        if column.default is None or any(value != column.default for value in values):
            columns[column.name] = values
    steps = columns["step"]
    return _batch(
        BatchKind.OPS,
        json_body(columns),
        events=len(rows),
        steps=(min(steps), max(steps)),
        steps_done=steps_done,
    )


def context_batch(
    document: Mapping[str, Any], *, rows: int, steps_done: int | None = None
) -> Batch:
    """Side evidence; ``schema`` is added to the document."""
    steps = [step for step in _steps_of(document) if isinstance(step, int)]
    return _batch(
        BatchKind.CONTEXT,
        _json({"schema": CONTEXT_SCHEMA, **document}),
        events=rows,
        steps=(min(steps), max(steps)) if steps else (None, None),
        steps_done=steps_done,
    )


def _steps_of(document: Mapping[str, Any]) -> Iterable[object]:
    for part in document.values():
        if isinstance(part, Mapping) and isinstance(part.get("step"), list | tuple):
            yield from part["step"]


def end_batch(reason: str) -> Batch:
    """The last batch of a stream."""
    return Batch(
        seq=UNNUMBERED,
        kind=BatchKind.END,
        content_type=TYPE_JSON,
        encoding="identity",
        events=0,
        body=_json({"reason": reason}),
    )


def _batch(
    kind: BatchKind,
    raw: bytes,
    *,
    events: int,
    steps: tuple[int | None, int | None],
    steps_done: int | None,
) -> Batch:
    encoding, body = encode(raw)
    first, last = steps
    return Batch(
        seq=UNNUMBERED,
        kind=kind,
        content_type=TYPE_JSON,
        encoding=encoding,
        events=events,
        body=body,
        steps_done=steps_done,
        first_step=first,
        last_step=last,
    )


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


# --- encodings --------------------------------------------------------------------------------


def encode(raw: bytes) -> tuple[str, bytes]:
    """(encoding, body) of a decoded body: zstd, else gzip; not at all if it shrinks too well."""
    encoding, body = _compressed(raw)
    if len(raw) > _SMALL_BYTES and len(raw) > _MAX_RATIO * len(body):
        return "identity", raw
    return encoding, body


def _compressed(raw: bytes) -> tuple[str, bytes]:
    try:
        import zstandard
    except ImportError:
        # mtime: the same bytes give the same body at any time.
        return "gzip", gzip.compress(raw, compresslevel=6, mtime=0)
    return "zstd", zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)


def decode(batch: Batch) -> bytes:
    """The decoded body of a batch of this host.

    Raises
    ------
    WireError
        It is not what its encoding says, or zstandard is not installed.
    """
    try:
        if batch.encoding == "gzip":
            return gzip.decompress(batch.body)
        if batch.encoding == "zstd":
            import zstandard

            return bytes(zstandard.ZstdDecompressor().decompress(batch.body))
    # zstandard's error is no subclass of these; its base is Exception.
    except Exception as error:
        raise WireError(
            Problem.MALFORMED_BODY, f"expected a body in {batch.encoding}, found none"
        ) from error
    return batch.body


def recoded(batch: Batch) -> Batch | None:
    """The batch in the next simpler encoding, for a server that does not take this one.

    Returns
    -------
    Batch | None
        gzip for zstd, identity for gzip; None if there is nothing simpler.
    """
    if batch.encoding == "identity":
        return None
    try:
        raw = decode(batch)
    except WireError:
        return None
    if batch.encoding == "gzip":
        return replace(batch, encoding="identity", body=raw)
    return replace(batch, encoding="gzip", body=gzip.compress(raw, compresslevel=6, mtime=0))


def parts_of(batch: Batch, parts: int) -> list[Batch] | None:
    """A batch of ops cut into so many of about equal length, for a server with lower limits.

    The same batch always gives the same parts. Only the last one says which steps are done.

    Returns
    -------
    list[Batch] | None
        None if it cannot be cut: no ops as JSON columns, or fewer events than parts.
    """
    if batch.kind is not BatchKind.OPS or batch.content_type != TYPE_JSON or batch.events < parts:
        return None
    try:
        columns = json.loads(decode(batch))["columns"]
        rows = len(columns["step"])
    except (WireError, ValueError, KeyError, TypeError):
        return None
    edges = [rows * part // parts for part in range(parts + 1)]
    pieces = []
    for begin, end in pairwise(edges):
        piece = {name: values[begin:end] for name, values in columns.items()}
        steps = (min(piece["step"]), max(piece["step"]))
        done = batch.steps_done if end == rows else None
        pieces.append(
            _batch(
                BatchKind.OPS,
                json_body(piece),
                events=end - begin,
                steps=steps,
                steps_done=done,
            )
        )
    return pieces


# --- what a server takes ------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text as every server takes it: other characters become ``-``, and the rest is cut off."""
    kept = (c if c.isascii() and (c.isalnum() or c in TEXT_EXTRA) else "-" for c in text.strip())
    return "".join(kept)[:MAX_NAME]


def fault_of(row: OpRow, op_types: Mapping[str, object]) -> str | None:
    """Why a server would refuse this op, as a word; None if it would not."""
    if row.optype not in op_types:
        return "unknown-op-type"
    if not 0 <= row.duration_ns <= MAX_DURATION_NS:
        return "duration-out-of-range"
    for column, value in zip(COLUMNS, row, strict=True):
        if column.name == OPTYPE:
            continue
        low = 0 if column.default is None else column.default
        if type(value) is not int or not low <= value <= _HIGHEST[column.type]:
            return "number-out-of-range"
    return None


_HIGHEST: Final = {"int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**62}
