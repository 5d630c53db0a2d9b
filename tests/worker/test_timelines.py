from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from smon.errors import ConfigError, NothingUsableError, StoreError
from smon.store.models import Mode, Result
from smon.store.results import unpacked
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.timing import SlowCompute
from smon.worker.timelines import (
    Limits,
    MarksOptions,
    TimelineOptions,
    step_marks,
    timeline_options,
    timeline_pieces,
)
from tests.worker.feed import Store


@pytest.fixture(scope="module")
def made() -> Synthetic:
    """A job whose second half is slower, so that no step has the ideal of the window."""
    fault = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5, from_step=4)
    return generate(Scenario(dp=3, pp=2, microbatches=3, steps=8, faults=(fault,)))


def analysed(store: Store, made: Synthetic) -> str:
    """A recorded window of it, analysed."""
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    store.send(stream, made.table, end=True)
    store.worker().drain()
    return store.window().id


def report(store: Store) -> dict[str, Any]:
    """The report of the only window."""
    with store.database.read() as session:
        packed = session.execute(select(Result.report)).scalar_one()
    document: dict[str, Any] = json.loads(unpacked(packed))
    return document


def marks(store: Store, window: str, step: int, *workers: tuple[int, int]) -> dict[str, Any]:
    """One step of some workers."""
    return step_marks(store.worker().service, MarksOptions(window, step, workers), lambda *_: None)


def drawn(store: Store, options: TimelineOptions, limits: Limits | None = None) -> dict[str, Any]:
    """A trace file, read back."""
    service = store.worker().service
    text = "".join(timeline_pieces(service, options, lambda *_: None, limits))
    document: dict[str, Any] = json.loads(text)
    return document


def steps_drawn(document: dict[str, Any]) -> list[int]:
    """Which steps have ops."""
    return sorted({e["args"]["step"] for e in document["traceEvents"] if e["ph"] == "X"})


def test_a_step_is_drawn_as_the_report_of_the_window_sees_it(store: Store, made: Synthetic) -> None:
    """One number, one meaning: recorded and ideal are the report's, though one step is read."""
    window = analysed(store, made)
    for each in report(store)["per_step"]:
        found = marks(store, window, each["step"], (0, 0))
        assert found["recorded_s"] == pytest.approx(each["recorded_s"], abs=1e-9)
        assert found["ideal_s"] == pytest.approx(each["ideal_s"], abs=1e-9)
        assert found["notes"] == []


def test_only_the_steps_that_are_drawn_are_read(store: Store, made: Synthetic) -> None:
    """The counter of rows says so; row groups hold whole steps."""
    window = analysed(store, made)
    worker = store.worker()
    options = MarksOptions(window, 5, ((0, 0),))
    step_marks(worker.service, options, lambda *_: None)
    read = worker.service.metrics.rows._value.get()
    assert read == int((made.table.step == 5).sum())


def test_without_the_ideals_of_the_window_a_step_says_so(store: Store, made: Synthetic) -> None:
    """The file of the workers may be gone; a drawing is still better than none."""
    window = analysed(store, made)
    (row,) = store.all(Result)
    whole = marks(store, window, 6, (0, 0))
    store.objects.delete(row.workers_path)
    alone = marks(store, window, 6, (0, 0))
    assert "this step alone" in alone["notes"][0]
    assert alone["recorded_s"] == whole["recorded_s"]
    assert alone["ideal_s"] != pytest.approx(whole["ideal_s"], rel=1e-3)


def test_a_damaged_file_of_workers_is_an_error(store: Store, made: Synthetic) -> None:
    """It may be replaced, so it is tried again."""
    window = analysed(store, made)
    (row,) = store.all(Result)
    store.objects.put(row.workers_path, b"no parquet")
    with pytest.raises(StoreError, match="cannot read"):
        marks(store, window, 6, (0, 0))


