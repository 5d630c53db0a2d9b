from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from smon.store.models import Attempt, Mode, StepResult, Stream, Window, WindowState
from smon.store.streams import StreamInfo
from smon.store.windows import StreamState
from smon.synth.scenario import Scenario, generate
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.worker.assembly import EVERYTHING, MAX_NAMED, NOTHING, Assembly, standing
from tests.worker.feed import Store, of_steps, plain

LAYOUT = Layout(dp=2, pp=2, tp=2)

#: First ranks of the workers (0,0), (1,0), (0,1), (1,1).
RANKS = (0, 2, 4, 6)


def state(
    ranks: tuple[int, ...], done: int | None, *, ended: bool = False, heard: int = 1
) -> StreamState:
    """A stream."""
    return StreamState(f"{ranks}-{done}-{ended}", ranks, done, ended, heard)


# --- who has come how far ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "streams, expected",
    [
        ([], [NOTHING] * 4),
        ([state(RANKS, None)], [NOTHING] * 4),
        ([state(RANKS, 7)], [7] * 4),
        ([state((0, 1, 2, 3), 7), state((4, 5, 6, 7), 5)], [7, 7, 5, 5]),
        ([state((0, 2), 7)], [7, 7, NOTHING, NOTHING]),
        # The TP ranks of a worker come from two hosts: one of them is enough.
        ([state((0,), 7), state((1, 2, 3, 4, 5, 6, 7), 3)], [7, 3, 3, 3]),
        ([state(RANKS, 7, ended=True)], [EVERYTHING] * 4),
        ([state((0, 2), 7, ended=True), state((4, 6), 7)], [EVERYTHING, EVERYTHING, 7, 7]),
        # A process that was started again goes on where the first one stopped.
        ([state(RANKS, 7, ended=True), state(RANKS, 3)], [7] * 4),
        # Ranks are not known: it may send any.
        ([state((), 4)], [4] * 4),
        ([state((), 4), state((), 6)], [4] * 4),
        ([state((0,), 9), state((), 4)], [9, 4, 4, 4]),
        ([state((), None, ended=True)], [EVERYTHING] * 4),
        # Ranks that the layout does not have.
        ([state((0, 2, 4, 6, 8, 99), 7)], [7] * 4),
    ],
)
def test_progress_of_workers(streams: list[StreamState], expected: list[int]) -> None:
    """From the streams that declare their ranks; by stage, then DP rank."""
    assert standing(LAYOUT, streams).progress.tolist() == expected


def test_what_is_lacking_is_named_by_first_ranks() -> None:
    """In the order of ranks."""
    stand = standing(LAYOUT, [state((0, 6), 5), state((2,), 4)])
    assert stand.lacking(5) == [2, 4]
    assert (stand.ready(), stand.front()) == (NOTHING, 5)


# --- live attempts ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job:
    """A small live job, one stream for each worker unless told otherwise."""

    store: Store
    table: OpTable
    layout: Layout
    streams: list[StreamInfo]
    assembly: Assembly

    def send(self, who: int, step: int, *, done: bool = True, **more: Any) -> None:  # noqa: ANN401
        """One worker's ops of a step."""
        mine = self.of(who, step)
        self.store.send(self.streams[who], mine, steps_done=step if done else None, **more)

    def of(self, who: int, step: int) -> OpTable:
        """One worker's rows of a step."""
        rows = of_steps(self.table, step)
        worker = rows.dp + self.layout.dp * rows.stage
        return rows.take(worker == who)

    def all_send(self, step: int, *, but: tuple[int, ...] = (), **more: Any) -> None:  # noqa: ANN401
        """Everybody's ops of a step."""
        for who in range(len(self.streams)):
            if who not in but:
                self.send(who, step, **more)

    def ready_step(self) -> int | None:
        """After a look."""
        self.assembly.run(self.store.clock())
        return self.store.attempt().ready_step

    def state(self, number: int = 0) -> str:
        """State of a window, after a look."""
        self.assembly.run(self.store.clock())
        return self.store.window(number).state


@pytest.fixture(scope="module")
def table() -> OpTable:
    """Ops of 2 × 2 workers, ten steps."""
    return generate(Scenario(dp=2, pp=2, microbatches=2, steps=10)).table


@pytest.fixture
def job(store: Store, table: OpTable) -> Job:
    """A live job with windows of four steps; nobody has sent anything."""
    return make_job(store, table)


