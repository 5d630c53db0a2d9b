"""Sends damaged batches to a server and counts what it says: a process of its own, or a thread.

``python -m tests.proof.mutated PORT SEED COUNT STREAM...`` prints the counts as JSON. Requests are
written as bytes: what a client library costs would be most of what a million of them takes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from io import BytesIO
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ingest_agents.payload import ops_batch as json_ops
from smon.wire import DIGEST_HEADER, TYPE_ARROW, TYPE_FILE, TYPE_JSON, Batch, BatchKind
from smon.wire.arrow import encoded, ipc_body
from smon.wire.parts import FileFormat, FilePart, encode_part
from tests.agents.builders import rows
from tests.fuzz.mutants import mutant
from tests.ingest.batches import columns, record_batch

#: Of so many, one has a digest that does not fit, one a head that was damaged.
_WRONG_DIGEST: Final = 10
_BAD_HEAD: Final = 7

_ROWS: Final = 40
_TIMEOUT_S: Final = 60.0
_HEADS: Final = (
    "Content-Type", "Content-Encoding", "SMon-Schema", "SMon-Events", "SMon-Steps-Done",
    "SMon-Attempt", "SMon-Clock-Offset-Ns", DIGEST_HEADER,
)  # fmt: skip
_JUNK: Final = (
    "", "-1", "1e9", "9" * 400, "0x10", "NaN", "application/x-pickle", "br", "zstd, gzip",
    "smon.ops/2", "sha-256=:AAAA:", "md5=:AAAA:", "\u00e9", "a" * 9000, "../../etc/passwd",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What the server said to all of it, by status; and what it must never do.

    Attributes
    ----------
    kinds
        Bodies sent, by what they were before they were damaged.
    taken
        Bodies that were sound enough, with a digest that fits.
    wrong_digests_taken
        Bodies that were taken although their digest does not fit.
    cut
        Connections that ended without an answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    taken: int = 0
    wrong_digests_taken: int = 0
    cut: int = 0

    def add(self, other: Tally) -> None:
        """Count these too."""
        self.statuses.update(other.statuses)
        self.kinds.update(other.kinds)
        self.taken += other.taken
        self.wrong_digests_taken += other.wrong_digests_taken
        self.cut += other.cut

    def plain(self) -> dict[str, Any]:
        """As it is printed."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "statuses": dict(self.statuses), "kinds": dict(self.kinds)}

    @classmethod
    def of(cls, found: dict[str, Any]) -> Tally:
        """As it was printed."""
        statuses = {int(status): count for status, count in found.pop("statuses").items()}
        return cls(Counter(statuses), Counter(found.pop("kinds")), **found)


@dataclass(frozen=True, slots=True)
class _Sound:
    """A batch before it is damaged, and the headers of its request but the digest."""

    kind: str
    body: bytes
    headers: dict[str, str]


