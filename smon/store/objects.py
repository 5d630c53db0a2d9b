"""Files under one root: a local folder, or an object store (`pyarrow.fs`: S3, GCS).

Flow: `smon.config` → **here** → `smon.store.events` and all else that keeps files. Paths are made
of server-issued ids; what a user sent never becomes one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs

from smon.errors import ConfigError, StoreError

#: What paths of objects are made of; no part is ``.`` or ``..``.
_PATH: Final = re.compile(r"(?:[A-Za-z0-9=_-][A-Za-z0-9=._-]*/)*[A-Za-z0-9=_-][A-Za-z0-9=._-]*")

#: A file that is being written; never read, removed at start.
PARTIAL: Final = ".partial"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A file that exists."""

    path: str
    bytes: int
    modified_ns: int


class Objects:
    """Files by path below one root.

    Parameters
    ----------
    root
        A folder, or a URL such as ``s3://bucket/prefix?endpoint_override=host:port&scheme=http``.

    Raises
    ------
    ConfigError
        The root cannot be used.
    """

    __slots__ = ("_base", "_fs", "_local")

    def __init__(self, root: str) -> None:
        self._local: Path | None = None
        try:
            if "://" in root:
                self._fs, base = pafs.FileSystem.from_uri(root)
                self._base = base.rstrip("/")
                if isinstance(self._fs, pafs.LocalFileSystem):
                    self._local = Path(base)
            else:
                self._local = Path(root).absolute()
                self._fs, self._base = pafs.LocalFileSystem(), str(self._local)
            if self._local is not None:
                self._local.mkdir(parents=True, exist_ok=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"the root of the event files cannot be used: {error}") from error

    @property
    def local(self) -> Path | None:
        """The folder, if it is one."""
        return self._local

    def put(self, path: str, content: bytes | memoryview | pa.Buffer) -> int:
        """Write a whole file; it is there completely and durably, or not at all.

        Returns
        -------
        int
            Its size in bytes.

        Raises
        ------
        StoreError
            It cannot be written.
        """
        full, data = self._full(path), memoryview(content)
        try:
            if self._local is not None:
                _write_durably(Path(full), data)
            else:
                with self._fs.open_output_stream(full) as stream:
                    stream.write(data)
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        return data.nbytes

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """A file to read from any place of it (`pyarrow.NativeFile`).

        Raises
        ------
        StoreError
            It is not there, or cannot be read.
        """
        try:
            file = self._fs.open_input_file(self._full(path))
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        with file:
            yield file

    def get(self, path: str) -> bytes:
        """A whole file.

        Raises
        ------
        StoreError
            It is not there, or cannot be read.
        """
        with self.open(path) as file:
            try:
                return bytes(file.read())
            except (pa.ArrowException, OSError) as error:
                raise StoreError(f"cannot read {path}: {error}") from error

    def delete(self, path: str) -> bool:
        """Remove a file; whether it was there.

        Raises
        ------
        StoreError
            It cannot be removed.
        """
        try:
            self._fs.delete_file(self._full(path))
        except FileNotFoundError:
            return False
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot remove {path}: {error}") from error
        return True

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none.

        Raises
        ------
        StoreError
            The root cannot be reached.
        """
        try:
            info = self._fs.get_file_info(self._full(path))
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot look for {path}: {error}") from error
        return info.size if info.type == pafs.FileType.File else None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """All files below a folder, in any order; partial ones too.

        Raises
        ------
        StoreError
            The root cannot be reached.
        """
        selector = pafs.FileSelector(self._full(prefix), allow_not_found=True, recursive=True)
        try:
            found = self._fs.get_file_info(selector)
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot list {prefix}: {error}") from error
        for info in found:
            if info.type == pafs.FileType.File:
                path = info.path.removeprefix(self._base).lstrip("/")
                yield StoredObject(path, info.size, info.mtime_ns or 0)

    def _full(self, path: str) -> str:
        if not _PATH.fullmatch(path):
            raise StoreError(f"expected a path of plain names, found {path!r}")
        return f"{self._base}/{path}"


def _write_durably(target: Path, data: memoryview) -> None:
    """Write aside, sync, rename, sync the folder: after a crash it is whole or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{uuid4().hex}{PARTIAL}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            rest = data.cast("B")
            while rest.nbytes:
                # A full disk may write less than asked for, without an error.
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
