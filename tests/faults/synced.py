"""What a power cut leaves: only what was synced, and names only of folders that were synced.

SIGKILL alone loses nothing that was written: the kernel still has it. So the server runs with
`record`, which notes, after each sync has returned, how far which file is safe; and after the kill
`cut_power` makes the disk what it may be after a power cut:

* files end where they ended at their last sync;
* a file or folder whose name came after the last sync of its folder is gone;
* a file that was removed since the last sync of its folder may be there again.

The database is left alone: its own syncs, which are not Python's, are trusted.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

#: Environment of a server that runs with `record`: the file of notes, and the data folder.
VARIABLE: Final = "FAULTS_SYNCED"

#: What a power cut concerns, in the data folder.
FOLDERS: Final = ("wal", "objects")

_SHADOW: Final = "shadow"

#: A sync takes as long as on a disk that is busy: with the microseconds that some take, hardly a
#: kill comes between what is written and its sync.
_SYNC_S: Final = 0.004

#: Share of removed files that come back.
_RETURNS: Final = 0.75


class Notes:
    """Notes of one process, each a line that is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._shadow = path.with_name(_SHADOW)
        self._shadow.mkdir(exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = 0

    def note(self, *values: object) -> None:
        """Write one."""
        os.write(self._handle, json.dumps(values).encode() + b"\n")

    def close(self) -> None:
        """Give the file back."""
        os.close(self._handle)

    def kept(self, path: Path) -> str:
        """Another name of a file that is about to be removed."""
        self._count += 1
        name = str(self._shadow / f"{os.getpid()}-{self._count}")
        os.link(path, name)
        return name


def record(path: Path, data: Path) -> None:
    """From now on, note the syncs of this process in the data folder and below."""
    notes = Notes(path)
    base = f"{data.absolute()}{os.sep}"

    def below(name: str) -> bool:
        return f"{name}{os.sep}".startswith(base)

    def synced(original: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            status = os.fstat(descriptor)
            time.sleep(_SYNC_S)
            if not below(name):
                original(descriptor)
            elif Path(name).is_dir():
                inodes = _inodes(Path(name))
                original(descriptor)
                notes.note("folder", name, inodes)
            else:
                # What is written from here on may not be part of it.
                original(descriptor)
                notes.note("file", status.st_ino, status.st_size)

        return sync

    original_open, original_unlink = os.open, os.unlink

    def opened(name: Any, flags: int, *more: Any, **named: Any) -> int:  # noqa: ANN401  # as os.open
        descriptor = original_open(name, flags, *more, **named)
        if flags & os.O_CREAT and os.fstat(descriptor).st_size == 0:
            # The number of a file that is gone may be that of a new one.
            notes.note("file", os.fstat(descriptor).st_ino, 0)
        return descriptor

    def unlinked(name: Any, *more: Any, **named: Any) -> None:  # noqa: ANN401  # as os.unlink
        path = Path(name).absolute()
        if below(str(path)) and path.suffix == ".wal" and path.exists():
            notes.note("removed", str(path), notes.kept(path))
        original_unlink(name, *more, **named)

    system: Any = os
    system.fsync, system.fdatasync = synced(os.fsync), synced(os.fdatasync)
    system.open, system.unlink = opened, unlinked


def _inodes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


@dataclass(slots=True)
class Cut:
    """What a power cut took, and brought back."""

    truncated: int = 0
    removed: int = 0
    returned: int = 0

    def __add__(self, other: Cut) -> Cut:
        return Cut(
            self.truncated + other.truncated,
            self.removed + other.removed,
            self.returned + other.returned,
        )


@dataclass(slots=True)
class _Safe:
    """What is safe according to the notes."""

    sizes: dict[int, int] = field(default_factory=dict)
    names: dict[str, dict[str, int]] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)

    def take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            kind, *values = json.loads(line)
            if kind == "file":
                self.sizes[values[0]] = values[1]
            elif kind == "folder":
                self.names[values[0]] = values[1]
                inside = [name for name in self.removed if str(Path(name).parent) == values[0]]
                for name in inside:
                    del self.removed[name]
            else:
                self.removed[values[0]] = values[1]


def cut_power(path: Path, data: Path, chance: random.Random) -> Cut:
    """Make log and event files what a power cut may leave of them.

    Parameters
    ----------
    path
        The notes; they begin anew, with what is there now.
    data
        The data folder, which is safe itself.
    chance
        Whether a removed file comes back: both can happen.
    """
    safe, cut = _Safe(), Cut()
    if path.exists():
        safe.take(path.read_bytes().splitlines())
    _cut_folder(data, safe, cut, FOLDERS)
    for name, shadow in safe.removed.items():
        there = Path(name).parent.is_dir() and not Path(name).exists()
        if there and chance.random() < _RETURNS:
            os.link(shadow, name)
            cut.returned += 1
    shutil.rmtree(path.with_name(_SHADOW), ignore_errors=True)
    _begin_anew(path, data)
    return cut


def _cut_folder(folder: Path, safe: _Safe, cut: Cut, only: Collection[str] = ()) -> None:
    names = safe.names.get(str(folder), {})
    for entry in list(os.scandir(folder)):
        if only and entry.name not in only:
            continue
        here = Path(entry.path)
        if names.get(entry.name) != entry.inode():
            cut.removed += 1
            if entry.is_dir():
                shutil.rmtree(here)
            else:
                here.unlink()
        elif entry.is_dir():
            _cut_folder(here, safe, cut)
        elif entry.stat().st_size > (size := safe.sizes.get(entry.inode(), 0)):
            cut.truncated += 1
            os.truncate(here, size)


def _begin_anew(path: Path, data: Path) -> None:
    path.unlink(missing_ok=True)
    notes = Notes(path)
    notes.note("folder", str(data), _inodes(data))
    for top in FOLDERS:
        for each in (data / top, *(data / top).rglob("*")):
            if each.is_dir():
                notes.note("folder", str(each), _inodes(each))
            elif each.exists():
                notes.note("file", each.stat().st_ino, each.stat().st_size)
    notes.close()
