from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smon.errors import SMonError
from smon.topology import Layout
from smon.trace.formats import READERS
from smon.trace.load import load

LAYOUT = Layout(dp=4, pp=4)

RECORD = {
    "metric": "forward-compute", "step": 1, "stage": 0, "dp_rank": 0, "rank": 0,
    "start_ts": [1.0, 2.0], "duration": [0.5, 0.5], "model_chunk": [0, 0], "trial": "t",
}  # fmt: skip

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def _parquet(rows: int = 40) -> bytes:
    index = np.arange(rows)
    columns = {
        "step": index // 8,
        "dp_rank": (index % 2).astype(np.int8),
        "stage": (index // 2 % 2).astype(np.int8),
        "optype": pa.array(["forward-compute", "gc"] * (rows // 2)).dictionary_encode(),
        "start_ts": (index % 8).astype(np.float32),
        "duration": np.ones(rows, np.float32),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


PARQUET = _parquet()
LINES = "".join(json.dumps({**RECORD, "step": step}) + "\n" for step in range(5)).encode()


def _survives(content: bytes) -> None:
    """Reading gives a table or an `SMonError` of one line, by `load` and by every reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        reads: list[Callable[[], object]] = [partial(reader.read, path) for reader in READERS]
        reads += [partial(load, [path], layout=LAYOUT), partial(load, [path])]
        for read in reads:
            assert _message(read).isprintable()


def _message(read: Callable[[], object]) -> str:
    try:
        read()
    except SMonError as error:
        return str(error)
    return ""


@given(st.binary(max_size=300), st.sampled_from([b"", b"PAR1", b"\x1f\x8b\x08\x00", b'{"metric"']))
def test_random_bytes_raise_nothing_foreign(content: bytes, head: bytes) -> None:
    """Garbage of any kind, also with the right beginning."""
    _survives(head + content)


@given(st.sampled_from([PARQUET, LINES, gzip.compress(LINES)]), st.data())
def test_truncated_files_raise_nothing_foreign(content: bytes, data: st.DataObject) -> None:
    """A copy that stopped anywhere."""
    _survives(content[: data.draw(st.integers(0, len(content)))])


@given(st.sampled_from([PARQUET, LINES, gzip.compress(LINES)]), st.data())
def test_overwritten_bytes_raise_nothing_foreign(content: bytes, data: st.DataObject) -> None:
    """A few bytes changed anywhere: lengths, types and names of columns among them."""
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    _survives(bytes(damaged))


@given(st.dictionaries(st.sampled_from(sorted(RECORD)), JSON_VALUES, min_size=1))
def test_records_of_any_content_raise_nothing_foreign(changes: dict[str, Any]) -> None:
    """Any JSON value in any field of a record."""
    _survives(LINES + json.dumps({**RECORD, **changes}).encode())


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
@settings(max_examples=20)
@given(data=st.data())
def test_truncated_public_traces_raise_nothing_foreign(
    traces: Path, name: str, data: st.DataObject
) -> None:
    """The real files, cut off anywhere."""
    content = (traces / "straggler-analysis" / f"trace-{name}.parquet").read_bytes()
    _survives(content[: data.draw(st.integers(0, len(content) - 1))])
