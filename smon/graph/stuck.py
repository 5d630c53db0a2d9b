"""What a last step hangs on: the op that could have run and did not end, and who is waiting.

Profilers record ops when they end. In a hang everything that can still end does, and what is left
is missing; the op that everything missing waits for is the one that hangs. A recording that was
merely cut off looks alike, but leaves an op under way on many workers, or one that had no time.

Flow: `smon.graph.build`, `smon.trace.quality` → **here** → `smon.diagnose.causes.hang`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.graph.build import Graph
from smon.graph.structure import Replicas
from smon.ops import OpType
from smon.topology import Layout
from smon.trace.grid import Grid

#: It hangs if others went on for so many times the usual duration of the op since it could start.
PATIENCE = 3.0
#: And if at most this share of the workers (or one) have such an op.
MAX_STUCK_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Stuck:
    """An op that did not end.

    Attributes
    ----------
    step, optype, seq
        Which op.
    workers
        (dp, stage) on which it could have run; all members of a communication.
    waiting
        Number of workers that lack ops in this step.
    silent_ns
        How long other workers went on.
    """

    step: int
    optype: OpType
    seq: int
    workers: tuple[tuple[int, int], ...]
    waiting: int
    silent_ns: float


def find_stuck(
    grid: Grid,
    layout: Layout,
    groups: Sequence[Replicas],
    graphs: Sequence[Graph | None],
    skipped: dict[int, str],
) -> Stuck | None:
    """Look at the last step, if it did not come to its end."""
    last = len(grid.steps) - 1
    sound = [
        (replicas, graph)
        for replicas, graph in zip(groups, graphs, strict=True)
        if graph is not None
    ]
    if last < 1 or int(grid.steps[last]) not in skipped or not sound:
        return None
    lanes = np.flatnonzero(grid.lane_step == last)
    if len(lanes) < layout.dp:
        return None
    replicas, graph = sound[0]
    step = _LastStep(grid, graph, lanes)
    return step.stuck(_usual(replicas), layout)


def _usual(replicas: Replicas) -> NDArray[np.float64]:
    """(N,) typical duration of each op, 0 where unknown."""
    duration = replicas.end - replicas.start
    known = ~np.isnan(duration)
    total = np.where(known, duration, 0.0).sum(axis=1)
    mean: NDArray[np.float64] = total / np.maximum(known.sum(axis=1), 1)
    return mean


class _LastStep:
    """Ops of one step against the usual graph; (N, L) arrays over its lanes."""

    def __init__(self, grid: Grid, graph: Graph, lanes: NDArray[np.intp]) -> None:
        self.grid, self.graph, self.lanes = grid, graph, lanes
        end = np.full((len(graph), len(lanes)), np.nan)
        structure = graph.structure
        kinds = zip(grid.kind_stage.tolist(), grid.kind_optype.tolist(), strict=True)
        for kind, (stage, optype) in enumerate(kinds):
            slots = structure.of(stage, OpType(optype))
            first, stop = grid.kind_offset[kind], grid.kind_offset[kind + 1]
            count = min(len(slots), stop - first)
            end[slots[:count]] = grid.end[first : first + count][:, lanes]
        self.end = end
        self.present = ~np.isnan(end)

    def stuck(self, usual: NDArray[np.float64], layout: Layout) -> Stuck | None:
        """The op that hangs, if it is clear which."""
        ready, since = self._ready()
        roots = self._roots(ready)
        ops, lanes = np.nonzero(roots)
        workers = {
            (int(self.grid.lane_dp[self.lanes[lane]]), int(self.graph.structure.stage[op]))
            for op, lane in zip(ops.tolist(), lanes.tolist(), strict=True)
        }
        groups = {self._meeting_of(op) for op in ops.tolist()}
        total = layout.dp * layout.pp
        together = len(groups) == 1 and groups != {None}
        if self._incomplete() < total:
            # Somebody finished the step: nothing hangs, rows got lost.
            return None
        if not workers or not (together or len(workers) <= max(1, MAX_STUCK_SHARE * total)):
            return None
        silent = float(np.max(self.end, where=self.present, initial=0.0))
        silent -= float(np.min(since[ops, lanes]))
        if silent < PATIENCE * float(np.max(usual[ops])):
            return None
        structure = self.graph.structure
        return Stuck(
            step=int(self.grid.steps[-1]),
            optype=OpType(int(structure.optype[ops[0]])),
            seq=int(structure.seq[ops[0]]),
            workers=tuple(sorted(workers)),
            waiting=self._incomplete(),
            silent_ns=silent,
        )

    def _meeting_of(self, op: int) -> object:
        """What the members of a communication share; None for a local op."""
        if op in self.graph.sync:
            return self.graph.sync[op]
        group = int(self.graph.group[op])
        return group if group >= 0 else None

    def _ready(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """(N, L) ops whose dependencies have all ended, and since when."""
        ready = np.ones(self.end.shape, bool)
        np.logical_and.at(ready, self.graph.after, self.present[self.graph.before])
        since = np.zeros(self.end.shape)
        np.fmax.at(since, self.graph.after, self.end[self.graph.before])
        return ready, since

    def _roots(self, ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(N, L) missing ops that wait for nothing: no dependency, no member of their group."""
        started = self._followed()
        all_ready = ready.copy()
        for group in range(int(self.graph.group.max(initial=-1)) + 1):
            members = self.graph.group == group
            all_ready[members] = ready[members].all(axis=0)
        for slot in self.graph.sync:
            all_ready[slot] = all_ready[slot].all()
        roots: NDArray[np.bool_] = ~self.present & all_ready & ~started
        return roots

    def _followed(self) -> NDArray[np.bool_]:
        """(N, L) ops that something present depends on, directly or not: they did end."""
        followed = np.zeros(self.end.shape, bool)
        while True:
            known = followed.copy()
            later = self.present[self.graph.after] | followed[self.graph.after]
            np.logical_or.at(followed, self.graph.before, later)
            if bool((followed == known).all()):
                return followed

    def _incomplete(self) -> int:
        """Number of workers that lack ops."""
        stages = self.graph.structure.stage
        return sum(
            int(np.count_nonzero(~self.present[stages == stage].all(axis=0)))
            for stage in np.unique(stages)
        )
