"""One worker over steps and windows, beside its peers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smon.errors import StoreError
from smon.store.objects import Objects
from smon.store.queries.series import (
    SeriesLimits,
    SeriesWindow,
    WorkerStep,
    group_medians,
    series_of,
)
from smon.store.queries.workers import WorkersFile
from smon.worker.matrix import SCHEMA

Rows = list[dict[str, Any]]


def rows(steps: range, workers: Mapping[tuple[int, int], tuple[float | None, ...]]) -> Rows:
    """The same in each step: (slowdown, compute_s, wait_s) of each (dp, stage)."""
    names = ("slowdown", "compute_s", "wait_s")
    return [
        {"step": step, "dp": dp, "stage": stage, **dict(zip(names, values, strict=True))}
        for step in steps
        for (dp, stage), values in workers.items()
    ]


def content(found: Rows) -> bytes:
    """A file as the worker writes it."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(found, schema=SCHEMA), sink, row_group_size=5)
    return sink.getvalue()


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    """An empty root of files."""
    return Objects(str(tmp_path / "objects"))


def closed(objects: Objects, number: int, found: Rows) -> SeriesWindow:
    """A window with its file."""
    objects.put(f"{number}.parquet", content(found))
    return SeriesWindow(f"w{number}", number, WorkersFile(objects, f"{number}.parquet"))


def test_peers_are_the_other_dp_ranks_of_the_stage(objects: Objects) -> None:
    """Itself and other stages do not count, nor do those that are absent."""
    workers = {
        (0, 0): (1.0, 1.0, 0.1), (1, 0): (1.5, 9.0, 0.0), (2, 0): (1.0, 3.0, 0.5),
        (3, 0): (None, None, None), (0, 1): (1.0, 100.0, 100.0),
    }  # fmt: skip
    found = series_of([closed(objects, 0, rows(range(2), workers))], (1, 0))
    assert [each.step for each in found.steps] == [0, 1]
    step = found.steps[0]
    assert (step.slowdown, step.compute_s, step.wait_s) == (1.5, 9.0, 0.0)
    assert step.peers_compute_s == 2.0
    assert step.peers_wait_s == pytest.approx(0.3)


def test_an_absent_worker_and_one_without_peers_are_unknown(objects: Objects) -> None:
    """None, never 0."""
    workers = {(0, 0): (None, None, None), (0, 1): (1.0, 1.0, 0.0)}
    window = closed(objects, 0, rows(range(1), workers))
    assert series_of([window], (0, 0)).steps == (WorkerStep(0, None, None, None, None, None),)
    assert series_of([window], (0, 1)).steps == (WorkerStep(0, 1.0, 1.0, 0.0, None, None),)
    assert series_of([window], (5, 0)).steps == ()


def test_windows_join_and_the_newer_one_holds(objects: Objects) -> None:
    """The running diagnosis comes first; steps ascend however files come."""
    old = closed(objects, 0, rows(range(4), {(0, 0): (1.0, 1.0, 0.0)}))
    live = content(rows(range(2, 6), {(0, 0): (2.0, 2.0, 0.0)}))
    running = SeriesWindow(None, None, WorkersFile(objects, None, live))
    found = series_of([running, old], (0, 0))
    assert [each.step for each in found.steps] == [0, 1, 2, 3, 4, 5]
    assert [each.compute_s for each in found.steps] == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert found.left_out == 0


def test_large_jobs_read_fewer_windows(objects: Objects) -> None:
    """The newest at any size; older ones as long as all together stay small."""
    windows = [
        closed(objects, number, rows(range(4 * number, 4 * number + 4), {(0, 0): (1.0, 1.0, 0.0)}))
        for number in (2, 1, 0)
    ]
    found = series_of(windows, (0, 0), SeriesLimits(rows=8))
    assert [window.number for window in found.windows] == [2, 1]
    assert found.left_out == 1
    assert found.steps[0].step == 4


def test_files_that_have_gone_are_left_out(objects: Objects) -> None:
    """Retention takes them; what is left is shown."""
    gone = SeriesWindow("w9", 9, WorkersFile(objects, "gone.parquet"))
    kept = closed(objects, 0, rows(range(1), {(0, 0): (1.0, 1.0, 0.0)}))
    found = series_of([gone, kept], (0, 0))
    assert [each.step for each in found.steps] == [0]


def test_a_damaged_file_is_an_error_of_the_store(objects: Objects) -> None:
    """Not one of pyarrow."""
    objects.put("bad.parquet", b"PAR1 nonsense PAR1")
    window = SeriesWindow("w0", 0, WorkersFile(objects, "bad.parquet"))
    with pytest.raises(StoreError, match="cannot read the workers"):
        series_of([window], (0, 0))


def test_medians_are_those_of_numpy() -> None:
    """Of random groups, some empty, with unknown values."""
    random = np.random.default_rng(5)
    group = random.integers(0, 9, 200)
    group[group == 4] = 3
    values = np.where(random.random(200) < 0.2, np.nan, random.random(200))
    found = group_medians(values, group, 9)
    for number in range(9):
        mine = values[(group == number) & ~np.isnan(values)]
        assert np.isnan(found[number]) if not len(mine) else found[number] == np.median(mine)
