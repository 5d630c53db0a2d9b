"""A timeline as a file on the disk: complete under its name, or not there.

Flow: `smon.timeline.events` → **here** → a file.
"""

from __future__ import annotations

import errno
import gzip
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, cast

from smon.errors import ConfigError
from smon.trace.formats.reading import printable, quoted

#: A fast level: the next ones save a tenth of the size and take twice as long.
_GZIP_LEVEL: Final = 3

#: Errors that another file name may not cure.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Output:
    """A file that appears under its name when it is complete, or not at all.

    Raises
    ------
    ConfigError
        It cannot be made, written or put in place.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        with _explained(out):
            self._target = _target(out)
        self._partial = self._target.with_name(f".{self._target.name}.{secrets.token_hex(4)}.part")
        self._streams = ExitStack()

    def __enter__(self) -> Self:
        with _explained(self._out):
            self._stream: BinaryIO = self._streams.enter_context(self._partial.open("xb", 1 << 20))
            if self._out.suffix == ".gz":
                # Without name and time: equal timelines are equal files.
                packed = gzip.GzipFile("", "wb", _GZIP_LEVEL, self._stream, mtime=0)
                self._stream = cast("BinaryIO", self._streams.enter_context(packed))
        return self

    def write(self, text: str) -> None:
        """Append."""
        with _explained(self._out):
            self._stream.write(text.encode())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with _explained(self._out):
                self._streams.close()
                if kind is None:
                    self._partial.replace(self._target)
        except ConfigError:
            if kind is None:  # otherwise the first error counts
                raise
        finally:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)


def _target(out: Path) -> Path:
    """The file to write, links followed; devices and pipes would be replaced, so they are none."""
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise ConfigError(
            f"expected the name of a file for the timeline, found the folder {printable(out)}: "
            f"add a name, e.g. {printable(out / 'timeline.json.gz')}"
        )
    if target.exists() and not target.is_file():
        raise ConfigError(
            f"expected the name of a file for the timeline, found {printable(out)}, a device or "
            "pipe: name a file"
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"expected an existing folder for the timeline, found none at "
            f"{printable(out.parent)}: make it, or name another file"
        )
    return target


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence."""
    try:
        yield
    except OSError as error:
        cure = "make room, or name another file" if error.errno in _FULL else "name another file"
        raise ConfigError(
            f"expected a file for the timeline that can be written, found {printable(out)}: "
            f"{quoted(error)}: {cure}"
        ) from error
