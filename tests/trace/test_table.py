from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.errors import TraceError
from smon.trace.schema import COLUMNS, INVALID_NS, MAX_DURATION_NS
from smon.trace.table import concat, make_table, number_by_start, seconds_to_ns

NEEDED = ("step", "dp", "stage", "optype", "start_ns", "duration_ns", "seq")


def _columns(rows: int = 3) -> dict[str, Any]:
    return {name: np.zeros(rows, np.int64) for name in NEEDED}


def test_columns_get_their_types_and_defaults() -> None:
    """A table has every column of the schema, with its type."""
    table = make_table(_columns())
    for column in COLUMNS:
        values = table.columns[column.name]
        assert values.dtype == column.dtype
        assert values.tolist() == [column.default if column.default is not None else 0] * 3


@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_column_may_not_be_missing(name: str) -> None:
    """The message names it and says what it means."""
    columns = _columns()
    del columns[name]
    with pytest.raises(TraceError, match=f"no column {name}: "):
        make_table(columns)


def test_columns_must_have_equal_lengths() -> None:
    """A short column is no column of gaps."""
    with pytest.raises(TraceError, match="column stage has 2 rows, expected 3"):
        make_table({**_columns(), "stage": np.zeros(2, np.int64)})


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("optype", -1, "unknown op type"),
        ("start_ns", INVALID_NS, "start is not a number"),
        ("duration_ns", INVALID_NS, "duration is not a number"),
        ("duration_ns", -1, "negative duration"),
        ("duration_ns", MAX_DURATION_NS + 1, "duration above 7 days"),
        ("step", -1, "negative step, rank or sequence number"),
        ("dp", -1, "negative step, rank or sequence number"),
        ("stage", -1, "negative step, rank or sequence number"),
        ("seq", -1, "negative step, rank or sequence number"),
    ],
)
def test_unusable_rows_are_dropped_and_counted(name: str, value: int, reason: str) -> None:
    """Each row is counted once, for the first reason that holds; the reader's own are kept."""
    columns = _columns()
    columns[name][1] = value
    table = make_table(columns, dropped={"malformed": 2})
    assert len(table) == 2
    assert dict(table.dropped) == {reason: 1, "malformed": 2}


def test_a_row_with_two_faults_is_counted_once() -> None:
    """The counts add up to the rows that were left out."""
    columns = _columns()
    columns["optype"][:2] = -1
    columns["duration_ns"][1:] = -5
    table = make_table(columns)
    assert table.dropped == (("negative duration", 1), ("unknown op type", 2))
    assert len(table) == 0


def test_tables_are_put_together_with_their_counts() -> None:
    """Rows follow in order; reasons add up."""
    first = make_table({**_columns(), "step": np.arange(3)}, dropped={"a": 1})
    second = make_table({**_columns(2), "step": np.arange(5, 7)}, dropped={"a": 2, "b": 1})
    table = concat([first, second])
    assert table.step.tolist() == [0, 1, 2, 5, 6]
    assert table.dropped == (("a", 3), ("b", 1))
    assert concat([first]) is first


def test_tables_of_different_time_do_not_go_together() -> None:
    """Neither do no tables at all."""
    with pytest.raises(TraceError, match="separately"):
        concat([make_table(_columns()), make_table(_columns(), step_relative=True)])
    with pytest.raises(TraceError, match="no table"):
        concat([])


def test_a_range_of_steps_includes_both_ends() -> None:
    """None is open."""
    table = make_table({**_columns(6), "step": np.arange(6)})
    assert table.between(2, 4).step.tolist() == [2, 3, 4]
    assert table.between(None, 1).step.tolist() == [0, 1]
    assert len(table.between(None, None)) == 6


def test_seconds_become_nanoseconds() -> None:
    """Rounded; what is no number, or no time, is marked."""
    seconds = np.array([0.0, 1.5, -0.25, np.nan, np.inf, -np.inf, 1e300])
    assert seconds_to_ns(seconds).tolist() == [0, 1_500_000_000, -250_000_000] + [INVALID_NS] * 4
    assert seconds_to_ns(np.array([0.1], np.float32)).tolist() == [100_000_001]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(-5, 5)))
)
def test_numbers_count_each_group_by_start(ops: list[tuple[int, int, int, int]]) -> None:
    """Per (step, rank, op type) they are 0, 1, 2 …, and order by number is order by start."""
    step, rank, optype, start = (np.array([op[i] for op in ops], np.int64) for i in range(4))
    seq = number_by_start(step, rank.astype(np.int32), optype.astype(np.int8), start)
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for op, number in zip(ops, seq.tolist(), strict=True):
        groups.setdefault(op[:3], []).append((number, op[3]))
    for members in groups.values():
        members.sort()
        assert [number for number, _ in members] == list(range(len(members)))
        assert [when for _, when in members] == sorted(when for _, when in members)


def test_a_data_frame_has_the_names_of_op_types() -> None:
    """For notebooks."""
    pytest.importorskip("pandas")
    frame = make_table({**_columns(), "optype": np.array([0, 1, 4])}).to_pandas()
    assert frame["optype"].tolist() == ["forward-compute", "backward-compute", "gc"]
    assert len(frame.columns) == len(COLUMNS)
