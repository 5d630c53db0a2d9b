from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smon.graph.orders import group_by_order, group_by_value

NAN = np.nan


def test_lanes_of_one_order_are_one_group_whatever_their_pace() -> None:
    """Two forwards and two backwards, in two orders."""
    kinds = np.array([0, 0, 1, 1])
    start = np.array([[0, 0, 0], [5, 50, 9], [1, 10, 1], [7, 70, 2.0]])
    ids, orders = group_by_order(start, kinds)
    assert ids.tolist() == [0, 0, 1]
    assert [order.tolist() for order in orders] == [[0, 2, 1, 3], [0, 2, 3, 1]]


def test_a_missing_op_may_stand_anywhere() -> None:
    """A lane with a hole joins the lanes that agree with what it has."""
    start = np.array([[0, 0], [2, NAN], [1, 1.0]])
    ids, orders = group_by_order(start, np.array([0, 0, 1]))
    assert ids.tolist() == [0, 0]
    assert orders[0].tolist() == [0, 2, 1]


def test_a_hole_of_the_leading_lane_is_placed_as_in_a_lane_of_other_pace() -> None:
    """Each of three lanes misses another op, and one is late by more than the ops are long."""
    truth = np.arange(6)
    start = np.stack([truth, truth * 3.0 + 100, truth + 0.5], axis=1)
    start[2, 0] = start[4, 1] = start[1, 2] = NAN
    ids, orders = group_by_order(start, np.zeros(6, np.intp))
    assert ids.tolist() == [0, 0, 0]
    assert orders[0].tolist() == truth.tolist()


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.floats(0.0, 0.4))
def test_any_order_survives_losses_if_some_lane_has_each_op_beside_its_neighbours(
    seed: int, lanes: int, loss: float
) -> None:
    """Lanes of one order, paces and delays of their own: one group in the true order.

    At most one lane lacks an op, and never two that follow each other.
    """
    rng = np.random.default_rng(seed)
    kinds = np.repeat([0, 1], 12)
    order = _merged(rng, 12)
    steps = rng.uniform(0.5, 2.0, (24, lanes)) * rng.uniform(0.5, 2.0, lanes)
    start = np.empty((24, lanes))
    start[order] = np.cumsum(steps, axis=0) + rng.uniform(0, 50, lanes)
    for place in range(1, 24, 2):
        if rng.random() < loss:
            start[order[place], rng.integers(lanes)] = NAN
    ids, orders = group_by_order(start, kinds)
    assert not ids.any()
    assert orders[0].tolist() == order.tolist()


def _merged(rng: np.random.Generator, each: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Ops of two types, each type in order, mixed at random."""
    second = rng.permutation(np.repeat([False, True], each))
    order = np.empty(2 * each, np.intp)
    order[~second] = np.arange(each)
    order[second] = each + np.arange(each)
    return order


def test_ops_that_start_together_stand_by_number_then_type() -> None:
    """The tie-break of section 2 is the same in every lane."""
    start = np.zeros((4, 2))
    ids, orders = group_by_order(start, np.array([0, 0, 1, 1]))
    assert ids.tolist() == [0, 0]
    assert orders[0].tolist() == [0, 2, 1, 3]


def test_unknown_values_agree_with_everything() -> None:
    """Groups are led by the lanes that know most."""
    values = np.array([[1, 1, 2, -9], [3, -9, 3, 3]])
    groups = group_by_value(values, unknown=-9)
    assert [group.tolist() for group in groups] == [[0, 1, 3], [2]]
    assert [group.tolist() for group in group_by_value(values)] == [[0], [1], [2], [3]]
