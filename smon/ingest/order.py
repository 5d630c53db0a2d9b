"""Ops of many batches in the order of the files: by step, rank and start, window by window.

Flow: `smon.ingest.files` → **here** → `smon.store.events`, which sorts what is not in order. Agents
send ops of one rank and step in one go, so batches are made of long sorted runs: putting runs in
order and copying them costs a tenth of sorting rows. Only where runs of one rank and step overlap
in time the rows are not quite in order afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smon.ingest.plain import numbers, texts
from smon.ingest.values import COLUMN_OF_OPTYPE, Column, columns_of
from smon.wire.arrow import SCHEMA
from smon.wire.columns import OPTYPE

#: Shorter runs on average are not worth it: the batch is sorted by rows first.
_RUN_ROWS: Final = 8

#: Some 20,000 rows, copied in tens of microseconds.
_RUNS_AT_A_TIME: Final = 32

_WIDE: Final = pa.dictionary(pa.int32(), pa.utf8())


@dataclass(frozen=True, slots=True)
class WindowOps:
    """Ops of one window, and the steps that occur."""

    window: int
    table: pa.Table
    first_step: int
    last_step: int


class _Run(NamedTuple):
    """Rows of one step and rank in a row, in the order of time; runs sort by their fields."""

    window: int
    step: int
    rank: int
    dp: int
    stage: int
    start_ns: int
    batch: int
    first: int
    end: int


#: What rows are ordered by; dp and stage matter where ranks are not known.
_KEYS: Final = ("step", "rank", "dp", "stage", "start_ns")


def by_window(batches: Sequence[pa.RecordBatch], window_steps: int) -> Iterator[WindowOps]:
    """Ops of batches that are not empty, window by window.

    Parameters
    ----------
    window_steps
        Steps of a window; 0: all of them are window 0.
    """
    labels: dict[str, int] = {}
    parts: list[dict[str, Column]] = []
    runs: list[_Run] = []
    for batch in batches:
        columns = columns_of(batch)
        columns[OPTYPE] = _codes(batch, columns[OPTYPE], labels)
        columns, bounds = _in_runs(columns)
        runs.extend(_runs(columns, bounds, len(parts), window_steps))
        parts.append(columns)
    runs.sort()
    names = texts(list(labels))
    for window, group in groupby(runs, key=_window):
        chosen = list(group)
        table = _table(parts, chosen, names)
        yield WindowOps(window, table, chosen[0].step, chosen[-1].step)


def _window(run: _Run) -> int:
    return run.window


def _codes(batch: pa.RecordBatch, indices: Column, labels: dict[str, int]) -> Column:
    """Op types as places in `labels`, which grows by those that are new."""
    mine = batch.column(COLUMN_OF_OPTYPE).dictionary.to_pylist()
    codes = np.array([labels.setdefault(label, len(labels)) for label in mine], np.int32)
    return codes[indices]


def _in_runs(columns: dict[str, Column]) -> tuple[dict[str, Column], NDArray[np.intp]]:
    """Columns, sorted if they are in disorder, and where each run begins."""
    bounds = _bounds(columns)
    if len(bounds) * _RUN_ROWS > len(columns["step"]):
        order = np.lexsort([columns[name] for name in reversed(_KEYS)])
        columns = {name: column[order] for name, column in columns.items()}
        bounds = _bounds(columns)
    return columns, bounds


def _bounds(columns: dict[str, Column]) -> NDArray[np.intp]:
    start = columns["start_ns"]
    ends = start[1:] < start[:-1]
    for name in _KEYS[:-1]:
        column = columns[name]
        ends |= column[1:] != column[:-1]
    return np.concatenate(([0], np.flatnonzero(ends) + 1))


def _runs(
    columns: dict[str, Column], bounds: NDArray[np.intp], batch: int, window_steps: int
) -> Iterator[_Run]:
    firsts = bounds.tolist()
    ends = [*firsts[1:], len(columns["step"])]
    keys = [columns[name][bounds].tolist() for name in _KEYS]
    windows = [step // window_steps if window_steps else 0 for step in keys[0]]
    return map(_Run, windows, *keys, repeat(batch), firsts, ends)


def _table(parts: Sequence[dict[str, Column]], runs: Sequence[_Run], labels: pa.Array) -> pa.Table:
    arrays = []
    for field in SCHEMA:
        array = numbers(_joined([parts[run.batch][field.name] for run in runs], runs))
        arrays.append(
            pa.DictionaryArray.from_arrays(array, labels) if field.name == OPTYPE else array
        )
    fields = [
        pa.field(field.name, _WIDE if field.name == OPTYPE else field.type, nullable=False)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _joined(columns: Sequence[Column], runs: Sequence[_Run]) -> Column:
    """Rows of all runs of one column.

    A few runs at a time: the copy keeps the interpreter to itself, and a whole column at once would
    hold up every acknowledgement for ten milliseconds.
    """
    joined = np.empty(sum(run.end - run.first for run in runs), columns[0].dtype)
    at = 0
    for begin in range(0, len(runs), _RUNS_AT_A_TIME):
        chosen = range(begin, min(begin + _RUNS_AT_A_TIME, len(runs)))
        part = [columns[index][runs[index].first : runs[index].end] for index in chosen]
        end = at + sum(map(len, part))
        np.concatenate(part, out=joined[at:end])
        at = end
    return joined
