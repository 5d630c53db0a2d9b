"""Workers of a window: exact slowdown of each, over the window or in one step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smon.errors import MissingError, StoreError
from smon.store.objects import Objects

_COLUMNS: Final = ("dp", "stage", "slowdown", "compute_s", "wait_s")


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker; times are seconds of one step, None where only the window is known."""

    dp: int
    stage: int
    rank: int
    host: str | None
    slowdown: float | None
    approx_slowdown: float | None
    compute_s: float | None
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerFilter:
    """Which workers are asked for; None: all."""

    dp: int | None = None
    stage: int | None = None


def workers_of(document: Mapping[str, Any], wanted: WorkerFilter) -> list[WorkerRow]:
    """Workers of a report, most slowed down first."""
    rows = [
        WorkerRow(
            dp=each["dp"],
            stage=each["stage"],
            rank=each["rank"],
            host=each["host"],
            slowdown=each["slowdown"],
            approx_slowdown=each["approx_slowdown"],
            compute_s=None,
            wait_s=None,
        )
        for each in document["workers"]
        if wanted.dp in (None, each["dp"]) and wanted.stage in (None, each["stage"])
    ]
    return sorted(rows, key=_order)


@dataclass(frozen=True, slots=True, eq=False)
class WorkersFile:
    """Every worker in each step: a file beside a window's report, or bytes of a live diagnosis."""

    objects: Objects
    path: str | None
    packed: bytes | None = None

    @property
    def there(self) -> bool:
        """Whether there is any."""
        path = self.path
        return self.packed is not None or (path is not None and self.objects.size(path) is not None)

    def open(self) -> AbstractContextManager[Any]:
        """For reading; only if it is there."""
        if self.packed is not None:
            return nullcontext(pa.BufferReader(self.packed))
        return self.objects.open(self.path or "")


def workers_in_step(
    file: WorkersFile, step: int, document: Mapping[str, Any], wanted: WorkerFilter
) -> list[WorkerRow]:
    """Workers in one step, most slowed down first.

    Raises
    ------
    MissingError
        The file of the workers is not there (any more), or it does not have this step.
    """
    known = {(each.dp, each.stage): each for each in workers_of(document, wanted)}
    if not file.there:
        raise MissingError("what each worker did in single steps is not kept for this window")
    table = _read(file, step)
    if not table.num_rows:
        raise MissingError("expected a step of this window that was analysed")
    columns = [table.column(name).to_pylist() for name in _COLUMNS]
    rows = [
        WorkerRow(
            dp=dp,
            stage=stage,
            rank=known[dp, stage].rank,
            host=known[dp, stage].host,
            slowdown=slowdown,
            approx_slowdown=None,
            compute_s=compute_s,
            wait_s=wait_s,
        )
        for dp, stage, slowdown, compute_s, wait_s in zip(*columns, strict=True)
        if (dp, stage) in known
    ]
    return sorted(rows, key=_order)


def _read(file: WorkersFile, step: int) -> pa.Table:
    try:
        with file.open() as opened:
            return pq.read_table(
                opened, columns=list(_COLUMNS), filters=pc.field("step") == step, partitioning=None
            )
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read the workers of a window: {error}") from error


def _order(row: WorkerRow) -> tuple[float, int, int]:
    return -(row.slowdown or 0.0), row.dp, row.stage
