"""The plain form of the published method is what it says: it gives the published answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smon.ops import OpType
from smon.synth.scenario import Scenario, generate
from smon.trace.load import load
from tests.proof.method import compare
from tests.proof.published import Published


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_the_published_answers_come_out(traces: Path, name: str) -> None:
    """S, S_t, S_stage and S_dp of the public traces, as far as their float32 columns go."""
    folder = traces / "straggler-analysis"
    trace = load([folder / f"trace-{name}.parquet"])
    answer = json.loads((folder / f"result-{name}.json").read_text(encoding="utf-8"))
    found = Published(trace.table, trace.job.layout).slowdowns()
    assert found.slowdown == pytest.approx(answer["blocking_slowdown"], rel=1e-6)
    for kind, ours in (
        ("optype", found.by_optype),
        ("stage", dict(enumerate(found.by_stage))),
        ("dp_rank", dict(enumerate(found.by_dp_rank))),
    ):
        named = {str(key): value for key, value in ours.items()}
        for key, published in answer[f"blocking_decompose_by_{kind}"].items():
            assert named[key] == pytest.approx(published, rel=1e-6), (kind, key)


def test_one_longer_op_is_seen() -> None:
    """An optimizer that takes a second more makes its step, DP rank and stage that much slower."""
    made = generate(Scenario(dp=4, pp=2, microbatches=4, steps=3))
    assert compare(made).difference < 1e-12
    table = made.table
    (row,) = np.flatnonzero(
        (table.optype == OpType.OPTIMIZER)
        & (table.dp == 2)
        & (table.stage == 1)
        & (table.step == 0)
    )
    longer = table.duration_ns.copy()
    longer[row] += 10**9
    before, after = (
        Published(one, made.job.layout).slowdowns()
        for one in (table, replace(table, duration_ns=longer))
    )
    assert after.simulated - before.simulated == pytest.approx(1e9 / 3, rel=0.01)
    assert np.argmax(after.by_dp_rank) == 2
    assert np.argmax(after.by_stage) == 1


def test_replicas_that_differ_are_refused() -> None:
    """The published method builds its graph from DP rank 0 and fails where another differs."""
    made = generate(Scenario(dp=2, pp=1, microbatches=2, steps=1))
    with pytest.raises(ValueError, match=r"same ops|cannot reshape"):
        Published(made.table.take(np.arange(1, len(made.table))), made.job.layout)
