"""Reports as the store keeps them, made by hand where a number must be known."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smon.store.queries.matrix import Matrix, Shape
from tests.api.filled import report_of


def slow_document(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # of the report
    """The report of a job of 4 × 4 workers whose rank 6 (DP rank 2, stage 1) is slow."""
    document = report_of("slow").to_dict()
    return {**document, **changes}


def wide_document(dp: int, pp: int, slow: tuple[int, int], value: float = 1.5) -> dict[str, Any]:
    """A report of many workers, of which one is slow."""
    workers = [
        {
            "dp": rank, "stage": stage, "rank": stage * dp + rank, "host": None,
            "slowdown": value if (rank, stage) == slow else 1.0, "approx_slowdown": 1.0,
        }
        for stage in range(pp)
        for rank in range(dp)
    ]  # fmt: skip
    layout = {"dp": dp, "pp": pp, "tp": 1, "cp": 1, "ep": 1, "vpp": 1}
    job = {"job_id": "wide", "attempt": 0, "layout": layout, "world_size": dp * pp}
    return {"job": job, "workers": workers, "per_step": [], "findings": []}


def matrix_with(rows: list[dict[str, Any]], dp: int, pp: int) -> Matrix:
    """A file of every worker in every step, in memory."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    content = sink.getvalue()
    return Matrix(lambda: pa.BufferReader(content), Shape(dp, pp))


def rotating(dp: int, pp: int, slow: list[tuple[int, int]]) -> Matrix:
    """A file in which the slow worker of step n is the n-th of a list."""
    return matrix_with(
        [
            {
                "step": step, "dp": rank, "stage": stage,
                "slowdown": 1.5 if (rank, stage) == place else 1.0 + 0.001 * rank,
                "compute_s": 0.5 + 0.1 * step, "wait_s": 0.0 if (rank, stage) == place else 0.25,
            }
            for step, place in enumerate(slow)
            for rank in range(dp)
            for stage in range(pp)
        ],
        dp,
        pp,
    )  # fmt: skip
