"""What a stream's folder holds besides its segments, and who may write there.

Flow: `ingest_agents.spool.writer` and `ingest_agents.shipping` → **here** → files. Small files are
replaced as a whole, so that a kill leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from smon.errors import StoreError, TopologyError
from smon.topology import Layout

SPEC_NAME: Final = "stream.json"
LOCK_NAME: Final = "lock"
CHECKPOINT_NAME: Final = "checkpoint.json"
EPOCH_NAME: Final = "epoch.json"

#: Held by the one agent that ships a spool.
AGENT_LOCK_NAME: Final = "agent.lock"
#: What the server wants: how often to send.
FLUSH_NAME: Final = "flush.json"
QUARANTINE_NAME: Final = "quarantine"
DEAD_NAME: Final = "dead"

#: Begins the name of a folder that is being removed.
GONE: Final = ".gone-"

_SEGMENT: Final = "seg-"

#: A server refuses more, and longer ones.
_MAX_NOTES: Final = 100
_MAX_NOTE: Final = 1000

#: Larger files are no ``stream.json``: 100,000 ranks take 700 kB.
_MAX_JSON_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """All that a server needs to know of a stream before its first batch.

    Attributes
    ----------
    key
        Names the producer for ever: the same key is the same stream. See `key_of`.
    mode
        ``live`` or ``recorded``.
    time
        What starts of ops count from: ``unix``, or ``step``.
    window_steps
        Steps of a window; None: the server's number.
    source
        Who writes: ``recorder``, ``directory``, ``recorded`` or ``counters``.
    ranks
        Global ranks of which this stream has the ops.
    """

    key: str
    job: str
    attempt: int
    layout: Layout
    mode: str
    time: str
    host: str
    source: str
    ranks: tuple[int, ...]
    window_steps: int | None = None
    epoch: int = 0
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON object of it, in ``stream.json`` and in a hello."""
        return {**asdict(self), "notes": [note[:_MAX_NOTE] for note in self.notes[:_MAX_NOTES]]}

    @property
    def folder_name(self) -> str:
        """Name of its folder: text of users never becomes a path."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:24]


def key_of(source: str, *parts: object) -> str:
    """A key that is as long for long names of jobs and hosts as for short ones."""
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()
    return f"{source}/{digest}"


def spec_of(document: Mapping[str, Any]) -> StreamSpec:
    """Read a stream's description.

    Raises
    ------
    StoreError
        A member is missing or of another type.
    """
    try:
        window_steps = document.get("window_steps")
        return StreamSpec(
            key=str(document["key"]),
            job=str(document["job"]),
            attempt=int(document["attempt"]),
            layout=Layout(**document["layout"]),
            mode=str(document["mode"]),
            time=str(document["time"]),
            host=str(document["host"]),
            source=str(document["source"]),
            ranks=tuple(int(rank) for rank in document["ranks"]),
            window_steps=None if window_steps is None else int(window_steps),
            epoch=int(document["epoch"]),
            notes=tuple(str(note) for note in document["notes"]),
        )
    except (KeyError, TypeError, ValueError, TopologyError) as error:
        raise StoreError(f"expected the description of a stream, found none: {error}") from error


def read_spec(folder: Path) -> StreamSpec:
    """The description in a stream's folder.

    Raises
    ------
    StoreError
        It is missing or damaged.
    """
    return spec_of(read_json(folder / SPEC_NAME))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the server has, as far as the agent last knew. Advisory: the server knows better.

    Attributes
    ----------
    next_seq
        First number of the spool's own counting that is not acknowledged.
    """

    next_seq: int
    stream_id: str = ""


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a stream; 0 where there is none, or a damaged one."""
    try:
        document = read_json(folder / CHECKPOINT_NAME)
        return Checkpoint(max(int(document["next_seq"]), 0), str(document.get("stream_id", "")))
    except (StoreError, KeyError, TypeError, ValueError):
        return Checkpoint(0)


# --- small files ------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file.

    Raises
    ------
    StoreError
        There is none, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_JSON_BYTES))
    except OSError as error:
        raise StoreError(f"{path.name}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name}: expected JSON, found something else") from error
    if not isinstance(document, dict):
        raise StoreError(f"{path.name}: expected an object, found something else")
    return document


def write_json(path: Path, document: Mapping[str, Any], *, sync: bool = False) -> None:
    """Replace a small file as a whole.

    Parameters
    ----------
    sync
        Survive also the end of the machine, not only of the process.

    Raises
    ------
    OSError
        It cannot be written; the old one is still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write_whole(aside, json.dumps(document, separators=(",", ":")).encode(), sync=sync)
    aside.replace(path)
    if sync:
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a new file, or none: a full disk takes a part without a word, and raises after that.

    Raises
    ------
    OSError
        It cannot be written; there is no such file.
    """
    try:
        with path.open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
            if sync:
                os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive the end of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- segments -----------------------------------------------------------------------------------


def segment_path(folder: Path, first_seq: int) -> Path:
    """The segment that begins with this number."""
    return folder / f"{_SEGMENT}{first_seq:012d}"


def segments_of(folder: Path) -> list[tuple[int, Path]]:
    """(first number, path) of the segments of a stream, in order; empty if there is no folder."""
    found = []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    for name in names:
        digits = name.removeprefix(_SEGMENT)
        if name.startswith(_SEGMENT) and digits.isascii() and digits.isdigit():
            found.append((int(digits), folder / name))
    return sorted(found)


def streams_in(root: Path) -> list[Path]:
    """Folders of streams in a spool, in the order of their names."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    others = {QUARANTINE_NAME, DEAD_NAME}
    kept = (name for name in sorted(names) if name not in others and not name.startswith("."))
    return [root / name for name in kept]


def spool_bytes(root: Path) -> int:
    """Bytes of all segments in a spool."""
    total = 0
    for folder in streams_in(root):
        total += sum(size_of(path) for _, path in segments_of(folder))
    return total


def size_of(path: Path) -> int:
    """Size of a file; 0 if it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- locks --------------------------------------------------------------------------------------


class Lock:
    """A lock that ends with the process that took it; see `take`."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """Take the lock; None if another holds it.

        Raises
        ------
        OSError
            The file cannot be made.
        """
        try:
            # Not with O_CREAT: in a folder that all may write to, Linux refuses that for a file
            # of another user.
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return cls(handle)

    def release(self) -> None:
        """Let others have it. In a forked child this leaves the parent's lock alone."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock."""
    if not path.exists():
        return False
    try:
        lock = Lock.take(path)
    except OSError:
        return True
    if lock is None:
        return True
    lock.release()
    return False
