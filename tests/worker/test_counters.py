"""Streams of counters: they make a cause surer, and nobody waits for them."""

from __future__ import annotations

import json

import pytest

from smon.store.models import WindowState
from smon.synth.scenario import Scenario, generate
from smon.trace.table import OpTable
from tests.worker.feed import Store
from tests.worker.test_assembly import Job, make_job

RANKS = 4


@pytest.fixture(scope="module")
def table() -> OpTable:
    """Ops of 2 × 2 workers, ten steps."""
    return generate(Scenario(dp=2, pp=2, microbatches=2, steps=10)).table


@pytest.fixture
def job(store: Store, table: OpTable) -> Job:
    """A live job with windows of four steps."""
    return make_job(store, table)


def counters(step: int, value: float) -> bytes:
    """Side evidence as an agent sends it."""
    columns = {
        "step": [step] * RANKS,
        "rank": list(range(RANKS)),
        "name": ["host_cpu_ratio"] * RANKS,
        "value": [value] * RANKS,
    }
    return json.dumps({"schema": "smon.context/1", "counters": columns}).encode()


def test_no_step_waits_for_counters(job: Job) -> None:
    """An agent that reads every ten seconds does not hold up steps of one."""
    job.store.stream(job.layout, key="c", ranks=[], source="counters", window_steps=4)
    job.all_send(0)
    assert job.ready_step() == 0


@pytest.mark.parametrize("ranks", [[], [0, 1, 2, 3]])
@pytest.mark.parametrize("end", [False, True])
def test_counters_say_nothing_of_how_far_a_rank_has_come(
    job: Job, ranks: list[int], *, end: bool
) -> None:
    """Neither that it has delivered a step, nor that it has nothing more to deliver."""
    stream = job.store.stream(job.layout, key="c", ranks=ranks, source="counters", window_steps=4)
    job.all_send(0)
    job.all_send(1, but=(3,))
    job.store.send(stream, context=counters(0, 0.5), end=end)
    assert job.ready_step() == 0


def test_counters_do_not_make_a_silent_rank_look_alive(job: Job) -> None:
    """Its host is read on; its process may hang."""
    stream = job.store.stream(job.layout, key="c", ranks=[3], source="counters", window_steps=4)
    job.all_send(0)
    for step in range(1, 8):
        job.all_send(step, but=(3,))
        job.store.send(stream, context=counters(step, 0.5))
        job.store.clock.go_on(2.0)
        job.ready_step()
    assert job.ready_step() == 7


def test_a_window_is_complete_without_the_end_of_the_counters(job: Job) -> None:
    """And the attempt ends when they end, too."""
    stream = job.store.stream(job.layout, key="c", ranks=[], source="counters", window_steps=4)
    for step in range(4):
        job.all_send(step)
    assert job.state(0) == WindowState.READY
    for each in job.streams:
        job.store.send(each, end=True)
    assert job.store.attempt().ended_ns is None
    job.store.send(stream, context=counters(3, 0.5), end=True)
    assert job.store.attempt().ended_ns is not None
