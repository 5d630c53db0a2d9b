from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select, update

from smon import __version__
from smon.analysis import Options, analyze, analyze_prepared, evenly, study
from smon.attribute.occupied import compute_and_wait
from smon.errors import FencedError, StoreError
from smon.prepare import prepare
from smon.store import work
from smon.store.models import (
    EventFile,
    Finding,
    FindingEvent,
    Mode,
    Result,
    StepResult,
    TimeBase,
    Window,
    WindowState,
)
from smon.store.results import unpacked
from smon.synth.presets import scenario
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.write import write_synthetic
from smon.topology import Layout
from smon.trace.context import context_beside
from smon.trace.load import load
from smon.trace.meta import Job
from smon.trace.table import OpTable
from smon.worker import windows
from smon.worker.material import complete, notes_of_rows
from smon.worker.service import category
from smon.worker.windows import analyse_window
from tests.builders import synthetic_job
from tests.worker.feed import Store, of_steps, renumbered


def report_of(store: Store) -> dict[str, Any]:
    """The only report."""
    with store.database.read() as session:
        (packed,) = session.scalars(select(Result.report)).all()
    found: dict[str, Any] = json.loads(unpacked(packed))
    return found


def stored(store: Store) -> str:
    """The text of the only report."""
    with store.database.read() as session:
        (packed,) = session.scalars(select(Result.report)).all()
    return unpacked(packed).decode()


def record(
    store: Store,
    table: OpTable,
    job: Job,
    *,
    notes: tuple[str, ...] = (),
    context: bytes | None = None,
) -> None:
    """A whole recorded trace, from one sender."""
    base = TimeBase.STEP if table.step_relative else TimeBase.UNIX
    stream = store.stream(
        job.layout,
        job=job.job_id,
        mode=Mode.RECORDED,
        attempt=job.attempt,
        time_base=base,
        notes=notes,
    )
    store.send(stream, table, context=context, end=True)


def claim_of(store: Store, owner: str = "a") -> work.Claim:
    """A claim of the window that waits."""
    with store.database.write() as session:
        found = work.claim(session, Window, owner, store.clock(), work.Terms(30.0, 3))
    assert found is not None
    return found


def of_the_command(paths: Sequence[Path]) -> str:
    """What ``smon analyze --json`` prints."""
    trace = load(paths)
    prepared = prepare(trace.table, trace.job, context_beside(paths))
    return analyze_prepared(prepared, Options(notes=trace.notes)).to_json()


# --- the same report --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["C01", "C02", "C07b", "C11", "N-overlap"])
def test_the_report_is_that_of_the_command(store: Store, tmp_path: Path, name: str) -> None:
    """Byte for byte what ``smon analyze --json`` prints for the same files, with side evidence."""
    made = generate(scenario(name))
    write_synthetic(made, tmp_path / name)
    context = tmp_path / name / "context.json"
    document = context.read_bytes() if context.exists() else None
    record(store, made.table, made.job, context=document)
    assert store.worker().drain()
    assert stored(store) == of_the_command([tmp_path / name])


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_the_report_of_a_public_trace_is_that_of_the_command(
    store: Store, traces: Path, name: str
) -> None:
    """Times restart in every step, and the layout comes from a meta file."""
    path = traces / "straggler-analysis" / f"trace-{name}.parquet"
    trace = load([path])
    record(store, trace.table, trace.job, notes=trace.notes)
    store.worker().drain()
    assert stored(store) == of_the_command([path])


def test_rows_that_the_sender_left_out_count_as_left_out(store: Store) -> None:
    """They come as notes, and stand in the report where the command has them."""
    table, job = synthetic_job()
    damaged = replace(table, dropped=(("negative duration", 1), ("unknown op type", 1234)))
    record(store, table, job, notes=("a note", *notes_of_rows(damaged.dropped)))
    store.worker().drain()
    assert stored(store) == analyze(damaged, job, Options(("a note",))).to_json()


