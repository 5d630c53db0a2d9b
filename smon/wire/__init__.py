"""The protocol between agent and server, version 1: names, batches, headers.

Flow: recorder or file source → **here** → spool → HTTP → **here** → the server's log and store.
Standard library only: this runs inside the trainer. ``docs/reference/protocol.md`` describes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from smon.errors import WireError
from smon.wire.frames import encode_frame
from smon.wire.problems import Problem

PROTOCOL: Final = 1
API: Final = "/api/v1"

TYPE_ARROW: Final = "application/vnd.apache.arrow.stream"
TYPE_JSON: Final = "application/json"
TYPE_FILE: Final = "application/vnd.smon.file"

ENCODINGS: Final = ("zstd", "gzip", "identity")

#: What streams say as their source that only bring counters: no step waits for them.
COUNTERS_SOURCE: Final = "counters"

SCHEMA_HEADER: Final = "SMon-Schema"
EVENTS_HEADER: Final = "SMon-Events"
STEPS_DONE_HEADER: Final = "SMon-Steps-Done"
CLOCK_OFFSET_HEADER: Final = "SMon-Clock-Offset-Ns"
CLOCK_ERROR_HEADER: Final = "SMon-Clock-Error-Ns"
ATTEMPT_HEADER: Final = "SMon-Attempt"
DIGEST_HEADER: Final = "Content-Digest"

#: Largest number that a header may hold.
_MAX_INT: Final = 2**63 - 1
_MAX_DIGITS: Final = 19


class BatchKind(IntEnum):
    """What a batch holds; the number is the type of its frame."""

    OPS = 1
    CONTEXT = 2
    GAP = 3
    END = 4
    FILE = 5

    @property
    def schema(self) -> str:
        """Schema id of the body, e.g. ``smon.ops/1``."""
        return f"smon.{self.name.lower()}/1"


KIND_BY_SCHEMA: Final = {kind.schema: kind for kind in BatchKind}

#: Content types of the kinds that are not JSON alone.
_TYPES: Final = {BatchKind.OPS: (TYPE_ARROW, TYPE_JSON), BatchKind.FILE: (TYPE_FILE,)}


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as its producer made it; a resend is the same, byte for byte.

    Attributes
    ----------
    seq
        Place in the stream, from 0 without gaps.
    content_type, encoding
        Of `body`: ``application/vnd.apache.arrow.stream``, ``application/json`` or
        ``application/vnd.smon.file``; ``zstd``, ``gzip`` or ``identity``.
    events
        Ops, or rows of side evidence; for a GAP, the events that are lost; for a FILE, 1.
    steps_done
        All ops of this step and of earlier ones are in this batch or in earlier ones; None if that
        is not known.
    first_step, last_step
        Steps that occur in it; None for a batch of no step.
    body
        Encoded.
    """

    seq: int
    kind: BatchKind
    content_type: str
    encoding: str
    events: int
    body: bytes
    steps_done: int | None = None
    first_step: int | None = None
    last_step: int | None = None

    def digest(self) -> str:
        """SHA-256 of the body, hexadecimal."""
        return hashlib.sha256(self.body).hexdigest()

    def headers(self, *, attempt: int = 1, clock: tuple[int, int] | None = None) -> dict[str, str]:
        """Headers of the request that carries it.

        Parameters
        ----------
        attempt
            How often it has been sent, this time included.
        clock
            (offset to the server's clock, its error), ns.
        """
        digest = base64.b64encode(hashlib.sha256(self.body).digest()).decode()
        headers = {
            "Content-Type": self.content_type,
            "Content-Encoding": self.encoding,
            "Content-Length": str(len(self.body)),
            DIGEST_HEADER: f"sha-256=:{digest}:",
            SCHEMA_HEADER: self.kind.schema,
            EVENTS_HEADER: str(self.events),
            ATTEMPT_HEADER: str(attempt),
        }
        if self.steps_done is not None:
            headers[STEPS_DONE_HEADER] = str(self.steps_done)
        if clock is not None:
            headers[CLOCK_OFFSET_HEADER], headers[CLOCK_ERROR_HEADER] = map(str, clock)
        return headers

    def to_frame(self) -> bytes:
        """The frame that holds it in a segment file."""
        head = json.dumps(
            [
                self.content_type,
                self.encoding,
                self.events,
                self.steps_done,
                self.first_step,
                self.last_step,
            ],
            separators=(",", ":"),
        ).encode()
        return encode_frame(self.seq, int(self.kind), _HEAD.pack(len(head)) + head + self.body)


