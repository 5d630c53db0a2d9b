"""Missing ops of usable lanes, filled in from what their peers and neighbours in the graph say.

An op that was lost still left traces: what it depends on had ended, what depends on it had not
started, the other ends of its communication ended with it. Its duration is estimated in several
ways; on the lanes where the op is present, the errors of all estimates are measured, and the best
one is used.

Flow: `smon.graph.structure`, `smon.graph.program` → **here** → `smon.simulate.window`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.graph.program import Program, Unit
from smon.graph.structure import Replicas

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """Lanes of one structure without holes.

    Attributes
    ----------
    program
        How to simulate them.
    step, dp
        (L,) index into the window's steps, and DP rank.
    row
        (N, L) row of the op table, -1 where the op was filled in.
    start, end
        (N, L) times in ns since the start of the step.
    """

    program: Program
    step: NDArray[np.intp]
    dp: NDArray[np.int32]
    row: NDArray[np.int32]
    start: Floats
    end: Floats


def fill_missing(
    replicas: Replicas, program: Program, step: NDArray[np.intp], dp: NDArray[np.int32]
) -> Filled:
    """Give every missing op a start and an end."""
    start, end = replicas.start, replicas.end
    holes = np.isnan(start)
    if holes.any():
        start, end = start.copy(), end.copy()
        filler = _Filler(program, step, dp, start, end, holes)
        for phase in program.phases:
            for unit in phase.units:
                filler.fill(unit, synced=False)
            for _, unit in phase.synced:
                filler.fill(unit, synced=True)
    return Filled(program, step, dp, replicas.row, start, end)


class _Filler:
    """Fills units in the order of the program, so that what an op depends on is whole."""

    def __init__(
        self,
        program: Program,
        step: NDArray[np.intp],
        dp: NDArray[np.int32],
        start: Floats,
        end: Floats,
        holes: NDArray[np.bool_],
    ) -> None:
        self.step, self.dp = step, dp
        self.start, self.end, self.holes = start, end, holes
        self.kinds = program.graph.structure.slots
        self.after: list[list[int]] = [[] for _ in range(len(program.graph))]
        for before, after in zip(
            program.graph.before.tolist(), program.graph.after.tolist(), strict=True
        ):
            self.after[before].append(after)
        self.structure = program.graph.structure
        self.group = _members(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.typical = self._typical_durations()

    def _typical_durations(self) -> Floats:
        """(N,) median duration of each op's kind, for ops that no lane has."""
        typical = np.zeros(len(self.structure))
        durations = self.end - self.start
        for slots in self.kinds.values():
            median = float(np.nanmedian(durations[slots]))
            typical[slots] = 0.0 if np.isnan(median) else median
        return typical

    def fill(self, unit: Unit, *, synced: bool) -> None:
        """Fill the holes of one unit."""
        ops = [op for op, _ in unit.members]
        if not self.holes[ops].any():
            return
        for op, deps in unit.members:
            self._fill_start(op, deps)
        if unit.grouped:
            self._fill_group_ends(ops, synced=synced)
        else:
            self._fill_local_end(*unit.members[0])

    def _ready(self, deps: Sequence[int]) -> Floats:
        """(L,) latest end of the dependencies."""
        if not deps:
            return np.zeros(len(self.step))
        ready: Floats = self.end[list(deps)].max(axis=0)
        return ready

    def _next(self, op: int) -> Floats:
        """(L,) when an op must have ended: earliest recorded start of what depends on it.

        Where such an op is missing too, the end of its communication counts. NaN if nothing is
        known.
        """
        bounds = [np.full(len(self.step), np.nan)]
        for other in self.after[op]:
            bounds.append(np.where(self.holes[other], np.nan, self.start[other]))
            bounds.extend(
                np.where(self.holes[member], np.nan, self.end[member])
                for member in self.group.get(other, ())
            )
        earliest: Floats = np.fmin.reduce(bounds, axis=0)
        return earliest

    def _fill_start(self, op: int, deps: Sequence[int]) -> None:
        """As long after its dependencies, or before what follows, as it is elsewhere."""
        lost = self.holes[op]
        if not lost.any():
            return
        start, following = np.where(lost, np.nan, self.start[op]), self._next(op)
        estimates = [_shifted(self._ready(deps), start), _shifted(following, start)]
        guess = _best(estimates, start, 0.0)
        # What depends on it had to wait for it.
        self.start[op, lost] = np.maximum(np.fmin(guess, following), 0.0)[lost]

    def _fill_local_end(self, op: int, deps: Sequence[int]) -> None:
        lost = self.holes[op]
        start, ends = self.start[op], self.end[op]
        duration = np.where(lost, np.nan, ends - start)
        following = self._next(op)
        estimates = [
            _shifted(following - self._ready(deps), duration),
            _peer_mean(duration, self.step),
            _peer_mean(duration, self.dp),
        ]
        guess = _best(estimates, duration, self.typical[op])
        finished = np.fmin(start + np.maximum(guess, 0.0), following)
        ends[lost] = np.maximum(finished, start)[lost]

    def _fill_group_ends(self, ops: list[int], *, synced: bool) -> None:
        """Members of a group end together; if nobody is left, after the usual transfer time."""
        lost = self.holes[ops]
        ends = np.where(lost, np.nan, self.end[ops])
        latest = self.start[ops].max(axis=0)
        together = np.fmax.reduce(ends, axis=0)
        if synced:
            latest, together = self._over_replicas(latest, together)
        transfer = ends - latest
        usual = float(np.nanmedian(transfer)) if not np.isnan(transfer).all() else 0.0
        following = np.fmin.reduce([self._next(op) for op in ops], axis=0)
        after_transfer = np.maximum(np.fmin(latest + usual, following), latest)
        guess = np.where(np.isnan(together), after_transfer, together)
        for index, op in enumerate(ops):
            mine = lost[index]
            finished = np.fmin(guess, self._next(op))
            self.end[op, mine] = finished[mine]
            self.start[op, mine] = np.minimum(self.start[op, mine], finished[mine])

    def _over_replicas(self, latest: Floats, together: Floats) -> tuple[Floats, Floats]:
        steps = int(self.step.max()) + 1
        latest_start = np.full(steps, -np.inf)
        np.maximum.at(latest_start, self.step, latest)
        last_end = np.full(steps, np.nan)
        np.fmax.at(last_end, self.step, together)
        return latest_start[self.step], last_end[self.step]