def test_a_price_is_in_the_report(store: Store) -> None:
    """If the server has one."""
    table, job = synthetic_job()
    record(store, table, job)
    store.worker(price_per_gpu_hour=2.5).drain()
    assert report_of(store)["cost"]["price_per_gpu_hour"] == 2.5


def test_job_and_attempt_are_those_of_the_sender(store: Store) -> None:
    """The name, not an id of the server."""
    table, job = synthetic_job()
    record(store, table, replace(job, job_id="a job / with spaces", attempt=3))
    store.worker().drain()
    assert report_of(store)["job"]["job_id"] == "a job / with spaces"
    assert report_of(store)["job"]["attempt"] == 3


# --- what stands beside it --------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Synthetic:
    """A small job with a straggler from step 6 on."""
    from smon.synth.timing import SlowCompute

    slow = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5, from_step=6)
    return generate(Scenario(dp=4, pp=2, steps=16, faults=(slow,)))


def test_lists_find_the_main_numbers_in_columns(store: Store, made: Synthetic) -> None:
    """Without opening the report."""
    record(store, made.table, made.job)
    store.worker().drain()
    report, (row,) = report_of(store), store.all(Result)
    assert row.code_version == f"{__version__}+{windows.ANALYSIS_REVISION}"
    assert (row.verdict, row.cause) == ("straggler", "slow_gpu")
    assert row.slowdown == report["slowdown"]["paper"]
    assert row.waste_ratio == report["waste_ratio"]
    assert row.recorded_s == report["step_time"]["recorded_s"]
    assert row.ideal_s == report["step_time"]["ideal_s"]
    assert row.coverage_ratio == 1.0
    assert (row.revision, row.fence) == (1, 1)
    window = store.window()
    assert (window.state, window.analysed_revision, window.tries) == (WindowState.DONE, 1, 0)


def test_every_step_has_a_row(store: Store, made: Synthetic) -> None:
    """With its times, and when it began."""
    record(store, made.table, made.job)
    store.worker().drain()
    report = report_of(store)
    rows = {row.step: row for row in store.all(StepResult)}
    assert sorted(rows) == list(range(16))
    for part in report["per_step"]:
        row = rows[part["step"]]
        assert (row.recorded_s, row.ideal_s) == (part["recorded_s"], part["ideal_s"])
        assert row.start_ns == of_steps(made.table, row.step).start_ns.min()


def test_a_step_that_was_left_out_says_why(store: Store, made: Synthetic) -> None:
    """And has no numbers."""
    lost = made.table.take(~((made.table.step == 4) & (made.table.stage == 1)))
    record(store, lost, made.job)
    store.worker().drain()
    (row,) = [row for row in store.all(StepResult) if row.skipped]
    assert row.step == 4
    assert (row.recorded_s, row.slowdown) == (None, None)


def test_every_worker_in_every_step_is_kept(store: Store, made: Synthetic) -> None:
    """Exact slowdown, computing, waiting; sorted, one row for each."""
    record(store, made.table, made.job)
    store.worker().drain()
    (row,) = store.all(Result)
    assert row.workers_path == f"results/job={row.job_id}/{row.id}-workers.parquet"
    root = store.objects.local
    assert root is not None
    table = pq.read_table(root / row.workers_path, partitioning=None)
    studied = study(prepare(made.table, made.job))
    exact = studied.times.by_worker / studied.times.ideal
    compute, wait = compute_and_wait(studied.prepared.window)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    places = list(zip(columns["step"], columns["dp"], columns["stage"], strict=True))
    assert places == sorted(places)
    assert len(places) == 16 * 4 * 2
    for values, expected in (
        (columns["slowdown"], exact),
        (columns["compute_s"], compute / 1e9),
        (columns["wait_s"], wait / 1e9),
    ):
        got = np.array(values).reshape(16, 4, 2)
        np.testing.assert_allclose(got, np.moveaxis(expected, 2, 0), rtol=1e-6)
    slow = compute[2, 1, 6:].mean() / compute[2, 1, :6].mean()
    assert slow == pytest.approx(1.5, rel=0.01)
    assert wait[2, 1, 6:].mean() < wait[0, 1, 6:].mean()


