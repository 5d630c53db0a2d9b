"""How fast a large trace of `torch.profiler` is read.

Run by ``make bench``. The goal is 3 s and 1 GB for 450,000 events; nothing is asserted in seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from smon.trace.formats import kineto
from tests.kineto_files import Ddp, ddp_events, document

EVENTS = 450_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which most events are CPU ops, as in real ones."""
    job = Ddp(ranks=1, steps=40)
    (events,) = ddp_events(job)
    args = {"External id": 7, "Ev Idx": 3, "Input Dims": [[64, 1024], []], "Sequence number": 12}
    filler = {
        "ph": "X", "cat": "cpu_op", "name": "aten::add_", "pid": 4_000, "tid": 100, "ts": 1.5,
        "dur": 2.25, "args": args,
    }  # fmt: skip
    events += [{**filler, "ts": float(at)} for at in range(EVENTS - len(events))]
    path = tmp_path_factory.mktemp("large") / "rank0.json"
    path.write_text(json.dumps(document(job, 0, events), indent=1))
    return path


def test_reading_450_000_events(benchmark: BenchmarkFixture, large: Path) -> None:
    """Text of 150 MB, a few megabytes at a time."""
    (events,) = benchmark(kineto.read, large).events
    assert len(events.steps) == 40
