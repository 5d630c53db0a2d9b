"""Nsight Systems: what ``nsys export --type sqlite`` writes (``docs/sources.md``).

One file holds the GPUs of one machine, each a rank. Tables exist only if they hold data. There is
no step unless NVTX ranges name them, and no group: collectives are matched by their order.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.trace.events import Collective, Kind, RankEvents, StepSpan, event_columns
from smon.trace.formats.reading import Reading, printable, quoted
from smon.trace.spans import Times, enclosing
from smon.trace.words import NCCL_KERNEL, collective_of, collective_of_kernel, phase_of

NAME: Final = "nsys"
LOOKS_FOR: Final = "SQLite export of Nsight Systems"
SELF_DESCRIBED: Final = True

_MAGIC: Final = b"SQLite format 3\0"
_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_STEP: Final = re.compile(
    r"^(?:ProfilerStep#|(?:train[_ ]?)?(?:step|iter(?:ation)?)[ _#:=-]*)(\d+)$"
)
_OP_ID: Final = re.compile(r", (?:op_id|seq) = .*$")
_RANK_IN_NAME: Final = re.compile(r"rank[\[\-_/]?(\d{1,7})")
_NVTX_RANGE: Final = 59
_MAX_ROWS: Final = 20_000_000
_MAX_NUMBER: Final = 2**61

_KERNEL_QUERY: Final = """
select k.start, k.end, k.deviceId, k.globalPid, k.streamId, k.correlationId, s.value
from CUPTI_ACTIVITY_KIND_KERNEL k left join StringIds s on s.id = k.shortName
order by k.start limit ?
"""
_LAUNCH_QUERY: Final = """
select correlationId, globalTid, start from CUPTI_ACTIVITY_KIND_RUNTIME limit ?
"""
_RANGE_QUERY: Final = """
select n.start, n.end, n.globalTid, coalesce(n.text, s.value)
from NVTX_EVENTS n left join StringIds s on s.id = n.textId
where n.eventType = ? and n.end is not null order by n.start limit ?
"""

#: Process and thread of a global id: the low 24 bits are the thread.
_THREAD_BITS: Final = 24

Row = tuple[Any, ...]


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file is SQLite."""
    return head.startswith(_MAGIC)


def read(path: Path) -> Reading:
    """Read the ranks of one machine.

    Raises
    ------
    TraceError
        It cannot be read, is no export of Nsight Systems, or has no NCCL kernel.
    """
    name = printable(path)
    with _reading(name), closing(_open(path)) as base:
        tables = {row[0] for row in base.execute("select name from sqlite_master")}
        if _KERNELS not in tables or "StringIds" not in tables:
            raise TraceError(
                f"{name}: no GPU kernels: looked for the table {_KERNELS}: export with "
                "`nsys export --type sqlite` a profile with --trace=cuda,nvtx"
            )
        kernels = base.execute(_KERNEL_QUERY, (_MAX_ROWS,)).fetchall()
        launches = _if_there(base, "CUPTI_ACTIVITY_KIND_RUNTIME", tables, _LAUNCH_QUERY, _MAX_ROWS)
        ranges = _if_there(base, "NVTX_EVENTS", tables, _RANGE_QUERY, _NVTX_RANGE, _MAX_ROWS)
        epoch = _single(base, tables, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        host = _host(base, tables)
    return Reading(events=tuple(_ranks(path, _Profile(kernels, launches, ranges, epoch, host))))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, OverflowError, UnicodeDecodeError) as error:
        raise TraceError(f"{name}: damaged, or no export of Nsight Systems: {quoted(error)}") from (
            error
        )


def _open(path: Path) -> sqlite3.Connection:
    # Immutable: a profile is never written, and no journal beside it is looked at.
    base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    base.text_factory = lambda text: text.decode("utf-8", "replace")
    return base


def _if_there(
    base: sqlite3.Connection, table: str, tables: set[str], query: str, *values: int
) -> list[Row]:
    return base.execute(query, values).fetchall() if table in tables else []


