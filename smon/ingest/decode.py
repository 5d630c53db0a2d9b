"""From the body of a batch to what is in it, or to the reason why it is refused.

Flow: `smon.api.ingest` → `smon.ingest.service` → **here** → `smon.ingest.wal`; and from the log
again, before it becomes files: `smon.ingest.drain`. The digest comes first: a body that is not
what its sender made is not even decompressed.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from smon.errors import WireError
from smon.ingest.columns import read_columns
from smon.ingest.documents import Evidence, Gap, read_end, read_evidence, read_gap
from smon.ingest.encodings import decompress
from smon.ingest.ipc import read_ipc
from smon.ingest.limits import Limits
from smon.ingest.values import Producer, check_values
from smon.wire import EVENTS_HEADER, TYPE_ARROW, BatchHead, BatchKind
from smon.wire.parts import MAX_BODY_BYTES, FilePart, decode_part
from smon.wire.problems import Problem

#: A row of ops, in Arrow's columns; what a batch takes besides.
_ROW_BYTES: Final = 50
_OVERHEAD_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a batch; one of these, by its kind.

    Attributes
    ----------
    ops
        Record batch of `smon.wire.arrow.SCHEMA`.
    end_reason
        Why the stream ended.
    part
        Of a file of a rank.
    """

    ops: pa.RecordBatch | None = None
    evidence: Evidence | None = None
    gap: Gap | None = None
    end_reason: str | None = None
    part: FilePart | None = None

    @property
    def memory_bytes(self) -> int:
        """About what it takes in memory."""
        rows = 0 if self.ops is None else self.ops.num_rows
        document = 0 if self.evidence is None else len(self.evidence.document)
        content = 0 if self.part is None else len(self.part.content)
        return _OVERHEAD_BYTES + _ROW_BYTES * rows + document + content


def check_digest(head: BatchHead, body: bytes) -> None:
    """Let the body pass if it is what its head says.

    Raises
    ------
    WireError
        Length or digest are others.
    """
    if len(body) != head.length:
        raise WireError(
            Problem.BAD_REQUEST, f"expected a body of {head.length} bytes, found {len(body)}"
        )
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), head.digest):
        raise WireError(
            Problem.DIGEST_MISMATCH,
            "expected the SHA-256 of the body in Content-Digest, found another: the body was "
            "changed on its way",
        )


def decode(head: BatchHead, body: bytes, seq: int, limits: Limits) -> Content:
    """What is in a body whose digest is right; its structure is checked, ranges of ops are not.

    Raises
    ------
    WireError
        It is too large, malformed, or not of the schema.
    """
    if head.kind is BatchKind.FILE:
        return Content(part=_part(head, body, limits))
    raw = decompress(body, head.encoding, limits)
    if head.kind is BatchKind.OPS:
        if head.content_type == TYPE_ARROW:
            return Content(ops=read_ipc(raw, head.events, limits))
        return Content(ops=read_columns(raw, head.events, limits))
    if head.kind is BatchKind.CONTEXT:
        return Content(evidence=read_evidence(raw))
    if head.kind is BatchKind.GAP:
        return Content(gap=read_gap(raw, seq, head.events))
    return Content(end_reason=read_end(raw))


def _part(head: BatchHead, body: bytes, limits: Limits) -> FilePart:
    if head.events != 1:
        raise WireError(Problem.WRONG_VALUES, f"expected {EVENTS_HEADER} to be 1: one part")
    small = replace(limits, decoded=min(limits.decoded, MAX_BODY_BYTES))
    return decode_part(decompress(body, head.encoding, small))


def check(content: Content, producer: Producer, limits: Limits, now_ns: int) -> None:
    """Let the ops of a batch pass if all of their values are inside their ranges.

    Raises
    ------
    WireError
        One is not.
    """
    if content.ops is not None:
        check_values(content.ops, producer, limits, now_ns)
