from __future__ import annotations

import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from smon.config import Settings
from smon.errors import ConfigError, FencedError, TaskLostError, TraceError
from smon.executors import Executor, Here
from smon.executors.pool import Pool
from smon.store import work
from smon.store.models import Mode, Result, Window, WindowState
from smon.store.results import unpacked
from smon.store.work import Claim
from smon.synth.scenario import Scenario, generate
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.worker.elsewhere import (
    ClaimCheck,
    Outcome,
    Reference,
    analyse_elsewhere,
    settings_elsewhere,
)
from smon.worker.flight import Flight
from smon.worker.loop import Worker
from smon.worker.service import Counts
from tests.waiting import wait_until
from tests.worker.feed import Store
from tests.worker.test_loop import started

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def table() -> OpTable:
    """A tiny job."""
    return generate(Scenario(dp=2, pp=1, microbatches=2, steps=3)).table


@pytest.fixture
def own(store: Store) -> Store:
    """A store whose settings name its database and its files."""
    url = store.database.engine.url.render_as_string(hide_password=False)
    root = str(store.objects.local)
    store.settings = replace(store.settings, database_url=url, trace_url=root)
    return store


def record(store: Store, table: OpTable, count: int) -> None:
    """Windows that are ready: recorded jobs."""
    for number in range(count):
        stream = store.stream(Layout(dp=2, pp=1), job=f"job-{number}", mode=Mode.RECORDED)
        store.send(stream, table, end=True)


def claimed(store: Store, worker: Worker) -> Claim:
    """The next window, claimed."""
    worker.assembly.run(store.clock())
    with store.database.write() as session:
        claim = work.claim(session, Window, "worker", store.clock(), worker.service.terms)
    assert claim is not None
    return claim


def reference_of(store: Store, claim: Claim) -> Reference:
    """What goes elsewhere."""
    settings = settings_elsewhere(store.settings)
    return Reference(settings, claim.id, claim.owner, claim.fence, claim.tries)


class Hand:
    """An executor whose work is done when the test says so."""

    def __init__(self, parallel: int = 2) -> None:
        self.parallel = parallel
        self.sent: list[tuple[Reference, Future[Outcome]]] = []

    def submit(self, do: Callable[[Any], Any], argument: Any) -> Future[Any]:  # noqa: ANN401
        """Keep it."""
        future: Future[Outcome] = Future()
        self.sent.append((argument, future))
        return future

    def close(self) -> None:
        """Nothing."""


OUTCOME = Outcome(WindowState.DONE, Counts(0.0, 0.0, {}, {}))


def flying(store: Store, executor: Executor, **settings: Any) -> tuple[Worker, Flight]:  # noqa: ANN401
    """A worker whose windows fly, and the part of it that sends them off."""
    worker = store.worker(poll_interval_s=0.01, **settings)
    worker.analyse_with(executor)
    assert worker._flight is not None
    worker.assembly.run(store.clock())
    return worker, worker._flight


# --- what travels -----------------------------------------------------------------------------


def test_a_reference_names_places_in_full_and_no_secret_address(tmp_path: Path) -> None:
    """Elsewhere there is another working folder, and nobody there sends messages."""
    given = Settings(
        data_dir=Path("here"),
        trace_url="objects",
        notify_slack_url="https://hooks.example.com/secret",
    )
    sent = settings_elsewhere(given)
    assert sent.database == f"sqlite:///{Path.cwd()}/here/smon.db"
    assert sent.traces == f"{Path.cwd()}/objects"
    assert sent.data_dir == Path.cwd() / "here"
    assert b"secret" not in pickle.dumps(sent)
    shared = replace(given, trace_url="s3://bucket/smon")
    assert settings_elsewhere(shared).traces == "s3://bucket/smon"


def test_a_reference_is_small(own: Store, table: OpTable) -> None:
    """It refers to what is analysed, and has nothing of it."""
    record(own, table, 1)
    reference = reference_of(own, claimed(own, own.worker()))
    assert len(pickle.dumps(reference)) < 4000
    assert pickle.loads(pickle.dumps(reference)) == reference  # noqa: S301  # made just now


# --- done elsewhere ---------------------------------------------------------------------------


