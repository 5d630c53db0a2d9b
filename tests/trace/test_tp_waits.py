from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from smon.topology import Layout
from smon.trace.events import Collective, Kind, ProcessGroup, RankEvents, event_columns
from smon.trace.tp_waits import TP_COMM, TP_WAIT, tp_waits

LAYOUT = Layout(dp=1, pp=1, tp=2)
GROUP = ProcessGroup("5", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), 2)


def rank_of(
    rank: int, durations: list[int], *, seq: list[int] | None = None, group: ProcessGroup = GROUP
) -> RankEvents:
    """All-reduces of these lengths in ms, of step 7."""
    count = len(durations)
    columns: dict[str, Any] = event_columns(
        {
            "start_ns": 10**18 + np.arange(count) * 10**9,
            "duration_ns": np.array(durations) * 1_000_000,
            "step": np.full(count, 7),
            "kind": np.full(count, Kind.COLLECTIVE),
            "collective": np.full(count, Collective.ALL_REDUCE),
            "group": np.zeros(count),
            "seq": np.full(count, -1) if seq is None else np.array(seq),
        },
        Counter(),
    )
    return RankEvents(rank=rank, world_size=2, **columns, groups=(group,))


def values(*ranks: RankEvents) -> dict[tuple[str, int], float]:
    """By counter and rank, of step 7."""
    counters = tp_waits(ranks, LAYOUT).counters
    assert set(counters.step.tolist()) <= {7}
    keys = zip(counters.name.tolist(), counters.rank.tolist(), strict=True)
    return dict(zip(keys, counters.value.tolist(), strict=True))


def test_what_a_member_takes_longer_than_the_shortest_is_its_wait() -> None:
    """Rank 1 comes last to both but the second: it waits 2 ms, its peer 9 ms."""
    found = values(rank_of(0, [5, 3, 10]), rank_of(1, [4, 5, 2]))
    assert found == pytest.approx(
        {(TP_WAIT, 0): 0.009, (TP_WAIT, 1): 0.002, (TP_COMM, 0): 0.009, (TP_COMM, 1): 0.009}
    )


def test_members_are_matched_by_sequence_number() -> None:
    """One of rank 0's is not in the trace of rank 1: it is left out, the others stay in step."""
    found = values(rank_of(0, [9, 5, 10], seq=[3, 4, 5]), rank_of(1, [4, 2], seq=[4, 5]))
    assert (found[TP_WAIT, 0], found[TP_WAIT, 1]) == pytest.approx((0.009, 0.0))


def test_members_that_cannot_be_matched_say_nothing() -> None:
    """Without numbers and with different counts it is not known which belong together."""
    assert values(rank_of(0, [9, 5, 10]), rank_of(1, [4, 2])) == {}


def test_a_group_of_which_a_rank_has_no_file_says_nothing() -> None:
    """The one that all wait for may be the one that is missing."""
    assert values(rank_of(0, [9, 5, 10])) == {}


def test_a_group_without_a_telling_name_is_told_by_its_members() -> None:
    """The layout says that they differ in TP alone; of another dimension nothing is counted."""
    plain = ProcessGroup("5", "undefined", (0, 1), 2)
    ranks = [rank_of(0, [5], group=plain), rank_of(1, [4], group=plain)]
    assert len(tp_waits(ranks, Layout(dp=1, pp=2, tp=2)).counters) == 4
    assert not len(tp_waits(ranks, Layout(dp=2, pp=1)).counters)
