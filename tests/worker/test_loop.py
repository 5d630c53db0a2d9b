from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from smon.commands import worker as command
from smon.config import PARENT_VARIABLE
from smon.errors import ConfigError, FencedError, StoreError
from smon.store import work
from smon.store.database import Database
from smon.store.models import Mode, Node, Result, Task, Window, WindowState, WorkState
from smon.store.objects import Objects
from smon.synth.scenario import Scenario, generate
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.worker.housekeeping import remove_strays
from smon.worker.leases import Leases
from smon.worker.loop import SOON_POLLS, SOONER, Worker
from tests.service import sqlite_url
from tests.waiting import wait_until
from tests.worker.feed import S, Store, make_store, of_steps, plain

ROOT = Path(__file__).resolve().parents[2]

#: Nothing here takes so long; what waits longer has failed.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def table() -> OpTable:
    """A tiny job."""
    return generate(Scenario(dp=2, pp=1, microbatches=2, steps=3)).table


def record(store: Store, table: OpTable, count: int, first: int = 0) -> None:
    """Windows that are ready: recorded jobs, numbered from `first` on."""
    from smon.topology import Layout

    for number in range(first, first + count):
        stream = store.stream(Layout(dp=2, pp=1), job=f"job-{number}", mode=Mode.RECORDED)
        store.send(stream, table, end=True)


# --- rounds -----------------------------------------------------------------------------------


def test_a_round_does_one_of_everything(store: Store, table: OpTable) -> None:
    """So that nobody waits for all windows; the round says whether there was work."""
    record(store, table, 3)
    worker = store.worker()
    assert worker.tick()
    states = Counter(window.state for window in store.all(Window))
    assert states == {WindowState.DONE: 1, WindowState.READY: 2}
    assert worker.drain() == 2
    assert not worker.tick()


def test_a_worker_says_that_it_is_alive(store: Store) -> None:
    """In a row of its own, renewed with every round of housekeeping."""
    worker = store.worker("w1")
    worker.tick()
    store.clock.go_on(31)
    worker.tick()
    (row,) = store.all(Node)
    assert (row.id, row.role, row.seen_ns) == ("w1", "worker", store.clock())
    assert row.seen_ns > row.started_ns


def test_a_live_job_whose_hosts_have_gone_is_over(store: Store) -> None:
    """With the next round of housekeeping after half an hour of silence."""
    store.stream(Layout(dp=2, pp=2))
    worker = store.worker()
    store.clock.go_on(1790)
    worker.tick()
    assert store.attempt().ended_ns is None
    store.clock.go_on(31)
    worker.tick()
    assert store.attempt().ended_ns == store.clock()


def test_what_is_done_is_counted(store: Store, table: OpTable) -> None:
    """In the registry that is given."""
    registry = CollectorRegistry()
    record(store, table, 2)
    Worker(
        store.settings,
        store.database,
        store.objects,
        name="w",
        clock=store.clock,
        registry=registry,
    ).drain()
    values = {
        (one.name, *one.labels.values()): one.value
        for family in registry.collect()
        for one in family.samples
    }
    assert values["smon_windows_total", "done"] == 2
    assert values["smon_steps_analyzed_total",] == 6
    assert values["smon_analysis_seconds_count", "window"] == 2


def test_files_that_a_dead_worker_left_are_removed(store: Store, table: OpTable) -> None:
    """After a day; those of results stay, however old."""
    record(store, table, 1)
    worker = store.worker()
    worker.drain()
    (row,) = store.all(Result)
    for path in ("results/job=1/stray.parquet", "tasks/stray.json.gz"):
        store.objects.put(path, b"x")
    now = time.time_ns()
    assert remove_strays(worker.service, now) == 0
    later = now + 90_000 * S
    assert remove_strays(worker.service, later) == 2
    assert [file.path for file in store.objects.list("results")] == [row.workers_path]


# --- stopping ---------------------------------------------------------------------------------


class Stuck(Objects):
    """Objects that keep a reader of events waiting until it is let go."""

    __slots__ = ("entered", "go")

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.entered, self.go = threading.Event(), threading.Event()

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """Wait, then read."""
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        with super().open(path) as file:
            yield file


@pytest.fixture
def stuck(store: Store, table: OpTable) -> Store:
    """A store with one window whose events take for ever to read."""
    record(store, table, 1)
    store.objects = Stuck(str(store.objects.local))
    return store


def running(worker: Worker) -> threading.Thread:
    """A worker in a thread."""
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return thread


def real(store: Store, **settings: Any) -> Worker:  # noqa: ANN401  # of Settings
    """A worker with the real clock."""
    chosen = replace(store.settings, poll_interval_s=0.02, **settings)
    return Worker(chosen, store.database, store.objects, name="real")