def test_a_window_done_elsewhere_has_the_same_report(own: Store, table: OpTable) -> None:
    """Byte for byte, under the fence of the claim."""
    record(own, table, 2)
    worker = own.worker()
    outcome = analyse_elsewhere(reference_of(own, claimed(own, worker)))
    assert outcome.state is WindowState.DONE
    assert outcome.counts == Counts(
        rows=float(len(table)), steps=3.0, skipped={}, seconds=outcome.counts.seconds
    )
    assert set(outcome.counts.seconds) == {"window"}
    worker.drain()
    assert [row.fence for row in own.all(Result)] == [1, 1]
    with own.database.read() as session:
        reports = [unpacked(each) for each in session.scalars(select(Result.report))]
    assert len(reports) == 2
    assert len({report.replace(b"job-1", b"job-0") for report in reports}) == 1


def test_another_version_of_smon_analyses_nothing(own: Store, table: OpTable) -> None:
    """Its reports would count as those of this version."""
    record(own, table, 1)
    reference = replace(reference_of(own, claimed(own, own.worker())), code_version="0.0.1+1")
    with pytest.raises(ConfigError, match=r"expected SMon 0\.0\.1\+1"):
        analyse_elsewhere(reference)
    assert own.all(Result) == []


def test_who_has_lost_the_claim_writes_nothing(own: Store, table: OpTable) -> None:
    """As in the worker itself."""
    record(own, table, 1)
    reference = reference_of(own, claimed(own, own.worker()))
    with pytest.raises(FencedError):
        analyse_elsewhere(replace(reference, fence=reference.fence - 1))
    assert own.all(Result) == []


def test_a_long_analysis_looks_whether_its_claim_still_holds(own: Store, table: OpTable) -> None:
    """As often as leases are renewed, not at every step of the work."""
    record(own, table, 1)
    worker, now = own.worker(lease_s=30.0), [0.0]
    claim = claimed(own, worker)
    check = ClaimCheck(worker.service, claim, lambda: now[0])
    now[0] = 10.0
    check("simulate", 1, 2)
    with own.database.write() as session:
        work.release(session, claim, not_before_ns=0, counts=False)
    now[0] = 19.0
    check("simulate", 2, 2)
    now[0] = 20.0
    with pytest.raises(FencedError):
        check()


# --- a worker that sends windows off ----------------------------------------------------------


def test_all_windows_are_analysed_in_other_processes(own: Store, table: OpTable) -> None:
    """Each once; what they count is counted by the worker."""
    record(own, table, 5)
    registry = CollectorRegistry()
    worker = Worker(
        own.settings, own.database, own.objects, name="w", clock=own.clock, registry=registry
    )
    pool = Pool(2)
    try:
        worker.analyse_with(pool)
        worker.drain()
    finally:
        pool.close()
    assert {window.state for window in own.all(Window)} == {WindowState.DONE}
    assert [result.fence for result in own.all(Result)] == [1] * 5
    assert registry.get_sample_value("smon_windows_total", {"state": "done"}) == 5
    assert registry.get_sample_value("smon_steps_analyzed_total") == 15
    assert registry.get_sample_value("smon_analysis_rows_read_total") == 5 * len(table)
    assert registry.get_sample_value("smon_analysis_seconds_count", {"kind": "window"}) == 5
    assert worker.leases.current() == []


def test_no_more_windows_are_claimed_than_are_worked_on(own: Store, table: OpTable) -> None:
    """The rest is left to other workers."""
    record(own, table, 3)
    hand = Hand(parallel=2)
    worker, flight = flying(own, hand)
    assert flight.round()
    assert len(hand.sent) == len(worker.leases.current()) == 2
    hand.sent[0][1].set_result(OUTCOME)
    assert flight.round()
    assert flight.round()
    assert len(hand.sent) == 3
    states = sorted(window.state for window in own.all(Window))
    assert states == [WindowState.CLAIMED] * 3  # the hand has written nothing


def test_leases_of_what_is_away_are_renewed(own: Store, table: OpTable) -> None:
    """By the worker that has claimed it."""
    record(own, table, 1)
    hand = Hand()
    worker, flight = flying(own, hand)
    flight.round()
    before = own.window().lease_ns
    own.clock.go_on(10)
    worker.leases.renew()
    assert own.window().lease_ns == before + 10 * 10**9


