"""The actual and the ideal run side by side, as a trace file that Perfetto and Chrome open.

One process per DP rank and kind (actual, ideal), one thread per stage and stream, all steps on one
time axis; format: "Trace Event Format", complete events (``X``) and metadata (``M``).

Flow: `smon.simulate` → **here** → a file.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from smon import __version__
from smon.errors import ConfigError
from smon.ops import OpType
from smon.prepare import Prepared
from smon.simulate.engine import Floats
from smon.simulate.window import Part, Window, latest_dependency
from smon.trace.formats.reading import printable, quoted

#: Called with (phase, done, total).
Progress = Callable[[str, int, int], None]

#: Between two steps, as a share of the first one: enough to tell them apart by eye.
GAP_RATIO: Final = 0.05

#: Perfetto drops an event that overlaps another one of its thread. An op that ends this much too
#: late, as a share of its duration, is drawn shorter; one that overlaps more gets a row of its own.
#: Computes of AR overlap their successor by up to 0.7 % (19 % of those of stage 0), of SE by 0.1 %.
MAX_CUT_RATIO: Final = 0.1

#: A fast level: the next ones save a tenth of the size and take twice as long.
_GZIP_LEVEL: Final = 3

#: Errors that another file name may not cure.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

#: Rows of one stream have consecutive places in the order of threads, as far as this many.
_ROWS: Final = 100

_Ints = NDArray[np.int64]
_Number = TypeVar("_Number", int, NDArray[np.intp])


class Stream(IntEnum):
    """Threads of a stage, from top to bottom."""

    COMPUTE = 0
    FORWARD_RECV = 1
    FORWARD_SEND = 2
    BACKWARD_RECV = 3
    BACKWARD_SEND = 4
    DP_COLLECTIVES = 5
    END_OF_STEP = 6

    @property
    def label(self) -> str:
        """The name on the thread."""
        return _LABEL.get(self, self.name.lower().replace("_", "-"))


_LABEL: Final = {Stream.DP_COLLECTIVES: "DP collectives", Stream.END_OF_STEP: "end of step"}

#: Every stream is one chain of the dependency graph (``docs/method.md`` section 2); all other types
#: belong to the chain at the end of the step.
_STREAM_OF: Final = {
    OpType.FORWARD_COMPUTE: Stream.COMPUTE,
    OpType.BACKWARD_COMPUTE: Stream.COMPUTE,
    OpType.WEIGHT_GRAD_COMPUTE: Stream.COMPUTE,
    OpType.FORWARD_RECV: Stream.FORWARD_RECV,
    OpType.FORWARD_SEND: Stream.FORWARD_SEND,
    OpType.BACKWARD_RECV: Stream.BACKWARD_RECV,
    OpType.BACKWARD_SEND: Stream.BACKWARD_SEND,
    OpType.PARAMS_ALL_GATHER: Stream.DP_COLLECTIVES,
    OpType.GRADS_REDUCE_SCATTER: Stream.DP_COLLECTIVES,
}


class Kind(IntEnum):
    """Of the two processes of a DP rank."""

    ACTUAL = 0
    IDEAL = 1

    @property
    def label(self) -> str:
        """The name on the process."""
        return self.name.lower()


def write_timeline(prepared: Prepared, out: Path, *, progress: Progress | None = None) -> int:
    """Draw every op of the window twice: as recorded, and as it would be if all were ideal.

    Times are in µs, with ns after the point. A step begins where the one before it ended, in both
    runs, plus a small gap; its ideal run starts at the same instant as the actual one. Ops without
    duration that only stand for a garbage collection are left out. Memory holds one step of one DP
    rank at a time.

    Parameters
    ----------
    prepared
        A prepared window.
    out
        The file, replaced if it exists; compressed if its name ends in ``.gz``.
    progress
        Called with ("timeline", done, total).

    Returns
    -------
    int
        Number of ops drawn, actual and ideal together.

    Raises
    ------
    ConfigError
        The file cannot be written; whatever was at its place before is still there.
    """
    events = 0
    with _Output(out) as output:
        output.write(_opening(prepared))
        drawing = _Drawing(prepared)
        lanes = _in_order(prepared.window)
        separator = "\n"
        for done, (part, lane) in enumerate(lanes, 1):
            names, ops = drawing.lane(part, lane)
            output.write(separator + ",\n".join(names + ops))
            separator = ",\n"
            events += len(ops)
            if progress is not None:
                progress("timeline", done, len(lanes))
        output.write("\n]}\n")
    return events


def _opening(prepared: Prepared) -> str:
    """The file up to its first event."""
    about = {
        "writer": f"smon {__version__}",
        "job": prepared.job.job_id,
        "attempt": prepared.job.attempt,
        "layout": str(prepared.job.layout),
        "actual": "as recorded",
        "ideal": "every op takes what is ideal for its type, and nothing is late",
    }
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":['


def _in_order(window: Window) -> list[tuple[int, int]]:
    """(part, lane) of all lanes, by step and DP rank."""
    found = [
        (step, dp, number, lane)
        for number, part in enumerate(window.parts)
        for lane, (step, dp) in enumerate(zip(part.step.tolist(), part.dp.tolist(), strict=True))
    ]
    return [(number, lane) for _, _, number, lane in sorted(found)]


# --- what is drawn --------------------------------------------------------------------------


class _AllIdeal:
    """Durations of the ideal run."""

    what_ifs = 1

    def row(self, part: int, op: int) -> Floats | None:  # noqa: ARG002  # as `Durations`
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Sheet:
    """What the lanes of one structure share; ``N`` ops, ``L`` lanes.

    Attributes
    ----------
    head, facts, stage
        (N,) pieces of JSON: how the event of an op begins, and what is always in its args; and
        its stage.
    thread
        (N,) thread, counted over all stages.
    placeholder
        (N,) left out where it takes no time.
    grouped
        (N,) whether it can wait for peers.
    ideal_start, ideal_end
        (N, L) ideal times in ns since the start of the step; L is 1 if all lanes are alike.
    """

    part: Part
    head: list[str]
    facts: list[str]
    stage: list[int]
    thread: NDArray[np.intp]
    placeholder: NDArray[np.bool_]
    grouped: NDArray[np.bool_]
    ideal_start: Floats
    ideal_end: Floats


def _sheets(prepared: Prepared) -> list[_Sheet]:
    ideal = prepared.engine.run(_AllIdeal(), keep_all=True)
    sheets = []
    for part, ends in zip(prepared.window.parts, ideal.ends, strict=True):
        structure = part.graph.structure
        ops = [OpType(code) for code in structure.optype.tolist()]
        streams = np.array([_STREAM_OF.get(op, Stream.END_OF_STEP) for op in ops], np.intp)
        ideal_end = np.stack([np.atleast_1d(end) for end in ends])
        sheets.append(
            _Sheet(
                part=part,
                head=[f'{{"ph":"X","name":{json.dumps(op.label)},"cat":' for op in ops],
                facts=_facts(structure.seq.tolist(), structure.chunk.tolist()),
                stage=structure.stage.tolist(),
                thread=structure.stage * len(Stream) + streams,
                placeholder=structure.optype == OpType.GC,
                grouped=part.graph.group >= 0,
                # An op of a group starts when it is posted, so this is not end − duration.
                ideal_start=latest_dependency(part.graph, ideal_end),
                ideal_end=ideal_end,
            )
        )
    return sheets


def _facts(seq: list[int], chunk: list[int]) -> list[str]:
    return [
        f',"seq":{number}' + (f',"chunk":{of_model}' if of_model >= 0 else "")
        for number, of_model in zip(seq, chunk, strict=True)
    ]


def _origins(window: Window, sheets: list[_Sheet]) -> _Ints:
    """(steps,) where time 0 of each step lies on the common axis, in ns.

    A step lasts until the end of both its runs.
    """
    first = [-part.start.min(axis=0) for part in window.parts]
    last = [np.maximum(sheet.part.end.max(axis=0), sheet.ideal_end.max(axis=0)) for sheet in sheets]
    before = np.maximum(window.meeting.latest(first), 0.0)
    length = before + window.meeting.latest(last)
    begin = np.cumsum(length * (1.0 + GAP_RATIO)) - length * (1.0 + GAP_RATIO)
    return np.rint(begin + before).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Some ops of one lane on the common time axis, in ns; all arrays are (ops,).

    Attributes
    ----------
    op
        Which ones.
    row
        0, or more for ops that overlap others of their thread.
    cut
        What was cut from the end.
    """

    op: NDArray[np.intp]
    start: _Ints
    end: _Ints
    row: _Ints
    cut: _Ints