def test_a_worker_that_is_stopped_gives_back_what_it_has(stuck: Store) -> None:
    """Others take it over at once, and it writes nothing any more."""
    objects = stuck.objects
    assert isinstance(objects, Stuck)
    worker = real(stuck, stop_timeout_s=0.1)
    thread = running(worker)
    assert objects.entered.wait(PATIENCE_S)
    worker.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    window = stuck.window()
    assert (window.state, window.lease_ns, window.tries) == (WindowState.READY, 0, 0)
    objects.go.set()
    wait_until(lambda: not worker.leases.current(), "the analysis to end")
    assert stuck.all(Result) == []
    real(stuck).drain()
    assert stuck.window().state == WindowState.DONE


def test_a_worker_that_is_stopped_finishes_what_is_quick(stuck: Store) -> None:
    """Within `stop_timeout_s`."""
    objects = stuck.objects
    assert isinstance(objects, Stuck)
    worker = real(stuck, stop_timeout_s=PATIENCE_S)
    thread = running(worker)
    assert objects.entered.wait(PATIENCE_S)
    worker.stop()
    objects.go.set()
    thread.join(PATIENCE_S)
    assert stuck.window().state == WindowState.DONE


def test_a_lease_is_renewed_while_the_work_goes_on(stuck: Store) -> None:
    """A long analysis is not taken for a dead worker."""
    objects = stuck.objects
    assert isinstance(objects, Stuck)
    worker = real(stuck, lease_s=3.0)
    thread = running(worker)
    assert objects.entered.wait(PATIENCE_S)
    first = stuck.window().lease_ns
    wait_until(lambda: stuck.window().lease_ns > first, "the lease to be renewed")
    objects.go.set()
    worker.stop()
    thread.join(PATIENCE_S)
    assert [row.fence for row in stuck.all(Result)] == [1]


def test_work_whose_lease_is_lost_stops_by_itself(store: Store, table: OpTable) -> None:
    """It need not be done to the end."""
    record(store, table, 1)
    worker = store.worker()
    worker.assembly.run(store.clock())
    terms = work.Terms(30.0, 3)
    with store.database.write() as session:
        claim = work.claim(session, Window, "a", store.clock(), terms)
    store.clock.go_on(31)
    with store.database.write() as session:
        work.claim(session, Window, "b", store.clock(), terms)
    assert claim is not None
    leases = Leases(worker.service)
    with leases.holding(claim) as lease:
        lease.check("simulate", 1, 2)
        leases.renew()
        with pytest.raises(FencedError):
            lease.check()
    assert leases.current() == []


# --- a database that is away ------------------------------------------------------------------


class Away(Database):
    """A database that cannot be reached for some time."""

    __slots__ = ("left",)

    def __init__(self, url: str, left: int) -> None:
        super().__init__(url)
        self.left = left

    @contextmanager
    def _session(self, *, immediate: bool) -> Iterator[Session]:
        if self.left:
            self.left -= 1
            raise StoreError("the database cannot be used: it is away")
        with super()._session(immediate=immediate) as session:
            yield session


def test_a_database_that_is_away_is_waited_for(tmp_path: Path, table: OpTable) -> None:
    """And then everything is done; the worker does not end."""
    store = make_store(Database(sqlite_url(tmp_path / "sql")), tmp_path)
    record(store, table, 1)
    away = Away(str(store.database.engine.url), 3)
    worker = Worker(
        replace(store.settings, poll_interval_s=0.02), away, store.objects, name="patient"
    )
    thread = running(worker)
    wait_until(lambda: store.window().state == WindowState.DONE, "the window to be done")
    worker.stop()
    thread.join(PATIENCE_S)
    away.close()
    store.database.close()


# --- processes --------------------------------------------------------------------------------


def start(store: Store, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """``smon worker`` on a store."""
    url = store.database.engine.url.render_as_string(hide_password=False)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SMON_")},
        "SMON_DATABASE_URL": url,
        "SMON_TRACE_URL": str(store.objects.local),
        "SMON_DATA_DIR": str(store.settings.data_dir),
        "SMON_LEASE_S": "1",
        "SMON_POLL_INTERVAL_S": "0.05",
        **variables,
    }
    script = (
        "import argparse, sys\n"
        "from smon.commands import worker\n"
        "parser = argparse.ArgumentParser()\n"
        "worker.add(parser.add_subparsers())\n"
        "parsed = parser.parse_args(sys.argv[1:])\n"
        "sys.exit(parsed.run(parsed))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, "worker", *arguments], env=environ, cwd=ROOT
    )


