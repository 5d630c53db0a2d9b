"""Ops as events of a trace file.

One process per DP rank and kind (actual, ideal), one thread per stage and stream, all steps on one
time axis; format: "Trace Event Format", complete events (``X``) and metadata (``M``).

Flow: `smon.timeline.spans` → **here** → `smon.timeline.output`, `smon.worker.timelines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from smon import __version__
from smon.ops import OpType
from smon.prepare import Prepared
from smon.simulate.window import Window
from smon.timeline.kinds import Choice, Kind, Stream
from smon.timeline.output import Output
from smon.timeline.spans import Sheet, Spans, origins, sheets, spans, waits
from smon.topology import Layout
from smon.trace.meta import Job

#: Called with (phase, done, total).
Progress = Callable[[str, int, int], None]

#: Rows of one stream have consecutive places in the order of threads, as far as this many.
_ROWS: Final = 100

_Number = TypeVar("_Number", int, NDArray[np.intp])

_EVERYTHING: Final = Choice()


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
    drawing = Drawing(prepared.job.layout)
    with Output(out) as output:
        output.write(opening(prepared.job))
        for piece in drawing.pieces(prepared, progress):
            output.write(piece)
        output.write(closing())
    return drawing.count


def opening(job: Job, **more: object) -> str:
    """The file up to its first event; what is known of it beforehand."""
    about = {
        "writer": f"smon {__version__}",
        "job": job.job_id,
        "attempt": job.attempt,
        "layout": str(job.layout),
        "actual": "as recorded",
        "ideal": "every op takes what is ideal for its type, and nothing is late",
        **more,
    }
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":['


def closing(**more: object) -> str:
    """The file after its last event; what is known of it only then."""
    known = "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in more.items())
    return f"\n]{known}}}\n"


class Drawing:
    """Turns windows, or parts of one that follow each other, into the events of one file.

    Parameters
    ----------
    layout
        Of the job.
    choice
        What is drawn; by default everything.

    Attributes
    ----------
    count
        Ops drawn so far, actual and ideal together.
    """

    def __init__(self, layout: Layout, choice: Choice = _EVERYTHING) -> None:
        self.count = 0
        self._layout = layout
        self._choice = choice
        self._named: dict[int, set[int]] = {}
        self._at_ns = 0
        self._separator = "\n"

    def pieces(self, prepared: Prepared, progress: Progress | None = None) -> Iterator[str]:
        """Text of the events, lane by lane; each part begins where the one before it ended."""
        drawn = _Prepared(prepared, self._at_ns)
        lanes = _in_order(prepared.window, self._choice)
        for done, (part, lane) in enumerate(lanes, 1):
            names, ops = self._lane(drawn, part, lane)
            if ops:
                yield self._separator + ",\n".join(names + ops)
                self._separator = ",\n"
            self.count += len(ops)
            if progress is not None:
                progress("timeline", done, len(lanes))
        self._at_ns = drawn.end_ns

    def _lane(self, drawn: _Prepared, number: int, lane: int) -> tuple[list[str], list[str]]:
        """Names of the processes and threads that are new, and the ops of one lane."""
        sheet = drawn.sheets[number]
        part, own = sheet.part, sheet.ideal_lane(lane)
        only = _of_stages(sheet, self._choice)
        names: list[str] = []
        ops: list[str] = []
        for kind, start, end in (
            (Kind.ACTUAL, part.start[:, lane], part.end[:, lane]),
            (Kind.IDEAL, sheet.ideal_start[:, own], sheet.ideal_end[:, own]),
        ):
            if kind not in self._choice.kinds:
                continue
            found = spans(sheet, start, end, int(drawn.origins[part.step[lane]]), only)
            if not len(found.op):
                continue
            thread = sheet.thread[found.op] + found.row * (self._layout.pp * len(Stream))
            names += self._names(kind, int(part.dp[lane]), thread)
            ops += self._events(drawn, number, lane, kind, (found, thread))
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
            row, place = divmod(number, self._layout.pp * len(Stream))
            stage, stream = divmod(place, len(Stream))
            label = f"stage {stage} · {Stream(stream).label}" + (f" ({row + 1})" if row else "")
            where = f'"pid":{pid},"tid":{_tid(number)}'
            names += _metadata("thread", where, label, place * _ROWS + min(row, _ROWS - 1))
        return names

    def _events(
        self,
        drawn: _Prepared,
        number: int,
        lane: int,
        kind: Kind,
        found: tuple[Spans, NDArray[np.intp]],
    ) -> list[str]:
        """One event per op; the pieces are joined in one pass, which is what takes the time."""
        sheet, (placed, thread) = drawn.sheets[number], found
        part, actual = sheet.part, kind is Kind.ACTUAL
        recorded = part.row[placed.op, lane] >= 0
        places = self._places(drawn.steps[int(part.step[lane])], int(part.dp[lane]))
        pid = _pid(kind, int(part.dp[lane]))
        drawn_so = f'"{kind.label}","pid":{pid}'
        filled = f'"{kind.label},filled","cname":"grey","pid":{pid}'
        looks = [drawn_so if known else filled for known in (recorded | (not actual)).tolist()]
        more = drawn.microbatches(sheet, lane, placed)
        if actual:
            more = _with_waits(more, sheet, lane, placed)
        columns = (
            placed.op.tolist(),
            looks,
            _tid(thread).tolist(),
            (placed.start / 1e3).tolist(),
            ((placed.end - placed.start) / 1e3).tolist(),
            more,
        )
        head, facts, stage = drawn.heads[number], drawn.facts[number], drawn.stages[number]
        return [
            f'{head[op]}{look},"tid":{tid},"ts":{ts},"dur":{dur},'
            f'"args":{{{places[stage[op]]}{facts[op]}{extra}}}}}'
            for op, look, tid, ts, dur, extra in zip(*columns, strict=True)
        ]

    def _places(self, step: int, dp: int) -> list[str]:
        """Args that the ops of a lane share, by stage."""
        return [
            f'"step":{step},"dp":{dp},"stage":{stage},"rank":{self._layout.rank(dp, stage)}'
            for stage in range(self._layout.pp)
        ]


class _Prepared:
    """A prepared window, its place on the axis, and pieces of JSON that its lanes share.

    Attributes
    ----------
    heads, facts, stages
        By structure, then op: how its event begins, what is always in its args, its stage.
    """

    def __init__(self, prepared: Prepared, at_ns: int) -> None:
        self.sheets = sheets(prepared)
        self.steps: list[int] = prepared.window.steps.tolist()
        begin, length = origins(prepared.window, self.sheets)
        self.origins = begin + at_ns
        self.end_ns = at_ns + length
        self._microbatch = prepared.table.microbatch
        structures = [sheet.part.graph.structure for sheet in self.sheets]
        self.heads = [_heads(one.optype.tolist()) for one in structures]
        self.facts = [_facts(one.seq.tolist(), one.chunk.tolist()) for one in structures]
        self.stages: list[list[int]] = [one.stage.tolist() for one in structures]

    def microbatches(self, sheet: Sheet, lane: int, placed: Spans) -> list[str]:
        """The arg of every op; empty where it has none, or was not recorded."""
        row = sheet.part.row[placed.op, lane]
        number = np.where(row >= 0, self._microbatch[row], -1)
        return [f',"microbatch":{one}' if one >= 0 else "" for one in number.tolist()]


def _heads(optypes: list[int]) -> list[str]:
    return [f'{{"ph":"X","name":{json.dumps(OpType(op).label)},"cat":' for op in optypes]


def _facts(seq: list[int], chunk: list[int]) -> list[str]:
    return [
        f',"seq":{number}' + (f',"chunk":{of_model}' if of_model >= 0 else "")
        for number, of_model in zip(seq, chunk, strict=True)
    ]


def _in_order(window: Window, choice: Choice) -> list[tuple[int, int]]:
    """(part, lane) of all chosen lanes, by step and DP rank."""
    found = [
        (step, dp, number, lane)
        for number, part in enumerate(window.parts)
        for lane, (step, dp) in enumerate(zip(part.step.tolist(), part.dp.tolist(), strict=True))
        if choice.has_dp(dp)
    ]
    return [(number, lane) for _, _, number, lane in sorted(found)]


def _of_stages(sheet: Sheet, choice: Choice) -> NDArray[np.bool_] | None:
    """(N,) ops of the chosen stages; None: all."""
    if not choice.stage:
        return None
    return np.isin(sheet.part.graph.structure.stage, list(choice.stage))


def _with_waits(more: list[str], sheet: Sheet, lane: int, placed: Spans) -> list[str]:
    """Args of the actual run added: waiting for peers, and what the drawing hides."""
    op = placed.op
    wait = np.where(sheet.grouped, waits(sheet, lane) / 1e3, -1.0)[op].tolist()
    more = [
        f'{one},"wait_us":{wait_us}' if wait_us >= 0 else one
        for one, wait_us in zip(more, wait, strict=True)
    ]
    for index in np.flatnonzero(sheet.part.row[op, lane] < 0).tolist():
        more[index] += ',"filled":true'
    for index in np.flatnonzero(placed.cut).tolist():
        more[index] += f',"cut_us":{placed.cut[index] / 1e3}'
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
