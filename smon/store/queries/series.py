"""One worker over the steps of its attempt, beside its peers: from the files of the windows.

Flow: `smon.worker.matrix` → files, running diagnosis → **here** → the page of a rank, REST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import StoreError
from smon.store.models import Attempt, Result, Window
from smon.store.objects import Objects
from smon.store.queries.workers import WorkersFile

#: Most steps of one answer.
MAX_STEPS: Final = 2000


@dataclass(frozen=True, slots=True)
class SeriesLimits:
    """How much is read, newest windows first: a page stays as quick with 2,048 workers as with 8.

    Attributes
    ----------
    windows
        Most files.
    rows
        Most rows of all of them together; the newest is read at any size.
    """

    windows: int = 16
    rows: int = 1_500_000


Floats = NDArray[np.float64]

_LIMITS: Final = SeriesLimits()

_VALUES: Final = ("slowdown", "compute_s", "wait_s")
_COLUMNS: Final = ("step", "dp", *_VALUES)


@dataclass(frozen=True, slots=True, eq=False)
class SeriesWindow:
    """Some steps of an attempt in one file of workers; `number` None: the running diagnosis."""

    id: str | None
    number: int | None
    file: WorkersFile


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One worker in one step; None where it, or every peer, is absent.

    Attributes
    ----------
    slowdown
        The exact S_w of this step.
    peers_compute_s, peers_wait_s
        Median of the other DP ranks of the same stage, which have the same work to do.
    """

    step: int
    slowdown: float | None
    compute_s: float | None
    wait_s: float | None
    peers_compute_s: float | None
    peers_wait_s: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Steps ascending; `windows` have been read, `left_out` older ones have not."""

    steps: tuple[WorkerStep, ...]
    windows: tuple[SeriesWindow, ...]
    left_out: int


def windows_with_workers(
    session: Session, objects: Objects, tenant_id: str, job_id: str, attempt: int
) -> tuple[SeriesWindow, ...]:
    """The running diagnosis of an attempt and its windows, newest first, as far as kept."""
    query = (
        select(Window.id, Window.number, Result.workers_path)
        .join(Window, Window.id == Result.window_id)
        .join(Attempt, Attempt.id == Result.attempt_id)
        .where(
            Result.tenant_id == tenant_id,
            Result.job_id == job_id,
            Attempt.number == attempt,
            Result.workers_path.is_not(None),
        )
        .order_by(Window.kind.desc(), Window.number.desc(), Result.created_ns.desc())
        .limit(4 * _LIMITS.windows)
    )
    found: dict[str, SeriesWindow] = {}
    for window_id, number, path in session.execute(query):
        file = WorkersFile(objects, path)
        found.setdefault(window_id, SeriesWindow(window_id, number, file))
    live = session.execute(
        select(Attempt.live_workers).where(
            Attempt.tenant_id == tenant_id, Attempt.job_id == job_id, Attempt.number == attempt
        )
    ).scalar()
    running = () if live is None else (SeriesWindow(None, None, WorkersFile(objects, None, live)),)
    return (*running, *found.values())


def series_of(
    windows: Sequence[SeriesWindow], place: tuple[int, int], limits: SeriesLimits = _LIMITS
) -> Series:
    """What a worker did in each step of the newest windows; of two that know a step, the newer.

    Parameters
    ----------
    windows
        Of `windows_with_workers`.
    place
        DP rank and stage of the worker.
    limits
        How much is read.

    Raises
    ------
    StoreError
        A file cannot be read.
    """
    steps: dict[int, WorkerStep] = {}
    read: list[SeriesWindow] = []
    rows = 0
    for window in windows[: limits.windows]:
        if not window.file.there:
            continue
        size, mine = _read(window.file, place)
        if read and (rows + size > limits.rows or len(steps) + len(mine) > MAX_STEPS):
            break
        rows += size
        read.append(window)
        steps = {each.step: each for each in mine} | steps
    ordered = tuple(steps[step] for step in sorted(steps)[-MAX_STEPS:])
    return Series(ordered, tuple(read), len(windows) - len(read))


def _read(file: WorkersFile, place: tuple[int, int]) -> tuple[int, list[WorkerStep]]:
    """Rows of a file, and the steps of one worker in it."""
    try:
        with file.open() as handle, pq.ParquetFile(handle) as opened:
            rows = opened.metadata.num_rows
            table = opened.read(columns=["stage", *_COLUMNS], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read the workers of a window: {error}") from error
    # A filter of pyarrow would import its data sets, and these pandas: two seconds.
    here = _numbers(table, "stage") == place[1]
    column = {name: _numbers(table, name)[here] for name in _COLUMNS}
    return rows, _steps_of(column, place[0])


def _steps_of(column: Mapping[str, NDArray[Any]], dp: int) -> list[WorkerStep]:
    """One DP rank beside all others, of the columns of one stage."""
    ours = column["dp"] == dp
    steps, index = np.unique(column["step"], return_inverse=True)
    peers = [
        group_medians(column[name][~ours], index[~ours], len(steps))
        for name in ("compute_s", "wait_s")
    ]
    return [
        WorkerStep(
            int(steps[index[row]]),
            *(_known(column[name][row]) for name in _VALUES),
            *(_known(medians[index[row]]) for medians in peers),
        )
        for row in np.flatnonzero(ours).tolist()
    ]


def group_medians(values: Floats, group: NDArray[np.intp], groups: int) -> Floats:
    """Median of each group without its NaN; NaN where a group has nothing."""
    there = ~np.isnan(values)
    values, group = values[there], group[there]
    ordered = values[np.lexsort((values, group))]
    count = np.bincount(group, minlength=groups)
    begin = np.cumsum(count) - count
    medians = np.full(groups, np.nan)
    filled = count > 0
    low = begin[filled] + (count[filled] - 1) // 2
    high = begin[filled] + count[filled] // 2
    medians[filled] = (ordered[low] + ordered[high]) / 2
    return medians


def _numbers(table: pa.Table, name: str) -> NDArray[Any]:
    """A column, null as NaN; without what would make pyarrow import pandas."""
    parts = [_plain(chunk, name) for chunk in table.column(name).chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.empty(0, np.float64)


def _plain(chunk: pa.Array, name: str) -> NDArray[Any]:
    if name not in _VALUES:
        return np.from_dlpack(chunk)
    unknown = pa.py_buffer(np.full(len(chunk), np.nan))
    nothing = pa.Array.from_buffers(pa.float64(), len(chunk), [None, unknown])
    return np.from_dlpack(pc.coalesce(chunk.cast(pa.float64()), nothing))


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
