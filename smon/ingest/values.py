"""Values of an ops batch: each column inside its range, all at once.

Flow: `smon.ingest.ipc`, `smon.ingest.columns` → **here** → `smon.ingest.wal`. Says which column
and row is wrong and what was expected, never what was sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smon.errors import WireError
from smon.ingest.limits import MAX_STEP, MAX_WINDOWS, Limits
from smon.ops import BY_LABEL
from smon.topology import Layout
from smon.wire.columns import COLUMNS, MAX_TEXT, OPTYPE, TEXT_EXTRA
from smon.wire.problems import Problem

_TEXT: Final = re.compile(rf"[A-Za-z0-9{re.escape(TEXT_EXTRA)}]{{1,{MAX_TEXT}}}", re.ASCII)

_DTYPES: Final = {
    column.name: np.dtype(np.int8 if column.name == OPTYPE else column.type) for column in COLUMNS
}

#: Start times: twice as much still fits into 64 bits.
_MAX: Final = 2**62

_UNSIGNED: Final = {4: np.uint32, 8: np.uint64}

#: Columns in which -1 means that there is none.
_OPTIONAL: Final = ("chunk", "global_chunk", "microbatch")

Column = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Producer:
    """What is known of who sends.

    Attributes
    ----------
    live_unix
        Whether its op times are unix times of now.
    window_steps
        Steps of a window; 0: all of them are one window.
    behind_s
        By how much its clock is behind the server's, as it says; negative: ahead.
    """

    layout: Layout
    live_unix: bool
    window_steps: int
    behind_s: int = 0


def is_text(text: object) -> bool:
    """Whether this is text as the protocol allows it: 1 to 256 harmless characters."""
    return isinstance(text, str) and _TEXT.fullmatch(text) is not None


def columns_of(batch: pa.RecordBatch) -> dict[str, Column]:
    """The columns as arrays that share the batch's memory; of op types, the indices."""
    columns: dict[str, Column] = {}
    for index, (name, dtype) in enumerate(_DTYPES.items()):
        array = batch.column(index)
        if name == OPTYPE:
            array = array.indices
        # By DLPack: `Array.to_numpy` would import pandas.
        columns[name] = np.from_dlpack(array) if batch.num_rows else np.empty(0, dtype)
    return columns


def check_values(batch: pa.RecordBatch, producer: Producer, limits: Limits, now_ns: int) -> None:
    """Let the batch pass if every value is inside its range.

    Raises
    ------
    WireError
        One is not.
    """
    check_labels(batch.column(COLUMN_OF_OPTYPE).dictionary.to_pylist())
    if not batch.num_rows:
        return
    columns = columns_of(batch)
    layout = producer.layout
    first_ns, last_ns = -_MAX, _MAX
    if producer.live_unix:
        # Ops of before a clock was set go out with the offset of after it: both times will do.
        behind_ns = producer.behind_s * 10**9
        first_ns = now_ns - limits.past_ns - max(behind_ns, 0)
        last_ns = now_ns + limits.future_ns - min(behind_ns, 0)
    _check_below("step", columns["step"], MAX_STEP)
    _check_below("dp", columns["dp"], layout.dp - 1)
    _check_below("stage", columns["stage"], layout.pp - 1)
    _check_below("duration_ns", columns["duration_ns"], limits.duration_ns)
    _check_range("start_ns", columns["start_ns"], first_ns, last_ns)
    for name, low in (("rank", -1), ("seq", 0), *((name, -1) for name in _OPTIONAL)):
        _check_above(name, columns[name], low)
    _check_ranks(columns, layout)
    _check_windows(columns["step"], producer.window_steps)


COLUMN_OF_OPTYPE: Final = [column.name for column in COLUMNS].index(OPTYPE)


def check_labels(labels: list[Any]) -> None:
    """Let op types pass if they are text as the protocol allows it.

    Raises
    ------
    WireError
        One is not.
    """
    for label in labels:
        if label not in BY_LABEL and not is_text(label):
            raise WireError(
                Problem.WRONG_VALUES,
                f"expected op types of 1 to {MAX_TEXT} letters, digits and {TEXT_EXTRA}",
            )


def _check_below(name: str, column: Column, high: int) -> None:
    """From 0 to `high`: as unsigned numbers, negative ones are larger than any `high`."""
    if column.view(_UNSIGNED[column.dtype.itemsize]).max() > high:
        raise _outside(name, (column < 0) | (column > high), f"from 0 to {high}")


def _check_above(name: str, column: Column, low: int) -> None:
    if column.min() < low:
        raise _outside(name, column < low, f"from {low}")


def _check_range(name: str, column: Column, low: int, high: int) -> None:
    if column.min() < low or column.max() > high:
        raise _outside(name, (column < low) | (column > high), f"from {low} to {high}")


def _outside(name: str, wrong: Column, expected: str) -> WireError:
    return WireError(
        Problem.WRONG_VALUES,
        f"expected {name} {expected}, found another value in row {int(np.argmax(wrong))}",
    )


def _check_ranks(columns: dict[str, Column], layout: Layout) -> None:
    """A rank must be one of the ranks of its worker, (dp, stage)."""
    rank = columns["rank"]
    if rank.max() < 0:
        return
    worker = columns["dp"] + np.int64(layout.dp) * columns["stage"]
    per_worker = layout.tp * layout.cp
    wrong = (rank // per_worker if per_worker > 1 else rank) != worker
    wrong &= rank >= 0
    if wrong.any():
        raise WireError(
            Problem.WRONG_VALUES,
            "expected rank to be -1 or one of the ranks of its dp and stage "
            f"(tp + TP*(cp + CP*(dp + DP*stage)) in {layout}), found another in row "
            f"{int(np.argmax(wrong))}",
        )


def _check_windows(steps: Column, window_steps: int) -> None:
    """Steps of one batch lie close together; else it would become hundreds of files."""
    if not window_steps:
        return
    first, last = int(steps.min()) // window_steps, int(steps.max()) // window_steps
    if last - first < MAX_WINDOWS:
        return
    if len(np.unique(steps // window_steps)) > MAX_WINDOWS:
        raise WireError(
            Problem.WRONG_VALUES,
            f"expected steps of at most {MAX_WINDOWS} windows of {window_steps} steps in a batch, "
            "found more: send smaller batches",
        )
