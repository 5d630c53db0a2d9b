"""Step times of the what-ifs, and a ledger of the lost time.

S, S_t and the exact S_w of every rank as in Lin et al., OSDI 2025 (Eq. 1, 2, 4), with segments in
place of computes.

Flow: `smon.collectives.simulate` → **here** → `smon.collectives.findings`,
`smon.collectives.report`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.attribute.ledger import Factor
from smon.attribute.shares import SLOWEST_RATIO
from smon.collectives.segments import Floats, Structure
from smon.collectives.simulate import Ideal, Simulator, ideals_of
from smon.trace.events import Collective

#: Key of the segments in ``by_optype``.
SEGMENTS: Final = "segments"


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """A window, simulated; ``S`` steps in ascending order, ``W`` ranks; times in ns.

    Attributes
    ----------
    structures, simulators, ideals
        Of the steps of one structure each.
    steps
        (S,) step numbers.
    recorded, simulated, ideal
        (S,) as recorded; T; T_ideal.
    by_type
        (S,) per kind of duration, with only that kind as recorded.
    by_rank
        (W, S) with only this rank as recorded; NaN where it takes part in nothing.
    """

    structures: tuple[Structure, ...]
    simulators: tuple[Simulator, ...]
    ideals: tuple[Ideal, ...]
    steps: NDArray[np.int64]
    recorded: Floats
    simulated: Floats
    ideal: Floats
    by_type: dict[str, Floats]
    by_rank: Floats

    @property
    def ranks(self) -> int:
        """Number of ranks that have a file."""
        return int(self.structures[0].members.shape[1])

    def times(self, durations: Durations) -> Floats:
        """(S,) step times of a what-if."""
        return self.times_of_all([durations])[0]

    def times_of_all(self, cases: Sequence[Durations]) -> list[Floats]:
        """(S,) step times of each of several what-ifs."""
        return _run_all(self.structures, self.simulators, cases)

    def cube(self, values: Callable[[Structure], Floats]) -> Floats:
        """(S, …) values of each step, by step, from those of each structure."""
        return _joined([values(structure) for structure in self.structures], self.structures)


#: Segments and transfers of the structure with this number, in a what-if.
Durations = Callable[[int, Structure], tuple[Floats, Floats]]


def study_of(structures: Sequence[Structure]) -> Study:
    """Simulate every what-if of the report."""
    ideals = ideals_of(structures)
    simulators = [Simulator(structure) for structure in structures]

    def run(*cases: Durations) -> list[Floats]:
        return _run_all(structures, simulators, cases)

    def all_ideal(at: int, structure: Structure) -> tuple[Floats, Floats]:
        shape = structure.transfer.shape
        return ideals[at].segment, np.broadcast_to(ideals[at].transfer, shape)

    simulated, ideal = run(lambda _, structure: (structure.segment, structure.transfer), all_ideal)
    recorded = _joined([structure.recorded for structure in structures], structures)
    return Study(
        structures=tuple(structures),
        simulators=tuple(simulators),
        ideals=tuple(ideals),
        steps=_joined([structure.steps for structure in structures], structures),
        recorded=np.where(np.isnan(recorded), simulated, recorded),
        simulated=simulated,
        ideal=ideal,
        by_type=_by_type(structures, ideals, run),
        by_rank=_by_rank(structures, ideals, run),
    )


def _run_all(
    structures: Sequence[Structure], simulators: Sequence[Simulator], cases: Sequence[Durations]
) -> list[Floats]:
    """(S,) step times of each what-if."""
    parts = [
        simulator.run_all([durations(at, structure) for durations in cases])
        for at, (simulator, structure) in enumerate(zip(simulators, structures, strict=True))
    ]
    return [_joined(times, structures) for times in zip(*parts, strict=True)]


def _joined(parts: Sequence[NDArray], structures: Sequence[Structure]) -> NDArray:  # type: ignore[type-arg]
    """Values by step, in the order of the step numbers."""
    steps = np.concatenate([structure.steps for structure in structures])
    joined: NDArray = np.concatenate(list(parts))[np.argsort(steps, kind="stable")]  # type: ignore[type-arg]
    return joined


_Run = Callable[..., list[Floats]]


def _by_type(
    structures: Sequence[Structure], ideals: Sequence[Ideal], run: _Run
) -> dict[str, Floats]:
    """S_t: segments as recorded; and each kind of collective."""
    kinds = sorted({place.collective for structure in structures for place in structure.places})

    def segments(at: int, structure: Structure) -> tuple[Floats, Floats]:
        ideal = np.broadcast_to(ideals[at].transfer, structure.transfer.shape)
        return structure.segment, ideal

    def only(kind: Collective) -> Durations:
        def durations(at: int, structure: Structure) -> tuple[Floats, Floats]:
            mine = np.array([place.collective == kind for place in structure.places])
            return ideals[at].segment, np.where(mine, structure.transfer, ideals[at].transfer)

        return durations

    times = run(segments, *(only(kind) for kind in kinds))
    return dict(zip([SEGMENTS, *(kind.label for kind in kinds)], times, strict=True))


def _by_rank(structures: Sequence[Structure], ideals: Sequence[Ideal], run: _Run) -> Floats:
    """S_w: one rank's segments as recorded, everything else ideal."""
    ranks = structures[0].members.shape[1]
    times = np.full((ranks, sum(len(structure.steps) for structure in structures)), np.nan)
    takes_part = np.any([structure.members.any(axis=0) for structure in structures], axis=0)

    def only(rank: int) -> Durations:
        def durations(at: int, structure: Structure) -> tuple[Floats, Floats]:
            segment = np.repeat(ideals[at].segment, len(structure.steps), axis=0)
            segment[:, :, rank] = structure.segment[:, :, rank]
            return segment, np.broadcast_to(ideals[at].transfer, structure.transfer.shape)

        return durations

    # A few at a time: each takes the memory of all segments.
    several = np.flatnonzero(takes_part).tolist()
    for first in range(0, len(several), _RANKS_AT_ONCE):
        group = several[first : first + _RANKS_AT_ONCE]
        for rank, found in zip(group, run(*map(only, group)), strict=True):
            times[rank] = found
    return times


