"""What every reader delivers, and what readers share.

Flow: file → one module of `smon.trace.formats` → **`Reading`** → `smon.trace.load`. Nothing here
knows a format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.ops import STREAM_COMPUTE
from smon.trace.dumps import RankDump
from smon.trace.events import RankEvents
from smon.trace.series import StepSeries
from smon.trace.table import OpTable, empty_table, number_by_start

GZIP_MAGIC: Final = b"\x1f\x8b"

#: A message quotes at most this much of a foreign one: it stays one line on a terminal.
MAX_QUOTED: Final = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """One file, read.

    Attributes
    ----------
    table
        Its ops.
    tp
        Tensor-parallel size seen in the file; 0 where the format does not say.
    job_id
        Name of the job that the file itself gives, if it does.
    unnumbered
        Columns that the file lacks and that are counted by start time: of ``seq`` and
        ``microbatch``. They are counted anew when several files become one table.
    notes
        Sentences for the report.
    events
        Instead of ops: the events of each rank in the file, of formats that know no ops.
    dumps
        Instead of ops: what ranks had called when they were dumped.
    series
        Instead of ops: step times of the whole job.
    """

    table: OpTable = field(default_factory=empty_table)
    tp: int = 0
    job_id: str | None = None
    unnumbered: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    events: tuple[RankEvents, ...] = ()
    dumps: tuple[RankDump, ...] = ()
    series: StepSeries | None = None

    @property
    def has_ops(self) -> bool:
        """Whether the table is what the file has."""
        return not self.events and not self.dumps and self.series is None


def printable(text: object) -> str:
    """`text` on one line, control characters and broken UTF-8 escaped.

    File names and foreign messages go through here: a name can hold terminal escapes.
    """
    line = str(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def quoted(error: BaseException) -> str:
    """The message of a foreign exception, fit for one of ours."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    line = printable(" ".join(str(reason).split()))
    return line if len(line) <= MAX_QUOTED else line[: MAX_QUOTED - 1] + "…"


@contextmanager
def reading_from(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of decompression into a `TraceError` with the path."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        # pyarrow and gzip report damage as OSError, but without the system's error number.
        failed = "cannot be read" if getattr(error, "errno", None) else "damaged or truncated"
        raise TraceError(f"{printable(path)}: {failed}: {quoted(error)}") from error


def inflated(head: bytes, limit: int) -> bytes:
    """`head`, unpacked if it is the beginning of a gzip; empty if that fails. At most `limit`."""
    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, limit)
    except zlib.error:
        return b""


def numbered(table: OpTable, columns: frozenset[str]) -> OpTable:
    """The table with ``seq`` and ``microbatch``, as far as in `columns`, counted by start time.

    ``seq`` counts per (step, worker, op type); ``microbatch`` per (step, worker, op type, model
    chunk), for computes that have a model chunk at all or none.
    """
    lane = _lanes(table)
    if "seq" in columns:
        seq = number_by_start(table.step, lane, table.optype, table.start_ns)
        table = replace(table, seq=seq)
    if "microbatch" in columns:
        lane = _combined(lane, table.chunk)
        index = number_by_start(table.step, lane, table.optype, table.start_ns)
        compute = np.isin(table.optype, list(STREAM_COMPUTE))
        table = replace(table, microbatch=np.where(compute, index, np.int32(-1)))
    return table


def _lanes(table: OpTable) -> NDArray[np.int32]:
    """One small integer per worker, and per rank where ranks are known."""
    lane = _combined(table.dp, table.stage)
    return lane if not len(lane) or table.rank.max() < 0 else _combined(lane, table.rank)


def _combined(
    first: NDArray[np.int32], second: NDArray[np.int32] | NDArray[np.int16]
) -> NDArray[np.int32]:
    """Dense codes of pairs; both are int32 or smaller, so a pair fits into one int64."""
    pairs = (first.astype(np.int64) << 32) + second
    codes = np.unique(pairs, return_inverse=True)[1]
    return codes.astype(np.int32)
