"""What an analysis is made of: ops, the job, notes, side evidence, earlier windows.

Flow: `smon.store.events` → **here** → `smon.prepare`, `smon.analysis`, as for files on a command
line: the same ops give the same report.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.history import Earlier, History, earlier_of, history_of
from smon.errors import ConfigError, NothingUsableError, StoreError
from smon.store.results import unpacked
from smon.store.windows import AttemptInfo
from smon.trace.context import Context
from smon.trace.load import fitted
from smon.trace.meta import Job
from smon.trace.table import OpTable

#: The latest windows say what is usual; older ones are of another time.
HISTORY_WINDOWS: Final = 16

#: How a report says that a reader left rows out.
_LEFT_OUT: Final = re.compile(r"([0-9][0-9,]*) rows? left out: (.+)")


def job_of(attempt: AttemptInfo) -> Job:
    """The job as a meta file would describe it."""
    return Job(attempt.job, attempt.layout, attempt.number)


def complete(table: OpTable | None, attempt: AttemptInfo) -> tuple[OpTable, tuple[str, ...]]:
    """A table checked against the layout and completed by it, and the notes for its report.

    Rows that the source had to leave out stand in the notes of the attempt; they count as if they
    had been left out here.

    Raises
    ------
    NothingUsableError
        There is no op.
    MetaError
        The table has ranks that the layout has not.
    """
    if table is None or not len(table):
        raise NothingUsableError("no op of this window has come")
    dropped = Counter(dict(table.dropped))
    notes = []
    for note in attempt.notes:
        match = _LEFT_OUT.fullmatch(note)
        if match is None:
            notes.append(note)
        else:
            dropped[match[2]] += int(match[1].replace(",", ""))
    whole, more = fitted(replace(table, dropped=tuple(sorted(dropped.items()))), attempt.layout)
    return whole, (*notes, *more)


def notes_of_rows(dropped: Iterable[tuple[str, int]]) -> list[str]:
    """Notes that `complete` turns back into what was left out."""
    return [
        f"{count:,} {'row' if count == 1 else 'rows'} left out: {reason}"
        for reason, count in dropped
        if count
    ]


def with_hosts(context: Context, hosts: Mapping[int, str]) -> Context:
    """Side evidence with the hosts that the streams name; what it says itself goes before."""
    return replace(context, hosts={**hosts, **context.hosts}) if hosts else context


def history_from(reports: Sequence[bytes], job: str) -> History | None:
    """What is usual for a job, from the reports of its latest windows; None without any."""
    earlier = [one for one in map(_earlier, reports) if one is not None and one.job_id == job]
    return history_of(earlier, job)


def _earlier(report: bytes) -> Earlier | None:
    try:
        return earlier_of(json.loads(unpacked(report)))
    except (ConfigError, StoreError, ValueError):
        # A window in which nothing could be analysed says nothing of what is usual.
        return None


def starts_of(table: OpTable) -> dict[int, int]:
    """Unix ns of the first op of each step; empty where times restart in every step."""
    if table.step_relative or not len(table):
        return {}
    # Rows mostly come in runs of one step, so runs are reduced first: no sort over all rows.
    begin = np.flatnonzero(np.concatenate(([True], table.step[1:] != table.step[:-1])))
    runs = zip(
        table.step[begin].tolist(), np.minimum.reduceat(table.start_ns, begin).tolist(), strict=True
    )
    first: dict[int, int] = {}
    for step, start in runs:
        first[step] = min(first.get(step, start), start)
    return dict(sorted(first.items()))


def by_step(table: OpTable) -> dict[int, OpTable]:
    """The rows of each step."""
    steps = np.unique(table.step).tolist()
    if len(steps) == 1:
        return {steps[0]: table}
    order: NDArray[Any] = np.argsort(table.step, kind="stable")
    bounds = np.searchsorted(table.step[order], [*steps, steps[-1] + 1] if steps else [])
    return {
        step: table.take(order[bounds[number] : bounds[number + 1]])
        for number, step in enumerate(steps)
    }