def test_an_absent_worker_has_no_numbers(store: Store) -> None:
    """Null, not 0: a job can run some steps with fewer replicas."""
    fewer = generate(Scenario(dp=4, pp=2, steps=8, step_dp=dict.fromkeys(range(4, 8), 3)))
    record(store, fewer.table, fewer.job)
    store.worker().drain()
    (row,) = store.all(Result)
    root = store.objects.local
    assert root is not None
    rows = pq.read_table(root / row.workers_path, partitioning=None).to_pylist()
    absent = [each for each in rows if each["slowdown"] is None]
    assert {(each["step"], each["dp"]) for each in absent} == {(step, 3) for step in range(4, 8)}
    assert all(each["compute_s"] is None and each["wait_s"] is None for each in absent)


def test_findings_of_a_recorded_job_are_over(store: Store, made: Synthetic) -> None:
    """Opened at their onset, at the time of that step; ended with the window."""
    record(store, made.table, made.job)
    store.worker().drain()
    (row,) = store.all(Finding)
    assert (row.state, row.cause, row.rank) == ("cleared", "slow_gpu", 6)
    assert (row.opened_step, row.onset_step, row.last_step, row.cleared_step) == (6, 6, 15, None)
    assert row.opened_ns == of_steps(made.table, 6).start_ns.min()
    assert row.last_ns == of_steps(made.table, 15).start_ns.min()
    assert row.document == report_of(store)["findings"][0]
    events = sorted(store.all(FindingEvent), key=lambda event: event.at_ns)
    assert [(event.event, event.step) for event in events] == [("opened", 6), ("ended", 15)]


def test_without_unix_time_findings_have_the_time_of_their_analysis(store: Store) -> None:
    """And steps have none."""
    table, job = synthetic_job(step_relative=True)
    record(store, table, job)
    store.worker().drain()
    (row,) = store.all(Finding)
    assert (row.opened_step, row.opened_ns) == (0, store.clock())
    assert {step.start_ns for step in store.all(StepResult)} == {None}


# --- nothing to analyse, and what contradicts itself ------------------------------------------


def test_a_window_without_a_usable_step_is_done_and_says_so(store: Store) -> None:
    """The report has all reasons and no numbers."""
    table, job = synthetic_job()
    record(store, table.take(table.stage == 0), job)
    store.worker().drain()
    assert store.window().state == WindowState.DONE
    report = report_of(store)
    assert report["verdict"] == "insufficient_data"
    assert len(report["window"]["skipped"]) == 12
    (row,) = store.all(Result)
    assert (row.slowdown, row.workers_path, row.coverage_ratio) == (None, None, 0.0)
    assert all(step.skipped for step in store.all(StepResult))


def test_side_evidence_alone_is_nothing_to_analyse(store: Store) -> None:
    """A window may have no ops at all."""
    table, job = synthetic_job(steps=2)
    record(store, table, job)
    store.write(lambda session: session.execute(update(EventFile).values(kind="context")))
    store.worker().drain()
    assert report_of(store)["verdict"] == "insufficient_data"


def test_ranks_that_contradict_the_layout_fail_the_window(store: Store) -> None:
    """For good, with the sentence that the command would print."""
    table, job = synthetic_job(dp=4, pp=4)
    record(store, table, replace(job, layout=Layout(dp=4, pp=2)))
    store.worker().drain()
    window = store.window()
    assert window.state == WindowState.FAILED
    assert "stage 3" in str(window.reason)
    assert store.all(Result) == []
    assert window.analysed_revision == window.revision


def test_a_failed_window_gets_another_chance_with_new_data(store: Store, made: Synthetic) -> None:
    """Whatever was wrong may be right now."""
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    store.send(stream, of_steps(made.table, 0, 7), end=True)
    claim = claim_after_look(store)
    with store.database.write() as session:
        work.fail(session, claim, "no", 1)
    assert store.worker().drain() == 0
    store.send(stream, of_steps(made.table, 8, 15))
    store.clock.go_on(3)
    store.worker().drain()
    assert store.window().state == WindowState.DONE


