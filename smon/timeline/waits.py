"""Who waited for whom in one step, and longer than in the ideal run.

Flow: `smon.timeline.spans` → **here** → `smon.timeline.marks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.simulate.engine import Floats
from smon.timeline.spans import Sheet, ideal_waits, waits

#: Whoever waits at least this share of the longest wait counts as waiting with it.
_ALONG: Final = 0.5


@dataclass(frozen=True, slots=True)
class Wait:
    """The longest of the waits of one kind for one worker.

    Attributes
    ----------
    op
        What waited.
    dp, stage
        Who waited.
    for_dp, for_stage
        Who was last: the others waited for it.
    microbatch
        -1 where there is none.
    start_ns
        When the waiting began, since the start of the step.
    wait_ns, ideal_ns
        How long, and how long in the ideal run.
    workers
        How many workers waited at least half as much longer than in the ideal run.
    """

    op: OpType
    dp: int
    stage: int
    for_dp: int
    for_stage: int
    microbatch: int
    start_ns: float
    wait_ns: float
    ideal_ns: float
    workers: int


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """Ops that met others in one step; all arrays are (members,); sorted by meeting and start."""

    meeting: NDArray[np.int64]
    op: NDArray[np.intp]
    dp: NDArray[np.intp]
    stage: NDArray[np.intp]
    microbatch: NDArray[np.int64]
    start: Floats
    wait: Floats
    ideal: Floats

    @property
    def excess(self) -> Floats:
        """What each waited longer than in the ideal run."""
        return self.wait - self.ideal


def longest_waits(
    sheets: Sequence[Sheet], step: int, microbatch: NDArray[np.integer], most: int
) -> list[Wait]:
    """The waits that exceed those of the ideal run by most, the worst first.

    Of all meetings at which ops of one type waited for the same worker, the worst one stands.

    Parameters
    ----------
    step
        Index into the window's steps.
    microbatch
        Of each row of the op table.
    """
    members = _members(sheets, step, microbatch)
    if not len(members.meeting):
        return []
    last = np.append(members.meeting[1:] != members.meeting[:-1], True)
    ends = np.flatnonzero(last)
    # Everybody of a meeting waited for the one that came last.
    waited_for = ends[np.searchsorted(ends, np.arange(len(last)))]
    worker = members.dp * (members.stage.max(initial=0) + 1) + members.stage
    kinds = members.op * (worker.max(initial=0) + 1) + worker[waited_for]
    order = np.lexsort((-members.excess, kinds))
    first = order[np.append(True, kinds[order][1:] != kinds[order][:-1])]
    worst = first[np.argsort(-members.excess[first], kind="stable")][:most]
    return [
        _wait(members, one, int(waited_for[one]), worker[kinds == kinds[one]], kinds)
        for one in worst.tolist()
        if members.excess[one] > 0
    ]


def _wait(
    members: _Members, one: int, last: int, workers: NDArray[np.intp], kinds: NDArray[np.intp]
) -> Wait:
    along = members.excess[kinds == kinds[one]] >= _ALONG * members.excess[one]
    return Wait(
        op=OpType(int(members.op[one])),
        dp=int(members.dp[one]),
        stage=int(members.stage[one]),
        for_dp=int(members.dp[last]),
        for_stage=int(members.stage[last]),
        microbatch=int(members.microbatch[one]),
        start_ns=float(members.start[one]),
        wait_ns=float(members.wait[one]),
        ideal_ns=float(members.ideal[one]),
        workers=len(np.unique(workers[along])),
    )


def _members(sheets: Sequence[Sheet], step: int, microbatch: NDArray[np.integer]) -> _Members:
    """The ops of all meetings of at least two, each meeting with its last arrival at the end."""
    parts = [_of_sheet(sheet, step, microbatch) for sheet in sheets]
    keys = np.concatenate([_keys(sheet, step, number) for number, sheet in enumerate(sheets)])
    _, number, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    number = number.reshape(-1)
    start = np.concatenate([part.start for part in parts])
    order = np.lexsort((start, number))
    order = order[count[number[order]] > 1]

    def of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return _Members(
        meeting=number[order].astype(np.int64),
        start=start[order],
        **{name: of(name) for name in ("op", "dp", "stage", "microbatch", "wait", "ideal")},
    )


def _of_sheet(sheet: Sheet, step: int, microbatch: NDArray[np.integer]) -> _Members:
    """The ops of one structure that can meet others, lane after lane; meetings are not known."""
    part = sheet.part
    slots, lanes = _slots_and_lanes(sheet, step)
    shape = (len(lanes), len(slots))
    pick = np.ix_(slots, lanes)
    row = part.row[pick].T.ravel()
    structure = part.graph.structure
    columns = lanes.tolist()
    return _Members(
        meeting=np.empty(0, np.int64),
        op=np.tile(structure.optype[slots], len(lanes)),
        dp=np.repeat(part.dp[lanes], len(slots)).astype(np.intp),
        stage=np.tile(structure.stage[slots], len(lanes)),
        microbatch=np.where(row >= 0, microbatch[row], -1).astype(np.int64),
        start=part.start[pick].T.ravel(),
        wait=np.array([waits(sheet, lane)[slots] for lane in columns]).reshape(shape).ravel(),
        ideal=np.array([ideal_waits(sheet, lane)[slots] for lane in columns])
        .reshape(shape)
        .ravel(),
    )


def _slots_and_lanes(sheet: Sheet, step: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.flatnonzero(sheet.grouped), np.flatnonzero(sheet.part.step == step)


def _keys(sheet: Sheet, step: int, number: int) -> NDArray[np.int64]:
    """(members, 5): over all DP ranks by what is synchronised, else within one lane."""
    graph = sheet.part.graph
    slots, lanes = _slots_and_lanes(sheet, step)
    keys = np.zeros((len(lanes), len(slots), 5), np.int64)
    keys[:, :, 0] = number
    keys[:, :, 1] = lanes[:, None]
    keys[:, :, 2] = graph.group[slots]
    for place, slot in enumerate(slots.tolist()):
        if slot in graph.sync:
            keys[:, place, :2] = -1
            keys[:, place, 2:] = graph.sync[slot]
    return keys.reshape(-1, 5)
