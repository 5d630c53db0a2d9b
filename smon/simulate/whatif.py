"""Durations of the what-if runs: which ops keep what was recorded, and which become ideal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.errors import SimulationError
from smon.ops import STREAM_COMPUTE
from smon.simulate.ideal import Ideal
from smon.simulate.window import Window

Floats = NDArray[np.float64]

#: A worker: (DP rank, stage).
Worker = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Every op takes what was recorded: T, or the replay if launch delays are added."""

    window: Window
    what_ifs: int = 1

    def row(self, part: int, op: int) -> Floats | None:
        """(L,) recorded durations."""
        row: Floats = self.window.parts[part].work[op]
        return row

    def delay(self, part: int, op: int) -> Floats:
        """(L,) recorded launch delays."""
        delay: Floats = self.window.parts[part].delay[op]
        return delay


class OnlySome:
    """What-ifs side by side, in each of which some ops keep what was recorded; the rest is ideal.

    Parameters
    ----------
    window, ideal
        Recorded and ideal durations.
    keep
        Per structure, (what_ifs, N): whether the op keeps its recorded durations.
    """

    def __init__(self, window: Window, ideal: Ideal, keep: Sequence[NDArray[np.bool_]]) -> None:
        self.window = window
        self.what_ifs = len(keep[0])
        self._keep = keep
        self._any: list[list[bool]] = [np.any(mask, axis=0).tolist() for mask in keep]
        self._all: list[list[bool]] = [np.all(mask, axis=0).tolist() for mask in keep]
        self._ideal = [ideal.of_ops(part.graph.structure.optype) for part in window.parts]

    def row(self, part: int, op: int) -> Floats | None:
        """(what_ifs, L) or (L,) durations, None if ideal in all what-ifs."""
        if not self._any[part][op]:
            return None
        recorded: Floats = self.window.parts[part].work[op]
        if self._all[part][op]:
            return recorded
        keep = self._keep[part][:, op, None]
        return np.where(keep, recorded, self._ideal[part][op])


class Replaced:
    """As recorded, but the ops of some workers take something else."""

    what_ifs = 1

    def __init__(self, window: Window, workers: Collection[Worker]) -> None:
        self.window = window
        self._lanes: list[list[NDArray[np.bool_] | None]] = []
        for part in window.parts:
            chosen = [
                np.isin(part.dp, [dp for dp, of in workers if of == stage])
                for stage in range(window.stages)
            ]
            by_stage = [lanes if lanes.any() else None for lanes in chosen]
            self._lanes.append([by_stage[stage] for stage in part.graph.structure.stage])

    def row(self, part: int, op: int) -> Floats | None:
        """(L,) durations."""
        recorded: Floats = self.window.parts[part].work[op]
        lanes = self._lanes[part][op]
        if lanes is None:
            return recorded
        row = recorded.copy()
        row[lanes] = self.replacement(part, op, lanes)
        return row

    def replacement(self, part: int, op: int, lanes: NDArray[np.bool_]) -> Floats | float:
        """Durations of an op on the chosen lanes."""
        raise NotImplementedError


class MadeIdeal(Replaced):
    """The chosen workers' ops are ideal (M_W and M_S, Eq. 5)."""

    def __init__(self, window: Window, ideal: Ideal, workers: Collection[Worker]) -> None:
        super().__init__(window, workers)
        self._ideal = [ideal.of_ops(part.graph.structure.optype) for part in window.parts]

    def replacement(self, part: int, op: int, lanes: NDArray[np.bool_]) -> Floats | float:  # noqa: ARG002
        """The ideal duration, the same on all `lanes`."""
        return float(self._ideal[part][op])


class MadeLikePeers(Replaced):
    """The chosen workers compute like their peers (the `repaired` reference).

    Peers are the other DP ranks of the same step, stage, op type and microbatch position, chosen
    workers left out; their mean counts.

    Raises
    ------
    SimulationError
        A chosen worker does not exist, or has no peer in some step.
    """

    def __init__(self, window: Window, workers: Collection[Worker]) -> None:
        super().__init__(window, workers)
        self._check(workers)
        stages = {stage for _, stage in workers}
        self._sums = [_PeerSums(window) for _ in range(window.stages)]
        for index, part in enumerate(window.parts):
            structure = part.graph.structure
            for op in np.flatnonzero(np.isin(structure.optype, list(STREAM_COMPUTE))).tolist():
                if structure.stage[op] in stages:
                    place = (int(structure.optype[op]), int(structure.seq[op]))
                    chosen = self._lanes[index][op]
                    peers = slice(None) if chosen is None else ~chosen
                    sums = self._sums[structure.stage[op]]
                    sums.add(place, part.step[peers], part.work[op][peers])

    def _check(self, workers: Collection[Worker]) -> None:
        replaced = set(workers)
        for dp, stage in workers:
            steps = [part.step[part.dp == dp] for part in self.window.parts]
            if not any(map(len, steps)) or not 0 <= stage < self.window.stages:
                raise SimulationError(f"there is no worker at DP rank {dp}, stage {stage}")
            others = [
                other for other in range(self.window.dp_ranks) if (other, stage) not in replaced
            ]
            peers = [part.step[np.isin(part.dp, others)] for part in self.window.parts]
            if not np.isin(np.concatenate(steps), np.concatenate(peers)).all():
                raise SimulationError(
                    "every DP rank of a stage is to be replaced by its peers: "
                    "no peer is left; choose fewer workers"
                )

    def replacement(self, part: int, op: int, lanes: NDArray[np.bool_]) -> Floats | float:
        """The peers' mean for computes, the recorded duration for everything else."""
        of = self.window.parts[part]
        structure = of.graph.structure
        recorded: Floats = of.work[op][lanes]
        if structure.optype[op] not in STREAM_COMPUTE:
            return recorded
        place = (int(structure.optype[op]), int(structure.seq[op]))
        mean = self._sums[structure.stage[op]].mean(place)[of.step[lanes]]
        # No peer has as many microbatches in this step.
        return np.where(np.isnan(mean), recorded, mean)


class _PeerSums:
    """Durations of the computes of one stage over the peers, whatever their structures."""

    def __init__(self, window: Window) -> None:
        self._steps = len(window.steps)
        self._sums: dict[tuple[int, int], Floats] = {}

    def add(self, place: tuple[int, int], steps: NDArray[np.intp], work: Floats) -> None:
        """Add the durations of an op, given by (op type, sequence number), in these steps."""
        sums = self._sums.setdefault(place, np.zeros((2, self._steps)))
        sums[0] += np.bincount(steps, work, minlength=self._steps)
        sums[1] += np.bincount(steps, minlength=self._steps)

    def mean(self, place: tuple[int, int]) -> Floats:
        """(steps,) mean over the peers; NaN where none has the op."""
        total, count = self._sums[place]
        mean = np.full(self._steps, np.nan)
        np.divide(total, count, out=mean, where=count > 0)
        return mean
