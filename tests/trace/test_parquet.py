from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smon.errors import TraceError, UnknownFormatError
from smon.ops import OpType
from smon.trace.formats import parquet
from smon.trace.table import OpTable


def _equal(first: OpTable, second: OpTable) -> bool:
    return all(
        np.array_equal(values, second.columns[name]) for name, values in first.columns.items()
    )


@pytest.mark.parametrize("name, rows", [("AR", 117_216), ("SE", 107_328), ("ST", 6_784)])
def test_public_traces_are_read_whole(traces: Path, name: str, rows: int) -> None:
    """Every row of a public trace is an op; its times restart in every step."""
    table = parquet.read(traces / "straggler-analysis" / f"trace-{name}.parquet").table
    assert len(table) == rows
    assert table.step_relative
    assert table.dropped == ()


def test_seconds_in_float32_become_nanoseconds_through_float64(traces: Path) -> None:
    """No more precision is lost than the file itself lost."""
    path = traces / "straggler-analysis" / "trace-ST.parquet"
    raw = pq.ParquetFile(path).read()
    table = parquet.read(path).table
    for name, column in (("start_ns", "start_ts"), ("duration_ns", "duration")):
        exact = np.array(raw[column].to_pylist(), np.float64) * 1e9
        assert np.abs(table.columns[name] - exact).max() <= 0.5


def test_absolute_times_that_begin_at_zero_are_not_step_relative(traces: Path) -> None:
    """Steps of 0.3 s in a row start within the first minute, and yet do not restart."""
    path = traces / "torch-gloo-2pp2dp" / "healthy" / "trace.parquet"
    assert not parquet.read(path).table.step_relative


def test_public_form(public: dict[str, Any], write_parquet: Callable[..., Path]) -> None:
    """Columns get the schema's names, types and units."""
    table = parquet.read(write_parquet("t.parquet", public)).table
    assert table.step_relative
    assert table.start_ns[:4].tolist() == [0, 500_000_000, 1_000_000_000, 1_500_000_000]
    assert table.duration_ns.dtype == np.int64
    assert table.optype[:2].tolist() == [OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE]
    assert table.rank.tolist() == public["rank"].tolist()


