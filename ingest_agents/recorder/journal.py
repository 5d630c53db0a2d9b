"""What a recorder has seen and not written yet: a bounded queue, and batches of it.

Flow: `ingest_agents.recorder.recorder` (any thread of the trainer) → **here** → its own thread
writes to the spool. Adding never waits: what does not fit is counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ingest_agents.payload import MAX_ROWS, OpRow, context_batch, fault_of, ops_batch
from ingest_agents.spool.writer import SpoolWriter
from smon.wire import Batch


class Done(NamedTuple):
    """All ops of this step have been added."""

    step: int


class Tokens(NamedTuple):
    """What was in a microbatch."""

    step: int
    dp: int
    microbatch: int
    tokens: int
    sum_len2: float


class Happened(NamedTuple):
    """Something the process did besides computing; as `smon.wire` carries events."""

    kind: str
    step: int
    rank: int | None
    start_ns: int | None
    duration_s: float


Entry = OpRow | Tokens | Happened | Done

QUEUE_FULL: Final = "queue-full"


@dataclass(slots=True)
class _Lost:
    """Events that never became part of a batch, by reason, and their steps."""

    events: int = 0
    first_step: int | None = None
    last_step: int | None = None

    def add(self, step: int) -> None:
        self.events += 1
        self.first_step = step if self.first_step is None else min(self.first_step, step)
        self.last_step = step if self.last_step is None else max(self.last_step, step)


@dataclass(slots=True)
class _Pile:
    """What goes into the batches of one round."""

    rows: list[OpRow] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)


class Journal:
    """The queue of one recorder.

    Parameters
    ----------
    writer
        Of its stream.
    capacity
        Entries that it holds.
    op_types
        Names of the ops that the protocol knows.

    Attributes
    ----------
    lost
        Events that were dropped before they reached the spool, by reason.
    """

    def __init__(self, writer: SpoolWriter, capacity: int, op_types: dict[str, object]) -> None:
        self.lost: dict[str, int] = {}
        self._writer, self._capacity, self._op_types = writer, capacity, op_types
        self._entries: deque[Entry] = deque()
        self._missing: deque[tuple[int, str]] = deque()
        self._done: int | None = None
        self._told: int | None = None
        self._faulty: dict[str, _Lost] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Take an entry in, or count it if there is no room. Never waits."""
        # A step that is done takes no room: without it, all its ops would be of no use.
        if len(self._entries) < self._capacity or isinstance(entry, Done):
            self._entries.append(entry)
        else:
            self.lose(entry.step, QUEUE_FULL)

    def lose(self, step: int, reason: str) -> None:
        """Count an event of this step that will never come. Never waits."""
        self._missing.append((step, reason))

    def write(self) -> None:
        """Write everything that is there now to the spool; for one thread only."""
        pile = _Pile()
        for _ in range(len(self._entries)):
            self._sort(self._entries.popleft(), pile)
            if len(pile.rows) >= MAX_ROWS:
                self._write_rows(pile)
        # Losses come first: a step counts as done only after what it lacks was said.
        self._write_losses()
        self._write_rows(pile)
        self._write_context(pile)
        self._writer.flush()

    def _sort(self, entry: Entry, pile: _Pile) -> None:
        if isinstance(entry, Done):
            self._done = entry.step if self._done is None else max(entry.step, self._done)
        elif isinstance(entry, Tokens):
            pile.tokens.append(entry)
        elif isinstance(entry, Happened):
            pile.events.append(entry)
        elif (fault := fault_of(entry, self._op_types)) is None:
            pile.rows.append(entry)
        else:
            self._faulty.setdefault(fault, _Lost()).add(int(entry.step))

    def _write_rows(self, pile: _Pile) -> None:
        rows, pile.rows = pile.rows, []
        if rows:
            self._append(ops_batch(rows, steps_done=self._done))

    def _write_losses(self) -> None:
        by_reason, self._faulty = self._faulty, {}
        for _ in range(len(self._missing)):
            step, reason = self._missing.popleft()
            by_reason.setdefault(reason, _Lost()).add(step)
        for reason, lost in by_reason.items():
            self.lost[reason] = self.lost.get(reason, 0) + lost.events
            self._writer.lose(lost.events, reason, (lost.first_step, lost.last_step))

    def _write_context(self, pile: _Pile) -> None:
        document: dict[str, Any] = {}
        if pile.tokens:
            document["microbatches"] = _columns(pile.tokens)
        if pile.events:
            document["events"] = _columns(pile.events)
        # Without anything else to write, the step that is done must still be told.
        if document or self._told != self._done:
            rows = len(pile.tokens) + len(pile.events)
            self._append(context_batch(document, rows=rows, steps_done=self._done))

    def _append(self, batch: Batch) -> None:
        self._writer.append(batch)
        self._told = batch.steps_done


def _columns(entries: list[Tokens] | list[Happened]) -> dict[str, tuple[Any, ...]]:
    names = entries[0]._fields
    return dict(zip(names, zip(*entries, strict=True), strict=True))
