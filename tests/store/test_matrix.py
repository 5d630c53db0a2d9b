"""Every worker in every step, read from its file: one step, the mean, the slowest of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from smon.errors import MissingError, StoreError
from smon.store.queries.matrix import Column, Matrix, Shape, Worst
from tests.web.documents import matrix_with, rotating

Rows = list[dict[str, Any]]


def test_a_step_is_a_grid_of_stages_and_dp_ranks() -> None:
    """Whatever the order of rows; who is absent is NaN."""
    rows: Rows = [
        {"step": 5, "dp": 1, "stage": 0, "slowdown": 1.2, "compute_s": 0.3, "wait_s": None},
        {"step": 5, "dp": 0, "stage": 1, "slowdown": 1.1, "compute_s": 0.4, "wait_s": 0.0},
        {"step": 6, "dp": 0, "stage": 0, "slowdown": 9.0, "compute_s": 0.4, "wait_s": 0.0},
    ]
    matrix = matrix_with(rows, 2, 2)
    grid = matrix.of_step(Column.SLOWDOWN, 5)
    np.testing.assert_allclose(grid, [[np.nan, 1.2], [1.1, np.nan]])
    assert np.isnan(matrix.of_step(Column.WAIT_S, 5)[0, 1])
    assert matrix.steps() == (5, 6)
    with pytest.raises(MissingError, match="a step of this window"):
        matrix.of_step(Column.SLOWDOWN, 7)


def test_the_mean_is_over_the_steps_in_which_a_worker_is_there() -> None:
    """Not over those in which it is not."""
    rows: Rows = [
        {"step": 1, "dp": 0, "stage": 0, "slowdown": 1.0, "compute_s": 0.2, "wait_s": 0.1},
        {"step": 2, "dp": 0, "stage": 0, "slowdown": 1.0, "compute_s": 0.4, "wait_s": None},
    ]
    matrix = matrix_with(rows, 2, 1)
    np.testing.assert_allclose(matrix.mean(Column.COMPUTE_S), [[0.3, np.nan]])
    np.testing.assert_allclose(matrix.mean(Column.WAIT_S), [[0.1, np.nan]])


def test_the_slowest_of_each_step_is_found() -> None:
    """Of equals the lower rank; a step without any is left out."""
    assert [(one.dp, one.stage) for one in rotating(4, 2, [(3, 1), (0, 0)]).worst()] == [
        (3, 1),
        (0, 0),
    ]
    rows: Rows = [
        {"step": 1, "dp": 1, "stage": 0, "slowdown": 1.5},
        {"step": 1, "dp": 0, "stage": 1, "slowdown": 1.5},
        {"step": 2, "dp": 0, "stage": 0, "slowdown": None},
    ]
    assert matrix_with(rows, 2, 2).worst() == (Worst(1, 1, 0, 1.5),)


def test_workers_outside_the_layout_are_left_out() -> None:
    """A file of another layout breaks nothing."""
    rows: Rows = [
        {"step": 1, "dp": 0, "stage": 0, "slowdown": 1.5},
        {"step": 1, "dp": 7, "stage": 9, "slowdown": 3.0},
    ]
    matrix = matrix_with(rows, 1, 1)
    np.testing.assert_allclose(matrix.of_step(Column.SLOWDOWN, 1), [[1.5]])
    np.testing.assert_allclose(matrix.mean(Column.SLOWDOWN), [[1.5]])
    assert len(matrix.worst()) == 1


def test_rows_come_as_they_are() -> None:
    """All, or those of one step."""
    matrix = rotating(2, 2, [(0, 0), (1, 1)])
    assert len(list(matrix.rows())) == 8
    assert {row["step"] for row in matrix.rows(1)} == {1}


def test_a_damaged_file_is_an_error_of_the_store() -> None:
    """No internals of the reader."""
    matrix = Matrix(lambda: pa.BufferReader(b"no parquet"), Shape(1, 1))
    for read in (matrix.steps, matrix.worst, lambda: matrix.mean(Column.WAIT_S)):
        with pytest.raises(StoreError, match="the file of the workers cannot be read"):
            read()
