"""Housekeeping of a worker whose clock is set, or that has just started."""

from __future__ import annotations

import pytest

from smon.store.models import EventFile, Mode, Node
from smon.store.streams import StreamInfo, heartbeat
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.topology import Layout
from smon.worker.housekeeping import HEARD_S, HOLD_S
from tests.worker.feed import Store

DAY_S = 86_400.0


def window(store: Store) -> None:
    """One that can be analysed."""
    table = generate(Scenario(dp=2, pp=1, microbatches=2, steps=3)).table
    store.send(store.stream(Layout(dp=2, pp=1), mode=Mode.RECORDED), table, end=True)


def beat(store: Store, stream: StreamInfo) -> None:
    """The agent says that it is there."""
    with store.database.write() as session:
        assert heartbeat(session, store.tenant_id, stream.id, {}, None, store.clock())


@pytest.mark.parametrize("jump_s", [3600.0, 40 * DAY_S])
def test_a_clock_that_was_set_ends_no_live_job(store: Store, jump_s: float) -> None:
    """Its agents are heard by the new time before anybody is given up."""
    stream = store.stream(Layout(dp=2, pp=2))
    worker = store.worker()
    store.clock.go_on(400)
    worker.tick()
    store.clock.set(jump_s)
    worker.tick()
    beat(store, stream)
    store.clock.go_on(HEARD_S + 1)
    worker.tick()
    assert store.attempt().ended_ns is None


def test_a_job_that_is_silent_after_a_clock_was_set_is_over_in_the_end(store: Store) -> None:
    """Nobody speaks for it by the new time either."""
    store.stream(Layout(dp=2, pp=2))
    worker = store.worker()
    worker.tick()
    store.clock.set(3600.0)
    store.clock.go_on(31)
    worker.tick()
    assert store.attempt().ended_ns is None
    store.clock.go_on(HEARD_S)
    worker.tick()
    assert store.attempt().ended_ns is not None


def test_a_worker_that_has_just_started_ends_no_job(store: Store) -> None:
    """If all of SMon was away for an hour, agents need a moment to be heard."""
    stream = store.stream(Layout(dp=2, pp=2))
    store.clock.go_on(3600)
    worker = store.worker()
    worker.tick()
    assert store.attempt().ended_ns is None
    beat(store, stream)
    store.clock.go_on(HEARD_S + 1)
    worker.tick()
    assert store.attempt().ended_ns is None


def test_a_clock_that_was_set_and_put_right_removes_nothing(store: Store) -> None:
    """Forty days ahead for half an hour: files of a retention of thirty days are still there."""
    window(store)
    worker = store.worker()
    worker.drain()
    before = [file.path for file in store.all(EventFile)]
    worker.tick()
    store.clock.set(40 * DAY_S)
    for _ in range(10):
        store.clock.go_on(180)
        worker.tick()
    store.clock.set(-40 * DAY_S)
    store.clock.go_on(HOLD_S + 31)
    worker.tick()
    assert [file.path for file in store.all(EventFile)] == before


def test_a_clock_that_stays_where_it_was_set_holds(store: Store) -> None:
    """After an hour, ages count by it."""
    window(store)
    worker = store.worker()
    worker.drain()
    worker.tick()
    store.clock.set(40 * DAY_S)
    store.clock.go_on(31)
    worker.tick()
    assert store.all(EventFile)
    store.clock.go_on(HOLD_S + 1)
    worker.tick()
    assert not store.all(EventFile)


def test_a_clock_that_was_set_back_holds_nothing_up(store: Store) -> None:
    """Housekeeping goes on, and says that the worker is alive."""
    worker = store.worker()
    worker.tick()
    store.clock.set(-3600.0)
    store.clock.go_on(31)
    worker.tick()
    (row,) = store.all(Node)
    assert row.seen_ns == store.clock()
