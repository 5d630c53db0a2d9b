from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from smon.ingest.decode import decode
from smon.ingest.limits import MAX_GAP, MAX_LOST, TRUSTED
from smon.ingest.values import columns_of
from smon.wire import TYPE_JSON, BatchKind
from smon.wire.problems import Problem
from tests.ingest.batches import (
    document,
    end,
    gap,
    head_of,
    json_ops,
    ops,
)
from tests.ingest.judging import accepted, refused

# --- JSON columns -----------------------------------------------------------------------------


def test_json_columns_give_the_same_ops_as_arrow() -> None:
    """One table, two ways to write it."""
    assert accepted(json_ops()).ops.equals(accepted(ops()).ops)


def test_json_columns_with_defaults_may_be_left_out() -> None:
    """Rank, chunk, global chunk and microbatch are then -1."""
    batch = json_ops()
    parsed = json.loads(batch.body)["columns"]
    for name in ("rank", "chunk", "global_chunk", "microbatch"):
        del parsed[name]
    body = json.dumps({"columns": parsed}).encode()
    content = accepted(dataclasses.replace(batch, body=body))
    assert set(columns_of(content.ops)["rank"].tolist()) == {-1}


@pytest.mark.parametrize(
    "columns_, problem",
    [
        ({"step": [1.5] * 12}, Problem.WRONG_SCHEMA),
        ({"step": [True] * 12}, Problem.WRONG_SCHEMA),
        ({"step": ["1"] * 12}, Problem.WRONG_SCHEMA),
        ({"step": [None] * 12}, Problem.WRONG_SCHEMA),
        ({"step": [[1]] * 12}, Problem.WRONG_SCHEMA),
        ({"step": [1] * 11}, Problem.WRONG_SCHEMA),
        ({"step": 7}, Problem.WRONG_SCHEMA),
        ({"rank": None}, Problem.WRONG_SCHEMA),
        ({"optype": [3] * 12}, Problem.WRONG_SCHEMA),
        ({"other": [1] * 12}, Problem.WRONG_SCHEMA),
        ({"dp": [2**31] * 12}, Problem.WRONG_VALUES),
        ({"chunk": [2**15] * 12}, Problem.WRONG_VALUES),
        ({"step": [2**63] * 12}, Problem.WRONG_VALUES),
        ({"step": [2**64] * 12}, Problem.WRONG_SCHEMA),
        ({"optype": [f"op{n}" for n in range(12)]}, None),
    ],
)
def test_json_columns_are_read_strictly(columns_: dict[str, Any], problem: Problem | None) -> None:
    """No number is rounded, wrapped or guessed."""
    batch = json_ops()
    parsed = {**json.loads(batch.body)["columns"], **columns_}
    changed = dataclasses.replace(batch, body=json.dumps({"columns": parsed}).encode())
    if problem is None:
        accepted(changed)
    else:
        assert refused(changed) is problem


def test_more_than_128_op_types_are_refused() -> None:
    """They are numbered with int8."""
    labels = [f"op{number}" for number in range(129)]
    accepted(json_ops(rows=128, optype=labels[:128]))
    assert refused(json_ops(rows=129, optype=labels)) is Problem.WRONG_VALUES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"columns": []}',
        b'{"columns": {}}',
        b'{"columns": NaN}',
        b"[" * 100_000,
        b'{"columns": {"step": [' + b"1," * 1000 + b"1]}}",
        '{"columns": {"\ud800": []}}'.encode("utf-8", "surrogatepass"),
    ],
)
def test_what_is_no_columns_is_refused(body: bytes) -> None:
    """Also deep nesting, and more values than the header announces."""
    batch = dataclasses.replace(json_ops(), body=body)
    assert refused(batch) in {Problem.MALFORMED_BODY, Problem.WRONG_SCHEMA}


# --- documents --------------------------------------------------------------------------------


def test_a_gap_says_what_is_lost() -> None:
    """Its own number is its first."""
    found = accepted(gap(3, 9)).gap
    assert (found.first_seq, found.last_seq, found.events, found.reason) == (3, 9, 5, "spool-full")


@pytest.mark.parametrize(
    "changed",
    [
        {"first_seq": 4},
        {"first_seq": -1},
        {"last_seq": 2},
        {"last_seq": 3 + MAX_GAP},
        {"last_seq": 2**70},
        {"events": 6},
        {"events": -1},
        {"events": True},
        {"reason": ""},
        {"reason": "a b"},
        {"reason": None},
        {"first_step": -1},
        {"last_step": "x"},
    ],
)
def test_a_gap_is_read_strictly(changed: dict[str, Any]) -> None:
    """It covers numbers for ever, so it must be right."""
    parsed = {**json.loads(gap(3, 9).body), **changed}
    batch = document(BatchKind.GAP, parsed, seq=3, events=5)
    assert refused(batch) is Problem.WRONG_VALUES


def test_the_longest_gap_is_taken() -> None:
    """At the limit."""
    assert accepted(gap(3, 2 + MAX_GAP)).gap.last_seq == 2 + MAX_GAP


def test_lost_events_have_a_largest_number() -> None:
    """At the limit; sums of more would not fit into a column."""
    assert accepted(gap(3, 9, MAX_LOST)).gap.events == MAX_LOST
    assert refused(gap(3, 9, MAX_LOST + 1)) is Problem.WRONG_VALUES


def test_an_end_has_a_reason() -> None:
    """A word."""
    assert accepted(end(4)).end_reason == "finished"
    wrong: tuple[object, ...] = ({}, {"reason": 3}, {"reason": "a b"}, [])
    for parsed in wrong:
        assert refused(document(BatchKind.END, parsed)) is Problem.WRONG_VALUES


def test_side_evidence_knows_its_steps() -> None:
    """The first one decides which window it is kept with."""
    parsed = {
        "schema": "smon.context/1",
        "counters": {"step": [7, 9], "rank": [0, 0], "name": ["a", "a"], "value": [1.0, 2.0]},
    }
    found = accepted(document(BatchKind.CONTEXT, parsed, events=2)).evidence
    assert (found.first_step, found.last_step) == (7, 9)
    stepless = {"schema": "smon.context/1", "hosts": {"0": "host0"}}
    found = accepted(document(BatchKind.CONTEXT, stepless, events=1)).evidence
    assert found.first_step is None


@pytest.mark.parametrize(
    "parsed, problem",
    [
        ({}, Problem.WRONG_SCHEMA),
        ({"schema": "smon.context/2"}, Problem.WRONG_SCHEMA),
        ({"schema": "smon.context/1", "hosts": {"x": "y"}}, Problem.WRONG_VALUES),
        ({"schema": "smon.context/1", "hosts": {"0": "a" * 300}}, Problem.WRONG_VALUES),
        ([], Problem.WRONG_VALUES),
    ],
)
def test_side_evidence_is_read_strictly(parsed: object, problem: Problem) -> None:
    """What the analysis could not read is refused at once; the answer does not quote it."""
    batch = document(BatchKind.CONTEXT, parsed, events=1)
    assert refused(batch) is problem


def test_what_was_accepted_stays_readable_under_stricter_settings() -> None:
    """The drain decodes without limits: settings that change lose nothing."""
    batch = ops(rows=200)
    assert refused(batch, events=100) is Problem.TOO_MANY_EVENTS
    content = decode(head_of(batch), batch.body, 0, TRUSTED)
    assert content.ops is not None
    assert content.ops.num_rows == 200


def test_json_bodies_have_their_type() -> None:
    """As the header says."""
    assert json_ops().content_type == TYPE_JSON
