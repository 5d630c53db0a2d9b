from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smon.ingest.streams import Digests, Ranges, StreamTable
from tests.ingest.batches import STREAM, info

_SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=30)


@given(_SPANS, st.integers(0, 70), st.integers(0, 10))
def test_ranges_are_a_set_of_numbers(spans: list[tuple[int, int]], first: int, length: int) -> None:
    """Whatever is added in whatever order, they know what is missing."""
    ranges, numbers = Ranges(), set[int]()
    for start, more in spans:
        ranges.add(start, start + more)
        numbers |= set(range(start, start + more + 1))
    absent = [number for number in range(first, first + length + 1) if number not in numbers]
    assert ranges.missing(first, first + length) == (absent[0] if absent else None)
    assert ranges.next_seq == next(number for number in range(200) if number not in numbers)
    stretches = sum(number - 1 not in numbers for number in numbers)
    assert ranges.holes == stretches - (0 in numbers)


def test_what_the_database_and_the_log_know_is_put_together() -> None:
    """Stored up to 9 and in the log from 10 on: 12 is next."""
    table = StreamTable()
    found = info(covered={0: ((0, 9),), 1: ((0, 0),)}, epoch=0)
    state = table.adopt(found, [(0, 10, 11), (1, 1, 1)], 5)
    assert state.ranges(0).next_seq == 12
    assert state.ranges(1).next_seq == 2
    state.ranges(0).add(12, 12)
    assert table.adopt(found, [], 6) is state
    assert state.ranges(0).next_seq == 13


def test_a_stream_belongs_to_its_tenant() -> None:
    """Another tenant does not find it, whatever it knows of its id."""
    table = StreamTable()
    table.adopt(info(), [], 0)
    assert table.get("default", STREAM) is not None
    assert table.get("other", STREAM) is None


def test_streams_that_are_not_used_are_forgotten() -> None:
    """Memory is bounded; the database knows the rest."""
    table = StreamTable(capacity=2)
    for name in ("a", "b"):
        table.adopt(info(name), [], 0)
    assert table.get("default", "a") is not None
    table.adopt(info("c"), [], 0)
    assert table.get("default", "b") is None
    assert len(table) == 2
    table.forget("a")
    assert table.get("default", "a") is None


def test_streams_of_jobs_that_are_over_are_forgotten() -> None:
    """A server that has seen many jobs does not grow; one that still sends is kept."""
    now_s = 0.0
    table = StreamTable(keep_s=100, monotonic=lambda: now_s)
    for name in ("over", "sends"):
        table.adopt(info(name), [], 0)
    now_s = 60.0
    assert table.get("default", "sends") is not None
    now_s = 150.0
    table.adopt(info("new"), [], 0)
    assert len(table) == 2
    assert table.get("default", "over") is None
    assert table.get("default", "sends") is not None


def test_the_digests_that_came_last_are_remembered() -> None:
    """Memory is bounded by their number."""
    digests = Digests(capacity=2)
    for number in range(3):
        digests.put((STREAM, 0, number), f"{number:064x}")
    assert digests.get((STREAM, 0, 0)) is None
    assert digests.get((STREAM, 0, 2)) == f"{2:064x}"


def test_digests_are_remembered_for_minutes_only() -> None:
    """A server with little to do does not grow for hours: each goes after twice the time."""
    now_s = 0.0
    digests = Digests(capacity=1000, keep_s=300.0, monotonic=lambda: now_s)
    for number in range(20):
        digests.put((STREAM, 0, number), f"{number:064x}")
        now_s += 60.0
    known = [number for number in range(20) if digests.get((STREAM, 0, number)) is not None]
    assert known == list(range(known[0], 20))
    assert 5 <= len(known) <= 10
