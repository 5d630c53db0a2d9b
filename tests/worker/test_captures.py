from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from smon.report import ReportOptions
from smon.reports import report_without_ops
from smon.store.models import (
    Finding,
    FindingState,
    Mode,
    Result,
    SentFile,
    StepResult,
    Window,
    WindowKind,
    WindowState,
)
from smon.store.results import unpacked
from smon.topology import Layout
from smon.trace.load import load
from tests.kineto_files import Ddp, write_ddp
from tests.worker.feed import START_NS, S, Store
from tests.worker.sent import dump_parts, file_parts, file_stream, kineto_files, send_parts

NVRX = "nvrx-flight-recorder"
WORLD = 16
RANKS = 4
SLOW = Ddp(ranks=RANKS, steps=24, extra_backward=(1, 40.0))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """What agents send of a job whose rank 1 has a slow backward, by rank."""
    folder = tmp_path_factory.mktemp("slow")
    write_ddp(folder, SLOW)
    return kineto_files(folder)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The same job, healthy, 50 steps later."""
    folder = tmp_path_factory.mktemp("later")
    write_ddp(folder, Ddp(ranks=RANKS, steps=24, first_step=60))
    return kineto_files(folder)


def send(store: Store, stream: Any, files: dict[int, bytes], first: int = 10) -> None:  # noqa: ANN401
    """The files of some ranks, of 24 steps."""
    for rank, content in files.items():
        steps = {"first_step": first, "last_step": first + 23}
        send_parts(store, stream, file_parts(content, rank=rank, world_size=RANKS, **steps))


def reports(store: Store) -> list[dict[str, Any]]:
    """All reports, in the order of their windows."""
    query = select(Result.report).join(Window, Window.id == Result.window_id)
    with store.database.read() as session:
        found = session.scalars(query.order_by(Window.number)).all()
    return [json.loads(unpacked(one)) for one in found]


def captures(store: Store) -> list[Window]:
    """All captures, by number."""
    found = [one for one in store.all(Window) if one.kind == WindowKind.CAPTURE]
    return sorted(found, key=lambda one: one.number)


def open_keys(store: Store) -> set[str]:
    """Findings that are there."""
    return {one.key for one in store.all(Finding) if one.state == FindingState.OPEN}


def dumps_of(folder: Path) -> dict[int, bytes]:
    """Dumps by rank."""
    found = sorted(folder.glob("_dump_*"))
    return {int(path.name.rpartition("_")[2]): path.read_bytes() for path in found}


def of_the_command(content: dict[int, bytes], folder: Path) -> dict[str, Any]:
    """The report of ``smon analyze`` for the same files."""
    folder.mkdir()
    for rank, data in content.items():
        (folder / f"rank-{rank}").write_bytes(data)
    trace = load([folder])
    report = report_without_ops(trace, ReportOptions(trace.notes))
    assert report is not None
    return dict(report.to_dict())


def test_files_of_all_ranks_become_one_capture_with_the_report_of_the_command(
    both: Store, slow: dict[int, bytes], tmp_path: Path
) -> None:
    """Ready as soon as the last rank is there; nothing but the job's name differs."""
    stream = file_stream(both, RANKS)
    worker = both.worker()
    send(both, stream, {rank: slow[rank] for rank in (0, 1, 2)})
    worker.drain()
    assert [one.state for one in captures(both)] == [WindowState.OPEN]
    send(both, stream, {3: slow[3]})
    both.worker().drain()
    (window,) = captures(both)
    assert (window.state, window.missing_count, window.rows) == (WindowState.DONE, 0, 0)
    assert (window.first_step, window.last_step) == (SLOW.first_step, SLOW.first_step + 23)
    (report,) = reports(both)
    expected = of_the_command(slow, tmp_path / "given")
    assert report.pop("job")["job_id"] == "job"
    expected.pop("job")
    assert report["quality"]["notes"] == expected["quality"]["notes"]
    assert report == expected
    assert report["findings"][0]["where"]["rank"] == 1
    assert open_keys(both) == {"slow_backward|rank|rank=1"}
    assert len(both.all(StepResult)) == SLOW.steps


