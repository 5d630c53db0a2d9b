from __future__ import annotations

import numpy as np
import pytest

from smon.collectives.matching import match
from smon.collectives.segments import Structure, structures_of
from smon.trace.events import ProcessGroup, RankEvents
from tests.collectives.builders import AG, MS, Met, Ran, job_of, rank_of


def only(ranks: list[RankEvents]) -> Structure:
    """The one structure of a job."""
    (structure,) = structures_of(match(ranks))
    return structure


def test_the_last_to_arrive_waits_for_nobody() -> None:
    """Transfer is the shortest duration; what others took longer they waited."""
    structure = only(job_of([[10.0, 13.0, 11.0]], transfer=2.0))
    assert structure.transfer.tolist() == [[2 * MS]]
    waits = structure.duration[0, 0] - structure.transfer[0, 0]
    assert waits.tolist() == [3 * MS, 0, 2 * MS]
    assert structure.last().tolist() == [[1]]


def test_segments_are_measured_inside_each_rank() -> None:
    """From the end of the last collective of the step before; clocks differ by seconds."""
    structure = only(job_of([[10.0, 13.0], [20.0, 12.0], [11.0, 11.0]]))
    assert structure.segment[1:, 0].tolist() == [[20 * MS, 12 * MS], [11 * MS, 11 * MS]]
    assert structure.recorded[1:].tolist() == [22 * MS, 13 * MS]


def test_the_first_step_begins_where_the_others_do() -> None:
    """Its lateness is what the others waited, on top of the usual way of the first to arrive."""
    structure = only(job_of([[10.0, 13.0], [20.0, 12.0], [11.0, 11.0]]))
    # The usual way of the first to arrive is the median of 12 and 11.
    assert structure.segment[0, 0].tolist() == [11.5 * MS, 14.5 * MS]
    assert np.isnan(structure.recorded[0])


def test_a_single_step_counts_from_its_marker() -> None:
    """The shortest way from a marker to the collective, and the lateness on top."""
    ranks = [
        rank_of(rank, [Met(10.0 + late, 5.0 - late)], world=2, steps=[(0, begin, 20.0)])
        for rank, late, begin in ((0, 0.0, 4.0), (1, 3.0, 12.0))
    ]
    assert only(ranks).segment[0, 0].tolist() == [1 * MS, 4 * MS]


def test_what_overlaps_does_not_depend_on_each_other() -> None:
    """Of three collectives the last depends on both others, these on none."""
    events = [Met(10, 10, kind=AG), Met(15, 10), Met(30, 2)]
    structure = only([rank_of(rank, events) for rank in range(2)])
    assert structure.before == ((), (), (1, 0))
    assert structure.segment[0, 2].tolist() == [5 * MS, 5 * MS]


def test_one_overlap_in_one_step_is_enough() -> None:
    """What a collective really depends on has ended every time."""
    events = [Met(10, 2, 0), Met(14, 2, 0), Met(110, 6, 1), Met(114, 2, 1)]
    assert only([rank_of(rank, events) for rank in range(2)]).before == ((), ())


def test_chains_keep_only_their_last_link() -> None:
    """What is reached through another dependency is not listed."""
    structure = only(job_of([[10.0, 11.0]], bulk=4))
    assert structure.before == ((), (0,), (1,), (2,))


def test_a_subgroup_does_not_hide_what_its_outsiders_waited_for() -> None:
    """Rank 2 is no member of the second group: the third depends on the first for its sake."""
    world = ProcessGroup("0", "all", (0, 1, 2), 3)
    pair = ProcessGroup("1", "pair", (0, 1), 2)
    inner = [Met(0, 2, group=0), Met(4, 2, group=1), Met(8, 2, group=0)]
    outer = [Met(0, 2, group=0), Met(7, 3, group=0)]
    ranks = [
        rank_of(0, inner, [world, pair]),
        rank_of(1, inner, [world, pair]),
        rank_of(2, outer, [world]),
    ]
    structure = only(ranks)
    assert structure.before == ((), (0,), (1, 0))
    assert structure.segment[0, 2].tolist() == [2 * MS, 2 * MS, 5 * MS]
    assert structure.members.tolist() == [[True] * 3, [True, True, False], [True] * 3]


def test_steps_with_other_collectives_are_a_structure_of_their_own() -> None:
    """Every tenth step may average a loss."""
    events = [Met(10, 2, 0), Met(110, 2, 1), Met(114, 2, 1), Met(210, 2, 2)]
    structures = structures_of(match([rank_of(rank, events) for rank in range(2)]))
    assert [structure.steps.tolist() for structure in structures] == [[0, 2], [1]]


@pytest.mark.parametrize("late", [0.0, 40.0])
def test_compute_behind_a_wait_counts_as_work(late: float) -> None:
    """Rank 0 computes 30 ms while it waits for rank 1: both have 30 ms between the collectives."""
    end = 42 + late
    second = max(40, 12 + late)
    busy: list[Met | Ran] = [Ran(0, 10), Met(10, 2 + late), Ran(10, 30), Met(second, end - second)]
    slow: list[Met | Ran] = [
        Ran(0, 10 + late),
        Met(10 + late, 2),
        Ran(10 + late, 30),
        Met(40 + late, 2),
    ]
    structure = only([rank_of(0, busy), rank_of(1, slow)])
    assert structure.beside.tolist() == [False, True]
    assert structure.segment[0, 1].tolist() == [30 * MS, 30 * MS]