def test_clocks_that_the_analysis_put_right_are_right_in_one_step(store: Store) -> None:
    """The offset of a clock is known from the whole window, not from the step that is drawn."""
    job = generate(Scenario(dp=3, pp=2, microbatches=3, steps=6))
    ahead = 200_000_000 * (job.table.dp == 1)
    skewed = replace(job.table, start_ns=job.table.start_ns + ahead)
    stream = store.stream(job.job.layout, mode=Mode.RECORDED)
    store.send(stream, skewed, end=True)
    store.worker().drain()
    window = store.window().id
    each = report(store)["per_step"][3]
    found = marks(
        store, window, each["step"], *((dp, stage) for dp in range(3) for stage in (0, 1))
    )
    assert found["recorded_s"] == pytest.approx(each["recorded_s"], rel=1e-4)
    columns = {name: np.array(column) for name, column in found["marks"].items()}
    step = job.table.take((job.table.step == each["step"]) & (job.table.duration_ns > 0))
    for row, place in enumerate(found["rows"]):
        mine = step.take((step.dp == place["dp"]) & (step.stage == place["stage"]))
        start = np.sort(columns["start_ns"][(columns["row"] == row) & (columns["kind"] == 0)])
        expected = np.sort(mine.start_ns - step.start_ns.min())
        assert np.abs(start - expected).max() < 2_000_000


def test_parts_of_a_window_are_drawn_one_after_the_other(store: Store, made: Synthetic) -> None:
    """Memory holds a part at a time; the file is that of the whole, each step at its place."""
    window = analysed(store, made)
    options = timeline_options({"window_id": window, "kind": "both"})
    whole = drawn(store, options)
    parts = drawn(store, options, Limits(part=len(made.table) // 4))
    assert [event["args"] for event in parts["traceEvents"]] == [
        event["args"] for event in whole["traceEvents"]
    ]
    for one, other in zip(parts["traceEvents"], whole["traceEvents"], strict=True):
        assert one.get("ts", 0.0) == pytest.approx(other.get("ts", 0.0), abs=0.1)
        assert one.get("dur", 0.0) == pytest.approx(other.get("dur", 0.0), abs=0.002)


def test_a_timeline_that_would_be_too_large_is_cut_and_says_so(
    store: Store, made: Synthetic
) -> None:
    """After the first steps that fit; of fewer workers, more steps fit."""
    window = analysed(store, made)
    of_step = int((made.table.step == 0).sum())
    limits = Limits(events=3 * of_step)
    actual = timeline_options({"window_id": window, "kind": "actual"})
    document = drawn(store, actual, limits)
    assert steps_drawn(document) == [0, 1, 2]
    assert document["otherData"]["steps"] == "0-2"
    assert "the first 3 of 8 steps" in document["otherData"]["bounded"]
    both = timeline_options({"window_id": window, "kind": "both"})
    assert steps_drawn(drawn(store, both, limits)) == [0]
    one = timeline_options({"window_id": window, "kind": "actual", "dp": [0], "stage": [0]})
    assert steps_drawn(drawn(store, one, limits)) == list(range(8))
    assert steps_drawn(drawn(store, one, Limits(read=2 * of_step))) == [0, 1]
    tiny = drawn(store, actual, Limits(events=1, read=1, part=1))
    assert steps_drawn(tiny) == [0]


def test_a_step_that_cannot_be_drawn_is_left_out_with_its_reason(
    store: Store, made: Synthetic
) -> None:
    """The others are drawn; if none can be, there is no file but an error."""
    table = made.table
    broken = (table.step == 3) & (table.stage == 1)
    stream = store.stream(made.job.layout, mode=Mode.RECORDED)
    store.send(stream, table.take(~broken), end=True)
    store.worker().drain()
    window = store.window().id
    document = drawn(store, timeline_options({"window_id": window}), Limits(part=1))
    assert steps_drawn(document) == [0, 1, 2, 4, 5, 6, 7]
    (left_out,) = document["leftOut"]
    assert left_out["step"] == 3
    assert left_out["reason"]
    with pytest.raises(NothingUsableError):
        drawn(store, timeline_options({"window_id": window, "steps": [3, 3]}))
    with pytest.raises(NothingUsableError):
        marks(store, window, 3, (0, 0))


def test_options_of_a_timeline() -> None:
    """Numbers may stand alone; kinds are actual, ideal or both."""
    options = timeline_options({"window_id": "w", "kind": "ideal", "dp": 3, "stage": None})
    assert [kind.label for kind in options.choice.kinds] == ["ideal"]
    assert (options.choice.dp, options.choice.stage) == (frozenset({3}), frozenset())
    assert options.steps is None
    with pytest.raises(ConfigError):
        timeline_options({"kind": "ideal"})
