"""Files under one root: a local folder, or an object store (`pyarrow.fs`: S3, GCS).

Flow: `smon.config` → **here** → `smon.store.events` and all else that keeps files. Paths are made
of server-issued ids; what a user sent never becomes one.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs

from smon.errors import ConfigError, StoreError

#: What paths of objects are made of; no part is ``.`` or ``..``.
_PATH: Final = re.compile(r"(?:[A-Za-z0-9=_-][A-Za-z0-9=._-]*/)*[A-Za-z0-9=_-][A-Za-z0-9=._-]*")

#: A file that is being written; never read, removed at start.
PARTIAL: Final = ".partial"

#: Folders that are known to be durable; then they are made durable again.
_REMEMBERED: Final = 4096

#: Tries to write into a folder that is removed meanwhile.
_TRIES: Final = 16

#: Sent to an object store at a time.
_PIECE: Final = 8 << 20


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

    __slots__ = ("_base", "_durable", "_fs", "_local")

    def __init__(self, root: str) -> None:
        self._local: Path | None = None
        self._durable: dict[Path, int] = {}
        try:
            if "://" in root:
                self._fs, base = pafs.FileSystem.from_uri(root)
                self._base = base.rstrip("/")
                if isinstance(self._fs, pafs.LocalFileSystem):
                    self._local = Path(base)
            else:
                self._local = Path(root).absolute()
                self._fs, self._base = pafs.LocalFileSystem(), str(self._local)
            if not self._base:
                raise ConfigError("the root of the event files cannot be used: it names no bucket")
            if self._local is not None:
                make_folder(self._local, self._local)
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
                with _written_durably(Path(full), self._opened) as file:
                    file.write(data)
            else:
                self._upload(full, [data])
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        return data.nbytes

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A file to write piece by piece; afterwards it is there completely and durably.

        If anything is raised inside, it is not there. On an object store it is kept in a temporary
        file until then.

        Raises
        ------
        StoreError
            It cannot be written.
        """
        full = self._full(path)
        try:
            if self._local is not None:
                with _written_durably(Path(full), self._opened) as file:
                    yield file
            else:
                with tempfile.TemporaryFile() as file:
                    yield file
                    file.seek(0)
                    self._upload(full, iter(lambda: file.read(_PIECE), b""))
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot write {path}: {error}") from error

    def move(self, source: str, target: str) -> bool:
        """Give a file another path, durably; whether it was there.

        Raises
        ------
        StoreError
            It cannot be moved.
        """
        old, new = self._full(source), self._full(target)
        try:
            if self._local is not None:
                self._make_folder(Path(new).parent, self._local)
                Path(old).replace(new)
                sync_folder(Path(new).parent)
                sync_folder(Path(old).parent)
                self._remove_empty(Path(old).parent)
            elif self.size(source) is None:
                return False
            else:
                self._fs.copy_file(old, new)
                self._fs.delete_file(old)
        except FileNotFoundError:
            return False
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot move {source}: {error}") from error
        return True

    def _upload(self, full: str, parts: Iterable[bytes | memoryview]) -> None:
        try:
            # Otherwise it compresses what has a name like .zst once more.
            with self._fs.open_output_stream(full, compression=None) as stream:
                for part in parts:
                    stream.write(part)
        except BaseException:
            # What was sent so far becomes a file when the stream closes, whatever happened.
            with suppress(pa.ArrowException, OSError):
                self._fs.delete_file(full)
            raise

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
        """Remove a file, and folders that are empty then; whether it was there.

        Raises
        ------
        StoreError
            It cannot be removed.
        """
        full = self._full(path)
        try:
            self._fs.delete_file(full)
        except FileNotFoundError:
            return False
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"cannot remove {path}: {error}") from error
        self._remove_empty(Path(full).parent)
        return True

    def _remove_empty(self, folder: Path) -> None:
        """Remove a local folder if it is empty, and those above it; the outermost ones stay.

        Every job and day has its own, so that they would become many. Who is about to write there
        meanwhile makes it anew.
        """
        top = self._local
        while top is not None and top not in (folder, folder.parent):
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

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

    def _opened(self, new: Path) -> int:
        """Descriptor of a new file in a local folder that is durable."""
        for _ in range(_TRIES):
            # Where somebody has just removed the folder, because it was empty, it is made again.
            with suppress(FileNotFoundError):
                self._make_folder(new.parent, self._local or new.parent)
                return os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again", str(new))

    def _make_folder(self, folder: Path, top: Path) -> None:
        """Make a folder durable once in this process, whoever had made it."""
        with suppress(FileNotFoundError):
            if self._durable.get(folder) == folder.stat().st_ino:
                return
        make_folder(folder, top)
        if len(self._durable) >= _REMEMBERED:
            self._durable.clear()
        self._durable[folder] = folder.stat().st_ino

    def _full(self, path: str) -> str:
        if not _PATH.fullmatch(path):
            raise StoreError(f"expected a path of plain names, found {path!r}")
        return f"{self._base}/{path}"


@contextmanager
def _written_durably(target: Path, opened: Callable[[Path], int]) -> Iterator[BinaryIO]:
    """Write aside, sync, rename, sync the folder: after a crash it is whole or not there."""
    aside = target.with_name(f"{target.name}.{uuid4().hex}{PARTIAL}")
    descriptor = opened(aside)
    try:
        # Buffered: it goes on where a full disk writes less than asked for, and raises in the end.
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def make_folder(folder: Path, top: Path) -> None:
    """Make a folder, and durable the names from its own up to that of `top`.

    A folder that is new is only safe once the one above it is synced; otherwise a power cut takes
    it, with all that was synced in it.

    Raises
    ------
    OSError
        It cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.parents):
        # The folder above the top may be another's, who lets nobody look into it.
        with suppress(PermissionError):
            sync_folder(each.parent)
        if each == top:
            break


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
