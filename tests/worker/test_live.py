from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from smon.errors import FencedError, StoreError
from smon.store import windows as table_of
from smon.store.compaction import compact
from smon.store.models import (
    Attempt,
    EventFile,
    Finding,
    FindingEvent,
    StepResult,
    Window,
    WindowState,
)
from smon.store.results import unpacked
from smon.store.streams import StreamInfo
from smon.synth import causes
from smon.synth.faults import SlowCompute, Warmup
from smon.synth.scenario import Scenario, generate
from smon.synth.timing import Noise
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.worker import live
from smon.worker.live import FORGET_S, PLAN_STEPS, Live
from smon.worker.loop import Worker
from smon.worker.material import starts_of
from smon.worker.trailing import MIN_STEPS, Trailing, most_steps
from tests.worker.feed import Store, of_steps, one_after_another, renumbered

LAYOUT = Layout(dp=4, pp=2)
NOISE = Noise(compute_ratio=0.01, communication_ratio=0.02, launch_delay_s=0.0005)


def plain_job(steps: int = 12, **fields: Any) -> OpTable:  # noqa: ANN401  # of Scenario
    """A healthy job with the noise of real ones."""
    given = {"dp": 4, "pp": 2, "microbatches": 4, "steps": steps, "noise": NOISE}
    return generate(Scenario(**{**given, **fields})).table


@pytest.fixture(scope="module")
def healthy() -> OpTable:
    """Twelve healthy steps."""
    return plain_job()


@pytest.fixture(scope="module")
def slow() -> OpTable:
    """The same steps with one GPU at two thirds of its speed."""
    return plain_job(faults=(SlowCompute(1, 2, 1.5, 1.5),))


def spell(healthy: OpTable, slow: OpTable, first: int, last: int, steps: int) -> OpTable:
    """A job that is slow from one step to another."""
    return one_after_another(
        renumbered(of_steps(slow if first <= step <= last else healthy, step % 12), step)
        for step in range(steps)
    )


class Running:
    """A live job that goes on step by step, and a worker that follows it."""

    def __init__(
        self,
        store: Store,
        table: OpTable,
        name: str = "job",
        **settings: Any,  # noqa: ANN401
    ) -> None:
        self.store = store
        self.table = table
        self.worker = store.worker(**settings)
        self.stream = store.stream(LAYOUT, job=name, window_steps=40)

    def step(self, *numbers: int, worker: Worker | None = None) -> None:
        """Steps come, and are analysed."""
        for number in numbers:
            self.store.send(self.stream, of_steps(self.table, number), steps_done=number)
        self.store.clock.go_on(3)
        follow(worker or self.worker)

    def run(self, numbers: Iterable[int]) -> None:
        """One after the other."""
        for number in numbers:
            self.step(number)

    def findings(self) -> list[Finding]:
        """All findings of the job, oldest first."""
        mine = [one for one in self.store.all(Finding) if one.job_id == self.stream.job_id]
        return sorted(mine, key=lambda row: row.opened_ns)

    def report(self) -> dict[str, Any]:
        """The latest report of the running diagnosis."""
        with self.store.database.read() as session:
            mine = select(Attempt.live_report).where(Attempt.id == self.stream.attempt_id)
            packed = session.scalars(mine).one()
        assert packed is not None
        found: dict[str, Any] = json.loads(unpacked(packed))
        return found


def follow(worker: Worker) -> None:
    """All that is due."""
    while worker._live_round():
        pass


# --- found and cleared ------------------------------------------------------------------------


def test_a_straggler_is_found_within_a_few_steps_and_clears_when_it_is_over(
    store: Store, healthy: OpTable, slow: OpTable
) -> None:
    """Slow from step 12 to 25: found by step 16, with its onset; over by step 33."""
    job = Running(store, spell(healthy, slow, 12, 25, 36), live_steps=16)
    opened = cleared = None
    for step in range(36):
        job.step(step)
        states = [row.state for row in job.findings()]
        assert len(states) <= 1
        opened = step if states == ["open"] and opened is None else opened
        cleared = step if states == ["cleared"] and cleared is None else cleared
    (row,) = job.findings()
    assert (row.cause, row.rank, row.dp, row.stage) == ("slow_gpu", 6, 2, 1)
    assert opened is not None
    assert 12 < opened <= 16
    assert row.opened_step == opened
    assert row.onset_step == 12
    assert cleared is not None
    assert 26 < cleared <= 33
    events = [event.event for event in job.store.all(FindingEvent)]
    assert [event for event in events if event != "severity"] == ["opened", "cleared"]


