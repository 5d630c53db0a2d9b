from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smon.errors import MetaError
from smon.trace.context import Context, merge, parse_context


def context(**parts: Any) -> Context:  # noqa: ANN401  # parts of a JSON document
    """The side evidence of a document with these parts."""
    return parse_context({"schema": "smon.context/1", **parts}, "a document")


def counters(*rows: tuple[int, int, str, float]) -> dict[str, list[Any]]:
    """A table of counters."""
    columns = zip(*rows, strict=True)
    return dict(zip(("step", "rank", "name", "value"), map(list, columns), strict=True))


def test_names_are_united_and_the_later_one_holds() -> None:
    """Of hosts, switches and GPUs."""
    merged = merge(
        [
            context(hosts={"0": "a", "1": "b"}, switches={"a": "s1"}, gpus={"0": "g"}),
            context(hosts={"1": "c", "2": "d"}, switches={"a": "s2"}),
        ]
    )
    assert merged.hosts == {0: "a", 1: "c", 2: "d"}
    assert (merged.switches, merged.gpus) == ({"a": "s2"}, {0: "g"})


def test_what_is_there_twice_counts_once() -> None:
    """A document that was sent twice adds nothing; rows that differ anywhere are two."""
    rows = [(1, 0, "pcie_width", 16.0), (1, 0, "nvlink_crc", 16.0), (1, 1, "pcie_width", 16.0)]
    events = {
        "kind": ["gc", "gc"],
        "step": [1, 1],
        "rank": [None, 3],
        "start_ns": [None, 5],
        "duration_s": [0.5, 0.5],
    }
    one = context(counters=counters(*rows), events=events)
    other = context(counters=counters(rows[1], (1, 0, "pcie_width", 8.0)), events=events)
    merged = merge([one, one, other])
    found = list(
        zip(
            merged.counters.step.tolist(),
            merged.counters.rank.tolist(),
            merged.counters.name.tolist(),
            merged.counters.value.tolist(),
            strict=True,
        )
    )
    assert found == [*rows, (1, 0, "pcie_width", 8.0)]
    assert merged.events == one.events
    assert merged.counters.step.dtype == np.int64


def test_tables_of_every_kind_are_united() -> None:
    """Microbatches and tokens of experts too; ignored keys add up."""
    first = {"step": [0], "dp": [0], "microbatch": [0], "tokens": [9], "sum_len2": [81.0]}
    second = {"step": [0], "rank": [1], "tokens": [2**62]}
    merged = merge(
        [context(microbatches=first, x=1), context(expert_tokens=second, y=1), context()]
    )
    assert merged.microbatches.tokens.tolist() == [9]
    assert merged.expert_tokens.tokens.tolist() == [2**62]
    assert merged.ignored == 2


def test_nothing_merged_is_nothing() -> None:
    """Without documents there is no evidence."""
    assert not merge([])
    assert not merge([context(), context()])


def test_a_malformed_document_is_named() -> None:
    """By what the caller calls it."""
    with pytest.raises(MetaError, match="from node-1: hosts"):
        parse_context({"schema": "smon.context/1", "hosts": []}, "from node-1")