def _single(base: sqlite3.Connection, tables: set[str], table: str, column: str) -> int | None:
    if table not in tables:
        return None
    # Both names are constants of this module.
    row = base.execute(f"select {column} from {table}").fetchone()  # noqa: S608
    return row[0] if row and isinstance(row[0], int) else None


def _host(base: sqlite3.Connection, tables: set[str]) -> str | None:
    if "TARGET_INFO_SYSTEM_ENV" not in tables:
        return None
    query = "select value from TARGET_INFO_SYSTEM_ENV where name = 'Hostname'"
    row = base.execute(query).fetchone()
    return printable(row[0]) if row and isinstance(row[0], str) else None


# --- rows to events -----------------------------------------------------------------------------


class _Profile:
    """The rows of one file."""

    def __init__(
        self,
        kernels: list[Row],
        launches: list[Row],
        ranges: list[Row],
        epoch_ns: int | None,
        host: str | None,
    ) -> None:
        self.kernels = [row for row in kernels if _are_numbers(row[:6])]
        self.broken = len(kernels) - len(self.kernels)
        #: (process, correlation) → (start, thread)
        self.launches = {
            (_process(thread), number): (start, thread)
            for number, thread, start in launches
            if _are_numbers((number, thread, start))
        }
        self.ranges = [
            (start, end, thread, _OP_ID.sub("", text))
            for start, end, thread, text in ranges
            if _are_numbers((start, end, thread)) and isinstance(text, str)
        ]
        self.epoch_ns = epoch_ns if epoch_ns is not None and 0 <= epoch_ns < _MAX_NUMBER else 0
        self.host = host


def _are_numbers(values: Sequence[object]) -> bool:
    """Whether all are whole numbers that can be added without overflow."""
    return all(isinstance(value, int) and abs(value) < _MAX_NUMBER for value in values)


def _process(thread: int) -> int:
    return thread >> _THREAD_BITS


def _ranks(path: Path, profile: _Profile) -> Iterator[RankEvents]:
    """One rank per GPU that ran NCCL kernels, in the order of the devices."""
    name = printable(path)
    devices = sorted({(row[2], row[3]) for row in profile.kernels if _is_nccl(row[6])})
    if not devices:
        raise TraceError(
            f"{name}: no collective in {len(profile.kernels):,} kernels: looked for NCCL kernels "
            "(ncclKernel…, ncclDevKernel…)"
        )
    named = _RANK_IN_NAME.search(path.name) if len(devices) == 1 else None
    for number, device in enumerate(devices):
        rank = int(named[1]) if named else number
        yield _rank(profile, rank, device, 0 if named else len(devices))


def _is_nccl(name: object) -> bool:
    return isinstance(name, str) and NCCL_KERNEL.search(name) is not None


def _rank(profile: _Profile, rank: int, device: tuple[int, int], world: int) -> RankEvents:
    kernels = [row for row in profile.kernels if row[2:4] == device]
    process = _process(device[1])
    ranges = [row for row in profile.ranges if _process(row[2]) == process]
    lanes = {thread: number for number, thread in enumerate(sorted({row[2] for row in ranges}))}
    spans = _times([(row[0], row[1], lanes[row[2]]) for row in ranges])
    launches = [profile.launches.get((process, row[5]), (row[0], -1)) for row in kernels]
    when = np.array([start for start, _ in launches], np.int64)
    lane = np.array([lanes.get(thread, -1) for _, thread in launches], np.int64)
    calls = [row for row in ranges if "ccl:" in row[3]]
    inner = enclosing(when, lane, _times([(row[0], row[1], lanes[row[2]]) for row in calls]))
    steps = _steps(ranges, kernels)
    dropped: Counter[str] = Counter()
    if profile.broken:
        dropped["kernel whose numbers are none"] = profile.broken
    types = [
        _type(row[6], calls[at][3] if at >= 0 else None)
        for row, at in zip(kernels, inner.tolist(), strict=True)
    ]
    columns: dict[str, Any] = event_columns(
        {
            "start_ns": np.array([row[0] for row in kernels], np.int64) + profile.epoch_ns,
            "duration_ns": np.array([row[1] - row[0] for row in kernels], np.int64),
            "step": _step_of(when, steps),
            "lane": np.array([row[4] for row in kernels], np.int64) % 2**31,
            "kind": np.array([_kind(each) for each in types], np.int8),
            "collective": np.array([-1 if each is None else each for each in types], np.int8),
            "phase": _phases(when, lane, ranges, spans),
            "launch_ns": when + profile.epoch_ns,
        },
        dropped,
    )
    return RankEvents(
        rank=rank,
        world_size=world,
        **columns,
        steps=tuple(
            StepSpan(step.number, step.start_ns + profile.epoch_ns, step.duration_ns)
            for step in steps
        ),
        host=profile.host,
        backend="nccl",
        on_gpu=any(each is None for each in types),
        dropped=tuple(sorted(dropped.items())),
        notes=tuple(_notes(world, steps)),
    )


