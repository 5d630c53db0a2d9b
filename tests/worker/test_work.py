from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

from smon.errors import FencedError
from smon.store import work
from smon.store.models import (
    Import,
    Mode,
    Task,
    Window,
    WindowState,
    WorkState,
)
from smon.store.work import Claim, Terms, Work
from smon.topology import Layout
from tests.worker.feed import S, Store, plain

LAYOUT = Layout(dp=2, pp=1)
TERMS = Terms(lease_s=30.0, max_tries=3)


def windows(store: Store, count: int, mode: Mode = Mode.LIVE, job: str = "job") -> list[str]:
    """Windows of one attempt that wait to be analysed; the first is the oldest."""
    stream = store.stream(LAYOUT, job=job, mode=mode)

    def add(session: Session, number: int) -> str:
        row = plain(
            session,
            Window,
            tenant_id=store.tenant_id,
            job_id=stream.job_id,
            attempt_id=stream.attempt_id,
            number=number,
            first_step=0,
            last_step=9,
            state=WindowState.READY.value,
            opened_ns=store.clock(),
            updated_ns=store.clock(),
            ready_ns=store.clock() + number,
            revision=1,
        )
        return str(row.id)

    with store.database.write() as session:
        return [add(session, number) for number in range(count)]


def tasks(store: Store, count: int) -> list[str]:
    """Tasks that wait; the first is the oldest."""
    with store.database.write() as session:
        return [
            plain(
                session,
                Task,
                tenant_id=store.tenant_id,
                key=f"k{number}",
                kind="timeline",
                options={},
                state=WorkState.QUEUED.value,
                created_ns=number,
            ).id
            for number in range(count)
        ]


def claimed(store: Store, model: Work = Window, owner: str = "a") -> Claim | None:
    """What a worker gets."""
    with store.database.write() as session:
        return work.claim(session, model, owner, store.clock(), TERMS)


def had(store: Store, model: Work = Window, owner: str = "a") -> Claim:
    """What a worker gets; there is something."""
    claim = claimed(store, model, owner)
    assert claim is not None
    return claim


def state_of(store: Store, row_id: str, model: Work = Window) -> Any:  # noqa: ANN401
    """A row."""
    (row,) = [one for one in store.all(model) if one.id == row_id]
    return row


def test_the_oldest_goes_first(both: Store) -> None:
    """By when they became ready."""
    ids = windows(both, 3)
    assert [had(both).id for _ in ids] == ids
    assert claimed(both) is None


def test_live_windows_go_before_recorded_ones(both: Store) -> None:
    """Somebody may be looking at a job that runs; an import can wait."""
    recorded = windows(both, 1, Mode.RECORDED, "recorded")
    live = windows(both, 2)
    assert [had(both).id for _ in range(3)] == [*live, *recorded]


def test_a_claim_says_who_has_it_and_until_when(both: Store) -> None:
    """Owner, fence, lease and tries stand in the row."""
    (window,) = windows(both, 1)
    claim = had(both, owner="me")
    row = state_of(both, window)
    assert (claim.fence, claim.tries) == (1, 1)
    assert (row.state, row.owner, row.fence, row.tries) == (WindowState.CLAIMED, "me", 1, 1)
    assert row.lease_ns == both.clock() + 30 * S


def test_a_lease_that_has_run_out_is_taken_over(both: Store) -> None:
    """Not before; and whoever had it writes nothing any more."""
    windows(both, 1)
    first = had(both, owner="dead")
    both.clock.go_on(29.9)
    assert claimed(both, owner="other") is None
    both.clock.go_on(0.2)
    second = had(both, owner="other")
    assert (second.id, second.fence, second.tries) == (first.id, 2, 2)
    values = {"state": WindowState.DONE.value}
    with pytest.raises(FencedError, match="taken over"), both.database.write() as session:
        work.finish(session, first, values)
    with both.database.write() as session:
        work.finish(session, second, values)
    assert state_of(both, first.id).state == WindowState.DONE


@pytest.mark.parametrize(
    "late",
    [
        lambda session, claim: work.renew(session, claim, 5, 30.0),
        lambda session, claim: work.progress(session, claim, {"reason": "x"}),
        lambda session, claim: work.fail(session, claim, "x", 5),
        lambda session, claim: work.release(session, claim, not_before_ns=0, counts=True),
    ],
    ids=["renew", "progress", "fail", "release"],
)
def test_a_fenced_worker_changes_nothing(
    store: Store, late: Callable[[Session, Claim], None]
) -> None:
    """Whatever it tries."""
    windows(store, 1)
    first = had(store)
    store.clock.go_on(31)
    second = had(store, owner="other")
    with pytest.raises(FencedError), store.database.write() as session:
        late(session, first)
    row = state_of(store, first.id)
    assert (row.owner, row.fence, row.state) == ("other", second.fence, WindowState.CLAIMED)


