"""Readers with a planted bug each, that processes can import."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

from smon.errors import TraceError

#: Bytes of a sound file, and of mutants that meet the bug: fewer than this.
WHOLE = 300
BAD = 100


def is_bad(content: bytes) -> bool:
    """Whether a file of this content meets the bug."""
    return len(content) < BAD


def _bad(path: Path) -> bool:
    return is_bad(path.read_bytes())


def sound(path: Path) -> str:
    """No bug: half of the files are refused."""
    if path.read_bytes()[-1:] < b"\x80":
        raise TraceError("refused")
    return ""


def raising(path: Path) -> str:
    """An exception that is none of ours."""
    if _bad(path):
        raise KeyError("lost")
    return sound(path)


def dying(path: Path) -> str:
    """A crash of native code."""
    if _bad(path):
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    return sound(path)


def obeying(path: Path) -> str:
    """Runs what it is told, and hides it."""
    if _bad(path):
        try:
            os.system("true")  # noqa: S605
        except BaseException:  # noqa: BLE001
            return ""
    return sound(path)


def looping(path: Path) -> str:
    """Never ends."""
    while _bad(path):
        pass
    return sound(path)


def hoarding(path: Path) -> str:
    """Takes more memory than there is to take."""
    if _bad(path):
        return "x" * (1100 << 20)
    return sound(path)
