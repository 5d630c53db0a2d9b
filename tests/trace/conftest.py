"""Small traces that the tests of reading write to disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Record = dict[str, Any]
WriteParquet = Callable[..., Path]


@pytest.fixture
def write_parquet(tmp_path: Path) -> WriteParquet:
    """Write columns to a Parquet file: ``write(name, columns, metadata=…)`` gives its path."""

    def write(name: str, columns: Record, metadata: dict[bytes, bytes] | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
        return path

    return write


@pytest.fixture
def public() -> Record:
    """Columns of the public form: 3 steps of 2 DP ranks × 2 stages, 4 ops per worker."""
    ops = ["forward-compute", "backward-compute", "forward-compute", "backward-compute"]
    places = [(s, d, p, i) for s in (7, 8, 9) for d in (0, 1) for p in (0, 1) for i in range(4)]
    step, dp, stage, index = (np.array(column) for column in zip(*places, strict=True))
    return {
        "step": step.astype(np.int64),
        "dp_rank": dp.astype(np.int8),
        "stage": stage.astype(np.int8),
        "rank": (dp + 2 * stage).astype(np.int16),
        "optype": pa.array([ops[i] for i in index]).dictionary_encode(),
        "start_ts": (index * 0.5).astype(np.float32),
        "duration": np.full(len(step), 0.25, np.float32),
        "seq_id": (index // 2).astype(np.int32),
        "mc": np.zeros(len(step), np.int8),
        "gmc": stage.astype(np.int16),
        "mb_id": (index // 2).astype(np.int8),
    }


@pytest.fixture
def native(public: Record) -> Record:
    """The same ops in SMon's own form, with unix time and steps of 2 s."""
    start = 1_790_000_000_000_000_000 + public["step"] * 2 * 10**9
    return {
        "step": public["step"],
        "dp": public["dp_rank"].astype(np.int32),
        "stage": public["stage"].astype(np.int32),
        "rank": public["rank"].astype(np.int32),
        "optype": public["optype"],
        "start_ns": start + (public["start_ts"] * 1e9).astype(np.int64),
        "duration_ns": np.full(len(start), 250_000_000, np.int64),
        "seq": public["seq_id"],
        "chunk": public["mc"].astype(np.int16),
        "global_chunk": public["gmc"],
        "microbatch": public["mb_id"].astype(np.int32),
    }


@pytest.fixture
def records() -> list[Record]:
    """Records of ndtimeline: 2 steps of 2 DP ranks × 2 stages, two microbatches each."""
    return [
        {
            "ts": 1_790_000_000.0,
            "metric": metric,
            "rank": dp + 2 * stage,
            "step": step,
            "iteration": step,
            "start_ts": [1_790_000_000.0 + 2 * step + offset + 0.25 * i for i in range(2)],
            "duration": [0.125, 0.125],
            "model_chunk": [0, 0],
            "stage": stage,
            "dp_rank": dp,
            "tp_rank": 0,
            "ip": "10.0.0.1",
            "trial": "run-a",
            "run_id": 3,
        }
        for step in (4, 5)
        for dp in (0, 1)
        for stage in (0, 1)
        for metric, offset in (("forward-compute", 0.0), ("backward-compute", 1.0))
    ]


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write records as JSON lines: ``write(records, name="trace.jsonl")`` gives the path."""

    def write(records: list[Any], name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
