"""How fast steps of very many collectives are analysed.

Run by ``make bench``. Time and memory must grow linearly with the collectives; nothing is asserted
in seconds.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from smon.collectives.report import analyze_collectives
from smon.report import ReportOptions
from smon.topology import Layout
from smon.trace.events import RankEvents
from smon.trace.meta import Job
from tests.collectives.builders import job_of

RANKS, STEPS = 8, 3


@pytest.mark.parametrize("collectives", [1_000, 10_000])
def test_analysing_steps_of_many_collectives(benchmark: BenchmarkFixture, collectives: int) -> None:
    """Eight ranks, three steps: ten times as many take ten times as long."""
    ranks: list[RankEvents] = job_of([[30.0] * RANKS] * STEPS, bulk=collectives)
    job = Job("many", Layout(dp=RANKS, pp=1))
    report = benchmark.pedantic(  # type: ignore[no-untyped-call]
        analyze_collectives, (ranks, job, ReportOptions((), None)), rounds=1
    )
    assert report.window.steps_used == STEPS
