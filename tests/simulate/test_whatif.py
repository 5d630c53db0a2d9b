from __future__ import annotations

import numpy as np
import pytest

from smon.analysis import Options, analyze
from smon.errors import SimulationError
from smon.ops import STREAM_COMPUTE, OpType
from smon.prepare import prepare
from smon.simulate.whatif import MadeLikePeers
from smon.synth.scenario import Scenario, generate
from smon.trace.table import OpTable
from tests.builders import REAL_NOISE, changed, rows_where, without


def _odd_replica(table: OpTable) -> OpTable:
    """DP rank 0 runs its last two ops of stage 1 in another order, in every step."""
    start = table.start_ns.copy()
    for step in np.unique(table.step).tolist():
        mine = rows_where(table, OpType.BACKWARD_COMPUTE, step=step, dp=0, stage=1, seq=2)
        next_ = rows_where(table, OpType.FORWARD_COMPUTE, step=step, dp=0, stage=1, seq=3)
        start[mine] = start[next_] + 1
    return changed(table, start_ns=start)


def test_a_replica_with_an_order_of_its_own_has_the_others_as_peers() -> None:
    """Peers are the other DP ranks, whatever their structure; their mean, op by op."""
    made = generate(Scenario(dp=3, pp=2, steps=3, noise=REAL_NOISE))
    window = prepare(_odd_replica(made.table), made.job).window
    assert len(window.parts) == 2
    (index,) = (number for number, part in enumerate(window.parts) if (part.dp == 0).all())
    odd, even = window.parts[index], window.parts[1 - index]
    repaired = MadeLikePeers(window, [(0, 1)])
    structure, other = odd.graph.structure, even.graph.structure
    for op in range(len(structure)):
        row = repaired.row(index, op)
        assert row is not None
        if structure.stage[op] != 1 or structure.optype[op] not in STREAM_COMPUTE:
            assert row.tolist() == odd.work[op].tolist()
            continue
        (twin,) = other.of(1, OpType(int(structure.optype[op])))[[structure.seq[op]]]
        for lane, step in enumerate(odd.step.tolist()):
            assert row[lane] == pytest.approx(even.work[twin][even.step == step].mean())


def test_a_suspect_with_more_microbatches_than_its_peers_keeps_the_rest() -> None:
    """Where no peer has the op, what was recorded stays."""
    made = generate(Scenario(dp=2, pp=1, steps=3, noise=REAL_NOISE))
    late = rows_where(made.table, dp=1) & np.isin(made.table.optype, list(STREAM_COMPUTE))
    late &= made.table.seq >= 6
    window = prepare(without(made.table, late), made.job).window
    repaired = MadeLikePeers(window, [(0, 0)])
    (index,) = (number for number, part in enumerate(window.parts) if (part.dp == 0).all())
    part = window.parts[index]
    forwards = part.graph.structure.of(0, OpType.FORWARD_COMPUTE)
    changed_ops = [
        bool((repaired.row(index, op) != part.work[op]).any()) for op in forwards.tolist()
    ]
    assert changed_ops == [True] * 6 + [False] * 2


@pytest.mark.parametrize("workers", [[(0, 0), (1, 0)], [(0, 1), (1, 1), (0, 0)]])
def test_a_stage_of_which_every_replica_is_a_suspect_has_no_peers(
    workers: list[tuple[int, int]],
) -> None:
    """Nobody is left to compare with."""
    made = generate(Scenario(dp=2, pp=2, steps=2))
    with pytest.raises(SimulationError, match="no peer is left"):
        MadeLikePeers(prepare(made.table, made.job).window, workers)


@pytest.mark.parametrize("worker", [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_suspect_that_does_not_exist_is_refused(worker: tuple[int, int]) -> None:
    """The worker is named."""
    made = generate(Scenario(dp=2, pp=2, steps=2))
    with pytest.raises(SimulationError, match=f"DP rank {worker[0]}, stage {worker[1]}"):
        analyze(made.table, made.job, Options(repair=(worker,)))
