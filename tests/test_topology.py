"""Ranks and coordinates of a layout."""

from __future__ import annotations

import pytest

from smon.errors import TopologyError
from smon.topology import Layout


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1), Layout(4, 2), Layout(2, 3, tp=4), Layout(3, 2, tp=2, cp=5, ep=3)],
    ids=str,
)
def test_the_place_of_a_rank_leads_back_to_it(layout: Layout) -> None:
    """For every rank; and no two ranks have one place."""
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    for rank, place in enumerate(places):
        assert layout.rank(place.dp, place.stage, place.tp, place.cp) == rank


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_has_no_place(rank: int) -> None:
    """Ranks count from 0 to one below the world size."""
    with pytest.raises(TopologyError, match="expected a rank below 8"):
        Layout(4, 2).place(rank)
