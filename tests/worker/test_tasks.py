from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import update

from smon.errors import FencedError
from smon.store import work
from smon.store.models import EventFile, Mode, Task, Window, WorkState
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.worker.tasks import run_task
from tests.worker.feed import Store, plain


@pytest.fixture(scope="module")
def made() -> Synthetic:
    """A small job."""
    return generate(Scenario(dp=3, pp=2, microbatches=2, steps=4))


@pytest.fixture
def window(store: Store, made: Synthetic) -> str:
    """A recorded window of it, analysed."""
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    store.send(stream, made.table, end=True)
    store.worker().drain()
    return store.window().id


def ask(store: Store, **options: Any) -> str:  # noqa: ANN401  # JSON
    """A task as the API makes it."""
    with store.database.write() as session:
        row = plain(
            session,
            Task,
            tenant_id=store.tenant_id,
            key=f"timeline:{options}",
            kind=options.pop("task", "timeline"),
            options=options,
            state=WorkState.QUEUED.value,
            created_ns=store.clock(),
        )
        return str(row.id)


def done(store: Store, **options: Any) -> Task:  # noqa: ANN401  # JSON
    """A task that a worker has been at."""
    task_id = ask(store, **options)
    store.worker().drain()
    (row,) = [one for one in store.all(Task) if one.id == task_id]
    assert isinstance(row, Task)
    return row