def claim_after_look(store: Store) -> work.Claim:
    """A claim of a window that has just become ready."""
    store.worker().assembly.run(store.clock())
    return claim_of(store)


# --- exactly one ------------------------------------------------------------------------------


def test_late_data_replace_the_result(both: Store, made: Synthetic) -> None:
    """There is exactly one, of all that has come; the old file of the workers is gone."""
    stream = both.stream(made.job.layout, mode=Mode.RECORDED)
    both.send(stream, of_steps(made.table, 0, 9), end=True)
    both.worker().drain()
    (first,) = both.all(Result)
    both.send(stream, of_steps(made.table, 10, 15))
    both.clock.go_on(3)
    both.worker().drain()
    (second,) = both.all(Result)
    assert second.id == first.id
    assert second.revision == first.revision + 1
    assert second.fence > first.fence
    assert report_of(both)["window"]["steps"] == 16
    files = [file.path for file in both.objects.list("results")]
    assert files == [second.workers_path]
    assert len(both.all(StepResult)) == 16
    assert len(both.all(Finding)) == 1
    assert Counter(event.event for event in both.all(FindingEvent)) == {"opened": 1, "ended": 1}


def test_data_that_come_during_the_analysis_make_another_one(store: Store, made: Synthetic) -> None:
    """The window is ready again at once, and the report on the way is not the last."""
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    store.send(stream, of_steps(made.table, 0, 9), end=True)
    claim = claim_after_look(store)
    late = [of_steps(made.table, 10, 15)]

    def check(*_progress: object) -> None:
        if late:
            store.send(stream, late.pop())

    analyse_window(store.worker().service, claim, check)
    window = store.window()
    assert (window.state, window.analysed_revision, window.revision) == (WindowState.READY, 1, 2)
    store.clock.go_on(3)
    store.worker().drain()
    assert store.window().state == WindowState.DONE
    assert report_of(store)["window"]["steps"] == 16


def test_a_worker_that_lost_its_lease_leaves_nothing_behind(both: Store, made: Synthetic) -> None:
    """No result, no step, no finding, no file."""
    record(both, made.table, made.job)
    slow = claim_after_look(both)
    both.clock.go_on(31)
    quick = claim_of(both, "other")
    service = both.worker().service
    with pytest.raises(FencedError):
        analyse_window(service, slow, lambda *_: None)
    assert both.all(Result) == []
    assert both.all(StepResult) == []
    assert both.all(Finding) == []
    assert list(both.objects.list("results")) == []
    analyse_window(service, quick, lambda *_: None)
    assert [row.fence for row in both.all(Result)] == [quick.fence]


def test_another_version_of_the_code_has_its_own_result(store: Store, made: Synthetic) -> None:
    """What an old version said stays beside it."""
    record(store, made.table, made.job)
    store.worker().drain()
    store.write(lambda session: session.execute(update(Result).values(code_version="0.0+0")))
    store.write(
        lambda session: session.execute(update(Window).values(state=WindowState.READY.value))
    )
    store.clock.go_on(3)
    store.worker().drain()
    assert len(store.all(Result)) == 2


# --- failures ---------------------------------------------------------------------------------


def test_a_file_that_is_gone_fails_the_window_in_the_end(store: Store, made: Synthetic) -> None:
    """After `max_tries`, with pauses in between: it may have been replaced in that moment."""
    record(store, made.table, made.job)
    for file in list(store.objects.list("events")):
        store.objects.delete(file.path)
    worker = store.worker()
    for _ in range(8):
        worker.tick()
        store.clock.go_on(2)
    window = store.window()
    assert (window.state, window.tries) == (WindowState.FAILED, 3)
    assert "cannot read" in str(window.reason)


class Broken:
    """Objects that nobody can reach."""

    def __getattr__(self, _name: str) -> Any:  # noqa: ANN401  # any method
        def fail(*_given: object, **_named: object) -> None:
            raise StoreError("cannot be reached")

        return fail


