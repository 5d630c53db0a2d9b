"""The latest steps of a live attempt, in memory: every op is read from files once.

Flow: `smon.store.events` → **here** → `smon.worker.live`. Bounded by steps and by ops; a worker
that takes an attempt over reads the latest steps anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy.orm import Session

from smon.config import Settings
from smon.store import windows as table
from smon.store.commit import CONTEXT, OPS
from smon.store.events import read_context, read_ops
from smon.store.objects import Objects
from smon.store.steps import latest_steps
from smon.store.windows import AttemptInfo, FileInfo
from smon.trace.context import Context, merge
from smon.trace.grid import Grid, joined, make_grid
from smon.trace.table import OpTable, concat
from smon.worker.material import by_step

#: However large a step is, a diagnosis needs so many of them.
MIN_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Read:
    """How much of a file has been read."""

    window_id: str | None
    first_step: int
    last_step: int
    up_to: int


@dataclass(slots=True, eq=False)
class Trailing:
    """Steps of one attempt, ascending, each in the pieces in which it came.

    Attributes
    ----------
    grids
        Of the steps that have been looked at as they are now.
    rows_read
        Ops read from files so far.
    files, contexts
        How much of which file of ops has been read; side evidence by file.
    """

    steps: dict[int, list[OpTable]] = field(default_factory=dict)
    grids: dict[int, Grid] = field(default_factory=dict)
    rows_read: int = 0
    files: dict[str, Read] = field(default_factory=dict)
    contexts: dict[str, Context] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Ops in memory."""
        return sum(len(piece) for pieces in self.steps.values() for piece in pieces)

    def table(self, latest: int | None = None) -> OpTable:
        """One table of all steps, or of the latest ones."""
        chosen = list(self.steps.values())[-(latest or len(self.steps)) :]
        return concat(piece for pieces in chosen for piece in pieces)

    def grid(self, table: OpTable, latest: int | None = None) -> Grid | None:
        """The grid of the table of all steps, or of the latest ones; None if it is not known.

        Each step is arranged once, however many analyses look at it.

        Parameters
        ----------
        table
            What `table` gives, as a report wants it: with the same rows.
        """
        for step, pieces in self.steps.items():
            if step not in self.grids:
                whole = concat(pieces)
                self.steps[step] = [whole]
                self.grids[step] = make_grid(whole)
        chosen = list(self.steps)[-(latest or len(self.steps)) :]
        return joined([self.grids[step] for step in chosen], table)

    def forget_grids(self, changed: Collection[int]) -> None:
        """After steps have changed, or have gone."""
        self.grids = {
            step: grid
            for step, grid in self.grids.items()
            if step in self.steps and step not in changed
        }

    def numbers(self) -> list[int]:
        """The step numbers, ascending."""
        return list(self.steps)

    def context(self) -> Context:
        """Side evidence of these steps and of the attempt."""
        return merge(self.contexts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read, as of one view of the database.

    Attributes
    ----------
    ops
        Files, each with the first step that is wanted of it.
    replaced
        (first, last) steps that are read anew, because their files have been put together.
    """

    up_to: int
    ops: tuple[tuple[FileInfo, int], ...]
    context: tuple[FileInfo, ...]
    replaced: tuple[tuple[int, int], ...]


def plan_reading(
    session: Session, trailing: Trailing, attempt: AttemptInfo, settings: Settings
) -> Plan:
    """What is new for an attempt: files, or later steps of files that are known.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    up_to = -1 if attempt.ready_step is None else attempt.ready_step
    low = _first_wanted(session, trailing, attempt, up_to, settings)
    _forget_before(trailing, low)
    files = table.files_of_steps(session, attempt.id, OPS, (low, up_to))
    replaced = _replaced(trailing, files)
    wanted = []
    for file in files:
        known = trailing.files.get(file.id)
        anew = known is None or any(
            first <= file.last_step and file.first_step <= last for first, last in replaced
        )
        begin = low if anew or known is None else known.up_to + 1
        if max(begin, file.first_step) <= min(up_to, file.last_step):
            wanted.append((file, begin))
    context = [
        *table.files_of_attempt(session, attempt.id, CONTEXT),
        *table.files_of_steps(session, attempt.id, CONTEXT, (low, up_to)),
    ]
    return Plan(up_to, tuple(wanted), tuple(context), tuple(replaced))


def _first_wanted(
    session: Session, trailing: Trailing, attempt: AttemptInfo, up_to: int, settings: Settings
) -> int:
    """First step that matters: the first in memory, or if there is none, one far enough back."""
    if trailing.steps:
        return min(trailing.steps)
    files = table.files_of_steps(session, attempt.id, OPS, (up_to - MIN_STEPS + 1, up_to))
    count = settings.live_steps
    if files:
        span = max(one.last_step for one in files) - min(one.first_step for one in files) + 1
        count = most_steps(settings, sum(one.rows for one in files) / span)
    low = up_to - count + 1
    # Where only some steps are traced, numbers are further apart.
    known = [step for step in latest_steps(session, attempt.id, count) if step <= up_to]
    return min([low, *known])


def most_steps(settings: Settings, ops_per_step: float) -> int:
    """How many steps of such a size the running diagnosis looks back."""
    fits = int(settings.live_max_ops / max(ops_per_step, 1.0))
    return max(MIN_STEPS, min(settings.live_steps, fits))


def _forget_before(trailing: Trailing, low: int) -> None:
    gone = [name for name, read in trailing.files.items() if read.last_step < low]
    for name in gone:
        del trailing.files[name]


def _replaced(trailing: Trailing, files: Sequence[FileInfo]) -> list[tuple[int, int]]:
    """Steps of windows of which a file that was read is not there any more.

    All ops of a window are then in other files, and are read again.
    """
    present = {file.id for file in files}
    known = trailing.files
    windows = {read.window_id for name, read in known.items() if name not in present}
    ranges = []
    for window_id in windows:
        mine = [read for read in known.values() if read.window_id == window_id]
        now = [file for file in files if file.window_id == window_id]
        first = min([*(one.first_step for one in mine), *(one.first_step for one in now)])
        last = max([*(one.last_step for one in mine), *(one.last_step for one in now)])
        ranges.append((first, last))
    return ranges


def read_new(objects: Objects, trailing: Trailing, plan: Plan, settings: Settings) -> set[int]:
    """Read what is new and drop what is too old.

    Returns
    -------
    set of int
        Steps that have changed.

    Raises
    ------
    StoreError
        A file cannot be read: nothing has changed in memory.
    """
    pieces: list[tuple[FileInfo, OpTable]] = []
    for file, begin in plan.ops:
        ops = read_ops(objects, [file.path], steps=(begin, plan.up_to))
        trailing.rows_read += len(ops)
        pieces.append((file, ops))
    contexts = _contexts(objects, trailing, plan)
    for first, last in plan.replaced:
        _drop(trailing, first, last)
    changed: set[int] = set()
    for file, ops in pieces:
        trailing.files[file.id] = Read(file.window_id, file.first_step, file.last_step, plan.up_to)
        for step, piece in by_step(ops).items():
            trailing.steps.setdefault(step, []).append(piece)
            changed.add(step)
    trailing.steps = dict(sorted(trailing.steps.items()))
    trailing.contexts = contexts
    _trim(trailing, settings)
    trailing.forget_grids(changed)
    return changed


def _contexts(objects: Objects, trailing: Trailing, plan: Plan) -> dict[str, Context]:
    known = trailing.contexts
    return {
        file.id: known[file.id] if file.id in known else read_context(objects, [file.path])
        for file in plan.context
    }


def _drop(trailing: Trailing, first: int, last: int) -> None:
    trailing.steps = {
        step: pieces for step, pieces in trailing.steps.items() if not first <= step <= last
    }
    trailing.files = {
        name: read
        for name, read in trailing.files.items()
        if read.last_step < first or read.first_step > last
    }


def _trim(trailing: Trailing, settings: Settings) -> None:
    if not trailing.steps:
        return
    count = most_steps(settings, trailing.rows / len(trailing.steps))
    for step in list(trailing.steps)[:-count]:
        del trailing.steps[step]