#: So many ranks are simulated side by side.
_RANKS_AT_ONCE: Final = 8


def repaired(studied: Study, ranks: Sequence[int]) -> Floats:
    """(S,) step times if these ranks, by position, were like their peers.

    Each of their segments becomes the mean of the other members' before the same collective in the
    same step, unless it is shorter already; where no other is left, it stays.
    """
    return studied.times(
        lambda _, structure: (_like_peers(structure.segment, ranks), structure.transfer)
    )


def evened(studied: Study, ranks: Sequence[int]) -> Floats:
    """(S,) step times if moreover all members came at the same time, with the same total work."""

    def even(_at: int, structure: Structure) -> tuple[Floats, Floats]:
        mean = _mean(_like_peers(structure.segment, ranks))
        return np.broadcast_to(mean, structure.segment.shape), structure.transfer

    return studied.times(even)


def _like_peers(segment: Floats, ranks: Sequence[int]) -> Floats:
    chosen = np.zeros(segment.shape[2], bool)
    chosen[list(ranks)] = True
    mean = _mean(np.where(chosen, np.nan, segment))
    changed: Floats = np.where(chosen & ~np.isnan(mean), np.fmin(segment, mean), segment)
    return changed


def _mean(values: Floats) -> Floats:
    """(S, J, 1) mean over the ranks, NaN left out; NaN where nothing is left."""
    known = ~np.isnan(values)
    count = known.sum(axis=2, keepdims=True)
    mean: Floats = np.full(count.shape, np.nan)
    total = np.where(known, values, 0.0).sum(axis=2, keepdims=True)
    np.divide(total, count, out=mean, where=count > 0)
    return mean


def slowest_share(studied: Study) -> float | None:
    """M_W: (T − T_fixed) / (T − T_ideal) with the slowest 3 % of the ranks ideal; None if 0 / 0."""
    mean = studied.by_rank.mean(axis=1)
    known = np.flatnonzero(~np.isnan(mean))
    count = int(np.ceil(SLOWEST_RATIO * len(known)))
    slowest = known[np.argsort(-mean[known], kind="stable")][:count]

    def fixed(at: int, structure: Structure) -> tuple[Floats, Floats]:
        segment = structure.segment.copy()
        ideal = np.broadcast_to(studied.ideals[at].segment, segment.shape)
        segment[:, :, slowest] = ideal[:, :, slowest]
        return segment, structure.transfer

    lost = float(studied.simulated.mean() - studied.ideal.mean())
    if lost == 0.0:
        return None
    return float(studied.simulated.mean() - studied.times(fixed).mean()) / lost


def ledger_of(studied: Study) -> dict[Factor, float]:
    """Mean ns per step that each factor adds; they sum to recorded − ideal.

    Shapley values of three switches, each on or off: a rank is slower than the others in all steps
    alike; it is slower in this step than usual; transfers take longer than typical ones of their
    kind and size. What the simulation misses comes last, as launch delay.
    """
    switches = (Factor.WORKER, Factor.STEP, Factor.COMMUNICATION)
    subsets = [
        on for size in range(len(switches) + 1) for on in itertools.combinations(switches, size)
    ]
    cases = [_switched(studied, frozenset(on)) for on in subsets]
    means = [float(times.mean()) for times in studied.times_of_all(cases)]
    values = dict(zip(subsets, means, strict=True))
    orders = list(itertools.permutations(switches))
    parts = dict.fromkeys(switches, 0.0)
    for order in orders:
        for at, factor in enumerate(order):
            before = tuple(each for each in switches if each in order[:at])
            after = tuple(each for each in switches if each in order[: at + 1])
            parts[factor] += (values[after] - values[before]) / len(orders)
    missing = float(studied.simulated.mean() - studied.ideal.mean()) - sum(parts.values())
    parts[Factor.STEP] += missing  # rounding
    return {**parts, Factor.LAUNCH_DELAY: float((studied.recorded - studied.simulated).mean())}


def _switched(studied: Study, on: frozenset[Factor]) -> Durations:
    """Segments with the parts that are on: the rank's mean over the steps, and the rest."""

    def durations(at: int, structure: Structure) -> tuple[Floats, Floats]:
        ideal = np.broadcast_to(studied.ideals[at].segment, structure.segment.shape)
        # What is seen once is not usual.
        once = len(structure.steps) == 1
        usual = ideal if once else structure.segment.mean(axis=0, keepdims=True)
        segment = ideal.copy()
        if Factor.WORKER in on:
            segment = segment + (usual - ideal)
        if Factor.STEP in on:
            segment = segment + (structure.segment - usual)
        if {Factor.WORKER, Factor.STEP} <= on:
            segment = structure.segment
        transfer = structure.transfer
        if Factor.COMMUNICATION not in on:
            transfer = np.broadcast_to(studied.ideals[at].transfer, transfer.shape)
        return np.maximum(segment, 0.0), transfer

    return durations