def drawn(store: Store, **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # JSON
    """The events of a timeline."""
    row = done(store, **options)
    assert (row.state, row.error) == ("done", None)
    assert row.path is not None
    document = json.loads(gzip.decompress(store.objects.get(row.path)))
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def marked(store: Store, **options: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    """The document of a step."""
    row = done(store, task="marks", **options)
    assert (row.state, row.error) == ("done", None)
    assert row.path is not None
    document: dict[str, Any] = json.loads(gzip.decompress(store.objects.get(row.path)))
    return document


def ops(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without names of processes and threads."""
    return [event for event in events if event["ph"] == "X"]


def shown(made: Synthetic) -> NDArray[np.bool_]:
    """Mask of the ops that take time: others only stand for a pause that did not happen."""
    mask: NDArray[np.bool_] = made.table.duration_ns > 0
    return mask


def test_a_timeline_has_every_op(store: Store, window: str, made: Synthetic) -> None:
    """Of the run as it was, or as it could have been; or both beside each other."""
    actual = ops(drawn(store, window_id=window, kind="actual"))
    ideal = ops(drawn(store, window_id=window, kind="ideal"))
    assert len(actual) == len(ideal) == shown(made).sum()
    assert {event["cat"] for event in actual} == {"actual"}
    assert {event["cat"] for event in ideal} == {"ideal"}
    both = ops(drawn(store, window_id=window, kind="both"))
    assert len(both) == 2 * shown(made).sum()


def test_a_timeline_can_be_of_some_workers(store: Store, window: str, made: Synthetic) -> None:
    """By DP rank, by stage, or by both; names only of what is there."""
    events = drawn(store, window_id=window, kind="actual", dp=[0, 2], stage=[1])
    places = {(event["args"]["dp"], event["args"]["stage"]) for event in ops(events)}
    assert places == {(0, 1), (2, 1)}
    mask = shown(made) & (made.table.dp != 1) & (made.table.stage == 1)
    assert len(ops(events)) == int(mask.sum())
    processes = {event["pid"] for event in ops(events)}
    named = {event["pid"] for event in events if event["ph"] == "M"}
    assert named == processes
    threads = {(event["pid"], event["tid"]) for event in ops(events)}
    assert {
        (event["pid"], event["tid"]) for event in events if event["ph"] == "M" and "tid" in event
    } == threads


def test_a_timeline_can_be_of_some_steps(store: Store, window: str, made: Synthetic) -> None:
    """The others are not in it; the file says which it has, and time begins with the first."""
    row = done(store, window_id=window, kind="actual", steps=[1, 2])
    assert row.path is not None
    document = json.loads(gzip.decompress(store.objects.get(row.path)))
    events = ops(document["traceEvents"])
    assert {event["args"]["step"] for event in events} == {1, 2}
    mask = shown(made) & np.isin(made.table.step, [1, 2])
    assert len(events) == int(mask.sum())
    assert min(event["ts"] for event in events) == 0.0
    assert document["otherData"]["steps"] == "1-2"
    assert "bounded" not in document["otherData"]


def test_marks_have_every_op_of_their_workers(store: Store, window: str, made: Synthetic) -> None:
    """As recorded to the ns, and once more as ideal."""
    document = marked(store, window_id=window, step=2, workers=[[1, 1], [0, 0]])
    table = made.table.take(shown(made) & (made.table.step == 2))
    origin = int(table.start_ns.min())
    marks = {name: np.array(column) for name, column in document["marks"].items()}
    for row, (dp, stage) in enumerate([(1, 1), (0, 0)]):
        mine = table.take((table.dp == dp) & (table.stage == stage))
        actual = (marks["row"] == row) & (marks["kind"] == 0)
        assert sorted(marks["start_ns"][actual]) == sorted((mine.start_ns - origin).tolist())
        lengths = (marks["end_ns"] - marks["start_ns"])[actual]
        assert sorted(lengths) == sorted(mine.duration_ns.tolist())
        assert int(((marks["row"] == row) & (marks["kind"] == 1)).sum()) == len(mine)
    assert [(row["dp"], row["stage"], row["rank"]) for row in document["rows"]] == [
        (1, 1, made.job.layout.rank(1, 1)),
        (0, 0, 0),
    ]


def test_workers_that_do_not_exist_give_an_empty_timeline(store: Store, window: str) -> None:
    """A valid file all the same."""
    assert drawn(store, window_id=window, kind="actual", dp=[99], stage=[]) == []


@pytest.mark.parametrize(
    "options, sign",
    [
        ({"task": "dance"}, "kind timeline, marks"),
        ({"kind": "past"}, "actual, ideal or both"),
        ({"kind": "actual", "dp": ["a"]}, "numbers"),
        ({"kind": "actual", "steps": [3, 2]}, "first and the last step"),
        ({"kind": "actual", "steps": [40, 50]}, "found 40 to 50"),
        ({"task": "marks"}, "number of a step"),
        ({"task": "marks", "step": 1, "workers": [[1]]}, "DP rank and a stage"),
        ({"task": "marks", "step": 1, "workers": [[3, 0]]}, "workers of layout dp3-pp2"),
        ({"task": "marks", "step": 40, "workers": [[0, 0]]}, "no ops of step 40"),
    ],
)
def test_a_task_that_makes_no_sense_fails(
    store: Store, window: str, options: dict[str, Any], sign: str
) -> None:
    """With a sentence for whoever asked."""
    row = done(store, window_id=window, **options)
    assert row.state == "failed"
    assert sign in str(row.error)
    assert row.finished_ns == store.clock()


def test_a_window_that_is_not_there_fails_the_task(store: Store) -> None:
    """At once: it will not come."""
    row = done(store, window_id="nothing", kind="actual")
    assert row.state == "failed"
    assert "does not exist" in str(row.error)


def test_a_window_whose_events_have_expired_cannot_be_drawn(store: Store, window: str) -> None:
    """The report is still there, the ops are not."""
    store.write(lambda session: session.execute(update(Window).values(expired_ns=1)))
    row = done(store, window_id=window, kind="actual")
    assert "expired" in str(row.error)


def test_a_file_that_is_missing_is_tried_again(store: Store, window: str) -> None:
    """It may have been replaced in that moment."""
    (file,) = store.all(EventFile)
    store.objects.delete(file.path)
    row = done(store, window_id=window, kind="actual")
    assert (row.state, row.tries) == ("queued", 1)


def test_a_worker_that_lost_its_lease_leaves_no_timeline(store: Store, window: str) -> None:
    """Its file is removed; the other one's stays."""
    ask(store, window_id=window, kind="actual")
    terms = work.Terms(30.0, 3)
    with store.database.write() as session:
        first = work.claim(session, Task, "a", store.clock(), terms)
    store.clock.go_on(31)
    with store.database.write() as session:
        second = work.claim(session, Task, "b", store.clock(), terms)
    assert first is not None
    assert second is not None
    service = store.worker().service
    run_task(service, second, lambda *_: None)
    with pytest.raises(FencedError):
        run_task(service, first, lambda *_: None)
    (row,) = store.all(Task)
    assert [file.path for file in store.objects.list("tasks")] == [row.path]