def test_a_store_that_is_away_costs_no_try(store: Store, made: Synthetic) -> None:
    """It is waited for, however long."""
    record(store, made.table, made.job)
    whole = store.objects
    store.objects = Broken()  # type: ignore[assignment]
    worker = store.worker()
    for _ in range(10):
        worker.assembly.run(store.clock())
        worker._one(_windows_kind())
        store.clock.go_on(6)
    assert (store.window().state, store.window().tries) == (WindowState.READY, 0)
    store.objects = whole
    store.worker().drain()
    assert store.window().state == WindowState.DONE


def _windows_kind() -> Any:  # noqa: ANN401  # private to the loop
    from smon.worker.loop import _KINDS

    return _KINDS[0]


def test_a_defect_is_tried_again_and_then_named(store: Store, made: Synthetic) -> None:
    """The reason has the class of the exception; the log has the rest."""
    record(store, made.table, made.job)
    worker = store.worker()
    defect = replace(_windows_kind(), do=_divide)
    worker.assembly.run(store.clock())
    for _ in range(5):
        worker._one(defect)
        store.clock.go_on(5)
    window = store.window()
    assert (window.state, window.tries) == (WindowState.FAILED, 3)
    assert "ZeroDivisionError" in str(window.reason)


def _divide(*_given: object) -> WindowState:
    1 / 0  # noqa: B018  # the defect
    return WindowState.DONE


# --- large windows ----------------------------------------------------------------------------


def test_of_a_window_that_is_too_large_some_steps_are_analysed(
    store: Store, made: Synthetic
) -> None:
    """Evenly spread, with a note; no more ops are read than allowed."""
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    for step in range(16):
        store.send(stream, of_steps(made.table, step), end=step == 15)
    per_step = len(of_steps(made.table, 0))
    worker = store.worker(max_window_ops=5 * per_step)
    worker.drain()
    report = report_of(store)
    assert [part["step"] for part in report["per_step"]] == [0, 4, 8, 11, 15]
    (note,) = [note for note in report["quality"]["notes"] if "evenly" in note]
    assert note.startswith("5 of 16 steps were analysed")
    assert worker.service.metrics.rows._value.get() == 5 * per_step


def test_two_steps_are_analysed_however_large_they_are(store: Store, made: Synthetic) -> None:
    """One alone says nothing."""
    record(store, made.table, made.job)
    store.worker(max_window_ops=400).drain()
    assert report_of(store)["window"]["steps_used"] == 2


@pytest.mark.parametrize(
    "count, chosen",
    [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))],
)
def test_steps_are_spread_evenly(count: int, chosen: list[int]) -> None:
    """The first and the last are among them."""
    assert evenly(list(range(10)), count) == chosen


# --- history ----------------------------------------------------------------------------------


def test_a_live_window_is_compared_with_the_earlier_ones(store: Store) -> None:
    """Of the same job; a recorded window with nothing, so that it gives what the command gives."""
    quick = generate(Scenario(dp=2, pp=2, steps=4)).table
    stream = store.stream(Layout(dp=2, pp=2), window_steps=4)
    for step in range(8):
        part = renumbered(of_steps(quick, step % 4), step)
        store.send(stream, part, steps_done=step)
    store.worker().drain()
    histories = {}
    with store.database.read() as session:
        query = select(Window.number, Result.report).join(Result, Result.window_id == Window.id)
        for number, packed in session.execute(query):
            histories[number] = json.loads(unpacked(packed))["slowdown"]["history"]
    assert histories[0] is None
    assert histories[1] == pytest.approx(1.0)


def test_reasons_are_counted_in_few_words() -> None:
    """Labels of a metric must not grow without bound."""
    assert category("warm-up of the job") == "warmup"
    assert category("its ops take no time") == "no_time"
    assert category("DP rank 0 stage 4: no ops (and 3 more replicas)") == "incomplete"


def test_no_ops_are_nothing_usable() -> None:
    """An empty table is a result, not a crash."""
    from smon.errors import NothingUsableError

    with pytest.raises(NothingUsableError):
        complete(None, None)  # type: ignore[arg-type]