def test_a_straggler_from_the_beginning_is_found_with_the_first_steps(
    store: Store, slow: OpTable
) -> None:
    """Two steps are enough."""
    job = Running(store, slow)
    job.step(0)
    assert job.report()["verdict"] == "insufficient_data"
    assert job.findings() == []
    job.step(1)
    assert [row.cause for row in job.findings()] == ["slow_gpu"]
    assert job.report()["verdict"] == "straggler"


def test_a_healthy_job_has_no_findings(store: Store, healthy: OpTable) -> None:
    """In no step of thirty, whether analysed one by one or in pairs."""
    job = Running(store, spell(healthy, healthy, 0, 0, 30))
    job.run(range(10))
    for step in range(10, 30, 2):
        job.step(step, step + 1)
    assert job.findings() == []
    assert job.report()["verdict"] == "none"


def test_a_weak_straggler_is_found_by_the_long_window(store: Store) -> None:
    """It takes many steps to see 4 %."""
    weak = plain_job(faults=(SlowCompute(1, 2, 1.04, 1.04),))
    job = Running(store, spell(weak, weak, 0, 0, 24))
    for first in range(0, 24, 4):
        job.step(*range(first, first + 4))
    (row,) = job.findings()
    assert (row.cause, row.rank, row.state) == ("slow_gpu", 6, "open")


def test_a_hang_is_found_although_no_step_ends_any_more(store: Store) -> None:
    """After `step_timeout_s` of silence."""
    hung = generate(
        Scenario(
            dp=4, pp=2, microbatches=4, steps=8, noise=NOISE, causes=(causes.hang(2, 1, 7, 2),)
        )
    )
    job = Running(store, hung.table)
    job.run(range(7))
    store.send(job.stream, of_steps(hung.table, 7))
    follow(job.worker)
    assert job.findings() == []
    store.clock.go_on(20)
    follow(job.worker)
    (row,) = job.findings()
    assert (row.cause, row.severity, row.state) == ("hang", "critical", "open")


def test_warm_up_is_said_of_the_start_only(store: Store) -> None:
    """Later, slow first steps of a trailing window are no warm-up."""
    warm = plain_job(24, causes=(causes.warmup(Warmup()),))
    job = Running(store, warm, live_steps=8)
    job.run(range(24))
    steps = {row.step: row.skipped for row in store.all(StepResult)}
    assert "warm-up" in str(steps[0])
    assert all(reason is None for step, reason in steps.items() if step > 3)


def test_no_finding_is_open_once_the_job_is_over(store: Store, slow: OpTable) -> None:
    """It ends with the job, as it was."""
    job = Running(store, slow)
    job.run(range(6))
    store.send(job.stream, end=True)
    store.clock.go_on(6)
    follow(job.worker)
    (row,) = job.findings()
    assert (row.state, row.last_step, row.cleared_step) == ("cleared", 5, None)
    assert [event.event for event in store.all(FindingEvent)] == ["opened", "ended"]


def test_windows_do_not_touch_the_findings_of_a_running_job(store: Store, slow: OpTable) -> None:
    """What is wrong now is said by the running diagnosis alone."""
    job = Running(store, slow)
    job.stream = replace(job.stream, window_steps=40)
    job.run(range(6))
    before = [(row.id, row.last_step) for row in job.findings()]
    store.write(
        lambda session: session.execute(update(Window).values(state=WindowState.READY.value))
    )
    assert job.worker._rest_round()
    assert store.window().state == WindowState.DONE
    assert [(row.id, row.last_step) for row in job.findings()] == before


# --- what is written --------------------------------------------------------------------------


def test_every_step_has_a_row_as_soon_as_it_is_analysed(store: Store, healthy: OpTable) -> None:
    """With its time, if the trace has unix time."""
    job = Running(store, healthy)
    job.run(range(4))
    rows = {row.step: row for row in store.all(StepResult)}
    assert sorted(rows) == [0, 1, 2, 3]
    assert all(row.recorded_s > 0 and row.slowdown >= 1 for row in rows.values())
    assert rows[3].start_ns == of_steps(healthy, 3).start_ns.min()
    assert store.attempt().live_step == 3
    assert store.attempt().live_analysed_ns == store.clock()


def test_steps_that_became_ready_together_are_analysed_together(
    store: Store, healthy: OpTable
) -> None:
    """Each has its row."""
    job = Running(store, healthy)
    job.step(0, 1)
    analyses = _analyses(job.worker)
    job.step(2, 3, 4, 5)
    assert _analyses(job.worker) == analyses + 1
    assert [row.step for row in store.all(StepResult)] == [0, 1, 2, 3, 4, 5]