_HEAD: Final = struct.Struct("<H")


def batch_of_frame(seq: int, type_: int, body: bytes) -> Batch:
    """The batch of a frame (`smon.wire.frames.Frame`).

    Raises
    ------
    WireError
        The frame is sound, but holds no batch.
    """
    try:
        (length,) = _HEAD.unpack_from(body)
        head = json.loads(body[_HEAD.size : _HEAD.size + length])
        content_type, encoding, events, steps_done, first_step, last_step = head
        return Batch(
            seq=seq,
            kind=BatchKind(type_),
            content_type=content_type,
            encoding=encoding,
            events=events,
            body=body[_HEAD.size + length :],
            steps_done=steps_done,
            first_step=first_step,
            last_step=last_step,
        )
    except (struct.error, ValueError, TypeError) as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a frame that holds a batch") from error


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What the headers of an ingest request say; see `Batch`."""

    kind: BatchKind
    content_type: str
    encoding: str
    length: int
    digest: str
    events: int
    steps_done: int | None
    attempt: int
    clock: tuple[int, int] | None


def parse_headers(headers: Mapping[str, str]) -> BatchHead:
    """Read the headers of an ingest request; their names are lower case.

    Raises
    ------
    WireError
        One is missing or malformed.
    """
    kind = KIND_BY_SCHEMA.get(headers.get(SCHEMA_HEADER.lower(), ""))
    if kind is None:
        known = ", ".join(KIND_BY_SCHEMA)
        raise WireError(Problem.WRONG_SCHEMA, f"expected {SCHEMA_HEADER} to be one of {known}")
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise WireError(
            Problem.LENGTH_REQUIRED, "expected Content-Length, and no Transfer-Encoding"
        )
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = _TYPES.get(kind, (TYPE_JSON,))
    if content_type not in allowed:
        raise WireError(
            Problem.UNSUPPORTED_TYPE, f"expected Content-Type to be {' or '.join(allowed)}"
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise WireError(
            Problem.UNSUPPORTED_ENCODING,
            f"expected one Content-Encoding of {', '.join(ENCODINGS)}",
        )
    offset = _number(headers, CLOCK_OFFSET_HEADER, signed=True)
    error = _number(headers, CLOCK_ERROR_HEADER)
    return BatchHead(
        kind=kind,
        content_type=content_type,
        encoding=encoding,
        length=_number(headers, "Content-Length") or 0,
        digest=_digest(headers.get(DIGEST_HEADER.lower(), "")),
        events=_required(headers, EVENTS_HEADER),
        steps_done=_number(headers, STEPS_DONE_HEADER),
        attempt=_number(headers, ATTEMPT_HEADER) or 1,
        clock=None if offset is None or error is None else (offset, error),
    )


def _required(headers: Mapping[str, str], name: str) -> int:
    number = _number(headers, name)
    if number is None:
        raise WireError(Problem.BAD_REQUEST, f"expected the header {name}")
    return number


def _number(headers: Mapping[str, str], name: str, *, signed: bool = False) -> int | None:
    text = headers.get(name.lower())
    if text is None:
        return None
    digits = text[1:] if signed and text.startswith("-") else text
    whole = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    if not whole or abs(int(text)) > _MAX_INT:
        raise WireError(Problem.BAD_REQUEST, f"expected a whole number in the header {name}")
    return int(text)


def _digest(text: str) -> str:
    """Hexadecimal SHA-256 of a Content-Digest (RFC 9530); other algorithms are passed over."""
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "sha-256" and value.startswith(":") and value.endswith(":"):
            try:
                raw = base64.b64decode(value[1:-1], validate=True)
            except ValueError:
                break
            if len(raw) == hashlib.sha256().digest_size:
                return raw.hex()
    raise WireError(
        Problem.DIGEST_MISMATCH, f"expected {DIGEST_HEADER}: sha-256=:BASE64: (RFC 9530)"
    )
