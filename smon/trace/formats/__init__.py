"""The readers, one module per input format (``docs/formats.md``).

Flow: file → **here** → `smon.trace.table` → `smon.trace.grid`. A file's format is recognised by
its content. Readers do not know each other; what they share is in `smon.trace.formats.reading`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from smon.errors import ConfigError
from smon.trace.formats import (
    flight_recorder,
    inspector,
    kineto,
    megatron_log,
    ndtimeline,
    nsys,
    parquet,
    rank_events,
    step_times,
)
from smon.trace.formats.reading import GZIP_MAGIC, Reading, inflated, printable

#: Bytes from the start of a file that a reader may judge by.
HEAD_BYTES: Final = 1 << 16


class Reader(Protocol):
    """What a module of this package offers."""

    @property
    def NAME(self) -> str:  # noqa: N802  # a module's constant
        """The format's name on the command line."""

    @property
    def LOOKS_FOR(self) -> str:  # noqa: N802  # a module's constant
        """How the format is recognised, for error messages."""

    @property
    def SELF_DESCRIBED(self) -> bool:  # noqa: N802  # a module's constant
        """Whether files say enough for the layout to be inferred, at least of what is there."""

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether a file that begins with `head` is of this format."""

    def read(self, path: Path) -> Reading:
        """Read a file.

        Raises
        ------
        TraceError
            The file cannot be read, is damaged, or holds nothing of what it should.
        """


READERS: Final[tuple[Reader, ...]] = (
    parquet,
    rank_events,
    ndtimeline,
    kineto,
    nsys,
    inspector,
    flight_recorder,
    step_times,
    megatron_log,
)

BY_NAME: Final = {reader.NAME: reader for reader in READERS}


def reader_named(name: str) -> Reader:
    """The reader of this format.

    Raises
    ------
    ConfigError
        There is no such format.
    """
    reader = BY_NAME.get(name)
    if reader is None:
        known = ", ".join(sorted(BY_NAME))
        raise ConfigError(f"unknown format {printable(name)!r}: expected one of {known}")
    return reader


def reader_of(head: bytes, path: Path) -> Reader | None:
    """The reader that recognises a file by its first `HEAD_BYTES`; None if none does."""
    return next((reader for reader in READERS if reader.recognises(head, path)), None)


def description(head: bytes) -> str:
    """What a file that no reader recognises seems to be, as part of an error message."""
    inner = inflated(head, HEAD_BYTES)
    if _is_pickle(inner):
        return "it is a Python pickle, which SMon never opens because that can run code"
    if head.startswith(GZIP_MAGIC) and inner.startswith(b"PAR1"):
        return "it is Parquet inside gzip: unpack it first"
    if b"\0" in inner or not inner:
        return "it is binary"
    if inner.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "it is JSON of another kind"
    return "it is text of another kind"


def _is_pickle(head: bytes) -> bool:
    # The protocol opcode and a version; versions 2 to 5 exist.
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def looked_for() -> str:
    """What every reader looks for, in one clause."""
    return "; ".join(f"{reader.NAME} ({reader.LOOKS_FOR})" for reader in READERS)
