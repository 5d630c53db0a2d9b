from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.collectives.activity import Part, activity_of
from smon.collectives.coverage import Coverage
from smon.collectives.matching import match
from smon.collectives.segments import structures_of
from smon.trace.events import Phase
from tests.collectives.builders import MS, Met, Ran, rank_of

SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=12)


@given(SPANS, SPANS, st.integers(0, 250), st.integers(0, 250))
def test_coverage_counts_each_moment_once(
    spans: list[tuple[int, int]], others: list[tuple[int, int]], one: int, other: int
) -> None:
    """As counting moments one by one does."""
    begin, end = sorted((one, other))

    def moments(spans: list[tuple[int, int]]) -> set[int]:
        return {at for start, length in spans for at in range(start, start + length)}

    def coverage(spans: list[tuple[int, int]]) -> Coverage:
        rank = rank_of(0, [Ran(start, length) for start, length in sorted(spans)])
        return Coverage.of(rank, 10**18)

    inside = set(range(begin, end))
    limits = np.array([begin * MS], float), np.array([end * MS], float)
    assert coverage(spans).within(*limits)[0] == pytest.approx(len(moments(spans) & inside) * MS)
    both = coverage(spans).joined(coverage(others))
    expected = (moments(spans) | moments(others)) & inside
    assert both.within(*limits)[0] == pytest.approx(len(expected) * MS)


def test_a_segment_is_split_by_what_ran_in_it() -> None:
    """20 ms between two collectives: 6 forward, 5 backward on two streams, 3 unknown, 6 idle."""
    events: list[Met | Ran] = [
        Met(0, 10),
        Ran(10, 6, phase=Phase.FORWARD),
        Ran(18, 4, phase=Phase.BACKWARD),
        Ran(19, 4, phase=Phase.BACKWARD),
        Ran(24, 3),
        Met(30, 2),
    ]
    ranks = [rank_of(rank, events) for rank in range(2)]
    (structure,) = structures_of(match(ranks))
    activity = activity_of(tuple(ranks), structure)
    found = {part: values[0, 0] / MS for part, values in activity.parts.items() if values.any()}
    assert found == pytest.approx(
        {Part.FORWARD: 6.0, Part.BACKWARD: 5.0, Part.KERNELS: 3.0, Part.IDLE: 6.0}
    )
    assert activity.kernels
    assert activity.phases


def test_without_kernels_what_no_annotation_covers_is_unknown() -> None:
    """Not idle: nobody looked."""
    ranks = [rank_of(rank, [Met(0, 10), Met(30, 2)]) for rank in range(2)]
    (structure,) = structures_of(match(ranks))
    activity = activity_of(tuple(ranks), structure)
    assert activity.parts[Part.UNKNOWN].tolist() == [[20 * MS, 20 * MS]]
    assert not activity.parts[Part.IDLE].any()
    assert not activity.kernels
