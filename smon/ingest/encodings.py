"""Decompression that cannot be made to fill the memory.

Flow: encoded body → **here** → `smon.ingest.ipc`, `smon.ingest.documents`. A frame may state any
size it likes: only bytes that come out are counted, and the reader stops at the cap.
"""

from __future__ import annotations

import threading
import zlib
from typing import Final

import zstandard

from smon.errors import WireError
from smon.ingest.limits import MAX_BLOCKS, MAX_WINDOW_BYTES, Limits
from smon.wire.problems import Problem

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOCK_HEAD: Final = 3
_CHECKSUM: Final = 4
_RLE: Final = 1

#: `zlib.decompressobj`: window of 32 KiB, with the head and tail of gzip.
_GZIP: Final = 31


class _Decoders(threading.local):
    """A zstd decoder for each thread: one must not be used by two at a time."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_decoders: Final = _Decoders()


def decompress(body: bytes, encoding: str, limits: Limits) -> bytes:
    """The decoded body.

    Raises
    ------
    WireError
        It is larger than the limits allow, before or after, or is no single whole frame.
    """
    if len(body) > limits.encoded:
        raise WireError(
            Problem.TOO_LARGE,
            f"expected a body of at most {limits.encoded} bytes, found {len(body)}: "
            "send smaller batches",
        )
    cap = limits.decoded_cap(len(body))
    if encoding == "zstd":
        decoded = _zstd(body, cap)
    elif encoding == "gzip":
        decoded = _gzip(body, cap)
    else:
        decoded = body
    if len(decoded) > cap:
        raise WireError(
            Problem.TOO_LARGE,
            f"expected a body that decodes to at most {limits.decoded} bytes and to at most "
            f"{limits.ratio} times its encoded size, found more: send smaller batches",
        )
    return decoded


def _zstd(body: bytes, cap: int) -> bytes:
    """At most `cap` + 1 bytes of a body that is one zstd frame."""
    try:
        _check_frame(body)
        parameters = zstandard.get_frame_parameters(body)
        if parameters.window_size > MAX_WINDOW_BYTES:
            raise WireError(
                Problem.TOO_LARGE,
                f"expected a zstd window of at most {MAX_WINDOW_BYTES} bytes: use a lower level",
            )
        # The stated size is a hint for how much to ask for, and no more.
        hint = min(parameters.content_size, cap) + 1
        with _decoders.zstd.stream_reader(body) as reader:
            decoded = reader.read(hint)
            if len(decoded) == hint <= cap:
                decoded += reader.read(cap + 1 - hint)
    except zstandard.ZstdError as error:
        raise _malformed("zstd") from error
    return decoded


def _check_frame(body: bytes) -> None:
    """See that one frame takes the whole body: no second one, nothing after it, nothing missing."""
    if body[:4] != _ZSTD_MAGIC:
        raise _malformed("zstd")
    parameters = zstandard.get_frame_parameters(body)
    at = zstandard.frame_header_size(body)
    for _ in range(MAX_BLOCKS):
        head = int.from_bytes(body[at : at + _BLOCK_HEAD], "little")
        size = 1 if (head >> 1) & 3 == _RLE else head >> 3
        at += _BLOCK_HEAD + size
        if head & 1 or at >= len(body):
            break
    if not head & 1 or at + _CHECKSUM * bool(parameters.has_checksum) != len(body):
        raise _malformed("zstd")


def _gzip(body: bytes, cap: int) -> bytes:
    """At most `cap` + 1 bytes of a body that is one gzip member."""
    decoder = zlib.decompressobj(_GZIP)
    try:
        decoded = decoder.decompress(body, cap + 1)
    except zlib.error as error:
        raise _malformed("gzip") from error
    if len(decoded) <= cap and (not decoder.eof or decoder.unused_data):
        raise _malformed("gzip")
    return decoded


def _malformed(encoding: str) -> WireError:
    return WireError(
        Problem.MALFORMED_BODY, f"expected a body that is one whole {encoding} frame, found another"
    )
