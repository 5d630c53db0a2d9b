from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.errors import WireError
from smon.wire.parts import (
    MAX_BODY_BYTES,
    MAX_FILE_BYTES,
    MAX_HEAD_BYTES,
    MAX_PART_BYTES,
    FileFormat,
    FilePart,
    decode_part,
    encode_part,
)

PART = FilePart(
    name="rank0.pt.trace.json.gz",
    format=FileFormat.RANK_EVENTS,
    rank=3,
    world_size=4,
    sha256="0123456789abcdef" * 4,
    bytes=10,
    part=1,
    parts=2,
    first_step=5,
    last_step=9,
    start_ns=1_800_000_000_000_000_000,
    end_ns=1_800_000_001_000_000_000,
    content=b"\0\xff{}",
)


def body_of(head: object, content: bytes = b"1234", length: int | None = None) -> bytes:
    """A body with a head of any kind."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack(">I", len(text) if length is None else length) + text + content


def head_of(**changed: Any) -> dict[str, Any]:  # noqa: ANN401  # any JSON
    """The head of `PART`, changed."""
    (length,) = struct.unpack_from(">I", encode_part(PART))
    head = json.loads(encode_part(PART)[4 : 4 + length])
    return {**head, **changed}


def test_a_part_comes_back_as_it_was_sent() -> None:
    """Content may be anything, also what looks like a head."""
    assert decode_part(encode_part(PART)) == PART


def test_what_is_not_known_is_null() -> None:
    """Rank, size, steps and times."""
    bare = replace(
        PART,
        rank=None,
        world_size=None,
        first_step=None,
        last_step=None,
        start_ns=None,
        end_ns=None,
    )
    assert decode_part(encode_part(bare)) == bare


def test_the_longest_head_fits() -> None:
    """Names and numbers at their longest, and the largest content."""
    largest = replace(
        PART,
        name="n" * 256,
        format=FileFormat.FLIGHT_RECORDER,
        rank=(1 << 20) - 1,
        world_size=1 << 20,
        bytes=MAX_FILE_BYTES,
        part=63,
        parts=64,
        first_step=1 << 53,
        last_step=1 << 53,
        start_ns=1 << 62,
        end_ns=1 << 62,
        content=bytes(MAX_PART_BYTES),
    )
    body = encode_part(largest)
    assert len(body) <= MAX_BODY_BYTES < 2 << 20
    assert decode_part(body) == largest


@pytest.mark.parametrize(
    "changed",
    [
        {"name": ""},
        {"name": "n" * 257},
        {"name": "two words"},
        {"name": "line\nbreak"},
        {"name": "naïve"},
        {"name": 7},
        {"name": None},
        {"format": "kineto"},
        {"format": ["rank-events"]},
        {"format": None},
        {"rank": -1},
        {"rank": 4},
        {"rank": 1 << 20, "world_size": None},
        {"rank": 1.0},
        {"rank": True},
        {"rank": "3"},
        {"world_size": 0},
        {"world_size": 2**63},
        {"sha256": "0" * 63},
        {"sha256": "G" * 64},
        {"sha256": "A" * 64},
        {"sha256": None},
        {"bytes": 0},
        {"bytes": 3},
        {"bytes": MAX_FILE_BYTES + 1},
        {"bytes": float("nan")},
        {"part": -1},
        {"part": 2},
        {"part": 2**63},
        {"part": None},
        {"part": 0, "parts": 0},
        {"part": 0, "parts": 65},
        {"parts": 10**300},
        {"first_step": None},
        {"first_step": 10},
        {"last_step": 2**53 + 1},
        {"first_step": -1},
        {"start_ns": None},
        {"end_ns": 0},
        {"end_ns": 2**63},
        {"end_ns": float("inf")},
    ],
)
def test_a_head_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    """Every value has a range, and none contradicts another; what was sent is not quoted."""
    with pytest.raises(WireError) as caught:
        decode_part(body_of(head_of(**changed)))
    assert "expected" in str(caught.value)
    assert "kineto" not in str(caught.value)


@pytest.mark.parametrize("key", list(head_of()))
def test_every_key_of_the_head_is_needed(key: str) -> None:
    """Null where a value is not known; a key that is absent is a mistake."""
    head = head_of()
    del head[key]
    with pytest.raises(WireError, match=key):
        decode_part(body_of(head))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0",
        body_of(b"{}", length=0xFFFFFFFF),
        body_of(b"{}", length=7),
        body_of(b" " * (MAX_HEAD_BYTES + 1)),
        body_of(b"[" * 2000),
        body_of(b"\xff\xfe"),
        body_of(b"[]"),
        body_of(b"null"),
        body_of(b"1" * 2000),
        body_of(head_of(), b""),
        body_of(head_of(bytes=MAX_FILE_BYTES), bytes(MAX_PART_BYTES + 1)),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    """Short, long, nested, no text, no object, no content."""
    with pytest.raises(WireError):
        decode_part(body)


@given(st.binary(max_size=300))
def test_no_body_does_anything_but_be_refused(body: bytes) -> None:
    """Whatever comes."""
    with pytest.raises(WireError):
        decode_part(body)


@given(st.data())
def test_a_damaged_part_is_a_part_or_refused(data: st.DataObject) -> None:
    """One byte changed anywhere."""
    body = bytearray(encode_part(PART))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        assert len(encode_part(decode_part(bytes(body)))) <= MAX_BODY_BYTES
