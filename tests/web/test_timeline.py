from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.web.figures.timeline import CLASSES, COMPUTE_CLASSES, Wanted, class_of, on_screen
from dashboards.web.views.timeline import drawn_words
from smon.ops import COMPUTE, LABELS, LOCAL, OpType

NAMES = ("row", "kind", "type", "start_ns", "end_ns", "wait_ns", "microbatch", "filled")

Op = tuple[int, int, int, int, int]


def document(*ops: Op) -> dict[str, Any]:
    """Marks of (row, kind, type, start, length), all of microbatch 0, a third of it waiting."""
    columns: dict[str, list[int]] = {name: [] for name in NAMES}
    for row, kind, optype, start, length in ops:
        values = (row, kind, optype, start, start + length, length // 3, 0, 0)
        for name, value in zip(NAMES, values, strict=True):
            columns[name].append(value)
    return {"marks": columns, "types": list(LABELS)}


def many(rows: int = 4, each: int = 3000, length: int = 900_000) -> dict[str, Any]:
    """Rows of computes that follow each other every ms, sends beside them."""
    return document(
        *[
            (row, 0, optype, at * 1_000_000, length)
            for row in range(rows)
            for optype in (OpType.FORWARD_COMPUTE, OpType.FORWARD_SEND)
            for at in range(each)
        ]
    )


def total(screen: dict[str, Any]) -> int:
    """Ops in all marks."""
    return sum(screen["marks"]["count"])


def test_few_marks_are_drawn_as_they_are() -> None:
    """Every op alone, times in seconds."""
    screen = on_screen(document((0, 0, 0, 10, 30), (0, 1, 0, 5, 20)), Wanted())
    assert (screen["ops"], screen["alone"]) == (2, 2)
    assert screen["marks"]["start_s"] == [1e-8, 5e-9]
    assert screen["marks"]["duration_s"] == [3e-8, 2e-8]
    assert screen["marks"]["wait_s"] == [1e-8, 6e-9]
    assert screen["length_s"] == 4e-8


@pytest.mark.parametrize("most", [100, 1000, 5000])
def test_what_is_too_much_for_a_screen_is_joined_and_counted(most: int) -> None:
    """No op is lost: the marks count as many as there are."""
    screen = on_screen(many(), Wanted(most=most))
    assert len(screen["marks"]["row"]) <= most
    assert total(screen) == screen["ops"] == 24_000
    assert screen["alone"] == screen["marks"]["count"].count(1) < 24_000


def test_a_closer_look_shows_every_op() -> None:
    """Zoomed in far enough, nothing is joined."""
    screen = on_screen(many(), Wanted(begin_s=1.0, end_s=1.1, most=1000))
    assert screen["ops"] == screen["alone"] == 4 * 2 * 101
    begin = np.array(screen["marks"]["start_s"])
    end = begin + np.array(screen["marks"]["duration_s"])
    assert ((end >= 1.0) & (begin <= 1.1)).all()


def test_long_ops_stay_alone_beside_short_ones() -> None:
    """What is worth seeing is never joined away."""
    short = [(0, 0, 0, 10**9 + at * 1000, 900) for at in range(20_000)]
    screen = on_screen(document((0, 0, 1, 0, 10**9), *short), Wanted(most=100))
    longest = int(np.argmax(screen["marks"]["duration_s"]))
    assert screen["marks"]["count"][longest] == 1
    assert screen["marks"]["type"][longest] == 1


ops = st.tuples(
    st.integers(0, 3), st.integers(0, 1), st.integers(0, len(LABELS) - 1),
    st.integers(0, 10**6), st.integers(0, 10**5),
)  # fmt: skip


@given(st.lists(ops, max_size=400), st.integers(100, 200))
def test_joined_marks_cover_their_ops_and_nothing_else_of_other_rows(
    drawn: list[Op], most: int
) -> None:
    """Whatever there is: all ops are counted, per row, run and band; no mark exceeds its ops."""
    screen = on_screen(document(*drawn), Wanted(most=most))
    marks = screen["marks"]
    expected: dict[tuple[int, int, bool], int] = {}
    for row, kind, optype, _, _ in drawn:
        key = (row, kind, class_of(LABELS[optype]) < COMPUTE_CLASSES)
        expected[key] = expected.get(key, 0) + 1
    found: dict[tuple[int, int, bool], int] = {}
    for at, count in enumerate(marks["count"]):
        band = class_of(LABELS[marks["type"][at]]) < COMPUTE_CLASSES
        key = (marks["row"][at], marks["kind"][at], band)
        found[key] = found.get(key, 0) + count
        assert 0 <= marks["wait_s"][at] <= marks["duration_s"][at]
    assert found == expected
    ends = [start + length for _, _, _, start, length in drawn]
    assert screen["length_s"] == max(ends, default=0) / 1e9


def test_a_range_outside_the_step_is_its_edge() -> None:
    """Nothing breaks when somebody asks for more than there is."""
    screen = on_screen(many(rows=1, each=10), Wanted(begin_s=5.0, end_s=1.0))
    assert 0 <= screen["begin_s"] < screen["end_s"] <= screen["length_s"]


def test_compute_has_the_warm_colours() -> None:
    """Every op type has a class; local work and communication are kept apart."""
    assert len(CLASSES) == 8
    for op in OpType:
        assert (class_of(op.label) < COMPUTE_CLASSES) == (op in COMPUTE | LOCAL)


def test_the_page_says_how_much_is_drawn() -> None:
    """Never silently less than all."""
    assert drawn_words({"ops": 448, "alone": 448}) == "All 448 ops are drawn."
    assert drawn_words({"ops": 12_300, "alone": 4210}).startswith("4,210 of 12,300 ops are drawn")


def test_marks_can_be_of_one_run() -> None:
    """Recorded or ideal."""
    both = document((0, 0, 0, 0, 10), (0, 1, 0, 0, 8))
    wanted = Wanted()
    assert on_screen(both, wanted)["ops"] == 2
    assert on_screen(both, replace(wanted, kinds=frozenset({1})))["marks"]["kind"] == [1]