def test_a_rank_that_sends_nothing_is_waited_for_and_then_named(
    store: Store, slow: dict[int, bytes]
) -> None:
    """The report says that it is missing; an attempt that goes on waits for longer."""
    stream = file_stream(store, RANKS)
    send(store, stream, {rank: slow[rank] for rank in (0, 1, 3)})
    worker = store.worker()
    worker.tick()
    store.clock.go_on(store.settings.window_timeout_s - 1)
    worker.tick()
    assert captures(store)[0].state == WindowState.OPEN
    store.clock.go_on(2)
    worker.drain()
    (window,) = captures(store)
    assert (window.state, window.missing, window.missing_count) == (WindowState.DONE, [2], 1)
    assert window.reason == "nothing came any more: 1 of 4 ranks sent no file"
    assert reports(store)[0]["quality"]["notes"][0] == "1 rank sent no file of this capture"


def test_a_profile_with_ops_is_analysed_as_ops(store: Store, traces: Path) -> None:
    """Workers and all; a rank without a file has no clock that could be corrected."""
    files = kineto_files(traces / "torch-gloo-2pp2dp" / "slow_rank3")
    stream = file_stream(store, RANKS)
    send(store, stream, {rank: files[rank] for rank in (0, 1, 3)}, first=0)
    store.worker().tick()
    store.clock.go_on(store.settings.window_timeout_s + 1)
    store.worker().drain()
    (report,) = reports(store)
    assert (report["job"]["layout"]["pp"], len(report["workers"])) == (2, 4)
    assert not any("nan" in note.split() or "+nan" in note for note in report["quality"]["notes"])
    assert all(one["offset_s"] is not None for one in report["quality"]["clock"]["offsets"])
    (result,) = store.all(Result)
    assert store.objects.size(result.workers_path) is not None


def test_steps_that_do_not_overlap_are_captures_of_their_own(
    store: Store, slow: dict[int, bytes], later: dict[int, bytes]
) -> None:
    """And the later one, which is healthy, clears what the earlier one found."""
    stream = file_stream(store, RANKS)
    send(store, stream, slow)
    store.worker().drain()
    assert open_keys(store) == {"slow_backward|rank|rank=1"}
    send(store, stream, later, first=60)
    store.worker().drain()
    assert [(one.number, one.state) for one in captures(store)] == [(0, "done"), (1, "done")]
    assert open_keys(store) == set()
    assert [one["verdict"] for one in reports(store)] == ["straggler", "none"]


def test_a_file_that_comes_too_late_changes_nothing(store: Store, slow: dict[int, bytes]) -> None:
    """The capture stays as it was analysed."""
    stream = file_stream(store, RANKS)
    send(store, stream, {rank: slow[rank] for rank in (0, 1, 3)})
    worker = store.worker()
    worker.tick()
    store.clock.go_on(store.settings.window_timeout_s + 1)
    worker.drain()
    before = store.all(Result)[0].created_ns
    send(store, stream, {2: slow[2]})
    store.worker().drain()
    assert len(store.all(SentFile)) == 3
    assert (len(captures(store)), store.all(Result)[0].created_ns) == (1, before)


def test_dumps_name_the_ranks_that_never_arrived(both: Store, traces: Path) -> None:
    """A finding as grave as any, opened for everybody who is told of findings."""
    stream = file_stream(both, WORLD, ranks=range(WORLD), host="node-7")
    for rank, content in dumps_of(traces / NVRX / "lock_gil_2nd").items():
        send_parts(both, stream, dump_parts(content, rank, WORLD))
    both.worker().drain()
    (window,) = captures(both)
    assert (window.state, window.first_step, window.last_step) == (WindowState.DONE, -1, -1)
    (report,) = reports(both)
    assert report["verdict"] == "hang"
    assert report["job"]["layout"]["pp"] == 4
    found = both.all(Finding)
    assert {(one.rank, one.host, one.severity, one.state) for one in found} == {
        (10, "node-7", "critical", "open"),
        (15, "node-7", "critical", "open"),
    }
    assert both.all(StepResult) == []


def test_dumps_of_another_moment_are_another_capture(store: Store, traces: Path) -> None:
    """Ten minutes later other ranks are to blame: those of before are gone."""
    stream = file_stream(store, WORLD)
    for name, at in (("lock_gil_2nd", START_NS), ("gpu_error_1st", START_NS + 600 * S)):
        for rank, content in dumps_of(traces / NVRX / name).items():
            send_parts(store, stream, dump_parts(content, rank, WORLD, at))
        store.worker().drain()
    assert len(captures(store)) == 2
    assert open_keys(store) == {"hang|rank|rank=12", "hang|rank|rank=14"}


