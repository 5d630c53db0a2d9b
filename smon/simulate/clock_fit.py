"""The offsets and drifts that explain the recorded ends best: reweighted least squares.

Each group of ends has a true time of its own, which is eliminated. What remains is a matrix over
clocks, made anew for each set of weights; groups of two, which most are, enter it link by link.

Flow: `smon.simulate.clock_evidence` → **here** → `smon.simulate.clock_estimate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.simulate.clock_axis import Floats, Indices
from smon.simulate.clock_evidence import Ends

#: Reweighting: Huber's weights with the usual 1.5, at least as many ns wide as timers resolve.
_HUBER = 1.5
_MIN_SCALE_NS = 1_000.0

#: A fit is settled when no value changes by more: 0.6 % of the smallest offset that is ever taken
#: off. The rough fit has only to tell ends that spread at least 200 µs, of which it is a tenth.
#: Measured: 3 to 5 rounds for the rough fit and 4 to 7 more; SE, whose clocks wander, goes through
#: all 12 and is within 10 µs of where it would settle.
SETTLED_NS = 300.0
ROUGHLY_SETTLED_NS = 20_000.0
_ROUNDS = 12

#: Conjugate gradients end when the next step is below a tenth of that; after 17 steps at most in
#: the public traces.
_CG_NS = 30.0
_CG_ROUNDS = 200

#: Below so much of what a direction would change if no clock met another, it changes nothing. In a
#: chain of n clocks it is 1/n² at least: 4e-9 for 16,384 of them.
_CG_FLAT = 1e-13

#: Most groups have so many ends, and are kept as differences.
_PAIR = 2


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Offsets at the middle of the window and drifts until its end, ns, and what is left.

    Attributes
    ----------
    values
        (1 or 2, clocks) offsets, and drifts if they were asked for.
    residual
        (ends,) of each end from the others of its group, as a sample of the noise of one end.
    weight
        (ends,) Huber's weight for that residual, 1 / max(|residual| / (1.5 MAD), 1).
    """

    values: Floats
    residual: Floats
    weight: Floats

    @staticmethod
    def unknown(ends: Ends, count: int, *, drifts: bool) -> Fit:
        """What to begin with: nobody is off, and all ends weigh the same."""
        return Fit(np.zeros((1 + drifts, count)), np.zeros(len(ends)), np.ones(len(ends)))

    def of(self, keep: NDArray[np.bool_]) -> Fit:
        """With these ends only."""
        return Fit(self.values, self.residual[keep], self.weight[keep])


def fit_clocks(ends: Ends, start: Fit, *, settled_ns: float = SETTLED_NS) -> Fit:
    """Least squares, reweighted until no value changes by more than `settled_ns`."""
    system = _System(ends, start)
    for _ in range(_ROUNDS):
        change = system.improve()
        system.reweigh()
        if change < settled_ns:
            break
    return Fit(system.values, system.residual, system.weight)


def centred(ends: Ends, values: Floats) -> Floats:
    """(ends,) distance from the mean of the group."""
    mean = np.bincount(ends.group, values) / np.bincount(ends.group)
    distance: Floats = values - mean[ends.group]
    return distance


def unbiased(ends: Ends) -> Floats:
    """(ends,) by how much a residual from the mean of few ends is smaller than the noise of one."""
    size = np.bincount(ends.group)[ends.group]
    factor: Floats = np.sqrt(size / (size - 1.0))
    return factor


def _powers(time: Floats, values: int) -> Floats:
    """(1 or 3, n) powers of the time that occur in the matrix of so many values per clock."""
    powers: Floats = time ** np.arange(2.0 * values - 1)[:, None]
    return powers


def _sums(place: Indices, values: Floats, count: int) -> Floats:
    """(m, count) sums over all of one place; of (m, n)."""
    return np.array([np.bincount(place, part, count) for part in values], np.float64)


