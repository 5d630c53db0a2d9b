"""The published what-if analysis, as plainly as it can be written: for comparison, and as a check.

Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
Written from the rules of ``docs/method.md`` alone; nothing of `smon.graph` or `smon.simulate` is
used. It does what the paper says that it does: one graph, from DP rank 0 of the first step; one
simulation of the whole job for each question, so one for each DP rank; and no simulation for each
worker, which the paper cannot afford.

It knows jobs with one model chunk per stage whose gradients are reduced after the backward, with
every op in the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.ops import COMPUTE, DP_COLLECTIVES, P2P, STREAM_COMPUTE, OpType, metric_key
from smon.topology import Layout
from smon.trace.table import OpTable

Floats = NDArray[np.float64]

_CLIP: Final = OpType.OPTIMIZER_CLIP_MAIN_GRAD
_EMBEDDING: Final = OpType.EMBEDDING_GRADS_ALL_REDUCE

#: Compute, send and receive of each direction, and which stage is at the other end of a send.
_DIRECTIONS: Final = (
    (OpType.FORWARD_COMPUTE, OpType.FORWARD_SEND, OpType.FORWARD_RECV, 1),
    (OpType.BACKWARD_COMPUTE, OpType.BACKWARD_SEND, OpType.BACKWARD_RECV, -1),
)

#: After the last compute of a stage, in this order.
_END: Final = (
    OpType.GC, OpType.LAYERNORM_GRADS_ALL_REDUCE, _EMBEDDING, OpType.GRADS_REDUCE_SCATTER, _CLIP,
    OpType.OPTIMIZER,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """What the published method reports; times in ns, means over the steps.

    Attributes
    ----------
    simulations
        How many simulations of the whole job it took.
    """

    simulated: float
    ideal: float
    by_optype: Mapping[str, float]
    by_stage: tuple[float, ...]
    by_dp_rank: tuple[float, ...]
    simulations: int

    @property
    def slowdown(self) -> float:
        """S, Eq. 1."""
        return self.simulated / self.ideal

    def approximate(self, dp: int, stage: int) -> float:
        """What stands for the slowdown of a worker, Eq. 4: min(S_dp, S_stage)."""
        return min(self.by_dp_rank[dp], self.by_stage[stage])


class Published:
    """One window of a job; arrays are (ops of a replica, steps, DP ranks), in ns.

    Raises
    ------
    ValueError
        Replicas or steps differ in their ops.
    """

    def __init__(self, table: OpTable, layout: Layout) -> None:
        order = np.lexsort((table.seq, table.optype, table.stage, table.dp, table.step))
        steps = len(np.unique(table.step))
        shape = (steps, layout.dp, -1)
        optype, stage = (values[order].reshape(shape) for values in (table.optype, table.stage))
        if (optype != optype[0, 0]).any() or (stage != stage[0, 0]).any():
            raise ValueError("expected the same ops in every replica and step")
        start = table.start_ns[order].reshape(shape)
        if not table.step_relative:
            start = start - start.min(axis=(1, 2), keepdims=True)
        self.start = np.moveaxis(start.astype(np.float64), 2, 0).copy()
        duration = np.moveaxis(table.duration_ns[order].reshape(shape), 2, 0)
        self.end = self.start + duration
        self.layout = layout
        self.optype = optype[0, 0]
        self.stage = stage[0, 0]
        self._places = _places(self.optype, self.stage)
        self.deps: list[set[int]] = [set() for _ in self.optype]
        self.groups = list(self._groups())
        self._depend()
        self.order = self._topological_order()
        self.work = self._work()
        self.ideal = self._ideal()

    # --- the graph, once (rules 1 to 10) -----------------------------------------------------

    def _of(self, stage: int, optype: OpType) -> Sequence[int]:
        """Ops of one type on one stage, by sequence number."""
        return self._places.get((stage, int(optype)), ())

    def _chain(self, ops: Iterable[int]) -> None:
        for before, after in pairwise(ops):
            self.deps[after].add(before)

    def _depend(self) -> None:
        for stage in range(self.layout.pp):
            stream = self._compute_stream(stage)
            self._chain(stream)
            for optype in P2P:
                self._chain(self._of(stage, optype))
            for direction in _DIRECTIONS:
                self._depend_on_messages(stage, direction)
            self._depend_first_backward(stage, stream)
            gathers = self._of(stage, OpType.PARAMS_ALL_GATHER)
            self._chain([*gathers, *self._of(stage, OpType.GRADS_REDUCE_SCATTER)])
            self._chain([*gathers[-1:], self._of(stage, OpType.FORWARD_COMPUTE)[0]])
            end = [op for optype in _END for op in self._of(stage, optype)]
            self._chain([*stream[-1:], *end])

    def _compute_stream(self, stage: int) -> list[int]:
        """Rule 1: in observed order."""
        ops = [op for optype in sorted(STREAM_COMPUTE) for op in self._of(stage, optype)]
        return sorted(ops, key=lambda op: float(self.start[op, 0, 0]))

    def _depend_on_messages(
        self, stage: int, direction: tuple[OpType, OpType, OpType, int]
    ) -> None:
        """Rules 3 and 4."""
        compute, send, recv, _ = direction
        computes = self._of(stage, compute)
        for op, sent in zip(computes, self._of(stage, send), strict=False):
            self.deps[sent].add(op)
        received = self._of(stage, recv)
        # The very first receive has nothing to receive, and often is not recorded.
        waiting = computes[len(computes) - len(received) :] if received else ()
        for op, got in zip(waiting, received, strict=True):
            self.deps[op].add(got)
            place = computes.index(op)
            if place:
                self.deps[got].add(computes[place - 1])

    def _depend_first_backward(self, stage: int, stream: Sequence[int]) -> None:
        """Rule 5."""
        place = [int(self.optype[op]) for op in stream].index(OpType.BACKWARD_COMPUTE)
        if place < 2:
            return
        for optype in (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV):
            for op in self._of(stage, optype)[:1]:
                self.deps[op].add(stream[place - 2])

    def _groups(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Rules 6 and 10: members of each group, and whether all DP ranks take part."""
        stages = range(self.layout.pp)
        for _, send, recv, towards in _DIRECTIONS:
            for stage in stages:
                peer = stage + towards
                if peer in stages:
                    pairs = zip(self._of(stage, send), self._of(peer, recv), strict=True)
                    yield from ((pair, False) for pair in pairs)
        for optype in (_EMBEDDING, _CLIP):
            ops = tuple(op for stage in stages for op in self._of(stage, optype))
            if ops:
                yield ops, optype is _CLIP
        for optype in DP_COLLECTIVES:
            for stage in stages:
                yield from (((op,), True) for op in self._of(stage, optype))

    def _topological_order(self) -> list[tuple[tuple[int, ...], bool | None]]:
        """Groups, and ops that are in none (None), each after what its members depend on."""
        units: list[tuple[tuple[int, ...], bool | None]] = list(self.groups)
        grouped = {op for ops, _ in units for op in ops}
        units += [((op,), None) for op in range(len(self.optype)) if op not in grouped]
        unit_of = {op: number for number, (ops, _) in enumerate(units) for op in ops}
        before = {
            number: {unit_of[dep] for op in ops for dep in self.deps[op]}
            for number, (ops, _) in enumerate(units)
        }
        return [units[number] for number in TopologicalSorter(before).static_order()]

    # --- durations, and one simulation --------------------------------------------------------

    def _work(self) -> Floats:
        """Durations of local ops, transfer times of the others."""
        work = self.end - self.start
        for ops, over_dp in self.groups:
            latest = self.start[list(ops)].max(axis=0)
            if over_dp:
                latest = latest.max(axis=1, keepdims=True)
            for op in ops:
                work[op] = self.end[op] - latest
        return work

    def _ideal(self) -> Floats:
        """(ops,) mean of computes, median of everything else, over the whole window."""
        ideal = np.empty(len(self.optype))
        for code in np.unique(self.optype).tolist():
            mine = self.optype == code
            typical = np.mean if code in COMPUTE else np.median
            ideal[mine] = typical(self.work[mine])
        return ideal

    def step_ns(self, work: Floats) -> Floats:
        """(steps,) simulated step times, launch delays left out."""
        end = np.zeros_like(work)
        for ops, over_dp in self.order:
            starts = [self._ready(end, op) for op in ops]
            latest = starts[0] if over_dp is None else np.maximum.reduce(starts)
            if over_dp:
                latest = latest.max(axis=1, keepdims=True)
            for op in ops:
                np.add(latest, work[op], out=end[op])
        last: Floats = end[self.optype == OpType.OPTIMIZER].max(axis=(0, 2))
        return last

    def _ready(self, end: Floats, op: int) -> Floats:
        deps = [end[dep] for dep in self.deps[op]]
        return np.maximum.reduce(deps) if deps else np.zeros(end.shape[1:])

    # --- what-ifs ------------------------------------------------------------------------------

    def all_ideal(self) -> Floats:
        """Every op takes the ideal of its type."""
        return np.broadcast_to(self.ideal[:, None, None], self.work.shape).copy()

    def only_ops(self, mine: NDArray[np.bool_]) -> Floats:
        """All ideal, but these ops as recorded."""
        work = self.all_ideal()
        work[mine] = self.work[mine]
        return work

    def only_dp_rank(self, dp: int) -> Floats:
        """All ideal, but one DP rank as recorded."""
        work = self.all_ideal()
        work[:, :, dp] = self.work[:, :, dp]
        return work

    def only_worker(self, dp: int, stage: int) -> Floats:
        """All ideal, but one worker as recorded."""
        work, mine = self.all_ideal(), self.stage == stage
        work[mine, :, dp] = self.work[mine, :, dp]
        return work

    def slowdowns(self) -> Slowdowns:
        """All that the paper reports of a job, by a simulation for each."""
        ideal = float(self.step_ns(self.all_ideal()).mean())

        def slowdown(work: Floats) -> float:
            return float(self.step_ns(work).mean()) / ideal

        types: dict[str, list[int]] = {}
        for code in np.unique(self.optype).tolist():
            types.setdefault(metric_key(OpType(code)), []).append(code)
        by_optype = {
            name: slowdown(self.only_ops(np.isin(self.optype, codes)))
            for name, codes in types.items()
        }
        stages, dp_ranks = range(self.layout.pp), range(self.layout.dp)
        return Slowdowns(
            simulated=float(self.step_ns(self.work).mean()),
            ideal=ideal,
            by_optype=by_optype,
            by_stage=tuple(slowdown(self.only_ops(self.stage == stage)) for stage in stages),
            by_dp_rank=tuple(slowdown(self.only_dp_rank(dp)) for dp in dp_ranks),
            simulations=2 + len(types) + len(stages) + len(dp_ranks),
        )

    def worker_slowdown(self, dp: int, stage: int) -> float:
        """S_w of one worker, by a simulation of the whole job of its own."""
        alone = self.step_ns(self.only_worker(dp, stage)).mean()
        return float(alone / self.step_ns(self.all_ideal()).mean())


def _places(optype: NDArray[np.int8], stage: NDArray[np.int32]) -> dict[tuple[int, int], list[int]]:
    """Ops of each (stage, op type), by sequence number."""
    places: dict[tuple[int, int], list[int]] = {}
    for op, key in enumerate(zip(stage.tolist(), optype.tolist(), strict=True)):
        places.setdefault(key, []).append(op)
    return places
