from __future__ import annotations

import dataclasses
import gzip
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from smon.errors import WireError
from smon.ingest import encodings
from smon.ingest.decode import check_digest
from smon.ingest.limits import RATIO_FREE_BYTES
from smon.wire.arrow import encoded, ipc_body
from smon.wire.problems import Problem
from tests.ingest.batches import (
    LIMITS,
    bomb,
    columns,
    head_of,
    ops,
    record_batch,
)
from tests.ingest.judging import accepted, raw_ops, refused


def test_a_body_that_differs_from_its_digest_is_refused() -> None:
    """The digest is compared over the encoded body, whatever else is right."""
    batch = ops()
    with pytest.raises(WireError) as caught:
        check_digest(head_of(batch), batch.body[:-1] + b"\0")
    assert caught.value.problem == Problem.DIGEST_MISMATCH
    check_digest(head_of(batch), batch.body)


def test_a_body_of_another_length_is_refused() -> None:
    """What was announced is what must come."""
    batch = ops()
    with pytest.raises(WireError) as caught:
        check_digest(head_of(batch, length=1), batch.body)
    assert caught.value.problem == Problem.BAD_REQUEST


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity"])
def test_every_encoding_gives_the_same_ops(encoding: str) -> None:
    """Encodings change bytes, not content."""
    raw = ipc_body(record_batch(columns()))
    body = {"zstd": encoded(raw), "gzip": gzip.compress(raw), "identity": raw}[encoding]
    content = accepted(raw_ops(body, encoding=encoding))
    assert content.ops.equals(record_batch(columns()))


def test_a_zstd_frame_without_a_stated_size_is_read() -> None:
    """Streaming senders do not know the size beforehand."""
    raw = ipc_body(record_batch(columns()))
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    body = packer.compress(raw[:100]) + packer.compress(raw[100:]) + packer.flush()
    assert accepted(raw_ops(body, encoding="zstd")).ops.num_rows == 12


def test_a_zstd_bomb_stops_at_the_cap() -> None:
    """33 KB that state and hold 1 GiB: refused, without the gigabyte."""
    body = bomb(1 << 30)
    assert len(body) < 40_000
    assert refused(raw_ops(body, encoding="zstd")) is Problem.TOO_LARGE


def test_a_gzip_bomb_stops_at_the_cap() -> None:
    """As for zstd."""
    body = gzip.compress(bytes(64 << 20), 9)
    assert refused(raw_ops(body, encoding="gzip")) is Problem.TOO_LARGE


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "identity"])
def test_the_decoded_size_has_a_limit(encoding: str) -> None:
    """Below and at the limit a body is decoded, above it is refused."""
    raw = np.random.default_rng(0).bytes(5000)
    body = {"zstd": encoded(raw), "gzip": gzip.compress(raw), "identity": raw}[encoding]
    for limit in (5001, 5000):
        bounds = dataclasses.replace(LIMITS, decoded=limit)
        assert encodings.decompress(body, encoding, bounds) == raw
    with pytest.raises(WireError) as caught:
        encodings.decompress(body, encoding, dataclasses.replace(LIMITS, decoded=4999))
    assert caught.value.problem == Problem.TOO_LARGE


def test_the_encoded_size_has_a_limit() -> None:
    """Below and at the limit a body is decoded, above it is refused."""
    raw = bytes(range(100))
    for limit in (101, 100):
        bounds = dataclasses.replace(LIMITS, encoded=limit)
        assert encodings.decompress(raw, "identity", bounds) == raw
    with pytest.raises(WireError) as caught:
        encodings.decompress(raw, "identity", dataclasses.replace(LIMITS, encoded=99))
    assert caught.value.problem == Problem.TOO_LARGE


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_the_ratio_counts_above_64_kib_only(encoding: str) -> None:
    """Small bodies may compress as they like; larger ones to a twentieth at most."""

    def packed(size: int) -> bytes:
        return encoded(bytes(size)) if encoding == "zstd" else gzip.compress(bytes(size))

    assert encodings.decompress(packed(RATIO_FREE_BYTES), encoding, LIMITS)
    with pytest.raises(WireError) as caught:
        encodings.decompress(packed(RATIO_FREE_BYTES + 1), encoding, LIMITS)
    assert caught.value.problem == Problem.TOO_LARGE
    noise = np.random.default_rng(0).bytes(20_000)
    body = packed(0)[:0] + (encoded(noise * 18) if encoding == "zstd" else gzip.compress(noise))
    assert encodings.decompress(body, encoding, LIMITS)


def test_a_zstd_window_above_8_mib_is_refused() -> None:
    """The window is the decoder's memory."""
    for log, taken in ((23, True), (24, False)):
        parameters = zstandard.ZstdCompressionParameters(
            window_log=log, write_content_size=False, compression_level=1
        )
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        body = packer.compress(bytes(1000)) + packer.flush()
        if taken:
            assert encodings.decompress(body, "zstd", LIMITS) == bytes(1000)
        else:
            with pytest.raises(WireError):
                encodings.decompress(body, "zstd", LIMITS)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body + body,
        lambda body: body + b"\0",
        lambda body: body + b"\x50\x2a\x4d\x18\0\0\0\0",
        lambda body: b"\x50\x2a\x4d\x18\0\0\0\0" + body,
        lambda body: body[:-1],
        lambda body: body[:3],
        lambda body: b"",
        lambda body: b"\x28\xb5\x2f\xfd",
        zlib.compress,
    ],
    ids=["twice", "rest", "skippable", "skippable-first", "cut", "stub", "empty", "magic", "zlib"],
)
@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_only_one_whole_frame_is_a_body(spoil: Callable[[bytes], bytes], encoding: str) -> None:
    """No second frame, nothing after it, nothing missing."""
    raw = ipc_body(record_batch(columns()))
    body = spoil(encoded(raw) if encoding == "zstd" else gzip.compress(raw))
    assert refused(raw_ops(body, encoding=encoding)) is Problem.MALFORMED_BODY


def test_a_frame_of_endless_tiny_blocks_is_refused() -> None:
    """Walking over a frame takes bounded time, whatever its blocks."""
    block = (1 << 3).to_bytes(3, "little") + b"x"
    header = encoded(b"")[:4] + bytes([0x00, 0x58])
    body = header + block * 200_000
    assert refused(raw_ops(body, encoding="zstd")) is Problem.MALFORMED_BODY
