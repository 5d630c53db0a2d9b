"""Which step was it: when the steps of a job ran, as one of its streams on this host says.

Flow: segments in the spool → **here** → `ingest_agents.sources.counters.source`. Steps are those of
the whole job, so one rank's ops tell for all; the lag between ranks is below a step.
"""

from __future__ import annotations

import json
import operator
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from ingest_agents.payload import decode
from ingest_agents.spool.folder import segments_of
from smon.errors import WireError
from smon.wire import TYPE_JSON, Batch, BatchKind, batch_of_frame
from smon.wire.frames import Frame, frame_at, scan_frames

#: Steps that are remembered: more than pass between a reading and the ops of its step.
_MAX_STEPS: Final = 1024

_LOCAL_TYPE: Final = 128

#: How columns begin in a body, as `smon.wire.columns.json_body` writes it.
_COLUMNS: Final = (b'"step":', b'"start_ns":', b'"duration_ns":')

#: Batches that are kept unopened; at 50 kB each.
_MAX_CLOSED: Final = 64

#: After every step that begins at the same time.
_LAST: Final = 1 << 62

#: Bytes of a segment that are read at once.
_CHUNK_BYTES: Final = 4 << 20


class Tail:
    """Batches that are added to a stream, from its newest segment on; reads only.

    Nothing depends on it seeing all of them: what it cannot read, it passes over.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: tuple[int, Path] | None = None
        self._offset, self._fruitless = 0, -1

    def new(self) -> Iterator[Batch]:
        """Batches since the last call."""
        while True:
            yield from self._read()
            later = self._next_segment()
            if later is None:
                return
            self._at, self._offset, self._fruitless = later, 0, -1

    def _next_segment(self) -> tuple[int, Path] | None:
        segments = segments_of(self._folder)
        if self._at is None:
            return segments[-1] if segments else None
        return next((each for each in segments if each[0] > self._at[0]), None)

    def _read(self) -> Iterator[Batch]:
        for frame in self._frames():
            if frame.type < _LOCAL_TYPE:
                try:
                    yield batch_of_frame(frame.seq, frame.type, frame.body)
                except WireError:
                    continue

    def _frames(self) -> Iterator[Frame]:
        if self._at is None:
            return
        try:
            with self._at[1].open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size in (self._offset, self._fruitless):
                    return
                data = memoryview(os.pread(file.fileno(), _CHUNK_BYTES, self._offset))
        except OSError:
            return
        at = 0
        while (frame := frame_at(data, at)) is not None:
            at = frame.end
            yield frame
        if at < len(data):
            # A write in progress, or damage: looked at again once there is more.
            found = [part for part in scan_frames(data, at + 1) if isinstance(part, Frame)]
            self._fruitless = -1 if found else size
            yield from found
            at = found[-1].end if found else at
        self._offset += at


class Steps:
    """When each step began and ended, unix ns.

    Batches are opened only where a time has to be placed, from the newest one back: most of them
    never are, which keeps this cheap whatever a trainer records.

    Attributes
    ----------
    done
        Last step whose ops are all known; −1: none.
    """

    def __init__(self) -> None:
        self.done = self._latest = -1
        self._closed: deque[Batch] = deque(maxlen=_MAX_CLOSED)
        self._span: dict[int, tuple[int, int]] = {}
        self._ordered: list[tuple[int, int]] = []

    def add(self, batch: Batch) -> None:
        """Take in what a batch says."""
        if batch.steps_done is not None:
            self.done = max(self.done, batch.steps_done)
        if batch.kind is BatchKind.OPS and batch.content_type == TYPE_JSON:
            self._closed.append(batch)
            if batch.last_step is not None:
                self._latest = max(self._latest, batch.last_step)

    def _open(self, ns: int) -> None:
        """Open batches until one has an op that had begun at a time; older ones say no more."""
        while self._closed:
            begin = self._add_ops(self._closed.pop())
            if begin is not None and begin <= ns:
                self._closed.clear()
        self._ordered = sorted((first, step) for step, (first, _) in self._span.items())
        for _, step in self._ordered[:-_MAX_STEPS]:
            del self._span[step]
        self._ordered = self._ordered[-_MAX_STEPS:]

    def _add_ops(self, batch: Batch) -> int | None:
        """Steps in a batch; when its first op began, None if it cannot be read."""
        try:
            raw = decode(batch)
            steps, starts, durations = (_column(raw, name) for name in _COLUMNS)
            ends = map(operator.add, starts, durations)
            rows = sorted(zip(steps, starts, ends, strict=True))
            begin = min(starts)
        except (WireError, ValueError, TypeError):
            return None
        for step, group in groupby(rows, operator.itemgetter(0)):
            spans = list(group)
            start, end = spans[0][1], max(each[2] for each in spans)
            first, last = self._span.get(step, (start, end))
            self._span[step] = min(first, start), max(last, end)
        return int(begin)

    def place(self, ns: int) -> int | None:
        """The last step that had begun at a time; None: before all, or not known yet.

        It is known if a later step has begun, or if the step was still under way then.
        """
        if self._closed:
            self._open(ns)
        index = bisect_right(self._ordered, (ns, _LAST))
        if index == 0:
            return None
        step = self._ordered[index - 1][1]
        known = index < len(self._ordered) or ns <= self._span[step][1]
        return step if known else None

    def first_after(self, ns: int) -> int | None:
        """The first step that is known, if a time lies before it; else None."""
        if self._closed:
            self._open(ns)
        if not self._ordered or ns >= self._ordered[0][0]:
            return None
        return self._ordered[0][1]

    def inside(self, step: int, ns: int) -> bool:
        """Whether a step was under way at a time; if not, it is one between two steps."""
        first, last = self._span[step]
        return first <= ns <= last

    def is_over(self, step: int) -> bool:
        """Whether a step is done, or a later one has begun."""
        return step <= self.done or step < self._latest


def _column(raw: bytes, name: bytes) -> list[int]:
    """One column of whole numbers; parsing the others, too, takes four times as long.

    Raises
    ------
    ValueError
        It is not there, or not one of whole numbers.
    """
    begin = raw.index(name) + len(name)
    column: list[int] = json.loads(raw[begin : raw.index(b"]", begin) + 1])
    return column