def make_job(store: Store, table: OpTable, mode: Mode = Mode.LIVE, steps: int = 4) -> Job:
    """A job with one stream for each worker."""
    layout = Layout(dp=2, pp=2)
    streams = [
        store.stream(layout, key=f"s{rank}", ranks=[rank], mode=mode, window_steps=steps)
        for rank in range(4)
    ]
    return Job(store, table, layout, streams, Assembly(store.settings, store.database))


def test_a_step_is_ready_when_everybody_has_delivered_it(job: Job) -> None:
    """And not before."""
    assert job.ready_step() is None
    job.all_send(0, but=(3,))
    assert job.ready_step() is None
    job.send(3, 0)
    assert job.ready_step() == 0
    job.all_send(1)
    job.all_send(2)
    assert job.ready_step() == 2


def test_ops_without_a_word_that_the_step_is_done_are_not_a_step(job: Job) -> None:
    """More of it may come."""
    job.all_send(0, done=False)
    assert job.ready_step() is None


def test_one_who_has_ended_is_not_waited_for(job: Job) -> None:
    """An agent that says END has sent all it had."""
    job.all_send(0, but=(3,))
    job.store.send(job.streams[3], end=True)
    assert job.ready_step() == 0


def test_a_laggard_is_waited_for_a_while(job: Job) -> None:
    """`step_timeout_s` after the others had the step; then it is taken without him."""
    job.all_send(0)
    job.all_send(1, but=(2,))
    assert job.ready_step() == 0
    job.store.clock.go_on(4.9)
    assert job.ready_step() == 0
    job.store.clock.go_on(0.2)
    assert job.ready_step() == 1


def test_a_dead_agent_does_not_hold_up_every_step(job: Job) -> None:
    """The others go on sending all the time; after one wait its steps are not waited for."""
    job.all_send(0)
    for step in range(1, 8):
        job.all_send(step, but=(1,))
        job.store.clock.go_on(2.0)
        job.ready_step()
    assert job.ready_step() == 7
    job.all_send(8, but=(1,))
    assert job.ready_step() == 8


def test_one_who_comes_back_is_waited_for_again(job: Job) -> None:
    """Once it sends again."""
    job.all_send(0)
    job.all_send(1, but=(1,))
    assert job.ready_step() == 0
    job.store.clock.go_on(6)
    assert job.ready_step() == 1
    job.send(1, 1)
    job.all_send(2, but=(1,))
    assert job.ready_step() == 1
    job.send(1, 2)
    assert job.ready_step() == 2


def test_a_step_that_stops_in_the_middle_is_shown_after_silence(job: Job) -> None:
    """A job that hangs has no complete step any more, and its last one says where."""
    job.all_send(0)
    job.send(0, 1, done=False)
    assert job.ready_step() == 0
    job.store.clock.go_on(5.1)
    assert job.ready_step() == 1


def add_long_step(job: Job, seconds: float) -> None:
    """An analysis that says how long a step takes."""
    job.store.write(
        lambda session: plain(
            session,
            StepResult,
            attempt_id=job.streams[0].attempt_id,
            job_id=job.streams[0].job_id,
            tenant_id=job.store.tenant_id,
            step=0,
            recorded_s=seconds,
            analysed_ns=1,
        )
    )


def test_long_steps_are_not_taken_for_silence(job: Job) -> None:
    """A step that takes half a minute leaves half a minute without data."""
    job.all_send(0)
    add_long_step(job, 30.0)
    job.send(0, 1, done=False)
    job.store.clock.go_on(50)
    assert job.ready_step() == 0
    job.store.clock.go_on(11)
    assert job.ready_step() == 1


def test_a_window_of_long_steps_waits_longer(job: Job) -> None:
    """Twice as long as a step takes."""
    job.all_send(0)
    add_long_step(job, 90.0)
    job.store.clock.go_on(170)
    assert job.state() == WindowState.OPEN
    job.store.clock.go_on(11)
    assert job.state() == WindowState.READY


def test_everything_is_ready_once_the_job_is_over(job: Job) -> None:
    """At once, also the last step that nobody finished."""
    job.all_send(0)
    job.all_send(1, done=False, end=True)
    assert job.ready_step() == 1
    assert job.state(0) == WindowState.READY
    assert job.store.window(0).missing is None


def test_a_window_is_ready_with_its_last_step(job: Job) -> None:
    """Live: when everybody has delivered that step."""
    for step in range(4):
        job.all_send(step, but=(0,) if step == 3 else ())
        assert job.state() == WindowState.OPEN
    job.send(0, 3)
    assert job.state() == WindowState.READY
    assert job.store.window().reason is None
    assert job.store.window().ready_ns == job.store.clock()


