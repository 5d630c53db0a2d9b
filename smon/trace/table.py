"""The one op table: numpy columns, validated once, when it is made.

Flow: `smon.trace.formats` → **here** → `smon.trace.grid`. Times are int64 nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.ops import OP_TYPES
from smon.trace.schema import COLUMNS, INVALID_NS, MAX_DURATION_NS

if TYPE_CHECKING:
    import pandas as pd


#: So many starts tell what is typical.
_SAMPLE = 10_001


@dataclass(frozen=True, slots=True, eq=False)
class OpTable:
    """Ops of a window, one row each, in any order. Columns as in `smon.trace.schema.COLUMNS`.

    Attributes
    ----------
    step_relative
        True if times start at 0 in every step (the public Parquet), False for unix time.
    dropped
        (reason, rows) of what the reader or the validation left out.
    """

    step: NDArray[np.int64]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    rank: NDArray[np.int32]
    optype: NDArray[np.int8]
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    seq: NDArray[np.int32]
    chunk: NDArray[np.int16]
    global_chunk: NDArray[np.int16]
    microbatch: NDArray[np.int32]
    step_relative: bool = False
    dropped: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns by name, in schema order."""
        return {column.name: getattr(self, column.name) for column in COLUMNS}

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> OpTable:
        """The table of these rows only (mask or indices)."""
        taken: dict[str, Any] = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, **taken)

    def between(self, first: int | None, last: int | None) -> OpTable:
        """The rows of steps `first` to `last`, both included; None is open."""
        keep = np.ones(len(self), bool)
        if first is not None:
            keep &= self.step >= first
        if last is not None:
            keep &= self.step <= last
        return self.take(keep)

    def to_pandas(self) -> pd.DataFrame:
        """A data frame of the columns, op types as categories. Needs pandas."""
        import pandas as pd

        frame = pd.DataFrame(self.columns)
        labels = [op.label for op in OP_TYPES]
        frame["optype"] = pd.Categorical.from_codes(self.optype, pd.Index(labels))
        return frame


def make_table(
    columns: Mapping[str, NDArray[Any]],
    *,
    step_relative: bool = False,
    dropped: Mapping[str, int] | None = None,
) -> OpTable:
    """Validate columns and make the table; unusable rows are dropped and counted by reason.

    Parameters
    ----------
    columns
        Arrays of equal length by schema name; columns with a default may be missing.
    step_relative
        Times start at 0 in every step.
    dropped
        Rows that the reader itself left out, by reason.

    Raises
    ------
    TraceError
        A column is missing, or lengths differ.
    """
    length = len(next(iter(columns.values()), ()))
    typed: dict[str, NDArray[Any]] = {}
    for column in COLUMNS:
        values = columns.get(column.name)
        if values is None:
            if column.default is None:
                raise TraceError(f"the trace has no column {column.name}: {column.meaning}")
            values = np.full(length, column.default, column.dtype)
        if len(values) != length:
            raise TraceError(f"column {column.name} has {len(values)} rows, expected {length}")
        typed[column.name] = np.asarray(values, column.dtype)
    counts = Counter(dropped or {})
    keep = _keep(typed, counts)
    if keep is not None:
        typed = {name: values[keep] for name, values in typed.items()}
    return OpTable(
        **typed,
        step_relative=step_relative,
        dropped=tuple(sorted(counts.items())),
    )


def empty_table() -> OpTable:
    """A table without a row."""
    return make_table({column.name: np.empty(0, column.dtype) for column in COLUMNS})


def _keep(columns: Mapping[str, NDArray[Any]], counts: Counter[str]) -> NDArray[np.bool_] | None:
    """Mask of usable rows, None if all are; adds to `counts` why the others are not."""
    start, duration = columns["start_ns"], columns["duration_ns"]
    unusable = (
        ("unknown op type", _unknown(columns["optype"])),
        ("start is not a number", start == INVALID_NS),
        ("duration is not a number", duration == INVALID_NS),
        ("negative duration", duration < 0),
        ("duration above 7 days", duration > MAX_DURATION_NS),
        ("negative step, rank or sequence number", _negative(columns)),
        ("start far from all others", _stray(start)),
    )
    keep: NDArray[np.bool_] | None = None
    for reason, bad in unusable:
        if not bad.any():
            continue
        fresh = bad if keep is None else bad & keep
        count = int(np.count_nonzero(fresh))
        if count:
            counts[reason] += count
            keep = ~bad if keep is None else keep & ~bad
    return keep


def _unknown(optype: NDArray[np.generic]) -> NDArray[np.bool_]:
    codes = optype.astype(np.int64, copy=False)
    return np.logical_or(codes < 0, codes >= len(OP_TYPES))


def _stray(start: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Starts more than seven days from the typical one, e.g. 0 among unix times."""
    times = start.astype(np.int64, copy=False)
    known = times[:: max(len(times) // _SAMPLE, 1)]
    known = known[known != INVALID_NS]
    if len(known) == 0:
        return np.zeros(len(times), bool)
    typical = int(np.median(known))
    if abs(int(times.min()) - typical) <= MAX_DURATION_NS >= abs(int(times.max()) - typical):
        return np.zeros(len(times), bool)
    # In float64: differences of any two int64 times fit, and microseconds do not matter here.
    return np.abs(times.astype(np.float64) - typical) > MAX_DURATION_NS


def _negative(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    names = ("step", "dp", "stage", "seq")
    if all(len(columns[name]) == 0 or columns[name].min() >= 0 for name in names):
        return np.zeros(len(columns["step"]), bool)
    negative: NDArray[np.bool_] = np.logical_or.reduce([columns[name] < 0 for name in names])
    return negative


def concat(tables: Iterable[OpTable]) -> OpTable:
    """One table of several, e.g. of one file per rank.

    Raises
    ------
    TraceError
        No table, or tables of both step-relative and absolute time.
    """
    parts = list(tables)
    if not parts:
        raise TraceError("no table to put together")
    if len(parts) == 1:
        return parts[0]
    if len({part.step_relative for part in parts}) > 1:
        raise TraceError(
            "some files have absolute time and some restart at 0 in every step: "
            "analyse them separately"
        )
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(dict(part.dropped))
    names = [field.name for field in fields(OpTable) if field.name in parts[0].columns]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return OpTable(
        **columns,
        step_relative=parts[0].step_relative,
        dropped=tuple(sorted(dropped.items())),
    )


def seconds_to_ns(seconds: NDArray[np.generic]) -> NDArray[np.int64]:
    """Seconds as int64 ns, rounded; `INVALID_NS` where not finite or too large."""
    with np.errstate(over="ignore"):
        values = np.asarray(seconds, np.float64) * 1e9
    np.rint(values, out=values)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(values) < 2.0**62)
    if bad.any():
        values[bad] = 0
    ns = values.astype(np.int64)
    ns[bad] = INVALID_NS
    return ns


def number_by_start(
    step: NDArray[np.int64],
    rank: NDArray[np.int32],
    optype: NDArray[np.int8],
    start_ns: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Sequence numbers for formats that have none: per (step, rank, op type), by start time."""
    order = np.lexsort((start_ns, optype, rank, step))
    ranked = [values[order] for values in (step, rank, optype)]
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.logical_or.reduce([values[1:] != values[:-1] for values in ranked])
    index = np.arange(len(order))
    first = np.maximum.accumulate(np.where(new, index, 0))
    seq = np.empty(len(order), np.int32)
    seq[order] = index - first
    return seq