def _moments(place: Indices, weight: Floats, powers: Floats, count: int) -> Floats:
    """(values, values, count) weighted sums of products of two powers of the time."""
    order = np.arange(len(powers) // 2 + 1)
    moments: Floats = _sums(place, weight * powers, count)[order[:, None] + order]
    return moments


class _System:
    """Least squares for the values of each clock, and one per group, which is eliminated.

    Attributes
    ----------
    values, residual, weight
        As in `Fit`.
    """

    def __init__(self, ends: Ends, start: Fit) -> None:
        size = np.bincount(ends.group)[ends.group]
        two, more = np.flatnonzero(size == _PAIR), np.flatnonzero(size > _PAIR)
        self._parts: list[tuple[_Pairs | _Groups, Indices]] = [
            (_Pairs(ends.take(two), start.values.shape), two),
            (_Groups(ends.take(more), start.values.shape), more),
        ]
        self.residual = start.residual
        self._put(start.values)
        self._weigh(start.weight)

    def improve(self) -> float:
        """Solve for the present weights; returns the largest change."""
        change = self._solution()
        self._put(self.values + change)
        self.residual = np.empty(len(self.weight))
        for part, place in self._parts:
            self.residual[place] = part.residual()
        return float(np.abs(change).max(initial=0.0))

    def reweigh(self) -> None:
        """Weights for the present residuals."""
        apart = np.abs(self.residual)
        width = _HUBER * max(float(np.median(apart)), _MIN_SCALE_NS)
        self._weigh(1.0 / np.maximum(apart / width, 1.0))

    def _weigh(self, weight: Floats) -> None:
        self.weight = weight
        for part, place in self._parts:
            part.weigh(weight[place])

    def _put(self, values: Floats) -> None:
        self.values = values
        for part, _place in self._parts:
            part.put(values)

    def _solution(self) -> Floats:
        """(values, clocks) least squares by conjugate gradients, each value on its own scale.

        The matrix has a direction per component that changes nothing: nothing is added along it.
        """
        own = np.sum([part.own() for part, _ in self._parts], axis=0)
        left: Floats = np.sum([part.pull() for part, _ in self._parts], axis=0)
        scale = np.einsum("aac->ac", own)
        # Nothing is known of a clock without ends, or of a drift with all ends in the middle.
        known = scale > _CG_FLAT * scale[0]
        values = np.zeros_like(left)
        move = ready = np.divide(left, scale, out=np.zeros_like(left), where=known)
        power = float((left * ready).sum())
        for _ in range(_CG_ROUNDS):
            if np.abs(ready).max(initial=0.0) < _CG_NS:
                break
            pushed = (own * move).sum(axis=1)
            for part, _place in self._parts:
                pushed += part.others(move)
            bend = float((move * pushed).sum())
            # What is left lies along what changes nothing, and is rounding alone.
            if not bend > _CG_FLAT * float((scale * move * move).sum()):
                break
            length = power / bend
            values += length * move
            left = left - length * pushed
            ready = np.divide(left, scale, out=np.zeros_like(left), where=known)
            before, power = power, float((left * ready).sum())
            move = ready + (power / before) * move
        return values


def _ends_of_pairs(ends: Ends) -> tuple[Indices, Indices]:
    """(groups,) the end of the lower clock of each group of two, and that of the higher one."""
    number = np.arange(len(ends))
    first, last = np.empty((2, len(ends) // 2), np.intp)
    # Of two values for one place, the last one stays.
    last[ends.group] = number
    first[ends.group[::-1]] = number[::-1]
    ordered = ends.clock[first] < ends.clock[last]
    return np.where(ordered, first, last), np.where(ordered, last, first)


class _Pairs:
    """Groups of two ends, of which only the difference counts.

    Both residuals are half of it, so that both have the same weight in every round.
    """

    def __init__(self, ends: Ends, shape: tuple[int, ...]) -> None:
        self._low, self._high = _ends_of_pairs(ends)
        self._values, self._count = shape
        links, self._link = np.unique(
            ends.clock[self._low] * self._count + ends.clock[self._high], return_inverse=True
        )
        one, other = np.divmod(links, self._count)
        #: Each link from both of its sides.
        self._near, self._far = np.concatenate([one, other]), np.concatenate([other, one])
        self._powers = _powers(ends.time[self._low], self._values)
        self._difference = ends.end[self._low] - ends.end[self._high]

    def put(self, values: Floats) -> None:
        """Take the clocks to be off by this."""
        links = len(self._near) // 2
        apart = (values[:, self._near] - values[:, self._far])[:, :links]
        self._left = self._difference - apart[0][self._link]
        if self._values > 1:
            self._left -= apart[1][self._link] * self._powers[1]

    def residual(self) -> Floats:
        """(ends,) as in `Fit`."""
        residual = np.empty(2 * len(self._left))
        residual[self._low] = self._left / np.sqrt(2.0)
        residual[self._high] = -residual[self._low]
        return residual

    def weigh(self, weight: Floats) -> None:
        """Give each end this weight."""
        self._half = weight[self._low] / 2
        links = _moments(self._link, self._half, self._powers, len(self._near) // 2)
        self._moments = np.concatenate([links, links], axis=2)

    def pull(self) -> Floats:
        """(values, clocks) how strongly what is left pulls at each value."""
        pull = self._half * self._left
        links = _sums(self._link, pull * self._powers[: self._values], len(self._near) // 2)
        return self._of_clocks(np.concatenate([links, -links], axis=1))

    def own(self) -> Floats:
        """(values, values, clocks) what the matrix has of each clock with itself."""
        return np.array([self._of_clocks(moments) for moments in self._moments])

    def others(self, move: Floats) -> Floats:
        """(values, clocks) all else of the matrix, times a move."""
        return -self._of_clocks((self._moments * move[:, self._far]).sum(axis=1))

    def _of_clocks(self, links: Floats) -> Floats:
        return _sums(self._near, links, self._count)


class _Groups:
    """Groups of more than two ends; see `_Pairs`."""

    def __init__(self, ends: Ends, shape: tuple[int, ...]) -> None:
        self._ends = ends
        self._values, self._count = shape
        self._powers = _powers(ends.time, self._values)
        self._groups = int(ends.group.max(initial=-1)) + 1
        # All ends of a group have one time.
        time = np.zeros(self._groups)
        time[ends.group] = ends.time
        self._group_powers = _powers(time, self._values)[: self._values].T
        self._unbiased = unbiased(ends)
        self._cell = ends.group * self._count + ends.clock

    def put(self, values: Floats) -> None:
        """Take the clocks to be off by this."""
        self._left = self._ends.end - values[0][self._ends.clock]
        if self._values > 1:
            self._left -= values[1][self._ends.clock] * self._powers[1]

    def residual(self) -> Floats:
        """(ends,) as in `Fit`."""
        return self._centred() * self._unbiased

    def weigh(self, weight: Floats) -> None:
        """Give each end this weight."""
        self._weight = weight
        self._total = np.bincount(self._ends.group, weight, self._groups)
        cells = np.bincount(self._cell, weight, self._groups * self._count)
        self._cells = cells.reshape(self._groups, self._count)

    def pull(self) -> Floats:
        """(values, clocks) how strongly what is left pulls at each value."""
        pull = self._weight * self._centred()
        return _sums(self._ends.clock, pull * self._powers[: self._values], self._count)

    def own(self) -> Floats:
        """(values, values, clocks) what the matrix has of each clock with itself.

        But for its share in the means of its groups, which is among the `others`.
        """
        return _moments(self._ends.clock, self._weight, self._powers, self._count)

    def others(self, move: Floats) -> Floats:
        """(values, clocks) all else of the matrix, times a move."""
        mean = (self._cells @ move.T * self._group_powers).sum(axis=1) / self._total
        pushed: Floats = -(mean[:, None] * self._group_powers).T @ self._cells
        return pushed

    def _centred(self) -> Floats:
        group = self._ends.group
        mean = np.bincount(group, self._weight * self._left, self._groups) / self._total
        distance: Floats = self._left - mean[group]
        return distance
