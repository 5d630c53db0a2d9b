from __future__ import annotations

import json

import numpy as np
import pytest

from smon.errors import TraceError
from smon.ops import OpType
from smon.prepare import prepare
from smon.simulate.ideal import Ideal
from smon.timeline.reference import Clocks, Reference, packed, reference_of, unpacked
from tests.synth.builders import quiet


def test_a_reference_survives_being_written() -> None:
    """To the last digit; op types that do not occur stay unknown."""
    job = quiet(dp=2, pp=2)
    ready = prepare(job.table, job.job)
    written = reference_of(ready)
    read = unpacked(packed(written))
    np.testing.assert_array_equal(read.ideal.by_optype, written.ideal.by_optype)
    assert np.isnan(read.ideal.by_optype[OpType.WEIGHT_GRAD_COMPUTE])
    assert read.clocks is None


def test_clocks_survive_being_written() -> None:
    """By step and worker."""
    ahead = np.arange(12, dtype=np.int64).reshape(2, 3, 2) * 10**9
    reference = Reference(Ideal(np.ones(len(OpType))), Clocks(np.array([3, 7]), ahead))
    clocks = unpacked(packed(reference)).clocks
    assert clocks is not None
    assert clocks.steps.tolist() == [3, 7]
    np.testing.assert_array_equal(clocks.ahead_ns, ahead)


def test_what_was_taken_off_each_clock_is_taken_off_its_ops() -> None:
    """Of the step, or of the next one the window has; steps still begin with their first op."""
    job = quiet(dp=2, pp=1, steps=3)
    ahead = np.zeros((2, 2, 1), np.int64)
    ahead[:, 1, 0] = [-5, -7]
    reference = Reference(Ideal(np.ones(len(OpType))), Clocks(np.array([0, 2]), ahead))
    moved = reference.put_right(job.table)
    change = moved.start_ns - job.table.start_ns
    for step, later in ((0, 5), (1, 7), (2, 7)):
        mine = job.table.step == step
        assert set(change[mine & (job.table.dp == 0)].tolist()) == {0}
        assert set(change[mine & (job.table.dp == 1)].tolist()) == {later}
        assert moved.start_ns[mine].min() == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"schema": "smon.reference/9", "ideal_ns": {}, "clocks": null}',
        json.dumps({"schema": "smon.reference/1", "ideal_ns": {"dance": 1}}).encode(),
        json.dumps(
            {
                "schema": "smon.reference/1",
                "ideal_ns": {},
                "clocks": {"steps": [1], "workers": [1, 1], "ahead_ns": "AAAA"},
            }
        ).encode(),
    ],
)
def test_what_is_no_reference_is_an_error(text: bytes) -> None:
    """One sentence, and what to do."""
    with pytest.raises(TraceError, match="analyse the window again"):
        unpacked(text)
