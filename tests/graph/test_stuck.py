from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smon.analysis import analyze
from smon.graph.stuck import Stuck
from smon.ops import OpType
from smon.prepare import prepare
from smon.synth.faults import Hang, SlowCompute
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.trace.meta import Job
from smon.trace.table import OpTable
from tests.builders import changed, cut_last_step, rows_where, without

#: The step that hangs, and the last one.
LAST = 5

LAYOUTS: dict[str, dict[str, Any]] = {
    "4x4": {"dp": 4, "pp": 4},
    "2x2": {"dp": 2, "pp": 2},
    "gpipe": {"dp": 4, "pp": 4, "schedule": "gpipe"},
    "interleaved": {"dp": 4, "pp": 4, "schedule": "interleaved", "vpp": 2},
    "zero-bubble": {"dp": 4, "pp": 4, "schedule": "zero-bubble"},
    "overlap": {"dp": 4, "pp": 4, "overlap": True},
    "one-stage": {"dp": 8, "pp": 1},
}


def made(layout: str, *faults: Hang | SlowCompute, **fields: Any) -> Synthetic:  # noqa: ANN401
    """A job of six steps of one of the layouts."""
    given = {"microbatches": 8, "steps": LAST + 1, "seed": 3, **LAYOUTS[layout], **fields}
    return generate(Scenario(**given, faults=faults))


def stuck_of(table: OpTable, job: Job) -> Stuck | None:
    """What the last step of a table hangs on."""
    return prepare(table, job).stuck


def known(stuck: Stuck | None) -> Stuck:
    """A hang that must be there."""
    assert stuck is not None
    return stuck


@pytest.mark.parametrize("forward", [0, 4, 7])
@pytest.mark.parametrize("corner", ["first", "last"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_worker_whose_forward_never_ends_is_named(
    layout: str, corner: str, forward: int
) -> None:
    """Everybody waits in the end, and lacks ops; only the one op could have run."""
    sizes = LAYOUTS[layout]
    dp, stage = (0, 0) if corner == "first" else (sizes["dp"] - 1, sizes["pp"] - 1)
    job = made(layout, Hang(stage=stage, dp=dp, step=LAST, forward=forward))
    stuck = known(stuck_of(job.table, job.job))
    assert (stuck.step, stuck.optype, stuck.seq) == (LAST, OpType.FORWARD_COMPUTE, forward)
    assert stuck.workers == ((dp, stage),)
    assert stuck.waiting == sizes["dp"] * sizes["pp"]
    assert stuck.silent_ns > 0


def test_a_hang_is_the_first_finding_and_critical() -> None:
    """Before a slow device that costs a lot, with the step left out and the trainer to look at."""
    slow = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)
    job = made("4x4", slow, Hang(stage=3, dp=1, step=LAST, forward=2))
    report = analyze(job.table, job.job)
    assert report.verdict == "hang"
    assert [finding.cause for finding in report.findings][:2] == ["hang", "slow_gpu"]
    hang = report.findings[0]
    assert (hang.severity, hang.scope, hang.phase) == ("critical", "rank", "forward-compute")
    assert (hang.where.dp, hang.where.stage, hang.where.rank) == (1, 3, 13)
    assert hang.persistence.onset_step == LAST
    assert hang.excess_s == 0.0
    assert "rank 13" in hang.next[0]
    assert [part.step for part in report.window.skipped] == [LAST]


def test_a_collective_that_hangs_names_its_members() -> None:
    """All of the last stage could gather their weights, and the others go on."""
    forwards = [Hang(stage=3, dp=dp, step=LAST) for dp in range(4)]
    job = made("4x4", *forwards)
    gathers = rows_where(job.table, OpType.PARAMS_ALL_GATHER, step=LAST, stage=3)
    table = without(job.table, gathers)
    stuck = known(stuck_of(table, job.job))
    assert stuck.optype == OpType.PARAMS_ALL_GATHER
    assert stuck.workers == tuple((dp, 3) for dp in range(4))
    (hang, *_) = analyze(table, job.job).findings
    assert (hang.scope, hang.where.stage, hang.where.rank) == ("dp_group", 3, None)
    assert hang.where.ranks == (12, 13, 14, 15)


def test_a_transfer_that_hangs_names_both_ends() -> None:
    """The sender and the receiver of one pair could have run it."""
    job = made("4x4", Hang(stage=2, dp=1, step=LAST))
    gone = rows_where(job.table, OpType.FORWARD_RECV, step=LAST, stage=2, dp=1)
    gone |= rows_where(job.table, OpType.FORWARD_SEND, step=LAST, stage=1, dp=1)
    stuck = known(stuck_of(without(job.table, gone), job.job))
    assert stuck.workers == ((1, 1), (1, 2))


def test_many_forwards_that_end_at_once_are_no_hang() -> None:
    """A fault of so many workers in the same moment is the recording's."""
    job = made("4x4", *(Hang(stage=3, dp=dp, step=LAST) for dp in range(4)))
    assert stuck_of(job.table, job.job) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recording_that_was_cut_off_names_nobody(layout: str) -> None:
    """It leaves an op under way on many workers at once, wherever in the step it ends."""
    job = made(layout)
    for share in np.linspace(0.03, 0.98, 12).tolist():
        assert stuck_of(cut_last_step(job.table, share), job.job) is None, share


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_one_replica_that_was_cut_off_while_its_pipeline_filled_names_nobody(pp: int) -> None:
    """One stage computes and all others wait for it, as in a hang; but it had no time to end."""
    job = made("one-stage", dp=1, pp=pp)
    for share in np.linspace(0.01, 0.4, 25).tolist():
        assert stuck_of(cut_last_step(job.table, share), job.job) is None, share


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("layout", ["4x4", "gpipe", "one-stage", "interleaved"])
def test_random_lost_rows_of_the_last_step_name_nobody(layout: str, share: float) -> None:
    """What waits for a lost op is there."""
    job = made(layout)
    rng = np.random.default_rng(11)
    for _ in range(8):
        lost = (job.table.step == LAST) & (rng.random(len(job.table)) < share)
        assert stuck_of(without(job.table, lost), job.job) is None


def test_a_worker_that_sent_nothing_of_the_last_step_is_not_a_hang() -> None:
    """Its peers finished the step, so it did, too: its agent is away."""
    job = made("4x4")
    gone = rows_where(job.table, step=LAST, dp=2, stage=1)
    assert stuck_of(without(job.table, gone), job.job) is None


def test_a_whole_last_step_is_no_hang() -> None:
    """Nothing is missing."""
    job = made("4x4")
    assert stuck_of(job.table, job.job) is None


def test_an_earlier_step_that_did_not_end_is_no_hang() -> None:
    """The job went on."""
    hung = made("4x4", Hang(stage=3, dp=1, step=LAST, forward=2)).table
    whole = made("4x4").table
    part = hung.take(hung.step == LAST)
    tables = [whole.take(whole.step != 2), changed(part, step=np.full(len(part), 2))]
    names = whole.columns
    table = changed(
        whole, **{name: np.concatenate([one.columns[name] for one in tables]) for name in names}
    )
    report = analyze(table, made("4x4").job)
    assert [skipped.step for skipped in report.window.skipped] == [2]
    assert "hang" not in {finding.cause for finding in report.findings}


def test_a_window_of_one_step_says_nothing_about_a_hang() -> None:
    """There is no step to compare it with."""
    job = made("4x4", Hang(stage=3, dp=1, step=LAST, forward=2))
    last_two = job.table.take(job.table.step >= LAST - 1)
    report = analyze(last_two, job.job)
    assert report.verdict == "insufficient_data"
    assert not report.findings
