"""Every worker in every step, as a worker process wrote it: one step, or the mean over steps.

Flow: a Parquet file of `smon.worker.matrix` → **here** → heat maps, rotation strip, CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smon.errors import MissingError, StoreError
from smon.store.queries.workers import WorkersFile

Floats = NDArray[np.float64]

#: Opens the file anew each time; it is closed after each reading.
Opener = Callable[[], AbstractContextManager[Any]]

_PLACE: Final = ("dp", "stage")


class Column(StrEnum):
    """What the file knows of a worker in a step."""

    SLOWDOWN = "slowdown"
    COMPUTE_S = "compute_s"
    WAIT_S = "wait_s"


@dataclass(frozen=True, slots=True)
class Shape:
    """Workers of a layout."""

    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Worst:
    """The slowest worker of a step."""

    step: int
    dp: int
    stage: int
    slowdown: float


class Matrix:
    """The file of one window, or of the running diagnosis.

    Parameters
    ----------
    opener
        Opens it.
    shape
        Of the layout; what lies outside is left out.
    """

    __slots__ = ("_opener", "_shape")

    def __init__(self, opener: Opener, shape: Shape) -> None:
        self._opener = opener
        self._shape = shape

    def steps(self) -> tuple[int, ...]:
        """Steps that the file has, ascending.

        Raises
        ------
        StoreError
            The file cannot be read.
        """
        found = np.unique(self._read(("step",)).column("step").to_numpy())
        return tuple(found.tolist())

    def of_step(self, column: Column, step: int) -> Floats:
        """(stages, dp_ranks) of one step; NaN where a worker is absent.

        Raises
        ------
        MissingError
            The file does not have this step.
        StoreError
            It cannot be read.
        """
        table = self._read((*_PLACE, column.value), pc.field("step") == step)
        if not table.num_rows:
            raise MissingError("expected a step of this window that was analysed")
        grid = np.full((self._shape.pp, self._shape.dp), np.nan)
        dp, stage, values = self._columns(table, column)
        grid[stage, dp] = values
        return grid

    def mean(self, column: Column) -> Floats:
        """(stages, dp_ranks), the mean over the steps in which a worker is there; else NaN.

        Raises
        ------
        StoreError
            The file cannot be read.
        """
        dp, stage, values = self._columns(self._read((*_PLACE, column.value)), column)
        known = ~np.isnan(values)
        place = (stage * self._shape.dp + dp)[known]
        size = self._shape.pp * self._shape.dp
        count = np.bincount(place, minlength=size)
        total = np.bincount(place, weights=values[known], minlength=size)
        mean = np.full(size, np.nan)
        np.divide(total, count, out=mean, where=count > 0)
        return mean.reshape(self._shape.pp, self._shape.dp)

    def worst(self) -> tuple[Worst, ...]:
        """The slowest worker of each step by exact S_w, ascending; steps without any left out.

        Raises
        ------
        StoreError
            The file cannot be read.
        """
        table = self._read(("step", *_PLACE, Column.SLOWDOWN.value))
        dp, stage, values = self._columns(table, Column.SLOWDOWN)
        steps = self._kept(table, table.column("step").to_numpy())
        # Of equals the first in the order of ranks: stage, then DP rank.
        order = np.lexsort((dp, stage, -np.nan_to_num(values, nan=-np.inf), steps))
        first = np.unique(steps[order], return_index=True)[1]
        return tuple(
            Worst(int(steps[row]), int(dp[row]), int(stage[row]), float(values[row]))
            for row in order[first]
            if not np.isnan(values[row])
        )

    def rows(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Each worker of each step, or of one, as the file has it; a row group at a time.

        Raises
        ------
        StoreError
            The file cannot be read.
        """
        with self._open() as file, _read_errors():
            parquet = pq.ParquetFile(file)
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group)
                if step is not None:
                    table = table.filter(pc.field("step") == step)
                yield from table.to_pylist()

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with _read_errors(), self._opener() as file:
            yield file

    def _read(self, columns: tuple[str, ...], only: pc.Expression | None = None) -> pa.Table:
        with self._open() as file:
            return pq.read_table(file, columns=list(columns), filters=only, partitioning=None)

    def _columns(
        self, table: pa.Table, column: Column
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        dp, stage = (table.column(name).to_numpy().astype(np.int64) for name in _PLACE)
        values = table.column(column.value).to_numpy().astype(np.float64)
        return self._kept(table, dp), self._kept(table, stage), self._kept(table, values)

    def _kept(self, table: pa.Table, values: NDArray[Any]) -> NDArray[Any]:
        dp, stage = (table.column(name).to_numpy() for name in _PLACE)
        inside = (dp >= 0) & (dp < self._shape.dp) & (stage >= 0) & (stage < self._shape.pp)
        return values if inside.all() else values[inside]


@contextmanager
def _read_errors() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError) as error:
        raise StoreError(f"the file of the workers cannot be read: {error}") from error


def matrix_of(file: WorkersFile, shape: Shape) -> Matrix | None:
    """The matrix of a window or of the running diagnosis; None if it is not kept."""
    return Matrix(file.open, shape) if file.there else None