def _times(spans: Sequence[tuple[int, int, int]]) -> Times:
    rows = np.array(spans, np.int64).reshape(-1, 3)
    return Times(rows[:, 0], rows[:, 1] - rows[:, 0], rows[:, 2], np.arange(len(rows)))


def _type(kernel: object, call: str | None) -> Collective | None:
    """What an NCCL kernel does; None for other kernels.

    A kernel of messages does what the call that launched it says: an all-to-all is made of them.
    """
    if not _is_nccl(kernel):
        return None
    own = collective_of_kernel(str(kernel))
    if own not in (None, Collective.SEND_RECV):
        return own
    called = None if call is None else collective_of(call)
    return Collective.SEND_RECV if called is None else called


def _kind(collective: Collective | None) -> Kind:
    if collective is None:
        return Kind.COMPUTE
    p2p = (Collective.SEND, Collective.RECV, Collective.SEND_RECV)
    return Kind.P2P if collective in p2p else Kind.COLLECTIVE


def _phases(
    when: NDArray[np.int64], lane: NDArray[np.int64], ranges: Sequence[Row], spans: Times
) -> NDArray[np.int8]:
    """Phase of each kernel by the ranges around its launch."""
    phases = np.array([-1 if (each := phase_of(row[3])) is None else each for row in ranges])
    found = np.full(len(when), -1, np.int8)
    for phase in np.unique(phases[phases >= 0]).tolist() if len(phases) else ():
        mine = phases == phase
        chosen = Times(spans.start[mine], spans.duration[mine], spans.lane[mine], spans.name[mine])
        found[(enclosing(when, lane, chosen) >= 0) & (found < 0)] = phase
    return found


def _steps(ranges: Sequence[Row], kernels: Sequence[Row]) -> list[StepSpan]:
    """Steps by ranges that name them; else one, the whole file."""
    named: dict[int, StepSpan] = {}
    for start, end, _, text in ranges:
        match = _STEP.match(text)
        if match and end >= start:
            named.setdefault(int(match[1][:18]), StepSpan(int(match[1][:18]), start, end - start))
    if named:
        return sorted(named.values(), key=lambda step: step.start_ns)
    first = min((row[0] for row in [*kernels, *ranges]), default=0)
    last = max((row[1] for row in kernels), default=first)
    return [StepSpan(0, first, last - first)]


def _step_of(when: NDArray[np.int64], steps: Sequence[StepSpan]) -> NDArray[np.int64]:
    if len(steps) == 1 and steps[0].number == 0:
        return np.zeros(len(when), np.int64)
    starts = np.array([step.start_ns for step in steps])
    ends = np.array([step.end_ns for step in steps])
    numbers = np.array([step.number for step in steps])
    at = np.maximum(np.searchsorted(starts, when, side="right") - 1, 0)
    inside = (when >= starts[at]) & (when <= ends[at])
    return np.where(inside, numbers[at], -1)


def _notes(world: int, steps: Sequence[StepSpan]) -> Iterator[str]:
    if world:
        yield (
            f"ranks are the {world} GPUs of this file, in the order of their devices: Nsight does "
            "not record ranks"
        )
    if len(steps) == 1:
        yield (
            "no step: the whole file counts as one; mark steps with NVTX ranges named step N, "
            "torch.cuda.nvtx.range_push(f'step {n}')"
        )