@pytest.mark.parametrize(
    "error, counts",
    [
        (TaskLostError("the node is gone"), True),
        (ConfigError("smon is not there"), False),
        (TraceError("nobody expected it"), True),
    ],
)
def test_what_comes_back_without_a_result_is_done_again(
    own: Store, table: OpTable, error: Exception, *, counts: bool
) -> None:
    """A lost process is a try; a machine that is not set up costs none."""
    record(own, table, 1)
    hand = Hand()
    worker, flight = flying(own, hand)
    flight.round()
    hand.sent[0][1].set_exception(error)
    flight.round()
    window = own.window()
    assert (window.state, window.tries) == (WindowState.READY, int(counts))
    assert worker.leases.current() == []
    own.clock.go_on(6)
    flight.round()
    assert hand.sent[1][0].fence == hand.sent[0][0].fence + 1


def test_a_window_that_ends_every_process_is_given_up(own: Store, table: OpTable) -> None:
    """After as many tries as any other; the reason is in the table."""
    record(own, table, 1)
    hand = Hand()
    _, flight = flying(own, hand, max_tries=2)
    for _ in range(2):
        flight.round()
        hand.sent[-1][1].set_exception(TaskLostError("the process ended"))
        flight.round()
        own.clock.go_on(5)
    window = own.window()
    assert (window.state, window.reason) == (
        WindowState.FAILED,
        "given up: the process ended",
    )


def test_a_window_that_was_written_before_its_process_ended_stays(
    own: Store, table: OpTable, caplog: pytest.LogCaptureFixture
) -> None:
    """The try counts for nothing then."""
    record(own, table, 1)
    hand = Hand()
    _, flight = flying(own, hand)
    flight.round()
    reference, future = hand.sent[0]
    analyse_elsewhere(reference)
    future.set_exception(TaskLostError("the node is gone"))
    with caplog.at_level(logging.ERROR):
        flight.round()
    assert own.window().state == WindowState.DONE
    assert not caplog.records


def test_an_executor_that_takes_nothing_costs_a_try(own: Store, table: OpTable) -> None:
    """And not the worker."""
    record(own, table, 1)

    class Broken(Here):
        """Takes nothing."""

        def submit(self, do: object, argument: object) -> Future[Any]:
            """Raise."""
            raise RuntimeError("closed")

    _, flight = flying(own, Broken())
    assert flight.round()
    assert own.window().state == WindowState.READY


@pytest.fixture
def stopped(own: Store, table: OpTable) -> Iterator[Callable[..., tuple[Worker, Hand]]]:
    """A worker that runs until it has sent a window off, and is then told to stop."""
    threads = []

    def run(**settings: Any) -> tuple[Worker, Hand]:  # noqa: ANN401  # of Settings
        record(own, table, 1)
        hand = Hand()
        worker = own.worker(poll_interval_s=0.01, **settings)
        worker.analyse_with(hand)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        threads.append(thread)
        wait_until(lambda: hand.sent, "a window to be sent off")
        worker.stop()
        return worker, hand

    yield run
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_worker_that_stops_waits_for_what_is_away(
    own: Store, stopped: Callable[..., tuple[Worker, Hand]]
) -> None:
    """As long as it may."""
    worker, hand = stopped(stop_timeout_s=PATIENCE_S)
    reference, future = hand.sent[0]
    future.set_result(analyse_elsewhere(reference))
    wait_until(lambda: not worker.leases.current(), "the window to be seen to")
    assert own.window().state == WindowState.DONE


def test_a_worker_that_stops_gives_back_what_is_away_for_longer(
    own: Store, stopped: Callable[..., tuple[Worker, Hand]]
) -> None:
    """Others take it over at once; what comes of the first try is not written."""
    _, hand = stopped(stop_timeout_s=0.1)
    wait_until(lambda: own.window().state == WindowState.READY, "the window to be given back")
    assert (own.window().lease_ns, own.window().tries) == (0, 0)
    with pytest.raises(FencedError):
        analyse_elsewhere(hand.sent[0][0])
    assert own.all(Result) == []


def test_a_worker_with_processes_of_its_own_survives_the_end_of_one(
    both: Store, table: OpTable
) -> None:
    """All windows are analysed, each once; with the worker all its processes end."""
    record(both, table, 8)

    def done() -> int:
        return sum(window.state == WindowState.DONE for window in both.all(Window))

    with started(both, "--parallel", "2") as process:
        worker = psutil.Process(process.pid)
        wait_until(done, "a first result")
        analysing = [child for child in worker.children() if "spawn_main" in str(child.cmdline())]
        analysing[0].kill()
        wait_until(lambda: done() == 8, "all windows to be done")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    _, alive = psutil.wait_procs(analysing, PATIENCE_S)
    assert not alive
    assert len(both.all(Result)) == 8
