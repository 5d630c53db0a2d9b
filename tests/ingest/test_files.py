from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from smon.errors import WireError
from smon.ingest.decode import decode
from smon.ingest.drain import Clocks, Drain
from smon.ingest.limits import Limits
from smon.ingest.wal import Wal
from smon.store.files import Dropped
from smon.wire import TYPE_FILE, TYPE_JSON, Batch, BatchKind, parse_headers
from smon.wire.parts import MAX_PART_BYTES, FileFormat, FilePart, encode_part
from smon.wire.problems import Problem
from tests.ingest.batches import (
    LIMITS,
    NOW,
    FakeStore,
    bomb,
    head_of,
    info,
    metrics,
    ops,
    record_head,
    settings,
)
from tests.ingest.serving import Running

CONTENT = b"what a rank has written"
HALF = len(CONTENT) // 2


def part(number: int = 0, **changed: object) -> FilePart:
    """One of the two parts of a file."""
    content = CONTENT[:HALF] if number == 0 else CONTENT[HALF:]
    whole = FilePart(
        name="rank0",
        format=FileFormat.RANK_EVENTS,
        rank=0,
        world_size=4,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
        part=number,
        parts=2,
        first_step=1,
        last_step=2,
        start_ns=None,
        end_ns=None,
        content=content,
    )
    return replace(whole, **changed)  # type: ignore[arg-type]


def file_batch(body: bytes, seq: int = 0, encoding: str = "identity") -> Batch:
    """A batch with this body."""
    return Batch(seq, BatchKind.FILE, TYPE_FILE, encoding, 1, body)


def problem_of(batch: Batch, limits: Limits = LIMITS) -> Problem:
    """Why a batch is refused once its headers have been."""
    with pytest.raises(WireError) as caught:
        decode(head_of(batch), batch.body, batch.seq, limits)
    return Problem(caught.value.problem)


def drained(store: FakeStore, folder: Path, batches: Sequence[Batch]) -> Drain:
    """A drain that has moved these batches from a log of its own."""
    chosen, counters = settings(folder), metrics()
    wal = Wal(chosen, counters.wal)
    wal.open()
    for batch in batches:
        wal.append(record_head(batch), batch.body, lambda _: None)
    group = wal._next_group()
    assert group is not None
    assert wal.write_group(group) is None
    clocks = Clocks(lambda: NOW, lambda: 0.0)
    drain = Drain(wal, store, chosen, counters, lambda _stream: None, clocks)
    assert drain.tick()
    wal.close()
    return drain


# --- over HTTP --------------------------------------------------------------------------------


def test_a_part_is_taken_in_and_a_resend_is_a_duplicate(shared: Running) -> None:
    """The largest one, too."""
    client = shared.client()
    largest = part(content=os.urandom(MAX_PART_BYTES), bytes=2 * MAX_PART_BYTES)
    first, second = file_batch(encode_part(part())), file_batch(encode_part(largest), 1)
    assert client.put(first).document == {"status": "stored", "next_seq": 1}
    assert client.put(first).document == {"status": "duplicate", "next_seq": 1}
    assert client.put(second).document == {"status": "stored", "next_seq": 2}


def test_a_part_that_cannot_be_is_refused(shared: Running) -> None:
    """With the name of what is wrong, and without what was sent."""
    client = shared.client()
    hostile = encode_part(part()).replace(b'"parts":2', b'"parts":0')
    answer = client.put(file_batch(hostile, 90))
    assert (answer.status, answer.problem) == (422, Problem.WRONG_VALUES)
    answer = client.put(file_batch(struct.pack(">I", 2**32 - 1), 90))
    assert (answer.status, answer.problem) == (400, Problem.MALFORMED_BODY)


# --- what is in a body ------------------------------------------------------------------------


def test_a_body_is_a_part() -> None:
    """In any encoding."""
    content = decode(head_of(file_batch(encode_part(part()))), encode_part(part()), 0, LIMITS)
    assert content.part == part()
    assert content.memory_bytes > len(part().content)


def test_a_file_is_one_part_a_batch() -> None:
    """So that events count parts."""
    assert problem_of(replace(file_batch(encode_part(part())), events=0)) == Problem.WRONG_VALUES
    assert problem_of(replace(file_batch(encode_part(part())), events=2)) == Problem.WRONG_VALUES


def test_a_bomb_is_not_unpacked_beyond_what_a_part_may_be() -> None:
    """Even where the limits of the server are wider."""
    wide = replace(LIMITS, decoded=1 << 40, ratio=1 << 40)
    assert problem_of(file_batch(bomb(1 << 28), encoding="zstd"), wide) == Problem.TOO_LARGE
    assert problem_of(file_batch(bomb(1 << 20), encoding="zstd")) == Problem.TOO_LARGE


def test_a_file_has_a_content_type_of_its_own() -> None:
    """And nothing else has it."""
    headers = {name.lower(): value for name, value in file_batch(b"x").headers().items()}
    assert parse_headers(headers).kind is BatchKind.FILE
    for wrong in ({**headers, "content-type": TYPE_JSON}, _as_ops(headers)):
        with pytest.raises(WireError) as caught:
            parse_headers(wrong)
        assert caught.value.problem == Problem.UNSUPPORTED_TYPE


def _as_ops(headers: dict[str, str]) -> dict[str, str]:
    return {**headers, "smon-schema": BatchKind.OPS.schema}


# --- from the log to the store ----------------------------------------------------------------


def test_parts_are_stored_with_their_contents(tmp_path: Path) -> None:
    """Beside ops of the same stream; a restart finds them in the log."""
    store = FakeStore(info())
    batches = [file_batch(encode_part(part(0))), ops(1), file_batch(encode_part(part(1)), 2)]
    drained(store, tmp_path, batches)
    assert [one.part.part for one in store.parts] == [0, 1]
    assert b"".join(store.written[one.path] for one in store.parts) == CONTENT
    assert {one.part.content for one in store.parts} == {b""}
    assert [note.kind for note in store.notes] == [BatchKind.FILE, BatchKind.OPS, BatchKind.FILE]
    assert len({one.path for one in store.parts}) == 2


def test_files_that_the_store_drops_are_counted(tmp_path: Path) -> None:
    """By reason; the batch is stored all the same: it is known, and never sent again."""

    class Full(FakeStore):
        def commit(self, *given: object) -> Sequence[Dropped]:
            super().commit(*given)  # type: ignore[arg-type]
            return (Dropped.TOO_MANY,)

    drain = drained(Full(info()), tmp_path, [file_batch(encode_part(part()))])
    assert drain._metrics.files_dropped.labels("too-many")._value.get() == 1
