"""Which TP rank of a slow worker it is, from rows of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smon.analysis import analyze
from smon.report import Finding
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.trace.table import OpTable, concat

TP = 8


def _of_each_rank(table: OpTable, slow: int | None) -> OpTable:
    """A row per TP rank; computes of all but the slow one are as short as those of the peers."""
    copies = []
    for tp in range(TP):
        duration = table.duration_ns.copy()
        if slow is not None and tp != slow:
            worker = (table.dp == 5) & (table.stage == 2) & (table.optype <= 1)
            duration[worker] = (duration[worker] / 1.5).astype(np.int64)
        copies.append(replace(table, rank=table.rank + np.int32(tp), duration_ns=duration))
    return concat(copies)


def _finding(slow: int | None) -> Finding:
    made = generate(scenario("slow-worker", steps=6))
    (found,) = analyze(_of_each_rank(made.table, slow), made.job).findings
    return found


@pytest.mark.parametrize("slow", [0, 3, 7])
def test_the_tp_rank_with_the_longest_computes_is_named(slow: int) -> None:
    """Rows of each TP rank tell which GPU it is."""
    found = _finding(slow)
    assert (found.cause, found.scope, found.where.tp) == ("slow_gpu", "rank", slow)
    assert found.where.rank == 168 + slow
    assert any("its TP peers" in line for line in found.evidence)


def test_ranks_that_all_take_alike_are_named_as_a_group() -> None:
    """Their times hold the wait for each other: nobody of the group stands out."""
    found = _finding(None)
    assert (found.scope, found.where.tp, found.where.rank) == ("tp_group", None, 168)
    assert any("nothing tells its TP ranks apart" in line for line in found.evidence)
