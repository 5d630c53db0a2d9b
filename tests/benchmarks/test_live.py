"""How long a worker takes for one more step of a live job, from stored files to its report.

Run by ``make bench``. Nothing here is asserted in seconds: machines are shared and noisy. The way
of a step through a server, its processes and REST is measured by `tests.load.live`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smon.store.database import Database
from smon.synth import causes
from smon.synth.scenario import Scenario, generate
from smon.trace.table import OpTable
from tests.service import database_url, sqlite
from tests.worker.feed import Store, make_store, of_steps
from tests.worker.test_live import follow

__all__ = ["database_url", "sqlite"]

#: (DP, PP, microbatches) of jobs with TP 8 and a slow worker.
SIZES = {
    "1024 GPUs": (16, 8, 16),
    "16384 GPUs": (128, 16, 64),
}

#: Steps that the worker knows, and those that come one by one.
BEFORE, MEASURED = 8, 4


@pytest.fixture(scope="module", params=list(SIZES))
def steps(request: pytest.FixtureRequest) -> OpTable:
    """The steps of a job, from before its worker becomes slow."""
    dp, pp, microbatches = SIZES[request.param]
    slow = (causes.slow_gpu(5, 2, 1.5),)
    return generate(
        Scenario(
            dp=dp,
            pp=pp,
            tp=8,
            microbatches=microbatches,
            steps=BEFORE + MEASURED + 1,
            causes=slow,
        )
    ).table


@pytest.fixture
def store(sqlite: Database, tmp_path: Path) -> Store:
    """A store on SQLite."""
    return make_store(sqlite, tmp_path)


def test_one_more_step(benchmark: Any, store: Store, steps: OpTable) -> None:  # noqa: ANN401
    """16,384 GPUs (766,208 ops a step) at most 2 s, what fixes would buy left out."""
    layout = Scenario(dp=int(steps.dp.max()) + 1, pp=int(steps.stage.max()) + 1, tp=8).layout
    stream, worker = store.stream(layout), store.worker()
    # Fixes are worked out after a step has its report.
    numbers = iter(range(BEFORE, BEFORE + MEASURED + 1))

    def come(*given: int) -> None:
        for number in given or (next(numbers),):
            store.send(stream, of_steps(steps, number), steps_done=number)
        store.clock.go_on(3)

    come(*range(BEFORE))
    follow(worker)
    benchmark.pedantic(follow, (worker,), setup=come, rounds=MEASURED, warmup_rounds=1)
    assert store.attempt().live_step == BEFORE + MEASURED