def _analyses(worker: Worker) -> float:
    (family,) = worker.service.metrics.seconds.collect()
    return sum(one.value for one in family.samples if one.name.endswith("_count"))


def test_ranks_that_contradict_the_layout_stop_nothing(store: Store, healthy: OpTable) -> None:
    """The report says what is wrong; the next steps may be right."""
    job = Running(store, healthy)
    job.run(range(2))
    wrong = replace(of_steps(healthy, 2), rank=of_steps(healthy, 2).rank + 1)
    store.send(job.stream, wrong, steps_done=2)
    follow(job.worker)
    assert store.attempt().live_step == 2
    assert "correct the meta file" in " ".join(job.report()["quality"]["notes"])


# --- one worker at a time ---------------------------------------------------------------------


def test_an_attempt_is_followed_by_one_worker(both: Store, healthy: OpTable) -> None:
    """The other one finds nothing to do while the lease lasts."""
    job, other = Running(both, healthy), both.worker("other")
    job.step(0)
    both.send(job.stream, of_steps(healthy, 1), steps_done=1)
    other.assembly.run(both.clock())
    assert not other.live.run()
    assert both.attempt().live_owner == "worker"
    both.clock.go_on(31)
    assert other.live.run()
    attempt = both.attempt()
    assert (attempt.live_owner, attempt.live_step) == ("other", 1)


def test_whoever_takes_over_knows_as_much(store: Store, healthy: OpTable, slow: OpTable) -> None:
    """It reads the latest steps again; findings go on living."""
    job = Running(store, spell(healthy, slow, 6, 99, 20))
    job.run(range(12))
    (before,) = job.findings()
    store.clock.go_on(31)
    other = store.worker("other")
    job.step(12, worker=other)
    (after,) = job.findings()
    assert (after.id, after.state, after.last_step) == (before.id, "open", 12)
    per_step = len(of_steps(job.table, 0))
    assert other.live.rows_read == 13 * per_step


def test_whoever_comes_back_knows_nothing_of_the_time_between(
    store: Store, healthy: OpTable
) -> None:
    """It reads the latest steps again, as anybody who takes over."""
    job, other = Running(store, healthy), store.worker("other")
    job.run(range(2))
    (before,) = job.worker.live._followed.values()
    store.clock.go_on(31)
    job.step(2, worker=other)
    store.clock.go_on(31)
    job.step(3)
    (after,) = job.worker.live._followed.values()
    assert after is not before
    assert after.trailing.rows_read == len(of_steps(healthy, 0, 3))


def test_a_worker_that_lost_an_attempt_writes_nothing(
    store: Store, healthy: OpTable, slow: OpTable
) -> None:
    """Whatever it had found; and it reads anew what it follows later."""
    job = Running(store, slow)
    job.run(range(3))
    store.send(job.stream, of_steps(slow, 3), steps_done=3)
    job.worker.assembly.run(store.clock())
    with store.database.write() as session:
        first = table_of.live_claim(session, job.stream.attempt_id, "worker", store.clock(), 30.0)
    store.clock.go_on(31)
    with store.database.write() as session:
        table_of.live_claim(session, job.stream.attempt_id, "other", store.clock(), 30.0)
    assert first is not None
    with pytest.raises(FencedError):
        job.worker.live._follow(first, lambda *_: None)
    assert store.attempt().live_step == 2
    assert len(store.all(StepResult)) == 3
    follow(store.worker("other"))
    assert store.attempt().live_step == 3


def test_a_file_that_is_gone_is_waited_for(store: Store, healthy: OpTable) -> None:
    """It may have been replaced in that moment; other jobs go on meanwhile."""
    job = Running(store, healthy)
    job.step(0)
    store.send(job.stream, of_steps(healthy, 1), steps_done=1)
    (row,) = [file for file in store.all(EventFile) if file.first_step == 1]
    kept = store.objects.get(row.path)
    store.objects.delete(row.path)
    job.worker._live_round()
    assert store.attempt().live_step == 0
    assert not job.worker.live.run()
    store.objects.put(row.path, kept)
    store.clock.go_on(3)
    follow(job.worker)
    assert store.attempt().live_step == 1


# --- constant cost ----------------------------------------------------------------------------


