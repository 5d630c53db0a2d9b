"""Keep a spool below its cap: the oldest steps go first, and a GAP stands where each batch was.

Flow: `ingest_agents.spool.writer` (without an agent), `ingest_agents.agent` → **here** → segments,
replaced as a whole. Only sealed ones are touched: not the last one of a stream, to which its writer
appends. What the server has, or may have, stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from ingest_agents.payload import Gap, frame_of, gap_of
from ingest_agents.spool.folder import (
    AGENT_LOCK_NAME,
    Lock,
    read_checkpoint,
    read_spec,
    segments_of,
    size_of,
    spool_bytes,
    streams_in,
)
from smon.errors import StoreError, WireError
from smon.wire import Batch, BatchKind, batch_of_frame
from smon.wire.frames import Frame, encode_frame, scan_frames

REASON: Final = "spool-full"

#: Frames of this type and above stay on the host.
_LOCAL_TYPE: Final = 128

#: Batches that the server may have beyond the checkpoint: more than are sent between two of them.
_UNSURE: Final = 1024

#: A twentieth below the cap, so that not every batch evicts another.
_SPARE: Final = 20


@dataclass(frozen=True, slots=True)
class _Stream:
    folder: Path
    attempt: tuple[str, int]
    keep: int
    """Batches below this number may have reached the server."""

    def sealed(self) -> list[Path]:
        """Segments that are complete, and not acknowledged as a whole."""
        pairs = pairwise(segments_of(self.folder))
        return [path for (_, path), (following, _) in pairs if following > self.keep]


def make_room(root: Path, cap_bytes: int) -> None:
    """`evict`, unless an agent runs, which does so itself.

    Raises
    ------
    OSError
        The spool cannot be written.
    """
    if not cap_bytes or spool_bytes(root) <= cap_bytes:
        return
    lock = Lock.take(root / AGENT_LOCK_NAME)
    if lock is None:
        return
    try:
        evict(root, cap_bytes, {})
    finally:
        lock.release()


def evict(root: Path, cap_bytes: int, keep: Mapping[str, int]) -> Counter[str]:
    """Drop the oldest steps of all streams until the spool fits.

    Ops go first, whole steps of a job at a time, over all its streams; then files of ranks, then
    side evidence. What knows no step goes as if it were of the first one.

    Parameters
    ----------
    root
        The spool. The caller holds its agent lock.
    cap_bytes
        What it may hold; 0: anything.
    keep
        By folder name, the first number that has certainly not been sent; -1: leave the stream
        alone. By default, the checkpoint says.

    Returns
    -------
    Counter[str]
        Events that were dropped, by folder name.
    """
    excess = spool_bytes(root) - cap_bytes
    dropped: Counter[str] = Counter()
    if not cap_bytes or excess <= 0:
        return dropped
    goal = excess + cap_bytes // _SPARE
    streams = list(_streams(root, keep))
    for kind in (BatchKind.OPS, BatchKind.FILE, BatchKind.CONTEXT):
        without: set[Path] = set()
        while goal > 0 and (oldest := _oldest(streams, kind, goal, without)):
            stream, last_step = oldest
            same = [other for other in streams if other.attempt == stream.attempt]
            freed = sum(_drop(other, kind, last_step, dropped) for other in same)
            if not freed:
                break
            goal -= freed
    return dropped


def _streams(root: Path, keep: Mapping[str, int]) -> Iterator[_Stream]:
    for folder in streams_in(root):
        first = keep.get(folder.name)
        if first is None:
            first = read_checkpoint(folder).next_seq
        if first < 0:
            continue
        try:
            spec = read_spec(folder)
            yield _Stream(folder, (spec.job, spec.attempt), first)
        except StoreError:
            yield _Stream(folder, (folder.name, 0), first)


def _oldest(
    streams: list[_Stream], kind: BatchKind, goal: int, without: set[Path]
) -> tuple[_Stream, int] | None:
    """The stream with the oldest segment that has any of the kind, and up to which step to drop.

    Parameters
    ----------
    without
        Segments that are known to have none; more are added.
    """
    sealed = [(stream, path) for stream in streams for path in stream.sealed()]
    fresh = [(stream, path) for stream, path in sealed if path not in without]
    for stream, path in sorted(fresh, key=lambda item: _age(item[1])):
        last_step = _bound(path, stream, kind, goal)
        if last_step is not None:
            return stream, last_step
        without.add(path)
    return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _bound(path: Path, stream: _Stream, kind: BatchKind, goal: int) -> int | None:
    """Last step to drop, so that about `goal` bytes go; None if nothing of the kind is there."""
    size, bound = 0, None
    for frame, batch in _batches(path):
        if batch is None or batch.kind is not kind or batch.seq < stream.keep:
            continue
        bound = max(bound or 0, batch.last_step or 0)
        size += frame.end - frame.offset
        if size >= goal:
            break
    return bound


def _drop(stream: _Stream, kind: BatchKind, last_step: int, dropped: Counter[str]) -> int:
    """Put GAPs for the batches of a stream up to a step; bytes that this freed."""

    def goes(batch: Batch) -> bool:
        early = batch.kind is kind and (batch.first_step or 0) <= last_step
        return early and batch.seq >= stream.keep

    freed = 0
    for path in stream.sealed():
        before = size_of(path)
        batches = [batch for _, batch in _batches(path) if batch is not None]
        if any(map(goes, batches)):
            dropped[stream.folder.name] += _rewrite(path, goes, stream.keep + _UNSURE)
            freed += before - size_of(path)
        elif any(batch.kind is kind and batch.seq >= stream.keep for batch in batches):
            # Only later steps from here on.
            break
    return freed


def _rewrite(path: Path, goes: Callable[[Batch], bool], join_from: int) -> int:
    """Replace a segment by one with GAPs; events that went.

    Parameters
    ----------
    join_from
        From this number on, GAPs that follow each other become one. Before, the server may have
        some of the batches without our knowing, and only single ones can be left out then.
    """
    parts: list[bytes | Gap] = []
    events = 0
    for frame, batch in _batches(path):
        gap = None
        if batch is not None and goes(batch):
            steps = (batch.first_step, batch.last_step)
            gap = Gap(batch.seq, batch.seq, batch.events, REASON, *steps)
            events += batch.events
        elif batch is not None and batch.kind is BatchKind.GAP:
            gap = _gap(batch)
        last = parts[-1] if parts else None
        if gap is None:
            parts.append(encode_frame(frame.seq, frame.type, frame.body, frame.flags))
        elif isinstance(last, Gap) and last.first_seq >= join_from and last.meets(gap):
            parts[-1] = last.joined(gap)
        else:
            parts.append(gap)
    data = b"".join(frame_of(part.batch()) if isinstance(part, Gap) else part for part in parts)
    return events if _replace(path, data) else 0


def _gap(batch: Batch) -> Gap | None:
    try:
        return gap_of(batch)
    except WireError:
        return None


def _replace(path: Path, data: bytes) -> bool:
    aside = path.with_name(f".{path.name}")
    try:
        was = path.stat()
        if aside.write_bytes(data) == len(data):
            # It is as old as what is left in it.
            os.utime(aside, ns=(was.st_atime_ns, was.st_mtime_ns))
            aside.replace(path)
            return True
    except OSError:
        pass
    with contextlib.suppress(OSError):
        aside.unlink()
    return False


def _batches(path: Path) -> Iterator[tuple[Frame, Batch | None]]:
    """Frames of a segment; what is damaged is missing, and the reader sees the hole."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for part in scan_frames(data):
        if not isinstance(part, Frame) or part.type >= _LOCAL_TYPE:
            continue
        try:
            yield part, batch_of_frame(part.seq, part.type, part.body)
        except WireError:
            yield part, None
