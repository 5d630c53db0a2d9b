"""A growing folder of op files: JSON lines that are appended to, Parquet files that appear whole.

Flow: files → **here** → spool. How far each file has been read is committed together with the batch
it was read for, so that neither a restart nor a kill loses a line or sends one twice. The format
of the lines: ``docs/reference/agent.md``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingest_agents.identity import coordinates
from ingest_agents.payload import MAX_ROWS, Gap, OpRow, context_batch, fault_of, ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import ConfigError, SMonError
from smon.ops import BY_LABEL
from smon.topology import Layout

#: Read at a time; a line that is longer is none.
_CHUNK_BYTES: Final = 1 << 20

#: The first line says which file it is, together with its inode; no more of it than this.
_HEAD_BYTES: Final = 4096

#: A file that is not seen so often is gone.
_GONE_POLLS: Final = 20

_DONE_KEY: Final = "step_done"
_NEEDED: Final = ("step", "optype", "start_ns", "duration_ns")

_PARQUET: Final = ".parquet"
_PASSED_OVER: Final = frozenset({".yaml", ".yml", ".tmp", ".gz"})
_BESIDE: Final = frozenset({"context.json", "truth.json", "meta.json"})

#: Columns of a Parquet file as rows of the wire, and whether times restart in every step.
ReadTable = Callable[[Path, Layout], tuple[Sequence[OpRow], bool]]


#: A server refuses ops of a live job that are older or newer, here with some room.
_MAX_AGE_NS: Final = 6 * 86_400 * 10**9
_MIN_AGE_NS: Final = -500 * 10**9

#: Steps of one batch lie close together: each window of it becomes a file of its own.
_MAX_SPAN: Final = 256

#: (DP rank, stage).
_Worker = tuple[int, int]


@dataclass(slots=True)
class _State:
    """How far one file has been read.

    Attributes
    ----------
    key
        Which file: inode and first line. Another file of the same name begins anew, and one that is
        renamed goes on.
    offset
        Bytes (of lines) or rows (of Parquet) that are committed.
    counts
        (step, ops) of each worker and op type, for lines without ``seq``.
    """

    key: str
    offset: int = 0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def number(self, worker: str, step: int) -> int:
        """The next sequence number of a worker and op type in a step."""
        known, number = self.counts.get(worker, (step, 0))
        number = number if known == step else 0
        self.counts[worker] = (step, number + 1)
        return number


@dataclass(slots=True)
class _Portion:
    """What a portion of a file gave; becomes true when it is committed."""

    state: _State
    done: dict[_Worker, int]
    rows: list[OpRow] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def full(self) -> bool:
        """Whether it is time for another batch."""
        rows = self.rows
        return len(rows) >= MAX_ROWS or (
            len(rows) > 1 and abs(rows[-1].step - rows[0].step) >= _MAX_SPAN
        )


class DirectorySource:
    """Ships the op files of one folder as one stream.

    A step of a worker counts as done when a later one of it has begun, or a line says so.

    Parameters
    ----------
    folder
        Where the files appear.
    root
        The spool.
    spec
        Of the stream; its ranks are those whose ops the files hold.
    limits
        Of the spool.
    read_table
        Reads a Parquet file; None: such files are passed over.
    wall
        Unix time, ns.

    Attributes
    ----------
    faults
        Lines that were left out, by reason, since the first start; each is also part of a GAP.

    Raises
    ------
    StoreError
        The spool cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        root: Path,
        spec: StreamSpec,
        limits: SpoolLimits,
        read_table: ReadTable | None = None,
        *,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder, self.faults = folder, Counter[str]()
        self._spec, self._read_table, self._wall = spec, read_table, wall
        self._workers = {coordinates(spec.layout, rank) for rank in spec.ranks}
        self._writer = SpoolWriter(root, spec, limits)
        self._states: dict[str, _State] = {}
        self._unseen: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._done: dict[_Worker, int] = {}
        self._later: dict[str, Any] = {}
        self._restore(self._writer.position)

    def _restore(self, position: Mapping[str, Any]) -> None:
        """What an earlier process has committed."""
        for name, value in position.items():
            kind, _, key = name.partition(":")
            if kind == "file":
                counts = {str(each): (int(step), int(n)) for each, (step, n) in value[1].items()}
                self._states[key] = _State(key, int(value[0]), counts)
            elif kind == "done":
                dp, _, stage = key.partition(",")
                self._done[int(dp), int(stage)] = int(value)
            elif kind == "fault":
                self.faults[key] = int(value)
            elif kind == "told":
                self._reported[key] = int(value)

    # --- rounds ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the files have beyond what is committed."""
        seen = set()
        for path in self._paths():
            with contextlib.suppress(OSError), path.open("rb") as file:
                key = _key(file.fileno(), whole=path.suffix == _PARQUET)
                if key is None:
                    continue
                seen.add(key)
                state = self._states.setdefault(key, _State(key))
                if path.suffix == _PARQUET:
                    self._take_table(path, state)
                else:
                    self._take_lines(file.fileno(), state)
        self._report()
        self._forget(seen)
        self._writer.flush()

    def close(self) -> None:
        """Take in what is left, and let go of the spool. The stream goes on after a restart."""
        self.poll()
        self._writer.close()

    def _paths(self) -> list[Path]:
        """Files by age: one that was moved away is read before its successor."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                beside = entry.name.startswith((".", "meta")) or entry.name in _BESIDE
                if beside or Path(entry.name).suffix in _PASSED_OVER:
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, entry.name))
        return [self.folder / name for _, name in sorted(found)]

    def _forget(self, seen: set[str]) -> None:
        """Drop the positions of files that are gone."""
        for key in list(self._states):
            self._unseen[key] = 0 if key in seen else self._unseen[key] + 1
            if self._unseen[key] > _GONE_POLLS:
                del self._states[key], self._unseen[key]
                self._writer.position.pop(f"file:{key}", None)

    def _portion(self, state: _State) -> _Portion:
        return _Portion(copy.deepcopy(state), dict(self._done))

    # --- files of lines -------------------------------------------------------------------------

    def _take_lines(self, handle: int, state: _State) -> None:
        size = os.fstat(handle).st_size
        if size < state.offset:
            # Cut off and begun anew.
            state.offset, state.counts = 0, {}
        while state.offset < size:
            data = os.pread(handle, _CHUNK_BYTES, state.offset)
            before = state.offset
            for portion in self._portions(data, state):
                if not self._commit(portion, state):
                    return
            if state.offset == before:
                return

    def _portions(self, data: bytes, state: _State) -> Iterator[_Portion]:
        """Whole lines of a stretch, in portions of a batch; what has no end yet is left."""
        portion = self._portion(state)
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= _CHUNK_BYTES:
            # Nothing that long is a record; its rest, up to the line's end, is none either.
            portion.faults["line-too-long"] += 1
            portion.state.offset += len(data)
            yield portion
            return
        for line in data[:end].splitlines(keepends=True):
            self._line(line, portion)
            portion.state.offset += len(line)
            if portion.full:
                yield portion
                portion = self._portion(state)
        if portion.state.offset > state.offset:
            yield portion

    def _line(self, line: bytes, portion: _Portion) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            portion.faults["not-json"] += 1
            return
        if not isinstance(record, dict):
            portion.faults["not-a-record"] += 1
        elif _DONE_KEY in record:
            self._step_done(record[_DONE_KEY], portion)
        else:
            self._record(record, portion)

    def _step_done(self, step: object, portion: _Portion) -> None:
        """All workers of this stream have done a step."""
        if type(step) is not int or step < 0:
            portion.faults["number-out-of-range"] += 1
            return
        for worker in self._workers:
            portion.done[worker] = max(step, portion.done.get(worker, -1))

    def _record(self, record: Mapping[str, Any], portion: _Portion) -> None:
        missing = [name for name in _NEEDED if name not in record]
        if missing:
            portion.faults[f"no-{missing[0]}"] += 1
            return
        try:
            row = self._row(record)
        except (TypeError, ConfigError):
            portion.faults["number-out-of-range"] += 1
            return
        self._add(row, portion, counted="seq" not in record)

    def _row(self, record: Mapping[str, Any]) -> OpRow:
        """The op of a line; a worker that it does not name is that of its rank.

        Raises
        ------
        ConfigError, TypeError
            It names no worker of the layout.
        """
        rank = record.get("rank", -1)
        dp, stage = record.get("dp"), record.get("stage")
        if dp is None or stage is None:
            dp, stage = coordinates(self._spec.layout, rank)
        return OpRow(
            record["step"],
            dp,
            stage,
            rank,
            record["optype"],
            record["start_ns"],
            record["duration_ns"],
            record.get("seq", 0),
            record.get("chunk", -1),
            record.get("global_chunk", -1),
            record.get("microbatch", -1),
        )

    def _add(self, row: OpRow, portion: _Portion, *, counted: bool = False) -> None:
        fault = None if type(row.optype) is str else "unknown-op-type"
        fault = fault or fault_of(row, BY_LABEL)
        fault = fault or self._misplaced(row)
        if fault is not None:
            portion.faults[fault] += 1
            return
        if counted:
            name = f"{row.dp},{row.stage},{row.rank},{row.optype}"
            row = row._replace(seq=portion.state.number(name, row.step))
        portion.rows.append(row)
        worker = (row.dp, row.stage)
        # Its earlier steps are done: a file has them one after the other.
        portion.done[worker] = max(row.step - 1, portion.done.get(worker, -1))

    def _misplaced(self, row: OpRow) -> str | None:
        """Why a server would refuse this op of this stream."""
        worker = (row.dp, row.stage)
        if worker not in self._workers:
            return "other-worker"
        layout = self._spec.layout
        if row.rank >= layout.world_size or (
            row.rank >= 0 and coordinates(layout, row.rank) != worker
        ):
            return "rank-of-other-worker"
        age_ns = self._wall() - row.start_ns
        if self._spec.time == "unix" and not _MIN_AGE_NS <= age_ns <= _MAX_AGE_NS:
            return "start-out-of-range"
        return None

    # --- Parquet --------------------------------------------------------------------------------

    def _take_table(self, path: Path, state: _State) -> None:
        if self._read_table is None or state.offset < 0:
            return
        try:
            rows, relative = self._read_table(path, self._spec.layout)
        except SMonError:
            rows, relative = [], False
            self._reject(state, "unreadable-file", 1)
            return
        if relative != (self._spec.time == "step"):
            self._reject(state, "other-time-base", len(rows))
            return
        while 0 <= state.offset <= len(rows):
            portion = self._portion(state)
            for row in rows[state.offset :]:
                self._add(row, portion)
                portion.state.offset += 1
                if portion.full:
                    break
            if portion.state.offset == len(rows):
                # The file is whole: so are its steps.
                for row in rows:
                    worker = (row.dp, row.stage)
                    portion.done[worker] = max(row.step, portion.done.get(worker, -1))
                portion.state.offset = -1
            if not self._commit(portion, state):
                return

    def _reject(self, state: _State, reason: str, rows: int) -> None:
        portion = self._portion(state)
        portion.faults[reason] += rows
        portion.state.offset = -1
        self._commit(portion, state)

    # --- committing -----------------------------------------------------------------------------

    def _commit(self, portion: _Portion, state: _State) -> bool:
        """Write a portion with how far it goes, both or none; False if there is no space."""
        faults = self.faults + portion.faults
        position: dict[str, Any] = {
            **self._later,
            f"file:{state.key}": [portion.state.offset, portion.state.counts],
            **{f"fault:{reason}": faults[reason] for reason in portion.faults},
        }
        for worker, step in portion.done.items():
            if self._done.get(worker) != step:
                position[f"done:{worker[0]},{worker[1]}"] = step
        if not self._write(portion, position):
            return False
        self.faults, self._done = faults, portion.done
        state.offset, state.counts = portion.state.offset, portion.state.counts
        return True

    def _write(self, portion: _Portion, position: dict[str, Any]) -> bool:
        done = self._steps_done(portion.done)
        if portion.rows:
            batch = ops_batch(portion.rows, steps_done=done)
        elif done != self._steps_done(self._done):
            batch = context_batch({}, rows=0, steps_done=done)
        else:
            # Nothing to send: if this is forgotten, the same lines are read again.
            self._later = position
            return True
        if not self._writer.try_append(batch, position):
            return False
        self._later = {}
        return True

    def _steps_done(self, done: Mapping[_Worker, int]) -> int | None:
        """The last step that every worker has done; None if there is none."""
        last = min((done.get(worker, -1) for worker in self._workers), default=-1)
        return last if last >= 0 else None

    def _report(self) -> None:
        """Tell the server of lines that were left out, each once."""
        for reason, count in (self.faults - self._reported).items():
            seq = self._writer.next_seq
            gap = Gap(seq, seq, count, reason).batch()
            position = {**self._later, f"told:{reason}": self.faults[reason]}
            if not self._writer.try_append(gap, position):
                return
            self._later = {}
            self._reported[reason] = self.faults[reason]


def _key(handle: int, *, whole: bool) -> str | None:
    """Which file this is; None for one without a first line."""
    status = os.fstat(handle)
    if whole:
        return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    head = os.pread(handle, _HEAD_BYTES, 0)
    line, newline, _ = head.partition(b"\n")
    if not newline and len(head) < _HEAD_BYTES:
        return None
    return f"{status.st_ino}-{hashlib.sha256(line).hexdigest()[:16]}"
