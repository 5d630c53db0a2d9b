"""unknown: much of the step is above ideal, and no cause explains it. Nobody is named."""

from __future__ import annotations

import numpy as np

from smon.attribute.peers import peers
from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence, Floats
from smon.diagnose.place import place
from smon.diagnose.thresholds import LATE_EXPLAINS, LATE_SHARE, UNKNOWN_SHARE
from smon.ops import DP_SYNCED, P2P, OpType
from smon.report import Candidate
from smon.simulate.cube import Changes

#: Ops that start late only if their own host launches them late. Receives, and collectives that
#: follow something that the graph does not have, are late because they wait.
_OWN = (
    OpType.FORWARD_COMPUTE,
    OpType.BACKWARD_COMPUTE,
    OpType.WEIGHT_GRAD_COMPUTE,
    OpType.OPTIMIZER,
    OpType.GC,
    OpType.PARAMS_ALL_GATHER,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.SEPARATE_GRADS_ALL_REDUCE,
)
#: The second latest worker is at most so late, against the latest.
_SECOND = 0.5


def find(evidence: Evidence) -> list[Draft]:
    """What is left of the slowdown once everything that was found is undone."""
    # Stalls are no part of the times that are simulated without launch delays.
    slow = Changes(work=evidence.explained.work)
    undone = float(np.mean(evidence.times.simulated - evidence.cost_ns(slow)))
    above = max(undone - float(np.mean(evidence.times.ideal)), 0.0)
    recorded = float(np.mean(evidence.times.recorded))
    late = _late_ns(evidence)
    # What healthy jobs have as well is no loss.
    late = late if late >= LATE_SHARE * recorded else 0.0
    left = above + late
    if left < UNKNOWN_SHARE * recorded:
        return []
    return [
        Draft(
            verdict="none",
            cause="unknown",
            scope="job",
            phase="launch" if late > above else "whole step",
            persistence=Persistence(Kind.PERSISTENT, 1.0),
            confidence=0.2,
            evidence=(
                f"{left / 1e6:.0f} ms per step above the ideal step time have no known cause; the "
                "ledger says which kind of time it is",
                *((_late_line(late),) if late else ()),
            ),
            candidates=_latest(evidence, late) if late else (),
            next=("smon analyze --timeline OUT: look at a few steps, actual over ideal",),
            extra_excess_ns=left,
        )
    ]


def _late_ns(evidence: Evidence) -> float:
    """What launch delays add to the mean step, the stalls that are explained taken off.

    0 where the trace lacks the communication that workers wait for: then waits look like delays.
    """
    if not _complete(evidence):
        return 0.0
    times = evidence.times
    stalls = evidence.cost_ns(Changes(stall=evidence.explained.stall))
    return max(float(np.mean(times.recorded - times.simulated - stalls)), 0.0)


def _complete(evidence: Evidence) -> bool:
    """Whether what workers wait for each other in is recorded, and their clocks agree."""
    window = evidence.window
    needed = [
        kinds for kinds, size in ((DP_SYNCED, window.dp_ranks), (P2P, window.stages)) if size > 1
    ]
    recorded = [any(evidence.recorded_work(op).size for op in kinds) for kinds in needed]
    return evidence.aligned and all(recorded)


def _late_line(late: float) -> str:
    return f"{late / 1e6:.0f} ms of them are launch delays: ops that could start, and did not"


def _latest(evidence: Evidence, late: float) -> tuple[Candidate, ...]:
    """The worker whose own late launches make up the loss, if there is one; no more than that."""
    extra = {op: _beyond_peers(evidence.delay(op)) for op in _OWN if evidence.delay(op).size}
    by_op = {op: cube.sum(axis=(0, 3)) for op, cube in extra.items()}
    total: Floats = np.asarray(sum(by_op.values()))
    order = np.sort(total, axis=None)
    if order[-1] <= 0 or (len(order) > 1 and order[-2] > _SECOND * order[-1]):
        return ()
    dp, stage = (int(index) for index in np.unravel_index(np.argmax(total), total.shape))
    only = {op: np.zeros_like(cube) for op, cube in extra.items()}
    for op, cube in extra.items():
        only[op][:, dp, stage] = cube[:, dp, stage]
    if float(np.mean(evidence.cost_ns(Changes(stall=only)))) < LATE_EXPLAINS * late:
        return ()
    most = max(by_op, key=lambda op: float(by_op[op][dp, stage]))
    where = place(evidence, dp, stage)
    return (Candidate("host_contention", where, f"what its host does before {most.label}"),)


def _beyond_peers(delay: Floats) -> Floats:
    """Launch delays beyond those of the other DP ranks, 0 where there are none."""
    usual = np.maximum(peers(delay, 1), 0.0)
    return np.maximum(np.nan_to_num(delay - usual), 0.0)