def test_the_findings_of_a_job_that_has_ended_are_over(store: Store, traces: Path) -> None:
    """They were there at its end, so lists still show them."""
    stream = file_stream(store, WORLD)
    for rank, content in dumps_of(traces / NVRX / "lock_gil_2nd").items():
        send_parts(store, stream, dump_parts(content, rank, WORLD), end=rank == WORLD - 1)
    worker = store.worker()
    worker.tick()
    worker.tick()
    assert len(open_keys(store)) == 2
    store.clock.go_on(store.settings.step_timeout_s + 1)
    store.worker().drain()
    found = store.all(Finding)
    assert {(one.state, one.cleared_step) for one in found} == {("cleared", None)}


def test_a_declared_layout_is_a_check(store: Store, traces: Path) -> None:
    """Dumps say TP 2 × DP 2 × PP 4; an agent that declares something else is told so."""
    stream = store.stream(Layout(dp=8, pp=2), source="files", ranks=(), mode=Mode.LIVE)
    for rank, content in dumps_of(traces / NVRX / "lock_gil_2nd").items():
        send_parts(store, stream, dump_parts(content, rank, WORLD))
    store.worker().drain()
    (window,) = captures(store)
    assert window.state == WindowState.FAILED
    assert "the declared layout dp8-pp2" in (window.reason or "")
    assert "/" not in (window.reason or "").split(":")[0]


def test_content_that_no_reader_takes_fails_the_capture_with_a_reason(store: Store) -> None:
    """A rank whose file is damaged cannot take the others with it, but all of them can."""
    stream = file_stream(store, 2)
    for rank in range(2):
        send_parts(store, stream, file_parts(b"no trace", rank=rank, world_size=2))
    store.worker().drain()
    (window,) = captures(store)
    assert window.state == WindowState.FAILED
    assert "rank-events" in (window.reason or "")


def test_one_damaged_file_is_left_out(store: Store, slow: dict[int, bytes]) -> None:
    """The report says which."""
    stream = file_stream(store, RANKS)
    send(store, stream, {**slow, 2: slow[2][: len(slow[2]) // 2]})
    store.worker().drain()
    (report,) = reports(store)
    assert any(note.startswith("left out: rank-2: ") for note in report["quality"]["notes"])
    assert report["findings"][0]["where"]["rank"] == 1


def test_captures_are_not_taken_for_what_a_running_job_lacks(
    store: Store, slow: dict[int, bytes]
) -> None:
    """No step of it becomes ready, so the running diagnosis says nothing of it."""
    stream = file_stream(store, RANKS)
    send(store, stream, slow)
    store.worker().drain()
    store.clock.go_on(30)
    store.worker().drain()
    attempt = store.attempt()
    assert (attempt.ready_step, attempt.live_step, attempt.ended_ns) == (None, None, None)
    assert open_keys(store) == {"slow_backward|rank|rank=1"}


def test_two_workers_make_one_capture_and_one_result(store: Store, slow: dict[int, bytes]) -> None:
    """Both look at the same files; what one has placed the other leaves alone."""
    stream = file_stream(store, RANKS)
    send(store, stream, slow)
    first, second = store.worker("first"), store.worker("second")
    for _ in range(3):
        first.tick()
        second.tick()
    assert [one.state for one in captures(store)] == [WindowState.DONE]
    assert len(store.all(Result)) == 1
    assert len(store.all(Finding)) == 1


def test_a_worker_that_dies_in_the_middle_is_replaced(store: Store, slow: dict[int, bytes]) -> None:
    """Its lease runs out, and the capture is analysed from the same files."""
    stream = file_stream(store, RANKS)
    send(store, stream, slow)
    store.worker().drain()
    store.write(
        lambda session: session.execute(
            update(Window).values(
                state=WindowState.CLAIMED.value,
                lease_ns=store.clock() + S,
                owner="dead",
                fence=Window.fence + 1,
            )
        )
    )
    store.clock.go_on(5)
    store.worker("other").drain()
    assert [one.state for one in captures(store)] == [WindowState.DONE]
    assert len(store.all(Result)) == 1
    assert len(store.all(Finding)) == 1


def test_a_recorded_attempt_has_findings_that_are_over(
    store: Store, slow: dict[int, bytes]
) -> None:
    """As those of any recorded window."""
    stream = file_stream(store, RANKS, mode=Mode.RECORDED)
    send(store, stream, slow)
    store.worker().drain()
    (found,) = store.all(Finding)
    assert (found.state, found.cleared_step, found.rank) == ("cleared", None, 1)