def test_a_lease_of_before_the_clock_was_set_back_has_run_out(both: Store) -> None:
    """No lease can last for an hour: whoever has it is dead, or would have renewed it."""
    windows(both, 1)
    had(both, owner="dead")
    both.clock.set(-3600.0)
    assert claimed(both, owner="other") is not None


def test_a_renewed_lease_lasts(both: Store) -> None:
    """From the moment of renewal."""
    windows(both, 1)
    claim = had(both)
    both.clock.go_on(20)
    with both.database.write() as session:
        work.renew(session, claim, both.clock(), 30.0)
    both.clock.go_on(20)
    assert claimed(both, owner="other") is None


def test_a_window_that_kills_its_workers_is_given_up(both: Store) -> None:
    """After as many tries as allowed, with a reason; the next window is taken in its place."""
    bad, good = windows(both, 2)
    for number in range(3):
        assert had(both, owner=f"w{number}").id == bad
        both.clock.go_on(31)
    assert had(both).id == good
    row = state_of(both, bad)
    assert row.state == WindowState.FAILED
    assert "3 tries" in row.reason
    assert row.analysed_revision == row.revision


def test_a_released_row_is_there_for_others_at_once(both: Store) -> None:
    """A worker that stops gives back what it has, and that was no try."""
    (window,) = windows(both, 1)
    claim = had(both)
    with both.database.write() as session:
        work.release(session, claim, not_before_ns=0, counts=False)
    again = had(both, owner="other")
    assert (again.id, again.tries, again.fence) == (window, 1, 2)


def test_a_row_can_be_put_off(both: Store) -> None:
    """After a failure the next try waits a little."""
    windows(both, 1)
    claim = had(both)
    with both.database.write() as session:
        work.release(session, claim, not_before_ns=both.clock() + S, counts=True)
    assert claimed(both) is None
    both.clock.go_on(1.5)
    assert had(both).tries == 2


def test_late_data_are_let_settle(store: Store) -> None:
    """A window that was analysed before waits for silence: it is not done for each batch."""
    (window,) = windows(store, 1)
    late = store.clock.go_on(100)

    def reopen(session: Session) -> None:
        row = session.get(Window, window)
        assert row is not None
        row.analysed_revision, row.revision, row.updated_ns = 1, 2, late

    store.write(reopen)
    assert claimed(store) is None
    store.clock.go_on(2.5)
    assert had(store).id == window


@pytest.mark.parametrize("model", [Task, Import])
def test_other_work_is_claimed_alike(both: Store, model: Work) -> None:
    """Imports and tasks have their own names of states."""

    def add(session: Session) -> None:
        for state in (WorkState.QUEUED, WorkState.DONE):
            given: dict[str, Any] = {"files": []}
            if model is Task:
                given = {"key": str(state), "kind": "timeline"}
            plain(
                session,
                model,
                tenant_id=both.tenant_id,
                options={},
                state=state.value,
                created_ns=1,
                **given,
            )

    both.write(add)
    claim = had(both, model)
    assert claimed(both, model) is None
    with both.database.write() as session:
        work.fail(session, claim, "no", 7)
    row = state_of(both, claim.id, model)
    assert (row.state, row.error, row.finished_ns) == (WorkState.FAILED, "no", 7)


def test_many_workers_share_without_doing_anything_twice(both: Store) -> None:
    """Eight at once, forty rows: each row goes to one of them."""
    ids = tasks(both, 40)
    barrier = threading.Barrier(8)

    def one(name: int) -> list[str]:
        barrier.wait()
        mine = []
        while (claim := claimed(both, Task, f"w{name}")) is not None:
            mine.append(claim.id)
        return mine

    with ThreadPoolExecutor(8) as pool:
        got = [claim for part in pool.map(one, range(8)) for claim in part]
    assert sorted(got) == sorted(ids)


def test_one_of_many_takes_over(both: Store) -> None:
    """A lease that has run out goes to one of those who see it."""
    tasks(both, 1)
    had(both, Task)
    both.clock.go_on(31)
    barrier = threading.Barrier(6)

    def one(name: int) -> Claim | None:
        barrier.wait()
        return claimed(both, Task, f"w{name}")

    with ThreadPoolExecutor(6) as pool:
        got = [claim for claim in pool.map(one, range(6)) if claim is not None]
    assert [claim.fence for claim in got] == [2]
