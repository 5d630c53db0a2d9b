"""Clocks that were set while a job ran: found by what ends together, and put right.

Flow: `smon.trace.table` → **here** → `smon.prepare`. From one step to the next, the end of the same
collective moves by as much on all DP ranks, however slow one of them is. On a host whose clock was
set it moves by more or less, once and by all of it. `smon.simulate.clock` knows offsets and drifts,
and would take such a jump for one of these, and then for a straggler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import DP_COLLECTIVES
from smon.trace.table import OpTable

#: Smaller jumps are left to the alignment of the clocks: it calls clocks aligned up to this.
MIN_JUMP_NS: Final = 5_000_000.0

#: Where ends of one collective differ anyway, a jump must be so many times larger. Ends of public
#: traces differ by 18 to 115 µs (1.4826 MAD).
SPREADS: Final = 20.0

#: A jump is taken back by one that differs by no more than this part of it.
_BACK: Final = 0.1

_SIGMA_PER_MAD: Final = 1.4826

#: Of three members one that is set does not move the median.
_ENOUGH: Final = 3

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Jump:
    """A clock was set.

    Attributes
    ----------
    step
        The first one on the new time.
    ahead_ns
        How much later it is by the new time; negative: earlier.
    """

    dp: int
    stage: int
    step: int
    ahead_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """How far the ends of collectives moved from one step to the next; ``M`` of them.

    Attributes
    ----------
    worker, place
        (M,) whose, and at which step it arrived, both as places.
    group
        (M,) which collective and which two steps.
    move_ns
        (M,).
    """

    worker: Ints
    place: Ints
    group: Ints
    move_ns: Floats


def without_jumps(table: OpTable) -> tuple[OpTable, tuple[Jump, ...]]:
    """The table as if no clock had been set, and the jumps that were taken off.

    Times are told by the clock of the first step. Jumps of workers that are alone in their DP group
    are not found.
    """
    rows = np.flatnonzero(np.isin(table.optype, [int(op) for op in DP_COLLECTIVES]))
    steps = np.unique(table.step[rows])
    if table.step_relative or len(steps) < 2:  # noqa: PLR2004  # one step has no next
        return table, ()
    stages = int(table.stage.max()) + 1
    count = (int(table.dp.max()) + 1) * stages
    jumps = _jumps(_moves(table, rows, steps, stages), count, len(steps))
    if not jumps.any():
        return table, ()
    found = tuple(
        Jump(worker // stages, worker % stages, int(steps[place]), int(jumps[worker, place]))
        for worker, place in np.argwhere(jumps).tolist()
    )
    ahead = np.cumsum(jumps, axis=1)
    # A step without any collective is told by the clocks of the one before.
    of = np.maximum(np.searchsorted(steps, table.step, side="right") - 1, 0)
    worker = table.dp.astype(np.int64) * stages + table.stage
    return replace(table, start_ns=table.start_ns - ahead[worker, of]), found


def _moves(table: OpTable, rows: NDArray[np.intp], steps: Ints, stages: int) -> _Moves:
    """Of each collective of each worker, from each step that has it to the next one that does."""
    names = ("stage", "optype", "chunk", "seq")
    key = np.zeros(len(rows), np.int64)
    for name in names:
        key = _numbered(key, getattr(table, name)[rows])
    dp, step = table.dp[rows], np.searchsorted(steps, table.step[rows])
    end = (table.start_ns + table.duration_ns)[rows]
    order = np.lexsort((step, dp, key))
    # Of an op that is there twice, the first counts, as everywhere.
    again = [np.diff(part[order], prepend=-1) == 0 for part in (key, dp, step)]
    order = order[~np.logical_and.reduce(again)]
    key, dp, step, end = key[order], dp[order].astype(np.int64), step[order], end[order]
    follows = np.flatnonzero((np.diff(key) == 0) & (np.diff(dp) == 0) & (np.diff(step) > 0))
    worker = dp[follows] * stages + table.stage[rows][order][follows]
    arrives = step[follows + 1]
    return _Moves(
        worker=worker,
        place=arrives,
        group=_numbered(_numbered(key[follows], step[follows]), arrives),
        move_ns=(end[follows + 1] - end[follows]).astype(np.float64),
    )


def _numbered(first: Ints, second: NDArray[np.integer]) -> Ints:
    """One number for each pair, from 0."""
    values, place = np.unique(second, return_inverse=True)
    number: Ints = np.unique(first * len(values) + place, return_inverse=True)[1].astype(np.int64)
    return number


def _jumps(moves: _Moves, workers: int, steps: int) -> Ints:
    """(workers, steps) by how much each clock has jumped when it arrives at each step, ns."""
    jumps = np.zeros((workers, steps), np.int64)
    more = moves.move_ns - _common(moves)
    cell, of = np.unique(moves.worker * steps + moves.place, return_inverse=True)
    typical = _medians(more, of, len(cell))
    worker, place = cell // steps, cell % steps
    # A clock that drifts moves by more each time; that is not what is looked for here.
    number = np.unique(worker, return_inverse=True)[1]
    drift = _medians(typical, number, int(number.max(initial=-1)) + 1)[number]
    typical -= drift
    spread = _SIGMA_PER_MAD * float(np.median(np.abs(typical))) if len(typical) else 0.0
    least = max(MIN_JUMP_NS, SPREADS * spread)
    # All collectives of a step are told by the clock: one alone that ends late is no jump.
    sure = np.abs(typical) > least
    np.logical_and.at(sure, of, (more - drift[of]) * np.sign(typical)[of] > least)
    # Nor is one that is gone a step later, with all that came after it.
    following = np.flatnonzero(sure[:-1] & sure[1:] & (np.diff(worker) == 0))
    sums = np.abs(typical[following] + typical[following + 1])
    back = following[sums <= np.maximum(least, _BACK * np.abs(typical[following]))]
    sure[back] = sure[back + 1] = False
    jumps[worker[sure], place[sure]] = np.round(typical[sure])
    return jumps


def _common(moves: _Moves) -> Floats:
    """(M,) how far a collective has moved by those of its clocks that were not set.

    By most of them; but if that is no plausible time, by the one that is nearest to what is usual:
    the host that was set may have half of the ranks or more.
    """
    count = int(moves.group.max(initial=-1)) + 1
    size = np.bincount(moves.group, minlength=count)
    common = _medians(moves.move_ns, moves.group, count)
    usual = float(np.median(moves.move_ns)) if count else 0.0
    order = np.lexsort((np.abs(moves.move_ns - usual), moves.group))
    nearest = moves.move_ns[order][np.cumsum(size) - size]
    odd = (size < _ENOUGH) | (np.abs(common - usual) > usual)
    picked: Floats = np.where(odd, nearest, common)[moves.group]
    return picked


def _medians(values: Floats, group: Ints, count: int) -> Floats:
    """(count,) median of each group; none is empty."""
    order = np.lexsort((values, group))
    size = np.bincount(group, minlength=count)
    first = np.cumsum(size) - size
    middle = values[order][first + size // 2] + values[order][first + (size - 1) // 2]
    half: Floats = middle / 2
    return half