def _members(program: Program) -> dict[int, list[int]]:
    """Other members of the communication group of each grouped op."""
    group = program.graph.group
    by_group: dict[int, list[int]] = {}
    for op in np.flatnonzero(group >= 0).tolist():
        by_group.setdefault(int(group[op]), []).append(op)
    return {op: ops for ops in by_group.values() if len(ops) > 1 for op in ops}


def _shifted(estimate: Floats, truth: Floats) -> Floats:
    """An estimate, moved by its typical distance from the truth where that is known."""
    error = estimate - truth
    error = error[~np.isnan(error)]
    return estimate - float(np.median(error)) if len(error) else estimate


def _peer_mean(duration: Floats, peers: NDArray[np.integer]) -> Floats:
    """(L,) mean over the lanes with the same step (or DP rank), the lane itself left out."""
    known = ~np.isnan(duration)
    count = np.bincount(peers[known], minlength=int(peers.max()) + 1)[peers] - known
    total = np.bincount(peers[known], duration[known], minlength=int(peers.max()) + 1)[peers]
    total = total - np.where(known, duration, 0.0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _best(estimates: Sequence[Floats], duration: Floats, typical: float) -> Floats:
    """The estimate with the smallest median error where the op is known; others fill its gaps."""
    ranked = []
    for number, estimate in enumerate(estimates):
        errors = np.abs(estimate - duration)
        errors = errors[~np.isnan(errors)]
        ranked.append((float(np.median(errors)) if len(errors) else np.inf, number))
    known = duration[~np.isnan(duration)]
    guess = np.full(len(duration), np.nan)
    for _, number in sorted(ranked):
        guess = np.where(np.isnan(guess), estimates[number], guess)
    fallback = float(np.median(known)) if len(known) else typical
    return np.where(np.isnan(guess), fallback, guess)
