from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT, Schedule, Shape, program


def _shape(schedule: Schedule, pp: int, microbatches: int, vpp: int = 1) -> Shape:
    return Shape(schedule, dp=1, pp=pp, vpp=vpp, microbatches=microbatches, overlap=False)


def _text(shape: Shape, stage: int) -> str:
    return " ".join(str(op) for op in program(shape, stage))


@pytest.mark.parametrize(
    "stage,expected",
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        (1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ],
)
def test_1f1b_warms_up_by_the_stages_behind_then_alternates(stage: int, expected: str) -> None:
    """Stage s runs PP-s-1 forwards first, then one forward and one backward in turn."""
    assert _text(_shape(Schedule.ONE_F_ONE_B, 4, 8), stage) == expected


def test_1f1b_with_few_microbatches_is_all_warm_up_on_the_first_stage() -> None:
    """The warm-up never has more forwards than there are microbatches."""
    assert _text(_shape(Schedule.ONE_F_ONE_B, 4, 2), 0) == "F0 F1 B0 B1"


def test_gpipe_runs_all_forwards_before_all_backwards() -> None:
    """Both halves take the microbatches in order."""
    assert _text(_shape(Schedule.GPIPE, 2, 3), 1) == "F0 F1 F2 B0 B1 B2"


@pytest.mark.parametrize(
    "stage,expected",
    [
        (0, "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"),
        (1, "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"),
    ],
)
def test_interleaving_takes_groups_of_pp_microbatches_through_all_chunks(
    stage: int, expected: str
) -> None:
    """Megatron's order for PP 2, VPP 2, 4 microbatches, written out by hand (F2.1: chunk 1)."""
    assert _text(_shape(Schedule.INTERLEAVED, 2, 4, vpp=2), stage) == expected


@pytest.mark.parametrize(
    "stage,expected",
    [
        (0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
        (1, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"),
        (2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
    ],
)
def test_zero_bubble_puts_weight_gradients_off_by_the_stage(stage: int, expected: str) -> None:
    """Stage s runs the weight gradient of a microbatch after s further backwards."""
    assert _text(_shape(Schedule.ZERO_BUBBLE, 3, 4), stage) == expected


@given(
    schedule=st.sampled_from(Schedule),
    pp=st.integers(2, 6),
    groups=st.integers(1, 4),
    vpp=st.integers(2, 4),
    data=st.data(),
)
def test_every_microbatch_passes_every_chunk_once_forward_before_backward(
    schedule: Schedule, pp: int, groups: int, vpp: int, data: st.DataObject
) -> None:
    """Each (kind, chunk, microbatch) occurs once, and F stands before B before W."""
    shape = _shape(schedule, pp, pp * groups, vpp if schedule is Schedule.INTERLEAVED else 1)
    ops = program(shape, data.draw(st.integers(0, pp - 1)))
    kinds = [FORWARD, BACKWARD] + [WEIGHT] * (schedule is Schedule.ZERO_BUBBLE)
    assert set(Counter(ops).values()) == {1}
    assert len(ops) == len(kinds) * shape.vpp * shape.microbatches
    place = {(op.kind, op.chunk, op.microbatch): index for index, op in enumerate(ops)}
    for op in ops:
        order = [place[kind, op.chunk, op.microbatch] for kind in kinds]
        assert order == sorted(order)