def _spans(sheet: _Sheet, start: Floats, end: Floats, origin: int) -> _Spans:
    begun = np.rint(start).astype(np.int64) + origin
    # Damaged clocks, and ideals of transfers that were measured with them.
    ended = np.maximum(np.rint(end).astype(np.int64) + origin, begun)
    op = np.flatnonzero(~sheet.placeholder | (ended > begun))
    begun, ended = begun[op], ended[op]
    last, row = _side_by_side(sheet.thread[op], begun, ended)
    return _Spans(op, begun, last, row, ended - last)


def _side_by_side(thread: NDArray[np.intp], start: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
    """Ends and rows with which no two ops of a thread and row overlap, see `MAX_CUT_RATIO`."""
    order = np.lexsort((end, start, thread))
    threads, first, last = thread[order], start[order], end[order]
    same = threads[1:] == threads[:-1]
    row = np.zeros(len(order), np.int64)
    over = np.where(same, last[:-1] - first[1:], 0)
    if not (over > 0).any():
        return end, row
    slight = (over > 0) & (over <= MAX_CUT_RATIO * (last - first)[:-1])
    last[:-1][slight] = first[1:][slight]
    if (same & (last[:-1] > first[1:])).any():
        row[order] = _rows(threads.tolist(), first.tolist(), last.tolist())
    shown = np.empty_like(end)
    shown[order] = last
    return shown, row


def _rows(threads: list[int], first: list[int], last: list[int]) -> list[int]:
    """The lowest free row of each op; ops are sorted by thread and start."""
    rows, free_at, current = [], list[int](), -1
    for thread, start, end in zip(threads, first, last, strict=True):
        if thread != current:
            current, free_at = thread, []
        row = next((row for row, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[row : row + 1] = [end]
        rows.append(row)
    return rows


# --- how it is written ----------------------------------------------------------------------


class _Drawing:
    """Turns lanes into events."""

    def __init__(self, prepared: Prepared) -> None:
        self._window = prepared.window
        self._layout = prepared.job.layout
        self._microbatch = prepared.table.microbatch
        self._sheets = _sheets(prepared)
        self._origins = _origins(prepared.window, self._sheets)
        self._named: dict[int, set[int]] = {}

    def lane(self, number: int, lane: int) -> tuple[list[str], list[str]]:
        """Names of the processes and threads that are new, and the ops of one lane."""
        sheet = self._sheets[number]
        part = sheet.part
        own = lane if sheet.ideal_end.shape[1] > 1 else 0
        names: list[str] = []
        ops: list[str] = []
        for kind, start, end in (
            (Kind.ACTUAL, part.start[:, lane], part.end[:, lane]),
            (Kind.IDEAL, sheet.ideal_start[:, own], sheet.ideal_end[:, own]),
        ):
            spans = _spans(sheet, start, end, int(self._origins[part.step[lane]]))
            thread = sheet.thread[spans.op] + spans.row * (self._window.stages * len(Stream))
            names += self._names(kind, int(part.dp[lane]), thread)
            ops += self._events(sheet, lane, kind, spans, thread)
        return names, ops

    def _names(self, kind: Kind, dp: int, thread: NDArray[np.intp]) -> list[str]:
        """Metadata of a process at its first event, and of threads at theirs."""
        pid = _pid(kind, dp)
        names = []
        if pid not in self._named:
            self._named[pid] = set()
            names = _metadata("process", f'"pid":{pid}', f"DP {dp} · {kind.label}", pid)
        new = set(np.unique(thread).tolist()) - self._named[pid]
        self._named[pid] |= new
        for number in sorted(new):
            row, place = divmod(number, self._window.stages * len(Stream))
            stage, stream = divmod(place, len(Stream))
            label = f"stage {stage} · {Stream(stream).label}" + (f" ({row + 1})" if row else "")
            where = f'"pid":{pid},"tid":{_tid(number)}'
            names += _metadata("thread", where, label, place * _ROWS + min(row, _ROWS - 1))
        return names

    def _events(
        self, sheet: _Sheet, lane: int, kind: Kind, spans: _Spans, thread: NDArray[np.intp]
    ) -> list[str]:
        """One event per op; the pieces are joined in one pass, which is what takes the time."""
        ops = spans.op.tolist()
        recorded = sheet.part.row[spans.op, lane] >= 0
        places = self._places(int(sheet.part.step[lane]), int(sheet.part.dp[lane]))
        pid = _pid(kind, int(sheet.part.dp[lane]))
        drawn = f'"{kind.label}","pid":{pid}'
        filled = f'"{kind.label},filled","cname":"grey","pid":{pid}'
        actual = kind is Kind.ACTUAL
        looks = [drawn if known else filled for known in (recorded | (not actual)).tolist()]
        more = self._microbatches(sheet, lane, spans)
        if actual:
            more = _with_waits(more, sheet, lane, spans)
        columns = (
            ops,
            looks,
            _tid(thread).tolist(),
            (spans.start / 1e3).tolist(),
            ((spans.end - spans.start) / 1e3).tolist(),
            more,
        )
        head, facts, stage = sheet.head, sheet.facts, sheet.stage
        return [
            f'{head[op]}{look},"tid":{tid},"ts":{ts},"dur":{dur},'
            f'"args":{{{places[stage[op]]}{facts[op]}{extra}}}}}'
            for op, look, tid, ts, dur, extra in zip(*columns, strict=True)
        ]

    def _places(self, step: int, dp: int) -> list[str]:
        """Args that the ops of a lane share, by stage."""
        return [
            f'"step":{self._window.steps[step]},"dp":{dp},"stage":{stage},'
            f'"rank":{self._layout.rank(dp, stage)}'
            for stage in range(self._window.stages)
        ]

    def _microbatches(self, sheet: _Sheet, lane: int, spans: _Spans) -> list[str]:
        """The arg of every op; empty where it has none, or was not recorded."""
        row = sheet.part.row[spans.op, lane]
        number = np.where(row >= 0, self._microbatch[row], -1)
        return [f',"microbatch":{one}' if one >= 0 else "" for one in number.tolist()]


def _with_waits(more: list[str], sheet: _Sheet, lane: int, spans: _Spans) -> list[str]:
    """Args of the actual run added: waiting for peers, and what the drawing hides."""
    part, op = sheet.part, spans.op
    wait = np.rint(part.end[op, lane] - part.start[op, lane] - part.work[op, lane])
    waits = np.where(sheet.grouped[op], np.maximum(wait, 0.0) / 1e3, -1.0).tolist()
    more = [
        f'{one},"wait_us":{wait_us}' if wait_us >= 0 else one
        for one, wait_us in zip(more, waits, strict=True)
    ]
    for index in np.flatnonzero(part.row[op, lane] < 0).tolist():
        more[index] += ',"filled":true'
    for index in np.flatnonzero(spans.cut).tolist():
        more[index] += f',"cut_us":{spans.cut[index] / 1e3}'
    return more


def _pid(kind: Kind, dp: int) -> int:
    """Even, and above 0: Perfetto takes process 0, and threads numbered as their process, apart."""
    return 2 * (len(Kind) * dp + kind + 1)


def _tid(thread: _Number) -> _Number:
    """Odd, see `_pid`."""
    return 2 * thread + 1


def _metadata(what: str, where: str, label: str, position: int) -> list[str]:
    """Name and place of a process or thread."""
    name = json.dumps(label, ensure_ascii=False)
    return [
        f'{{"ph":"M","name":"{what}_name",{where},"args":{{"name":{name}}}}}',
        f'{{"ph":"M","name":"{what}_sort_index",{where},"args":{{"sort_index":{position}}}}}',
    ]


# --- the file -------------------------------------------------------------------------------


class _Output:
    """A file that appears under its name when it is complete, or not at all.

    Raises
    ------
    ConfigError
        It cannot be made, written or put in place.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        with _explained(out):
            self._target = _target(out)
        self._partial = self._target.with_name(f".{self._target.name}.{secrets.token_hex(4)}.part")
        self._streams = ExitStack()

    def __enter__(self) -> Self:
        with _explained(self._out):
            self._stream: BinaryIO = self._streams.enter_context(self._partial.open("xb", 1 << 20))
            if self._out.suffix == ".gz":
                # Without name and time: equal timelines are equal files.
                packed = gzip.GzipFile("", "wb", _GZIP_LEVEL, self._stream, mtime=0)
                self._stream = cast("BinaryIO", self._streams.enter_context(packed))
        return self

    def write(self, text: str) -> None:
        """Append."""
        with _explained(self._out):
            self._stream.write(text.encode())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with _explained(self._out):
                self._streams.close()
                if kind is None:
                    self._partial.replace(self._target)
        except ConfigError:
            if kind is None:  # otherwise the first error counts
                raise
        finally:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)


def _target(out: Path) -> Path:
    """The file to write, links followed; devices and pipes would be replaced, so they are none."""
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise ConfigError(
            f"expected the name of a file for the timeline, found the folder {printable(out)}: "
            f"add a name, e.g. {printable(out / 'timeline.json.gz')}"
        )
    if target.exists() and not target.is_file():
        raise ConfigError(
            f"expected the name of a file for the timeline, found {printable(out)}, a device or "
            "pipe: name a file"
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"expected an existing folder for the timeline, found none at "
            f"{printable(out.parent)}: make it, or name another file"
        )
    return target


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence."""
    try:
        yield
    except OSError as error:
        cure = "make room, or name another file" if error.errno in _FULL else "name another file"
        raise ConfigError(
            f"expected a file for the timeline that can be written, found {printable(out)}: "
            f"{quoted(error)}: {cure}"
        ) from error