def test_a_window_waits_for_its_last_step_only(job: Job) -> None:
    """The next one goes on."""
    for step in range(5):
        job.all_send(step)
    assert (job.state(0), job.state(1)) == (WindowState.READY, WindowState.OPEN)


def test_a_window_does_not_wait_for_ever(job: Job) -> None:
    """After `window_timeout_s` without data it says who is missing."""
    for step in range(4):
        job.all_send(step, but=(1, 2) if step == 3 else ())
    job.store.clock.go_on(59)
    assert job.state() == WindowState.OPEN
    job.store.clock.go_on(2)
    assert job.state() == WindowState.READY
    window = job.store.window()
    assert (window.missing, window.missing_count) == ([1, 2], 2)
    assert "2 of 4 workers" in str(window.reason)


def test_late_data_prolong_the_wait(job: Job) -> None:
    """It counts from the last data of the window."""
    job.all_send(0)
    job.store.clock.go_on(59)
    job.send(0, 1)
    job.store.clock.go_on(59)
    assert job.state() == WindowState.OPEN


def test_whoever_came_late_is_not_missing_any_more(job: Job) -> None:
    """If that happens before the window is analysed."""
    for step in range(4):
        job.all_send(step, but=(1,) if step == 3 else ())
    job.store.clock.go_on(61)
    assert job.state() == WindowState.READY
    job.send(1, 3)
    assert job.state() == WindowState.READY
    assert job.store.window().missing is None
    assert job.store.window().missing_count == 0


def test_a_later_attempt_ends_the_windows_of_the_earlier_one(job: Job) -> None:
    """A job that was started again sends nothing more under the old number."""
    job.all_send(0)
    job.store.clock.go_on(10)
    job.store.stream(job.layout, key="again", attempt=1)
    job.assembly.run(job.store.clock())
    job.store.clock.go_on(5.1)
    job.assembly.run(job.store.clock())
    window = job.store.window()
    assert window.state == WindowState.READY
    assert "ended" in str(window.reason)


def test_a_whole_live_attempt_is_one_window_if_asked_for(store: Store, table: OpTable) -> None:
    """It is ready when all streams have ended."""
    job = make_job(store, table, steps=0)
    for step in range(10):
        job.all_send(step)
    assert job.state() == WindowState.OPEN
    for stream in job.streams:
        store.send(stream, end=True)
    assert job.state() == WindowState.READY


# --- recorded attempts ------------------------------------------------------------------------


def test_a_recorded_window_is_ready_when_all_streams_have_ended(
    store: Store, table: OpTable
) -> None:
    """Steps that are done do not matter: files come in any order."""
    job = make_job(store, table, Mode.RECORDED, 0)
    for step in range(10):
        job.all_send(step)
    assert job.state() == WindowState.OPEN
    for stream in job.streams[1:]:
        store.send(stream, end=True)
    assert job.state() == WindowState.OPEN
    store.send(job.streams[0], end=True)
    assert job.state() == WindowState.READY
    assert job.store.window().missing is None
    assert job.store.attempt().ready_step is None


def test_a_recorded_window_waits_briefly_for_ranks_that_nobody_sends(
    store: Store, table: OpTable
) -> None:
    """Five seconds: more files may be on their way."""
    layout = Layout(dp=2, pp=2)
    stream = store.stream(layout, ranks=[0, 1, 3], mode=Mode.RECORDED)
    job = Job(store, table, layout, [stream], Assembly(store.settings, store.database))
    store.send(stream, table.take(table.rank != 2), end=True)
    assert job.state() == WindowState.OPEN
    store.clock.go_on(5.1)
    assert job.state() == WindowState.READY
    window = store.window()
    assert (window.missing, window.missing_count) == ([2], 1)
    assert "1 of 4 workers" in str(window.reason)


def test_a_recorded_window_whose_sender_died_is_analysed_in_the_end(
    store: Store, table: OpTable
) -> None:
    """After `window_timeout_s`."""
    job = make_job(store, table, Mode.RECORDED, 0)
    job.all_send(0)
    store.clock.go_on(59)
    assert job.state() == WindowState.OPEN
    store.clock.go_on(2)
    assert job.state() == WindowState.READY
    assert store.window().missing_count == 4


def test_ranks_that_a_file_does_not_declare_are_not_missing(store: Store, table: OpTable) -> None:
    """A source that does not know them may have sent any."""
    stream = store.stream(Layout(dp=2, pp=2), ranks=[], mode=Mode.RECORDED)
    store.send(stream, table, end=True)
    assembly = Assembly(store.settings, store.database)
    assembly.run(store.clock())
    assert store.window().state == WindowState.READY