@contextmanager
def started(store: Store, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that is gone afterwards."""
    process = start(store, *arguments, **variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_workers_analyse_every_window_once_though_one_is_killed(
    both: Store, table: OpTable
) -> None:
    """Thirty windows, two processes; one is killed while it has a window."""
    total = 30
    record(both, table, total)

    def held_by(name: str) -> bool:
        with both.database.read() as session:
            query = select(func.count()).where(
                Window.owner == name, Window.state == WindowState.CLAIMED
            )
            # A worker says who it is beside its first window, not before it.
            return bool(session.scalar(query)) and session.get(Node, name) is not None

    def done() -> bool:
        with both.database.read() as session:
            query = select(func.count()).where(Window.state == WindowState.DONE)
            return session.scalar(query) == total

    def caught() -> bool:
        nonlocal total
        if done():
            # It was too quick to be seen at work.
            record(both, table, 30, first=total)
            total += 30
        return held_by("victim")

    with started(both, "--name", "victim") as victim:
        wait_until(caught, "the first worker to have a window")
        with started(both, "--name", "heir") as heir:
            victim.kill()
            victim.wait()
            wait_until(done, "all windows to be done")
            heir.send_signal(signal.SIGTERM)
            assert heir.wait(PATIENCE_S) == 0
    assert {node.id for node in both.all(Node)} == {"victim", "heir"}
    results = both.all(Result)
    assert len(results) == total
    assert len({result.window_id for result in results}) == total
    assert {result.verdict for result in results} == {"none"}
    paths = {file.path for file in both.objects.list("results")}
    assert {result.workers_path for result in results} <= paths


def test_once_does_what_is_ready_and_ends(store: Store, table: OpTable) -> None:
    """Exit code 0; nothing is left to do."""
    record(store, table, 2)
    with started(store, "--once") as process:
        assert process.wait(PATIENCE_S) == 0
    assert {window.state for window in store.all(Window)} == {WindowState.DONE}


def test_a_worker_beside_a_server_goes_with_it(store: Store) -> None:
    """If the server is killed, nobody else would end it."""
    with started(store, **{PARENT_VARIABLE: "1"}) as process:
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(process.pid).ppid() != 1
        assert process.wait(PATIENCE_S) == 0


def test_names_that_cannot_be_are_refused() -> None:
    """Before anything is opened."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    for name in ("", "x" * 200, "a\nb"):
        with pytest.raises(ConfigError, match="name"):
            command._name(parser.parse_args(["worker", "--name", name]).name)
    assert command._name(None) != command._name(None)


def test_whoever_waits_for_a_timeline_does_not_wait_for_all_windows(
    store: Store, table: OpTable
) -> None:
    """Tasks are done between windows."""
    record(store, table, 4)
    worker = store.worker()
    worker.tick()

    def ask(session: Session) -> None:
        plain(
            session,
            Task,
            tenant_id=store.tenant_id,
            key="k",
            kind="timeline",
            options={"window_id": store.all(Window)[0].id, "kind": "actual"},
            state=WorkState.QUEUED.value,
            created_ns=1,
        )

    store.write(ask)
    worker.tick()
    assert [task.state for task in store.all(Task)] == ["done"]
    assert WindowState.READY in {window.state for window in store.all(Window)}


def test_the_live_loop_does_not_wait_for_a_long_window(stuck: Store, table: OpTable) -> None:
    """A step of a running job is analysed while a window takes for ever."""
    objects = stuck.objects
    assert isinstance(objects, Stuck)
    worker = real(stuck, stop_timeout_s=0.1)
    thread = running(worker)
    assert objects.entered.wait(PATIENCE_S)
    live = stuck.stream(stuck_layout(), job="live")
    stuck.send(live, of_steps(table, 0), steps_done=0)

    def ready() -> bool:
        with stuck.database.read() as session:
            from smon.store.models import Attempt

            query = select(Attempt.ready_step).where(Attempt.id == live.attempt_id)
            return session.scalar(query) == 0

    wait_until(ready, "the step to be ready")
    worker.stop()
    objects.go.set()
    thread.join(PATIENCE_S)


def stuck_layout() -> Any:  # noqa: ANN401  # Layout
    """The layout of the tiny job."""
    from smon.topology import Layout

    return Layout(dp=2, pp=1)


def test_steps_of_a_running_job_are_looked_for_more_often(store: Store, table: OpTable) -> None:
    """Until nothing has come for a while; what is no live job has time."""
    worker = store.worker()
    calm = store.settings.poll_interval_s

    def pauses() -> tuple[float, float]:
        return worker._idle_s(worker._live_round), worker._idle_s(worker._rest_round)

    assert pauses() == (calm, calm)
    stream = store.stream(Layout(dp=2, pp=1), job="live")
    store.send(stream, of_steps(table, 0), steps_done=0)
    store.clock.go_on(3)
    while worker._live_round():
        pass
    assert pauses() == (calm / SOONER, calm)
    store.clock.go_on(calm * SOON_POLLS + 1)
    assert pauses() == (calm, calm)
