from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from sqlalchemy import delete, update

from smon.store.commit import AlreadyStored, covers, merged
from smon.store.database import Database
from smon.store.events import read_ops
from smon.store.models import Coverage, EventFile, Stream, Window
from smon.store.objects import Objects
from smon.store.streams import StreamInfo, next_seq
from tests.service import add_tenant
from tests.store.rows import (
    all_rows,
    live_paths,
    note,
    only,
    open_stream,
    ops,
    put_ops,
    store,
)

TABLE = ops(steps=6)

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: [pair[0], sum(pair)])
)


@given(RANGES)
def test_merged_ranges_hold_the_same_numbers(ranges: list[list[int]]) -> None:
    """Merging keeps the set of numbers, in ascending ranges that do not even touch."""
    result = merged(ranges)
    numbers = {n for first, last in ranges for n in range(first, last + 1)}
    assert {n for first, last in result for n in range(first, last + 1)} == numbers
    assert all(a[1] + 1 < b[0] for a, b in pairwise(result))
    assert all(covers(result, n) == (n in numbers) for n in range(-1, 72))
    assert next_seq(result) == min(set(range(73)) - numbers)


@given(st.permutations(range(12)), st.integers(1, 5))
def test_contiguous_numbers_are_one_range(order: list[int], size: int) -> None:
    """Ranges stay compact in whatever order batches come."""
    ranges: list[list[int]] = []
    for at in range(0, len(order), size):
        ranges = merged([*ranges, *([seq, seq] for seq in order[at : at + size])])
        assert len(ranges) <= 6 + 1
    assert ranges == [[0, 11]]


class Crash(Exception):  # noqa: N818  # stands for the power that fails
    """The server dies here."""


class Drain:
    """What ingest does: the batches of the log become a file and a commit."""

    def __init__(self, database: Database, objects: Objects, stream: StreamInfo) -> None:
        self._database = database
        self._objects = objects
        self._stream = stream

    def move(self, seqs: Sequence[int], *, crash: str = "") -> None:
        """Store batches as often as it takes; may crash after the file, or after the commit."""
        waiting = list(dict.fromkeys(seqs))
        while waiting:
            rows = np.isin(TABLE.step, waiting)
            file = put_ops(self._objects, self._stream, TABLE.take(rows))
            if crash == "file":
                raise Crash
            notes = [note(self._stream, seq, steps_done=seq) for seq in waiting]
            try:
                store(self._database, notes, [file])
            except AlreadyStored as error:
                self._objects.delete(file.path)
                waiting = [seq for seq in waiting if (self._stream.id, 0, seq) not in error.keys]
                continue
            if crash == "commit":
                raise Crash
            return


MOVES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["", "file", "commit"])
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture
def drain(database: Database, root: str) -> tuple[Database, Objects, Drain]:
    """A stream of six batches, one step each."""
    objects = Objects(root)
    stream = open_stream(database, add_tenant(database))
    return database, objects, Drain(database, objects, stream)


@given(moves=MOVES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_op_counts_exactly_once(
    drain: tuple[Database, Objects, Drain], moves: list[tuple[list[int], str]]
) -> None:
    """In any order, however often, and wherever the server dies: each op is there once."""
    database, objects, mover = drain
    with database.write() as session:
        for table in (EventFile, Window, Coverage):
            session.execute(delete(table))
        session.execute(update(Stream).values(steps_done=None))
    for seqs, crash in moves:
        try:
            mover.move(seqs, crash=crash)
        except Crash:
            continue
    mover.move(range(6))
    mover.move([3, 1])
    read = read_ops(objects, live_paths(database))
    assert len(read) == len(TABLE)
    assert sorted(read.start_ns.tolist()) == sorted(TABLE.start_ns.tolist())
    assert only(database, Coverage)["ranges"] == [[0, 5]]
    assert only(database, Window)["rows"] == len(TABLE)
    assert {row["steps_done"] for row in all_rows(database, Stream)} == {5}