class _Wire:
    """One connection that speaks bytes; it is opened anew when it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> int:
        """The status of the answer; 0: there is none."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), _TIMEOUT_S)
            self._socket.sendall(request)
            status, keep = self._answer(self._socket)
        except (OSError, ValueError):
            status, keep = 0, False
        if not keep:
            self.close()
        return status

    def _answer(self, connection: socket.socket) -> tuple[int, bool]:
        """Status, and whether the connection may be used again."""
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more(connection)
        head = data[:end].lower()
        at = head.index(b"content-length:") + 15
        missing = int(head[at:].split(b"\r\n", 1)[0]) - (len(data) - end - 4)
        while missing > 0:
            missing -= len(self._more(connection))
        return int(head[9:12]), b"connection: close" not in head

    def _more(self, connection: socket.socket) -> bytes:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        return data

    def close(self) -> None:
        """End it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def send(port: int, seed: int, count: int, streams: Sequence[str]) -> Tally:
    """Send so many to each stream, all streams at the same time."""
    sound = list(_sounds())
    tallies = [Tally() for _ in streams]
    threads = [
        threading.Thread(
            target=_send_to, args=(port, stream, seed * len(streams) + place, count, sound, tally)
        )
        for place, (stream, tally) in enumerate(zip(streams, tallies, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in tallies[1:]:
        tallies[0].add(other)
    return tallies[0]


def _send_to(
    port: int, stream: str, seed: int, count: int, sounds: list[_Sound], tally: Tally
) -> None:
    chance = random.Random(seed)  # noqa: S311  # no secret
    wire, seq = _Wire(port), 0
    for index in range(count):
        sound = chance.choice(sounds)
        body = mutant(seed, index, sound.body)
        wrong = index % _WRONG_DIGEST == 0
        headers = {**sound.headers, DIGEST_HEADER: _digest(sound.body if wrong else body)}
        if not wrong and index % _BAD_HEAD == 0:
            headers[chance.choice(_HEADS)] = chance.choice(_JUNK)
        status = wire.ask(_request(stream, seq, headers, body))
        tally.kinds[sound.kind] += 1
        tally.cut += status == 0
        tally.statuses[status] += status > 0
        if status == 200:
            fits = _digest(body) == headers[DIGEST_HEADER]
            tally.taken += fits
            tally.wrong_digests_taken += not fits
            seq += 1
    wire.close()


def _digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def _request(stream: str, seq: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"PUT /api/v1/ingest/{stream}/0/{seq} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Length: {len(body)}\r\n{lines}\r\n"
    )
    return head.encode("latin-1") + body


# --- sound batches --------------------------------------------------------------------------------


def _sounds() -> Iterator[_Sound]:
    for name, batch in _batches():
        headers = batch.headers()
        headers.pop("Content-Length", None)
        yield _Sound(name, batch.body, headers)


def _batches() -> Iterator[tuple[str, Batch]]:
    """Of each kind and encoding; and bodies that are something else than their head says."""
    yield "JSON", json_ops(rows(0, _ROWS))
    made = record_batch(columns(_ROWS))
    raw = ipc_body(made)
    yield "Arrow, zstd", _ops(encoded(raw), "zstd")
    yield "Arrow", _ops(raw, "identity")
    yield "Arrow, gzip", _ops(gzip.compress(raw), "gzip")
    counters = {"step": [1, 2], "rank": [0, 1], "name": ["power_w"] * 2, "value": [3.5, 4.5]}
    context = {"schema": "smon.context/1", "counters": counters, "hosts": {"0": "node"}}
    body = json.dumps(context).encode()
    yield "side evidence", Batch(0, BatchKind.CONTEXT, TYPE_JSON, "identity", 3, body)
    yield "end", Batch(0, BatchKind.END, TYPE_JSON, "identity", 0, b'{"reason": "complete"}')
    part = encode_part(_part())
    yield "file of a rank", Batch(0, BatchKind.FILE, TYPE_FILE, "identity", 1, part)
    yield "file, zstd", Batch(0, BatchKind.FILE, TYPE_FILE, "zstd", 1, encoded(part))
    framed = _ops(encoded(raw), "zstd").to_frame()
    yield "frame", _ops(framed, "identity")
    yield "frame, zstd", _ops(encoded(framed), "zstd")
    parquet = BytesIO()
    pq.write_table(pa.Table.from_batches([made]), parquet)
    yield "Parquet", _ops(parquet.getvalue(), "identity")
    yield "Parquet, zstd", _ops(encoded(parquet.getvalue()), "zstd")


def _ops(body: bytes, encoding: str) -> Batch:
    return Batch(0, BatchKind.OPS, TYPE_ARROW, encoding, _ROWS, body)


def _part() -> FilePart:
    content = json.dumps({"rank": 0, "events": [{"name": "step", "ts": 1, "dur": 2}] * 9}).encode()
    return FilePart(
        name="rank-0.json", format=FileFormat.RANK_EVENTS, rank=0, world_size=8,
        sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), part=0, parts=1,
        first_step=1, last_step=2, start_ns=None, end_ns=None, content=content,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    port, seed, count, *streams = arguments
    tally = send(int(port), int(seed), int(count), streams)
    print(json.dumps(tally.plain()))  # noqa: T201  # a command prints
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