def test_a_step_costs_the_same_however_old_the_job_is(store: Store) -> None:
    """Over 200 steps, two at a time: ops read, ops analysed, statements are always the same."""
    small = generate(Scenario(dp=2, pp=1, microbatches=1, steps=200)).table
    job = Running(store, small, live_steps=6)
    job.stream = store.stream(Layout(dp=2, pp=1), job="small", window_steps=40)
    asked = Statements(store)
    costs = []
    for step in range(1, 200, 2):
        store.send(job.stream, of_steps(small, step - 1, step), steps_done=step)
        store.clock.go_on(3)
        asked.count, read = 0, job.worker.live.rows_read
        follow(job.worker)
        (followed,) = job.worker.live._followed.values()
        costs.append((job.worker.live.rows_read - read, followed.trailing.rows, asked.count))
        if step % 40 == 39:
            job.worker._rest_round()
    per_step = len(of_steps(small, 0))
    assert {cost[0] for cost in costs} == {2 * per_step}
    assert {cost[1] for cost in costs[6:]} == {6 * per_step}
    assert max(cost[2] for cost in costs[50:]) <= max(cost[2] for cost in costs[:25])


class Statements:
    """Counts what is asked of a database."""

    def __init__(self, store: Store) -> None:
        from sqlalchemy import event

        self.count = 0
        event.listen(store.database.engine, "before_cursor_execute", self._one)

    def _one(self, *_given: object) -> None:
        self.count += 1


def test_files_that_were_put_together_are_not_counted_twice(store: Store, healthy: OpTable) -> None:
    """Compaction replaces the files of steps that are still looked at."""
    job = Running(store, spell(healthy, healthy, 0, 0, 60))
    for first in range(0, 41, 4):
        job.step(*range(first, min(first + 4, 41)))
    job.worker._rest_round()
    assert store.window(0).state == WindowState.DONE
    store.clock.go_on(200)
    assert compact(store.database, store.objects, store.settings, store.clock()) == 1
    job.step(41)
    (followed,) = job.worker.live._followed.values()
    per_step = len(of_steps(healthy, 0))
    assert followed.trailing.rows == 24 * per_step
    assert followed.trailing.numbers() == list(range(18, 42))
    assert not [note for note in job.report()["quality"]["notes"] if "duplicate" in note]
    job.step(42)
    assert followed.trailing.rows == 24 * per_step


def test_rows_that_come_late_complete_their_step(store: Store, healthy: OpTable) -> None:
    """If it is among the latest; nothing is read twice."""
    job = Running(store, healthy)
    job.run(range(3))
    whole = of_steps(healthy, 3)
    store.send(job.stream, whole.take(whole.dp < 2), steps_done=3)
    follow(job.worker)
    assert {row.step: row.skipped for row in store.all(StepResult)}[3]
    store.send(job.stream, whole.take(whole.dp >= 2))
    job.step(4)
    rows = {row.step: row.skipped for row in store.all(StepResult)}
    assert rows[3] is None
    assert rows[4] is None
    assert job.worker.live.rows_read == len(of_steps(healthy, 0, 4))


def test_a_file_with_steps_that_are_not_ready_is_read_later(store: Store, healthy: OpTable) -> None:
    """Only what is ready is in memory."""
    job = Running(store, healthy)
    store.send(job.stream, of_steps(healthy, 0, 5), steps_done=2)
    follow(job.worker)
    (followed,) = job.worker.live._followed.values()
    assert followed.trailing.numbers() == [0, 1, 2]
    store.send(job.stream, None, steps_done=5)
    follow(job.worker)
    assert followed.trailing.numbers() == [0, 1, 2, 3, 4, 5]
    assert job.worker.live.rows_read == len(of_steps(healthy, 0, 5))


def test_large_steps_shorten_the_window(store: Store, healthy: OpTable) -> None:
    """`live_max_ops`, but never fewer than six steps."""
    per_step = len(of_steps(healthy, 0))
    for most, steps in ((100, MIN_STEPS), (8 * per_step, 8), (10**9, 24)):
        settings = replace(store.settings, live_max_ops=most)
        assert most_steps(settings, per_step) == steps


def test_memory_is_bounded_over_all_attempts(store: Store, healthy: OpTable) -> None:
    """What was looked at longest ago is forgotten, and read again when it is needed."""
    per_step = len(of_steps(healthy, 0))
    worker = store.worker(live_max_ops=per_step)
    streams: list[StreamInfo] = [store.stream(LAYOUT, job=f"job-{n}") for n in range(4)]
    for step in range(6):
        for stream in streams:
            store.send(stream, of_steps(healthy, step), steps_done=step)
        store.clock.go_on(1)
        follow(worker)
    kept = sum(one.trailing.rows for one in worker.live._followed.values())
    assert kept <= 4 * per_step + 6 * per_step
    assert {attempt.live_step for attempt in store.all(Attempt)} == {5}


