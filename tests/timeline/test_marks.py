from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from smon.attribute.occupied import compute_and_wait
from smon.errors import NothingUsableError
from smon.ops import LABELS, OpType
from smon.prepare import Prepared, prepare
from smon.synth.scenario import Scenario, generate
from smon.synth.timing import SlowCompute
from smon.timeline.marks import Totals, marks
from smon.timeline.spans import sheets
from smon.timeline.waits import longest_waits
from tests.synth.builders import quiet


def slow(**fields: Any) -> Prepared:  # noqa: ANN401  # of Scenario
    """A quiet job of 3 × 2 workers whose worker (2, 1) computes twice as long."""
    fault = SlowCompute(stage=1, dp=2, forward=2.0, backward=2.0)
    job = quiet(**{"dp": 3, "pp": 2, "microbatches": 2, "steps": 2, "faults": (fault,), **fields})
    return prepare(job.table, job.job)


def document(ready: Prepared, *workers: tuple[int, int], step: int = 1) -> dict[str, Any]:
    """Marks of one step."""
    return marks(ready, step, workers, Totals(*compute_and_wait(ready.window)))


def test_the_longest_worker_is_named_with_how_late_it_is() -> None:
    """Against the median of the others of its stage: 2 × (10 + 20) ms more compute."""
    longest = document(slow())["longest"]
    assert (longest["dp"], longest["stage"], longest["rank"]) == (2, 1, 5)
    assert longest["compute_s"] == pytest.approx(0.12)
    assert longest["peers_s"] == pytest.approx(0.06)
    assert longest["meeting"] == "grads-reduce-scatter"
    assert longest["late_s"] == pytest.approx(0.06)


def test_without_peers_nobody_is_longest() -> None:
    """One replica: each stage has one worker, which may do other work than the next."""
    job = quiet(dp=1, pp=2, microbatches=2, steps=2)
    assert document(prepare(job.table, job.job))["longest"] is None


def test_waits_name_who_waited_for_whom() -> None:
    """At the reduction the others of the stage wait as long as the slow one computes longer."""
    (worst, *_) = [
        wait
        for wait in document(slow())["waits"]
        if wait["op"] == "grads-reduce-scatter" and wait["for"]["stage"] == 1
    ]
    assert worst["for"] == {"dp": 2, "stage": 1, "rank": 5}
    assert (worst["stage"], worst["dp"] in (0, 1)) == (1, True)
    assert worst["wait_s"] == pytest.approx(0.06, abs=1e-3)
    assert worst["workers"] == 2


def test_waits_that_the_ideal_has_too_are_none() -> None:
    """A pipeline fills and drains: its stages wait for each other in any run."""
    job = quiet(dp=2, pp=4, microbatches=4, steps=2)
    ready = prepare(job.table, job.job)
    assert document(ready)["waits"] == []
    assert max(compute_and_wait(ready.window)[1].ravel()) > 0


def test_waits_come_worst_first_and_once_for_each_kind() -> None:
    """Of all meetings of one op type with one late worker, the worst stands for the rest."""
    job = generate(Scenario(dp=4, pp=3, microbatches=6, steps=3))
    ready = prepare(job.table, job.job)
    found = longest_waits(sheets(ready), 0, ready.table.microbatch, 50)
    excess = [one.wait_ns - one.ideal_ns for one in found]
    assert excess == sorted(excess, reverse=True)
    assert min(excess) > 0
    kinds = Counter((one.op, one.for_dp, one.for_stage) for one in found)
    assert set(kinds.values()) == {1}
    assert len(longest_waits(sheets(ready), 0, ready.table.microbatch, 5)) == 5


def test_the_waits_of_a_meeting_are_until_its_last_arrival() -> None:
    """Whoever is named as late started its op when the wait ended."""
    job = generate(Scenario(dp=3, pp=2, microbatches=4, steps=3))
    ready = prepare(job.table, job.job)
    for one in longest_waits(sheets(ready), 1, ready.table.microbatch, 50):
        starts = [
            part.start[slot, lane]
            for part in ready.window.parts
            for lane in np.flatnonzero((part.step == 1) & (part.dp == one.for_dp)).tolist()
            for slot in np.flatnonzero(part.graph.structure.stage == one.for_stage).tolist()
            if part.graph.group[slot] >= 0
        ]
        assert min(abs(start - one.start_ns - one.wait_ns) for start in starts) < 2


def test_a_worker_that_is_absent_has_a_row_without_marks() -> None:
    """A replica may be missing from a step; the row says so by being empty."""
    job = generate(Scenario(dp=3, pp=2, microbatches=2, steps=3, step_dp={1: 2}))
    ready = prepare(job.table.between(1, 1), job.job)
    found = document(ready, (0, 0), (2, 0))
    assert set(found["marks"]["row"]) == {0}
    assert found["rows"][1]["compute_s"] is None


def test_a_step_that_was_left_out_is_not_drawn_as_another_one() -> None:
    """It says why instead."""
    job = generate(Scenario(dp=3, pp=2, microbatches=2, steps=3, step_dp={1: 2}))
    with pytest.raises(NothingUsableError, match="DP rank 2: no ops of any stage"):
        document(prepare(job.table, job.job), (0, 0))


def test_a_garbage_collection_that_did_not_happen_is_no_mark() -> None:
    """The recorder writes one of no length into every step."""
    job = generate(Scenario(dp=2, pp=2, microbatches=2, steps=2))
    assert (job.table.optype == OpType.GC).any()
    ready = prepare(job.table, job.job)
    found = document(ready, (0, 0))
    drawn = {LABELS[code] for code in found["marks"]["type"]}
    mine = job.table.take((job.table.step == 1) & (job.table.dp == 0) & (job.table.stage == 0))
    taken = mine.duration_ns > 0
    assert drawn == {LABELS[code] for code in mine.optype[taken].tolist()}


def test_a_wait_is_never_longer_than_its_op() -> None:
    """Also where clocks are damaged: a mark's pale part lies within it."""
    ready = slow()
    columns = document(ready, *((dp, stage) for dp in range(3) for stage in range(2)))["marks"]
    length = np.array(columns["end_ns"]) - np.array(columns["start_ns"])
    wait = np.array(columns["wait_ns"])
    assert (wait >= 0).all()
    assert (wait <= length).all()
    assert wait.max() > 0
