"""What the recorder takes of the training thread; times are of 1,000 ops: ms here are µs per op.

Time is that of the thread on its processor: what the recorder's own thread does is not in it. Run
by ``make bench``. What it takes of real steps is measured by ``make torch``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.recorder import Recorder
from ingest_agents.recorder.device import Event
from ingest_agents.spool.folder import streams_in
from smon.ops import OpType
from tests.agents.test_recorder import IDENTITY, settings

OPS = 1_000

#: A stage of 16 microbatches: forward, backward, send and receive of each, and the end of the step.
PER_STEP = 16 * 4 + 4


class Instant:
    """An event that costs nothing and is passed at once: what is left is the recorder's part."""

    def query(self) -> bool:
        """Passed."""
        return True

    def elapsed_time(self, end_event: object) -> float:
        """A millisecond to everything."""
        return 1.0


class Runtime:
    """A GPU whose calls cost nothing."""

    def event(self) -> Event:
        """A new event."""
        return Instant()

    def record(self, event: Event) -> int:
        """On stream 0."""
        return 0

    def anchor(self, event: Event) -> None:
        """Next to it."""

    def capturing(self) -> bool:
        """Never."""
        return False


@pytest.fixture(params=["host", "gpu", "off"])
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorder]:
    """A recorder whose thread writes only when its queue is half full."""
    runtime = Runtime() if request.param == "gpu" else None
    chosen = settings(tmp_path, enable=request.param != "off")
    one = Recorder(IDENTITY, chosen, find_device=lambda: runtime)
    yield one
    assert one.errors == 0
    one.close()


def step(recorder: Recorder, number: int, ops: int) -> None:
    """A step of so many ops, each begun and ended."""
    recorder.begin_step(number)
    for microbatch in range(ops):
        recorder.end(recorder.begin(OpType.FORWARD_COMPUTE, microbatch=microbatch))
    recorder.end_step()


@pytest.mark.benchmark(timer=time.thread_time)
def test_ops_in_the_training_thread(benchmark: Any, recorder: Recorder) -> None:  # noqa: ANN401
    """At most 5 µs per op on the host's clock; a GPU's own calls come on top."""
    numbers = iter(range(10**9))
    benchmark(lambda: step(recorder, next(numbers), OPS))


def test_bytes_of_a_step(benchmark: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """At most 1.2 kB for 68 ops with 2 % of noise, each step written alone."""
    steps, noise = 200, random.Random(0)  # noqa: S311  # the same each time
    recorder = Recorder(IDENTITY, settings(tmp_path))
    numbers = iter(range(steps))

    def one() -> None:
        with recorder.step(next(numbers)):
            start_ns = time.time_ns()
            for microbatch in range(PER_STEP):
                begun = recorder.begin(OpType.FORWARD_COMPUTE, microbatch=microbatch)
                duration_ns = round(noise.gauss(60e6, 1.2e6))
                recorder.measured(begun, start_ns, duration_ns)
                start_ns += duration_ns + noise.randrange(100_000)
        recorder._journal.write()

    benchmark.pedantic(one, rounds=steps, iterations=1)
    recorder.close()
    (stream,) = streams_in(tmp_path)
    written = sum(path.stat().st_size for path in stream.rglob("*") if path.is_file())
    benchmark.extra_info["bytes_per_step"] = written / steps
    assert written / steps <= 1_200
