"""What the log asks of the disk, in one place, so that a test can be the disk.

Flow: `smon.ingest.wal` → **here** → the operating system.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from smon.store.objects import sync_folder

#: Buffers that one call may write (IOV_MAX on Linux).
_BUFFERS: Final = 1024

_MODE: Final = 0o640


class Disk:
    """Append, sync, cut, and how much is free. Every call may raise OSError."""

    __slots__ = ()

    def create(self, path: Path) -> int:
        """A new file to append to; its name is durable when this returns."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, _MODE)
        try:
            sync_folder(path.parent)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[bytes]) -> int:
        """Append buffers; bytes written, which may be fewer than asked for."""
        written = 0
        for at in range(0, len(buffers), _BUFFERS):
            part = buffers[at : at + _BUFFERS]
            count = os.writev(descriptor, part)
            written += count
            if count < sum(map(len, part)):
                break
        return written

    def sync(self, descriptor: int) -> None:
        """Returns when all that was written is durable."""
        os.fdatasync(descriptor)

    def cut(self, descriptor: int, size: int) -> None:
        """Remove all bytes from this offset on."""
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        """Give a file back."""
        os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written to the file system of a folder."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