# --- several workers, and cost ----------------------------------------------------------------


def test_any_number_of_workers_decide_alike(both: Store, table: OpTable) -> None:
    """The second one finds nothing to do."""
    job = make_job(both, table)
    for step in range(4):
        job.all_send(step)
    one, other = (Assembly(both.settings, both.database) for _ in range(2))
    now = both.clock()
    assert one.run(now) == 2
    assert other.run(now) == 0
    assert one.run(now) == 0


def test_nothing_new_costs_nothing(job: Job) -> None:
    """Only attempts in which something changed, or a wait is over, are looked at."""
    job.all_send(0)
    job.ready_step()
    looks = job.assembly.looks
    for _ in range(5):
        job.store.clock.go_on(0.5)
        job.ready_step()
    assert job.assembly.looks == looks
    job.all_send(1)
    job.ready_step()
    assert job.assembly.looks == looks + 1


def test_a_defect_in_one_job_does_not_hold_up_the_others(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and looked at again later."""
    other = job.store.stream(Layout(dp=1, pp=1), job="other")
    small = generate(Scenario(dp=1, pp=1, microbatches=1, steps=1)).table
    job.store.send(other, small, steps_done=0)
    # Nothing in SMon writes that.
    job.store.write(
        lambda session: session.execute(
            update(Attempt).where(Attempt.id == other.attempt_id).values(dp=0)
        )
    )
    job.all_send(0)
    job.assembly.run(job.store.clock())
    ready = {attempt.id: attempt.ready_step for attempt in job.store.all(Attempt)}
    assert ready == {job.streams[0].attempt_id: 0, other.attempt_id: None}
    assert "cannot be assembled" in caplog.text


def test_ten_thousand_streams_are_looked_at_in_few_statements(store: Store) -> None:
    """As many as for four, once their ranks are known."""
    layout = Layout(dp=100, pp=100)
    stream = store.stream(layout, key="first", ranks=[0])

    def add(session: Session) -> None:
        base = {
            name: getattr(session.get(Stream, stream.id), name)
            for name in ("tenant_id", "job_id", "attempt_id", "host", "source", "epoch")
        }
        session.execute(
            Stream.__table__.insert(),  # type: ignore[attr-defined]
            [
                {
                    **base,
                    "id": f"s{rank}",
                    "key": f"k{rank}",
                    "ranks": [rank],
                    "steps_done": 3,
                    "ended": False,
                    "events": 0,
                    "lost_events": 0,
                    "created_ns": 1,
                    "last_data_ns": store.clock(),
                }
                for rank in range(1, 10_000)
            ],
        )

    store.write(add)
    small = generate(Scenario(dp=1, pp=1, microbatches=1, steps=4)).table
    store.send(stream, small, steps_done=3)
    assembly = Assembly(store.settings, store.database)
    assembly.run(store.clock())
    assert store.attempt().ready_step == 3
    counted = Statements(store)
    store.send(stream, None, steps_done=4)
    counted.reset()
    assembly.run(store.clock())
    assert counted.count <= 12


class Statements:
    """Counts what is asked of a database."""

    def __init__(self, store: Store) -> None:
        from sqlalchemy import event

        self.count = 0
        event.listen(store.database.engine, "before_cursor_execute", self._one)

    def _one(self, *_given: object) -> None:
        self.count += 1

    def reset(self) -> None:
        """Begin to count."""
        self.count = 0


def test_only_the_first_of_many_missing_ranks_are_named(store: Store) -> None:
    """All are counted."""
    layout = Layout(dp=100, pp=1)
    small = generate(Scenario(dp=1, pp=1, microbatches=1, steps=2)).table
    stream = store.stream(layout, ranks=[0], mode=Mode.RECORDED)
    store.send(stream, small, end=True)
    assembly = Assembly(store.settings, store.database)
    assembly.run(store.clock())
    store.clock.go_on(6)
    assembly.run(store.clock())
    window = store.window()
    assert window.missing == list(range(1, MAX_NAMED + 1))
    assert window.missing_count == 99


def test_a_window_that_expired_is_left_alone(job: Job) -> None:
    """Its state does not change."""
    job.all_send(0)
    job.store.write(
        lambda session: session.execute(
            update(Window).values(expired_ns=1, state=WindowState.DONE.value)
        )
    )
    job.store.clock.go_on(100)
    assert job.state() == WindowState.DONE
