from __future__ import annotations

from smon.collectives.matching import Matched, match
from smon.trace.events import Collective, ProcessGroup
from tests.collectives.builders import AG, AR, Met, job_of, rank_of

WORLD = ProcessGroup("0", "default_pg", (0, 1, 2), 3)


def found(matched: Matched) -> list[tuple[int, int, Collective]]:
    """(step, index, collective) of what was matched."""
    return [
        (step, place.index, place.collective)
        for step, places in matched.steps.items()
        for place in places
    ]


def reasons(matched: Matched) -> dict[str, int]:
    """Why, and how many events were not."""
    return dict(matched.unmatched)


def test_without_numbers_the_order_in_the_step_counts() -> None:
    """The n-th of one rank is the n-th of the others, and that is said."""
    matched = match(job_of([[1.0, 2.0], [1.0, 1.0]], bulk=2))
    assert found(matched) == [(0, 0, AR), (0, 1, AR), (1, 0, AR), (1, 1, AR)]
    assert (matched.matched, matched.total) == (8, 8)
    assert matched.assumed
    assert matched.by_order


def test_sequence_numbers_match_what_order_cannot() -> None:
    """A rank that lost its first collective still has the second one in common."""
    one = rank_of(0, [Met(0, 1, group=0, seq=4), Met(5, 1, group=0, seq=5)], [WORLD])
    two = rank_of(1, [Met(5, 1, group=0, seq=5)], [WORLD])
    matched = match([one, two])
    assert found(matched) == [(0, 0, AR)]
    assert reasons(matched) == {"no counterpart on the other members of its group": 1}
    assert not matched.by_order


def test_numbers_that_repeat_are_no_numbers() -> None:
    """Kernels of one coalesced call share a number: their order decides."""
    events = [Met(0, 1, group=0, seq=4), Met(2, 1, group=0, seq=4)]
    matched = match([rank_of(rank, events, [WORLD]) for rank in range(2)])
    assert len(found(matched)) == 2
    assert matched.by_order


def test_communicators_are_name_and_members() -> None:
    """Two groups of one description are two communicators."""
    groups = [
        ProcessGroup("3", "mesh_fsdp", (0, 1), 2),
        ProcessGroup("4", "mesh_fsdp", (2, 3), 2),
    ]
    ranks = [rank_of(rank, [Met(0, 1, group=0)], [groups[rank // 2]]) for rank in range(4)]
    matched = match(ranks)
    assert [group.ranks for group in matched.communicators] == [(0, 1), (2, 3)]
    assert len(matched.steps[0]) == 2
    assert not matched.assumed


def test_a_group_that_is_not_told_is_not_guessed() -> None:
    """With several groups in the job, a collective without one could be any of them."""
    mine = [WORLD, ProcessGroup("1", "mesh_tp", (0, 1), 2)]
    matched = match([rank_of(rank, [Met(0, 1)], mine) for rank in range(3)])
    assert found(matched) == []
    assert reasons(matched) == {"its process group is not in the trace": 3}


def test_different_counts_in_a_step_are_not_matched() -> None:
    """Cutting a window out leaves ranks with unequal numbers: which belong together is unknown."""
    more = rank_of(0, [Met(0, 1), Met(2, 1), Met(4, 1, kind=AG)])
    less = rank_of(1, [Met(0, 1), Met(4, 1, kind=AG)])
    matched = match([more, less])
    assert found(matched) == [(0, 0, AG)]
    assert reasons(matched) == {"no counterpart on the other members of its group": 3}


def test_kinds_are_counted_apart() -> None:
    """On streams of their own, all-gathers and all-reduces begin in another order on each rank."""
    one = rank_of(0, [Met(0, 3), Met(1, 2, kind=AG), Met(6, 1)])
    two = rank_of(1, [Met(0, 3, kind=AG), Met(1, 2), Met(6, 1)])
    assert sorted(found(match([one, two]))) == [(0, 0, AR), (0, 0, AG), (0, 1, AR)]


def test_another_collective_under_the_same_number_is_not_matched() -> None:
    """An all-gather cannot be the counterpart of an all-reduce."""
    one = rank_of(0, [Met(0, 1, group=0, seq=4)], [WORLD])
    two = rank_of(1, [Met(0, 1, group=0, seq=4, kind=AG)], [WORLD])
    assert reasons(match([one, two])) == {"members of its group run another collective there": 2}


def test_a_member_without_a_file_is_left_out() -> None:
    """The others are compared among themselves; alone, a rank cannot be compared."""
    pair = match([rank_of(rank, [Met(0, 1, group=0)], [WORLD]) for rank in range(2)])
    assert len(found(pair)) == 1
    alone = match([rank_of(0, [Met(0, 1, group=0)], [WORLD])])
    assert reasons(alone) == {"no other member of its group has a file": 1}


def test_one_sided_collectives_and_those_outside_of_steps_are_counted() -> None:
    """The root of a broadcast may leave before the others come."""
    events = [Met(0, 1, kind=Collective.BROADCAST), Met(2, 1, step=-1), Met(4, 1)]
    matched = match([rank_of(rank, events) for rank in range(2)])
    assert found(matched) == [(0, 0, AR)]
    assert sorted(reasons(matched).values()) == [2, 2]
    assert matched.matched == 2


def test_messages_between_two_ranks_are_a_meeting() -> None:
    """Whoever comes last, sender or receiver, waits for nobody; among more it cannot be told."""
    message = [Met(0, 1, kind=Collective.SEND_RECV)]
    two = match([rank_of(rank, message, world=2) for rank in range(2)])
    three = match([rank_of(rank, message, world=3) for rank in range(3)])
    assert found(two) == [(0, 0, Collective.SEND_RECV)]
    assert found(three) == []
