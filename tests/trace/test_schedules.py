from __future__ import annotations

from itertools import pairwise

import pytest

from smon.ops import OpType
from smon.synth.schedule import Schedule as Synthetic
from smon.synth.schedule import Shape, program
from smon.trace.schedules import Plan, Schedule, microbatches_of, program_of

PLANS = [
    Plan(Schedule.ONE_F_ONE_B),
    Plan(Schedule.ONE_F_ONE_B_APART),
    Plan(Schedule.GPIPE),
    Plan(Schedule.INTERLEAVED, 2),
    Plan(Schedule.INTERLEAVED_OVERLAP, 3),
]
ORDERS = {
    Schedule.ONE_F_ONE_B: Synthetic.ONE_F_ONE_B,
    Schedule.ONE_F_ONE_B_APART: Synthetic.ONE_F_ONE_B,
    Schedule.GPIPE: Synthetic.GPIPE,
    Schedule.INTERLEAVED: Synthetic.INTERLEAVED,
    Schedule.INTERLEAVED_OVERLAP: Synthetic.INTERLEAVED,
}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("stages, groups", [(2, 1), (2, 2), (4, 1), (4, 3), (8, 2)])
def test_computes_are_in_the_order_of_the_schedule(plan: Plan, stages: int, groups: int) -> None:
    """The same order as that of synthetic jobs, which is written down elsewhere."""
    microbatches = stages * groups
    shape = Shape(ORDERS[plan.schedule], 1, stages, plan.chunks, microbatches, overlap=False)
    for stage in range(stages):
        found = program_of(plan, stages, stage, microbatches)
        computes = [
            (one.op, one.chunk, one.microbatch) for piece in found.computes for one in piece
        ]
        expected = program(shape, stage)
        assert computes == [(one.kind, one.chunk, one.microbatch) for one in expected]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_send_has_its_receive_on_the_next_stage(plan: Plan, stages: int) -> None:
    """As many of one as of the other; with several chunks the last stage sends to the first."""
    microbatches = 2 * stages
    programs = [program_of(plan, stages, stage, microbatches) for stage in range(stages)]
    counts = [
        {op: sum(op in message for message in one.messages) for op in OpType} for one in programs
    ]
    for here, there in pairwise([*counts, counts[0]]):
        assert here[OpType.FORWARD_SEND] == there[OpType.FORWARD_RECV]
        assert here[OpType.BACKWARD_RECV] == there[OpType.BACKWARD_SEND]
    assert counts[0][OpType.FORWARD_SEND] == microbatches * plan.chunks
    assert counts[-1][OpType.FORWARD_SEND] == microbatches * (plan.chunks - 1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("stage", range(4))
def test_the_number_of_messages_tells_the_number_of_microbatches(plan: Plan, stage: int) -> None:
    """Every number of messages belongs to one number of microbatches at most."""
    unit = 4 if plan.schedule.interleaves else 1
    for microbatches in range(unit, 10 * unit + 10, unit):
        messages = len(program_of(plan, 4, stage, microbatches).messages)
        assert microbatches_of(plan, 4, stage, messages) == microbatches


def test_a_number_that_no_schedule_has_is_not_forced_into_one() -> None:
    """7 messages in the middle of four stages are those of no whole number of microbatches."""
    assert microbatches_of(Plan(Schedule.GPIPE), 4, 1, 7) is None
    assert microbatches_of(Plan(Schedule.ONE_F_ONE_B), 4, 1, 0) is None
    assert microbatches_of(Plan(Schedule.ONE_F_ONE_B), 4, 1, 10**9) is None


def test_a_send_and_the_receive_that_follows_are_one_kernel() -> None:
    """The steady part of 1F1B on a middle stage; without batching they are two."""
    both = (OpType.FORWARD_SEND, OpType.BACKWARD_RECV)
    assert both in program_of(Plan(Schedule.ONE_F_ONE_B), 3, 1, 4).messages
    apart = program_of(Plan(Schedule.ONE_F_ONE_B_APART), 3, 1, 4).messages
    assert {len(message) for message in apart} == {1}
