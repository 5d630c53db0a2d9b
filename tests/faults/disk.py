"""A disk that is full, and has room again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

_PIECE: Final = b"\0" * 4096


class SmallDisk:
    """A file system of its own, which somebody else's file fills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._foreign = folder / "foreign"

    def fill(self) -> None:
        """Take all that is free."""
        with self._foreign.open("ab", buffering=0) as file:
            while _write(file.fileno(), _PIECE):
                pass
            while _write(file.fileno(), b"\0"):
                pass

    def free(self) -> None:
        """Give it back."""
        self._foreign.unlink()


def _write(descriptor: int, data: bytes) -> bool:
    try:
        return os.write(descriptor, data) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
