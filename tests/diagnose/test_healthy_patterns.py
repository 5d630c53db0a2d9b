"""Patterns of healthy hardware that were blamed on it: long chunks, long rings, a moment."""

from __future__ import annotations

import pytest

from smon.ops import OpType
from smon.synth import causes as synthetic
from smon.synth.faults import Fault, GcPauses, SlowCollective, SlowCompute, SlowP2P, When
from smon.synth.spec import Scenario
from tests.diagnose.jobs import LossChunk, candidates, causes, named, report_of

RING = (OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER)


# --- the ring of a stage with more parameters -------------------------------------------------


def _ring(stage: int, *faults: Fault) -> Scenario:
    """The collectives of one stage take longer in all steps; of an inner one they cost less."""
    ring = SlowCollective(stage, 1.4 if stage in (0, 3) else 2.5, optypes=RING)
    return Scenario(dp=8, pp=4, microbatches=8, steps=30, faults=(ring, *faults))


def test_one_hiccup_does_not_name_a_node_of_a_ring_that_is_always_long() -> None:
    """Slow sends in one step of 30 say nothing about the other 29."""
    (found,) = report_of(_ring(0, SlowP2P(0, 5, 2.0, when=When(steps=(17,))))).findings
    assert (found.cause, found.scope, found.where.rank) == ("slow_link", "dp_group", None)


def test_slow_sends_in_most_steps_do_name_the_node() -> None:
    """A card that is slow in all its groups."""
    (found,) = report_of(_ring(1, SlowP2P(1, 5, 2.0))).findings
    assert (found.scope, found.where.dp, found.where.stage) == ("node", 5, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_ring_of_an_end_of_the_pipeline_may_have_more_to_carry(stage: int) -> None:
    """An embedding is no slow link: it comes first among what it could be."""
    (found,) = report_of(_ring(stage)).findings
    assert (found.cause, found.scope) == ("slow_link", "dp_group")
    first = found.candidates[0]
    assert (first.cause, first.where.stage) == ("stage_partition", stage)
    assert found.confidence < 0.5
    assert "parameters" in found.next[0]


def test_the_ring_of_an_inner_stage_has_no_such_excuse() -> None:
    """Unless its computes are longer, too."""
    (found,) = report_of(_ring(1)).findings
    assert (candidates(found), found.confidence) == ({"slow_link"}, 0.6)
    longer = report_of(_ring(1, SlowCompute(1, None, 1.2, 1.2)))
    found = next(one for one in longer.findings if one.cause == "slow_link")
    assert candidates(found) == {"slow_link", "stage_partition"}


def test_a_ring_that_becomes_slow_is_no_question_of_parameters() -> None:
    """They do not change in the middle of a run."""
    ring = SlowCollective(0, 1.6, optypes=RING, when=When(first=12))
    job = Scenario(dp=8, pp=4, microbatches=8, steps=30, faults=(ring,))
    found = next(one for one in report_of(job).findings if one.cause == "slow_link")
    assert found.persistence.kind == "onset"
    assert candidates(found) == {"slow_link"}


# --- chunks of an interleaved schedule --------------------------------------------------------


@pytest.mark.parametrize("dp, pp, vpp", [(1, 4, 4), (2, 4, 4), (4, 4, 2)])
def test_the_chunk_with_the_loss_is_no_garbage_collection(dp: int, pp: int, vpp: int) -> None:
    """It is long in every step, at the same positions."""
    job = Scenario(
        schedule="interleaved",
        dp=dp,
        pp=pp,
        vpp=vpp,
        microbatches=16,
        steps=8,
        faults=(LossChunk(),),
    )
    assert "gc" not in causes(report_of(job))


@pytest.mark.parametrize("faults", [(), (LossChunk(),)])
def test_pauses_of_an_interleaved_job_are_still_found(faults: tuple[LossChunk, ...]) -> None:
    """Beside a long chunk, too."""
    job = Scenario(
        schedule="interleaved",
        dp=4,
        pp=4,
        vpp=4,
        microbatches=16,
        steps=20,
        causes=(synthetic.gc(GcPauses(24, 0.35)),),
        faults=faults,
    )
    found = next(one for one in report_of(job).findings if one.cause == "gc")
    assert (found.scope, found.where.rank) == ("job", None)


# --- experts ----------------------------------------------------------------------------------

SLOW = SlowCompute(1, 5, 1.3, 1.3)


@pytest.mark.parametrize("until", [17, 19])
def test_a_moment_of_another_worker_does_not_hide_a_slow_device(until: int) -> None:
    """30 % in all steps, beside 10 % in one or three: no experts that take turns."""
    moment = SlowCompute(1, 2, 1.1, 1.1, from_step=17, until_step=until)
    job = Scenario(dp=8, pp=4, microbatches=8, steps=30, faults=(SLOW, moment))
    report = report_of(job)
    assert causes(report)[0] == "slow_gpu"
    assert named(report) == {(5, 1)}


def test_workers_that_take_turns_are_uneven_experts() -> None:
    """Ten steps each."""
    turns = tuple(
        SlowCompute(1, dp, 1.3, 1.3, from_step=10 * turn, until_step=10 * turn + 9)
        for turn, dp in enumerate((5, 2, 7))
    )
    job = Scenario(dp=8, pp=4, ep=8, microbatches=8, steps=30, faults=turns)
    report = report_of(job)
    assert causes(report) == ["moe_load"]