def test_jobs_that_are_over_are_forgotten(store: Store, healthy: OpTable) -> None:
    """Also healthy ones, which nobody comes back to; a job that goes on is read again."""
    worker = store.worker()
    streams = [store.stream(LAYOUT, job=f"job-{n}") for n in range(3)]
    for stream in streams:
        store.send(stream, of_steps(healthy, 0, 3), steps_done=3)
    follow(worker)
    assert len(worker.live._followed) == 3
    store.clock.go_on(FORGET_S + 1)
    for step in (4, 5):
        store.send(streams[0], of_steps(healthy, step), steps_done=step)
        follow(worker)
        store.clock.go_on(1)
    assert list(worker.live._followed) == [streams[0].attempt_id]
    (followed,) = worker.live._followed.values()
    assert followed.trailing.numbers() == [0, 1, 2, 3, 4, 5]


def test_a_step_starts_with_its_first_op_in_any_order_of_rows(healthy: OpTable) -> None:
    """Rows of one step need not stand together."""
    shuffled = healthy.take(np.random.default_rng(0).permutation(len(healthy)))
    first = {step: int(of_steps(healthy, step).start_ns.min()) for step in range(12)}
    assert starts_of(shuffled) == starts_of(healthy) == first


def test_nothing_kept_is_an_empty_table() -> None:
    """A follower that has just begun."""
    assert Trailing().numbers() == []
    assert Trailing().rows == 0


# --- the cost of a step -----------------------------------------------------------------------


def fixes_over_time(store: Store, table: OpTable, plan_ops: int) -> list[int]:
    """How many steps in a row each set of fixes stayed, of twenty steps of a slow job."""
    job = Running(store, table, live_steps=6)
    job.worker.live = Live(job.worker.service, job.worker.leases, plan_ops=plan_ops)
    seen = []
    for step in range(20):
        job.run([step])
        seen.append(job.report()["fixes"])
    return [len(list(same)) for fixes, same in itertools.groupby(seen) if fixes]


def test_of_a_large_job_fixes_are_worked_out_now_and_then(store: Store, slow: OpTable) -> None:
    """Above the limit they stay while the findings do, but never longer than eight steps."""
    table = spell(slow, slow, 0, 20, 20)
    stayed = fixes_over_time(store, table, plan_ops=0)
    assert max(stayed) == PLAN_STEPS


def test_of_other_jobs_fixes_are_worked_out_at_each_step(store: Store, slow: OpTable) -> None:
    """Below the limit no step shows the fixes of another."""
    stayed = fixes_over_time(store, spell(slow, slow, 0, 20, 20), plan_ops=10**6)
    assert set(stayed) == {1}
    assert len(stayed) > 10


def large(store: Store, table: OpTable, name: str = "job") -> Running:
    """A job that counts as a large one."""
    job = Running(store, table, name, live_steps=6)
    job.worker.live = Live(job.worker.service, job.worker.leases, plan_ops=0)
    return job


def test_of_a_large_job_steps_and_findings_come_before_the_report(
    store: Store, slow: OpTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends between them has said who is slow; the report is made up for."""
    job = large(store, spell(slow, slow, 0, 20, 20))
    job.run(range(8))

    def ends(*_: object) -> None:
        raise StoreError("the process is going away")

    before = [(row.event, row.step) for row in store.all(FindingEvent)]
    with monkeypatch.context() as patch:
        patch.setattr(live, "report_of", ends)
        job.step(8)
    assert max(row.step for row in store.all(StepResult)) == 8
    (finding,) = job.findings()
    assert (finding.rank, finding.last_step) == (6, 8)
    (attempt,) = store.all(Attempt)
    assert (attempt.ready_step, attempt.live_step) == (8, 7)
    assert job.report()["window"]["last_step"] == 7

    store.clock.go_on(store.settings.lease_s)
    follow(store.worker(live_steps=6))
    (attempt,) = store.all(Attempt)
    assert attempt.live_step == 8
    assert job.report()["window"]["last_step"] == 8
    assert [(row.event, row.step) for row in store.all(FindingEvent)] == before
    assert [row.id for row in job.findings()] == [finding.id]


def test_a_large_job_is_told_the_same_as_a_small_one(store: Store, slow: OpTable) -> None:
    """In two transactions or in one: same findings, same report, the fixes left out."""
    table = spell(slow, slow, 0, 20, 20)
    small = Running(store, table, live_steps=6)
    small.run(range(10))
    big = large(store, table, name="big")
    big.run(range(10))
    reports = [job.report() for job in (small, big)]
    for report in reports:
        del report["fixes"], report["job"]
    assert reports[0] == reports[1]
    told = [
        [(row.key, row.opened_step, row.last_step) for row in job.findings()]
        for job in (small, big)
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 1