def test_native_form_comes_back_as_written(
    native: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Int64 nanoseconds survive to the last digit."""
    native["start_ns"] += 1
    table = parquet.read(write_parquet("t.parquet", native)).table
    assert not table.step_relative
    for name, values in native.items():
        if name != "optype":
            assert np.array_equal(table.columns[name], values), name


@pytest.mark.parametrize(
    "mark, expected", [(b"true", True), (b"1", True), (b"false", False), (b"0", False)]
)
def test_the_mark_in_the_file_decides_whether_times_are_relative(
    public: dict[str, Any], write_parquet: Callable[..., Path], mark: bytes, *, expected: bool
) -> None:
    """``smon.step_relative`` is believed over what the times look like."""
    path = write_parquet("t.parquet", public, {parquet.STEP_RELATIVE_KEY: mark})
    assert parquet.read(path).table.step_relative is expected


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "binary", "chunks"])
def test_op_types_in_any_encoding(
    public: dict[str, Any], write_parquet: Callable[..., Path], kind: str
) -> None:
    """Names of op types are read from strings, bytes and dictionaries alike."""
    expected = parquet.read(write_parquet("expected.parquet", public)).table
    names = public["optype"].to_pylist()
    values = {
        "string": pa.array(names, pa.string()),
        "large_string": pa.array(names, pa.large_string()),
        "dictionary": pa.array(names).dictionary_encode(),
        "binary": pa.array([name.encode() for name in names], pa.binary()),
        "chunks": pa.chunked_array([names[:5], names[5:]]),
    }
    public["optype"] = values[kind]
    assert _equal(parquet.read(write_parquet("t.parquet", public)).table, expected)


def test_row_groups_are_put_together_in_order(native: dict[str, Any], tmp_path: Path) -> None:
    """A file of many row groups reads like a file of one."""
    one, many = tmp_path / "one.parquet", tmp_path / "many.parquet"
    pq.write_table(pa.table(native), one)
    pq.write_table(pa.table(native), many, row_group_size=7)
    assert _equal(parquet.read(one).table, parquet.read(many).table)


def test_unknown_op_types_are_counted(
    public: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """A type that SMon does not know, or none, is dropped; an unused category is no row."""
    names = public["optype"].to_pylist()
    names[0], names[1] = "first-op", None
    public["optype"] = pa.array(names).dictionary_encode()
    table = parquet.read(write_parquet("t.parquet", public)).table
    assert len(table) == len(names) - 2
    assert table.dropped == (("unknown op type", 2),)


def test_gaps_and_impossible_times_are_counted(
    public: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """NaN, null, infinite, negative and endless durations drop their row, each for a reason."""
    start, duration = public["start_ts"], public["duration"]
    duration[:4] = [np.nan, np.inf, -1, 1e6]
    public["start_ts"] = pa.array([None, *start[1:5], float("nan"), *start[6:]], pa.float32())
    table = parquet.read(write_parquet("t.parquet", public)).table
    assert table.dropped == (
        ("duration above 7 days", 1),
        ("duration is not a number", 1),
        ("negative duration", 1),
        ("start is not a number", 2),
    )


def test_optional_columns_may_be_missing(
    public: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Without rank, chunks and microbatch there are none; ``seq`` is counted by start."""
    expected = parquet.read(write_parquet("expected.parquet", public)).table
    for name in ("rank", "mc", "gmc", "mb_id", "seq_id"):
        del public[name]
    reading = parquet.read(write_parquet("t.parquet", public))
    assert reading.unnumbered == {"seq"}
    assert np.array_equal(reading.table.seq, expected.seq)
    for name in ("rank", "chunk", "global_chunk", "microbatch"):
        assert set(reading.table.columns[name].tolist()) == {-1}


def test_whole_numbers_with_gaps_are_read_from_floats_and_nulls(
    public: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Pandas writes integers with gaps as floats; a gap is -1."""
    public["mb_id"] = public["mb_id"].astype(np.float64)
    public["mb_id"][0] = np.nan
    public["gmc"] = pa.array([None, *public["gmc"][1:]], pa.uint8())
    table = parquet.read(write_parquet("t.parquet", public)).table
    assert table.microbatch[:3].tolist() == [-1, 0, 1]
    assert table.global_chunk[:3].tolist() == [-1, 0, 0]


def test_a_column_that_may_not_have_gaps_drops_the_row(
    native: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """A row without step or start belongs nowhere."""
    native["step"] = pa.array([None, *native["step"][1:]], pa.int64())
    native["start_ns"] = pa.array([1, None, *native["start_ns"][2:]], pa.int64())
    table = parquet.read(write_parquet("t.parquet", native)).table
    assert table.dropped == (
        ("negative step, rank or sequence number", 1),
        ("start is not a number", 1),
    )


@pytest.mark.parametrize(
    "column, values, says",
    [
        ("dp_rank", [2**40] * 48, "column dp_rank: expected numbers from"),
        ("mc", [float("inf")] * 48, "column mc: expected numbers from"),
        ("stage", ["a"] * 48, "column stage: expected whole numbers, found string"),
        ("start_ts", ["a"] * 48, "column start_ts: expected a number of seconds"),
        ("optype", [1] * 48, "column optype: expected names of op types, found int64"),
        ("rank", [[1]] * 48, "column rank: expected whole numbers, found list"),
    ],
)
def test_unusable_columns_are_named(
    public: dict[str, Any],
    write_parquet: Callable[..., Path],
    column: str,
    values: list[Any],
    says: str,
) -> None:
    """A column of the wrong type or range is an error that says what was expected."""
    public[column] = pa.array(values)
    with pytest.raises(TraceError, match=says):
        parquet.read(write_parquet("t.parquet", public))


def test_float_nanoseconds_are_refused(
    native: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Nanoseconds of unix time do not fit into a float."""
    native["start_ns"] = native["start_ns"].astype(np.float64)
    with pytest.raises(TraceError, match="expected whole nanoseconds, found double"):
        parquet.read(write_parquet("t.parquet", native))


def test_unix_time_in_float32_is_refused(
    public: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Neighbouring float32 values are 128 s apart there: the times say nothing."""
    public["start_ts"] = public["start_ts"] + np.float32(1.79e9)
    with pytest.raises(TraceError, match="128 s apart"):
        parquet.read(write_parquet("t.parquet", public))


def test_other_parquet_files_are_of_unknown_format(write_parquet: Callable[..., Path]) -> None:
    """What lacks is said, of the form that comes closest."""
    path = write_parquet("t.parquet", {"step": [1], "stage": [0], "optype": ["gc"], "dp": [0]})
    with pytest.raises(UnknownFormatError, match="lacks duration_ns, start_ns"):
        parquet.read(path)


def test_steps_that_begin_late_or_follow_each_other_are_absolute() -> None:
    """Times restart only if all steps begin in the first minute and lie over each other."""
    step = np.repeat(np.arange(5), 10)
    within = np.tile(np.arange(10) * 10**9, 5)
    assert parquet.restarts_in_every_step(step, within)
    assert parquet.restarts_in_every_step(step, within + 5 * 10**9 * (step == 3) // 2)
    assert not parquet.restarts_in_every_step(step, within + step * 10**10)
    assert not parquet.restarts_in_every_step(step[:20], (within + step * 10**10)[:20])
    assert not parquet.restarts_in_every_step(step, within + 60 * 10**9)
    assert not parquet.restarts_in_every_step(step[:10], within[:10] + 60 * 10**9)
    assert parquet.restarts_in_every_step(step[:10], within[:10])
    assert not parquet.restarts_in_every_step(step[:0], within[:0])


def test_order_of_rows_does_not_matter_for_restarts() -> None:
    """Rows in any order give the same answer as sorted ones."""
    step = np.tile(np.arange(5), 10)
    start = np.repeat(np.arange(10) * 10**9, 5)
    assert parquet.restarts_in_every_step(step, start)
    assert not parquet.restarts_in_every_step(step, start + step * 10**10)


def test_reading_imports_neither_pandas_nor_datasets(
    native: dict[str, Any], write_parquet: Callable[..., Path]
) -> None:
    """Both cost more time than reading the file does."""
    native["chunk"] = pa.array([None, *native["chunk"][1:]], pa.int16())
    path = write_parquet("t.parquet", native)
    code = (
        "import sys; from pathlib import Path; from smon.trace.formats import parquet; "
        f"parquet.read(Path({str(path)!r})); "
        "print(sorted({'pandas', 'pyarrow.dataset'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
