"""Records of the write-ahead log: what stands before a batch's body, and where it lies.

Flow: `smon.ingest.service` → **here** → `smon.ingest.wal` → `smon.ingest.drain`. A record has all
that is needed to store the batch: after a crash no database has to be asked what it belongs to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from smon.errors import SMonError, WireError
from smon.ingest.decode import Content
from smon.store.commit import Key
from smon.wire import BatchHead, BatchKind
from smon.wire.problems import Problem

_HEAD: Final = struct.Struct("<I")

#: Bytes of a record besides the body: ids, digest, a few numbers, with room.
HEAD_ROOM: Final = 4096


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose batch it is; as `smon.store.streams.StreamInfo`.

    Attributes
    ----------
    step_relative
        Whether op times count from the start of their step.
    """

    tenant_id: str
    job_id: str
    attempt_id: str
    stream_id: str
    window_steps: int
    step_relative: bool


@dataclass(frozen=True, slots=True)
class RecordHead:
    """All of a batch but its body.

    Attributes
    ----------
    first_seq, last_seq
        Sequence numbers that it covers: more than one only for a gap.
    received_ns
        When it was accepted, unix time.
    """

    origin: Origin
    epoch: int
    first_seq: int
    last_seq: int
    received_ns: int
    batch: BatchHead

    @property
    def key(self) -> Key:
        """(stream, epoch, seq)."""
        return self.origin.stream_id, self.epoch, self.first_seq

    @property
    def known_digest(self) -> str:
        """Digest that a resend must have; empty for a gap, whose numbers may be known in part."""
        return "" if self.batch.kind is BatchKind.GAP else self.batch.digest

    def encode(self, body: bytes) -> bytes:
        """The body of the frame."""
        origin, batch = self.origin, self.batch
        head = orjson.dumps(
            {
                "tenant": origin.tenant_id,
                "job": origin.job_id,
                "attempt": origin.attempt_id,
                "stream": origin.stream_id,
                "window_steps": origin.window_steps,
                "step_relative": origin.step_relative,
                "epoch": self.epoch,
                "seq": self.first_seq,
                "last_seq": self.last_seq,
                "received_ns": self.received_ns,
                "kind": int(batch.kind),
                "type": batch.content_type,
                "encoding": batch.encoding,
                "length": batch.length,
                "digest": batch.digest,
                "events": batch.events,
                "steps_done": batch.steps_done,
                "tries": batch.attempt,
                "clock": batch.clock,
            }
        )
        return b"".join((_HEAD.pack(len(head)), head, body))


def decode_record(data: bytes) -> tuple[RecordHead, bytes]:
    """Head and body of what `RecordHead.encode` made.

    Raises
    ------
    WireError
        The frame is sound, but holds no record.
    """
    try:
        (length,) = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        return _head_of(orjson.loads(data[_HEAD.size : end])), data[end:]
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a record of the log") from error


def _head_of(parsed: dict[str, Any]) -> RecordHead:
    clock = parsed["clock"]
    return RecordHead(
        origin=Origin(
            tenant_id=parsed["tenant"],
            job_id=parsed["job"],
            attempt_id=parsed["attempt"],
            stream_id=parsed["stream"],
            window_steps=parsed["window_steps"],
            step_relative=parsed["step_relative"],
        ),
        epoch=parsed["epoch"],
        first_seq=parsed["seq"],
        last_seq=parsed["last_seq"],
        received_ns=parsed["received_ns"],
        batch=BatchHead(
            kind=BatchKind(parsed["kind"]),
            content_type=parsed["type"],
            encoding=parsed["encoding"],
            length=parsed["length"],
            digest=parsed["digest"],
            events=parsed["events"],
            steps_done=parsed["steps_done"],
            attempt=parsed["tries"],
            clock=None if clock is None else (clock[0], clock[1]),
        ),
    )


#: Called once, with None when the record is durable, with the error when it is not there.
Settled = Callable[[SMonError | None], None]


@dataclass(slots=True, eq=False)
class Record:
    """A record on its way through the log.

    Attributes
    ----------
    number
        Place in the log, ascending over all segments.
    key
        (stream, epoch, seq).
    last_seq
        Last sequence number that it covers.
    events, received_ns
        As its head has them.
    digest
        `RecordHead.known_digest`.
    tenant_id, attempt_id
        Whose it is.
    windows
        First and last window of its ops, each of which becomes a file; (0, 0) where that is not
        known: of other kinds, and after a restart.
    segment, offset, size
        Where its frame lies; known once it is durable.
    head, content
        What was decoded when it came, so that it need not be decoded again; None where memory is
        short, or after a restart.
    """

    number: int
    key: Key
    last_seq: int
    events: int
    received_ns: int
    digest: str
    tenant_id: str = ""
    attempt_id: str = ""
    windows: tuple[int, int] = (0, 0)
    settled: Settled | None = None
    frame: bytes = b""
    segment: int = -1
    offset: int = 0
    size: int = 0
    head: RecordHead | None = None
    content: Content | None = None
