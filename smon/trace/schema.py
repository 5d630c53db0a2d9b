"""The op table's columns: name, type, unit and meaning, once (``docs/method.md`` section 1).

Readers deliver these columns, `smon.trace.table.make_table` validates them, and nothing after that
looks at a file again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the op table."""

    name: str
    dtype: DTypeLike
    unit: str
    meaning: str
    default: int | None = None


COLUMNS: Final = (
    Column("step", np.int64, "", "training step (iteration) of the job"),
    Column("dp", np.int32, "", "data-parallel rank of the worker"),
    Column("stage", np.int32, "", "pipeline stage of the worker (its pipeline-parallel rank)"),
    Column("rank", np.int32, "", "global rank; -1 where the trace does not say", -1),
    Column("optype", np.int8, "", "code of `smon.ops.OpType`; -1 for a type SMon does not know"),
    Column("start_ns", np.int64, "ns", "start: unix time, or since the start of the step"),
    Column("duration_ns", np.int64, "ns", "duration as recorded, waiting included"),
    Column("seq", np.int32, "", "0, 1, 2 … for ops of one type of one worker in one step"),
    Column("chunk", np.int16, "", "model chunk (virtual stage) within the stage; -1: none", -1),
    Column("global_chunk", np.int16, "", "model chunk in the whole model; -1: unknown", -1),
    Column("microbatch", np.int32, "", "microbatch of a forward or backward compute; -1: none", -1),
)

NAMES: Final = tuple(column.name for column in COLUMNS)

#: Marks a time that was NaN, infinite or absent in the file. Such a row is dropped and counted.
INVALID_NS: Final = np.iinfo(np.int64).min

#: Longer durations are clock or profiler errors: traces with 236-year kernels are in circulation.
MAX_DURATION_NS: Final = 7 * 86_400 * 10**9
