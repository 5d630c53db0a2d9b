"""Whether a batch is taken, or with which problem it is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smon.errors import WireError
from smon.ingest.decode import check, decode
from smon.ingest.values import Producer
from smon.wire import Batch
from smon.wire.problems import Problem
from tests.ingest.batches import (
    LAYOUT,
    LIMITS,
    NOW,
    head_of,
    ops,
)

LIVE = Producer(LAYOUT, live_unix=True, window_steps=10)
SECOND = 10**9


def refused(batch: Batch, producer: Producer = LIVE, **limits: int) -> Problem:
    """The problem that a batch is refused with."""
    bounds = dataclasses.replace(LIMITS, **limits)
    with pytest.raises(WireError) as caught:
        check(decode(head_of(batch), batch.body, batch.seq, bounds), producer, bounds, NOW)
    return Problem(caught.value.problem)


def accepted(batch: Batch, producer: Producer = LIVE, **limits: int) -> Any:  # noqa: ANN401  # Content, without asking which part is there
    """What is in a batch that is taken."""
    bounds = dataclasses.replace(LIMITS, **limits)
    content = decode(head_of(batch), batch.body, batch.seq, bounds)
    check(content, producer, bounds, NOW)
    return content


def raw_ops(raw: bytes, rows: int = 12, encoding: str = "identity") -> Batch:
    """A batch with these bytes as Arrow body."""
    return dataclasses.replace(ops(rows=rows), encoding=encoding, body=raw)
