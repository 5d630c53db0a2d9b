"""Ops of a window on one time axis, actual and ideal, so that none of a thread overlap.

Flow: `smon.prepare` → **here** → `smon.timeline.events`, `smon.timeline.marks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.prepare import Prepared
from smon.simulate.engine import Floats
from smon.simulate.window import Part, Window, latest_dependency
from smon.timeline.kinds import STREAM_OF, Stream

Ints = NDArray[np.int64]

#: Between two steps, as a share of the first one: enough to tell them apart by eye.
GAP_RATIO: Final = 0.05

#: Perfetto drops an event that overlaps another one of its thread. An op that ends this much too
#: late, as a share of its duration, is drawn shorter; one that overlaps more gets a row of its own.
#: Computes of AR overlap their successor by up to 0.7 % (19 % of those of stage 0), of SE by 0.1 %.
MAX_CUT_RATIO: Final = 0.1


class _AllIdeal:
    """Durations of the ideal run."""

    what_ifs = 1

    def row(self, part: int, op: int) -> Floats | None:  # noqa: ARG002  # as `Durations`
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """What the lanes of one structure share; ``N`` ops, ``L`` lanes.

    Attributes
    ----------
    thread
        (N,) thread, counted over all stages.
    placeholder
        (N,) left out where it takes no time.
    grouped
        (N,) whether it can wait for peers.
    ideal
        (N,) ideal duration in ns, waiting not included.
    ideal_start, ideal_end
        (N, L) ideal times in ns since the start of the step; L is 1 if all lanes are alike.
    """

    part: Part
    thread: NDArray[np.intp]
    placeholder: NDArray[np.bool_]
    grouped: NDArray[np.bool_]
    ideal: Floats
    ideal_start: Floats
    ideal_end: Floats

    def ideal_lane(self, lane: int) -> int:
        """Column of the ideal times of a lane."""
        return lane if self.ideal_end.shape[1] > 1 else 0


def sheets(prepared: Prepared) -> list[Sheet]:
    """One for each structure of the window, with its ideal run."""
    run = prepared.engine.run(_AllIdeal(), keep_all=True)
    made = []
    for index, (part, ends) in enumerate(zip(prepared.window.parts, run.ends, strict=True)):
        structure = part.graph.structure
        ops = [OpType(code) for code in structure.optype.tolist()]
        streams = np.array([STREAM_OF.get(op, Stream.END_OF_STEP) for op in ops], np.intp)
        ideal_end = np.stack([np.atleast_1d(end) for end in ends])
        made.append(
            Sheet(
                part=part,
                thread=structure.stage * len(Stream) + streams,
                placeholder=structure.optype == OpType.GC,
                grouped=part.graph.group >= 0,
                ideal=prepared.engine.ideal[index],
                # An op of a group starts when it is posted, so this is not end − duration.
                ideal_start=latest_dependency(part.graph, ideal_end),
                ideal_end=ideal_end,
            )
        )
    return made


def origins(window: Window, drawn: list[Sheet]) -> tuple[Ints, int]:
    """(steps,) where time 0 of each step lies on the common axis, in ns; and where the next would.

    A step lasts until the end of both its runs.
    """
    first = [-part.start.min(axis=0) for part in window.parts]
    last = [np.maximum(sheet.part.end.max(axis=0), sheet.ideal_end.max(axis=0)) for sheet in drawn]
    before = np.maximum(window.meeting.latest(first), 0.0)
    length = (before + window.meeting.latest(last)) * (1.0 + GAP_RATIO)
    ends = np.cumsum(length)
    return np.rint(ends - length + before).astype(np.int64), round(float(ends[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
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
    start: Ints
    end: Ints
    row: Ints
    cut: Ints


def spans(
    sheet: Sheet, start: Floats, end: Floats, origin: int, only: NDArray[np.bool_] | None = None
) -> Spans:
    """The ops of one lane, all or `only` some, side by side."""
    begun, ended = whole(start, end, origin)
    shown = ~sheet.placeholder | (ended > begun)
    op = np.flatnonzero(shown if only is None else shown & only)
    begun, ended = begun[op], ended[op]
    last, row = side_by_side(sheet.thread[op], begun, ended)
    return Spans(op, begun, last, row, ended - last)


def whole(start: Floats, end: Floats, origin: int) -> tuple[Ints, Ints]:
    """Times in whole ns on the common axis; none ends before it begins."""
    begun = np.rint(start).astype(np.int64) + origin
    # Damaged clocks, and ideals of transfers that were measured with them.
    return begun, np.maximum(np.rint(end).astype(np.int64) + origin, begun)


def side_by_side(thread: NDArray[np.intp], start: Ints, end: Ints) -> tuple[Ints, Ints]:
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


def waits(sheet: Sheet, lane: int) -> Floats:
    """(N,) ns that each op of a lane waited for its peers; 0 for local ops."""
    part = sheet.part
    wait = np.rint(part.end[:, lane] - part.start[:, lane] - part.work[:, lane])
    found: Floats = np.where(sheet.grouped, np.maximum(wait, 0.0), 0.0)
    return found


def ideal_waits(sheet: Sheet, lane: int) -> Floats:
    """(N,) as `waits`, in the ideal run."""
    own = sheet.ideal_lane(lane)
    wait = np.rint(sheet.ideal_end[:, own] - sheet.ideal_start[:, own] - sheet.ideal)
    found: Floats = np.where(sheet.grouped, np.maximum(wait, 0.0), 0.0)
    return found
