from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smon.errors import StoreError
from smon.store.events import (
    GROUP_ROWS,
    context_path,
    open_ops,
    ops_path,
    read_context,
    read_ops,
    steps_of,
    write_context,
    write_ops,
)
from smon.store.objects import Objects
from smon.trace.table import OpTable
from smon.wire.arrow import SCHEMA
from tests.service import record_batch
from tests.store.rows import DAY_NS, NOW, ops

LARGE = ops(dp=8, pp=8, microbatches=12, steps=6)


def write(objects: Objects, path: str, table: OpTable, *, shuffled: bool = True) -> int:
    """Write a table, its rows in a random order."""
    order = np.random.default_rng(7).permutation(len(table))
    rows = record_batch(table.take(order) if shuffled else table)
    return write_ops(objects, path, rows, step_relative=table.step_relative)


def sorted_rows(table: OpTable) -> list[tuple[int, ...]]:
    """All rows, in an order of their own."""
    return sorted(zip(*(values.tolist() for values in table.columns.values()), strict=True))


def test_ops_come_back_as_they_were(any_root: str) -> None:
    """Every column of every row survives, locally and on S3."""
    objects = Objects(any_root)
    table = ops(steps=3)
    size = write(objects, "events/a.parquet", table)
    assert objects.size("events/a.parquet") == size
    read = read_ops(objects, ["events/a.parquet"])
    assert sorted_rows(read) == sorted_rows(table)
    assert read.step_relative == table.step_relative
    assert read.dropped == ()


@pytest.mark.parametrize("relative", [True, False])
def test_the_time_base_stands_in_the_file(root: str, *, relative: bool) -> None:
    """Times that restart in every step are not taken for unix time, nor the other way round."""
    objects = Objects(root)
    write(objects, "events/a.parquet", replace(ops(), step_relative=relative))
    assert read_ops(objects, ["events/a.parquet"]).step_relative == relative
    with open_ops(objects, "events/a.parquet") as file:
        assert file.schema_arrow.metadata[b"smon.schema"] == b"smon.ops/1"


def test_rows_lie_by_step_rank_and_start(root: str) -> None:
    """The order that the encodings live on, whatever order rows come in."""
    objects = Objects(root)
    write(objects, "events/a.parquet", LARGE)
    read = read_ops(objects, ["events/a.parquet"])
    keys = np.lexsort((read.start_ns, read.rank, read.step))
    assert (np.diff(keys) == 1).all()


def test_a_file_takes_a_third_less_than_by_default(root: str) -> None:
    """The encodings and the order pay: bytes per op, against Parquet as it comes."""
    objects = Objects(root)
    size = write(objects, "events/a.parquet", LARGE)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([record_batch(LARGE)]), sink)
    assert size <= 0.67 * sink.getvalue().size
    with open_ops(objects, "events/a.parquet") as file:
        columns = [file.metadata.row_group(0).column(n) for n in range(11)]
        encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "DELTA_BINARY_PACKED" in encodings["start_ns"]
    assert "BYTE_STREAM_SPLIT" in encodings["duration_ns"]


def test_a_large_step_has_a_row_group_of_its_own(root: str) -> None:
    """So that one step can be read without the others."""
    objects = Objects(root)
    table = ops(dp=16, pp=8, microbatches=8, steps=3)
    rows = len(table) // 3
    assert rows > GROUP_ROWS
    write(objects, "events/a.parquet", table)
    with open_ops(objects, "events/a.parquet") as file:
        groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert groups == [rows] * 3


def test_small_steps_share_a_row_group(root: str) -> None:
    """A file of a small job does not have a group per step."""
    objects = Objects(root)
    table = ops(steps=40)
    write(objects, "events/a.parquet", table)
    with open_ops(objects, "events/a.parquet") as file:
        assert file.num_row_groups == 1
    assert list(steps_of(objects, "events/a.parquet")) == list(range(40))


def test_only_the_wanted_steps_are_read(any_root: str) -> None:
    """By range, by choice, and both; a file without any of them gives nothing."""
    objects = Objects(any_root)
    paths = ["events/a.parquet", "events/b.parquet"]
    table = ops(dp=16, pp=8, microbatches=8, steps=4)
    write(objects, paths[0], table.between(0, 1))
    write(objects, paths[1], table.between(2, 3))
    assert set(read_ops(objects, paths, steps=(1, 2)).step.tolist()) == {1, 2}
    assert set(read_ops(objects, paths, only=[0, 3]).step.tolist()) == {0, 3}
    assert set(read_ops(objects, paths, steps=(0, 2), only={2, 3}).step.tolist()) == {2}
    assert len(read_ops(objects, paths, steps=(7, 9))) == 0
    assert len(read_ops(objects, paths)) == len(table)


def test_row_groups_of_other_steps_are_not_even_read(root: str) -> None:
    """Damage in a step that nobody wants does not matter: it is not touched."""
    objects = Objects(root)
    write(objects, "events/a.parquet", ops(dp=16, pp=8, microbatches=8, steps=3))
    with open_ops(objects, "events/a.parquet") as file:
        group = file.metadata.row_group(2)
    begin = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    path = Path(root) / "events/a.parquet"
    data = bytearray(path.read_bytes())
    data[begin : begin + group.total_byte_size // 4] = b"\xff" * (group.total_byte_size // 4)
    path.write_bytes(data)
    assert set(read_ops(objects, ["events/a.parquet"], steps=(0, 1)).step.tolist()) == {0, 1}
    with pytest.raises(StoreError, match="damaged"):
        read_ops(objects, ["events/a.parquet"])


def test_rows_of_each_step_are_counted(root: str) -> None:
    """From the statistics where a group is one step, from the column where it is several."""
    objects = Objects(root)
    table = ops(dp=16, pp=8, microbatches=8, steps=3)
    few = table.take(np.flatnonzero((table.step != 1) | (np.arange(len(table)) % 40 == 0)))
    write(objects, "events/a.parquet", few)
    steps, counts = np.unique(few.step, return_counts=True)
    expected = dict(zip(steps.tolist(), counts.tolist(), strict=True))
    assert steps_of(objects, "events/a.parquet") == expected


def test_an_unknown_op_type_is_kept_in_the_file(root: str) -> None:
    """The analysis counts it; a later version may know it."""
    objects = Objects(root)
    batch = record_batch(ops())
    labels = ["moe-dispatch"] * batch.num_rows
    index = SCHEMA.get_field_index("optype")
    batch = batch.set_column(index, SCHEMA.field(index), pa.array(labels, SCHEMA.field(index).type))
    write_ops(objects, "events/a.parquet", batch, step_relative=False)
    read = read_ops(objects, ["events/a.parquet"])
    assert read.dropped == (("unknown op type", batch.num_rows),)
    with open_ops(objects, "events/a.parquet") as file:
        assert set(file.read().column("optype").to_pylist()) == {"moe-dispatch"}


def test_extreme_values_survive(root: str) -> None:
    """Times and numbers at the ends of their types are written and read exactly."""
    objects = Objects(root)
    table = ops()
    wide = replace(
        table,
        step=table.step + (2**63 - 1 - int(table.step.max())),
        duration_ns=np.where(np.arange(len(table)) % 2, 0, 3600 * 10**9),
        microbatch=np.full(len(table), 2**31 - 1, np.int32),
    )
    write(objects, "events/a.parquet", wide)
    assert sorted_rows(read_ops(objects, ["events/a.parquet"])) == sorted_rows(wide)


def test_nothing_is_no_file(root: str) -> None:
    """A file without ops has no steps and no use."""
    objects = Objects(root)
    with pytest.raises(StoreError, match="found none"):
        write_ops(objects, "events/a.parquet", record_batch(ops()).slice(0, 0), step_relative=False)
    with pytest.raises(StoreError, match="found none"):
        read_ops(objects, [])
    assert list(objects.list("events")) == []


@pytest.mark.parametrize("keep", [0, 3, 8, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_a_store_error(root: str, keep: float) -> None:
    """Never a crash, and never fewer ops than there were."""
    objects = Objects(root)
    write(objects, "events/a.parquet", ops())
    path = Path(root) / "events/a.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(StoreError, match=r"events/a\.parquet"):
        read_ops(objects, ["events/a.parquet"])
    with pytest.raises(StoreError, match=r"events/a\.parquet"):
        steps_of(objects, "events/a.parquet")


def test_a_missing_file_is_a_store_error(any_root: str) -> None:
    """The message names the path."""
    with pytest.raises(StoreError, match=r"events/no\.parquet"):
        read_ops(Objects(any_root), ["events/no.parquet"])


def test_files_of_both_time_bases_do_not_mix(root: str) -> None:
    """Unix time and time within the step make no one window."""
    objects = Objects(root)
    for name, relative in (("a", True), ("b", False)):
        write(objects, f"events/{name}.parquet", replace(ops(), step_relative=relative))
    with pytest.raises(StoreError, match="do not fit"):
        read_ops(objects, ["events/a.parquet", "events/b.parquet"])


def test_paths_are_made_of_ids_days_and_windows() -> None:
    """The layout on disk, as the page on the store says; days are those of UTC."""
    assert ops_path("0a1b", NOW, 12, "f-1") == "events/job=0a1b/day=2026-09-21/w12-f-1.parquet"
    assert ops_path("0a1b", DAY_NS - 1, 0, "f") == "events/job=0a1b/day=1970-01-01/w0-f.parquet"
    assert context_path("0a1b", DAY_NS, None, "f").endswith("/day=1970-01-02/all-f.jsonl.zst")
    assert context_path("0a1b", DAY_NS, 3, "f").endswith("/w3-f.jsonl.zst")


@pytest.mark.parametrize(
    "job", ["../../evil", "a/../b", "/etc", "", ".", "..", "a\x00b", "a b", "ä", "a\nb", "\\x"]
)
def test_a_hostile_name_never_becomes_a_path(tmp_path: Path, job: str) -> None:
    """If a name got where an id belongs, nothing would be written, least of all outside."""
    objects = Objects(str(tmp_path / "objects"))
    before = set(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="plain names"):
        write(objects, f"{job}/x.parquet", ops())
    assert set(tmp_path.rglob("*")) == before


DOCUMENTS = [
    {"schema": "smon.context/1", "hosts": {"0": "a", "1": "b"}, "switches": {"a": "leaf-1"}},
    {
        "schema": "smon.context/1",
        "hosts": {"1": "c"},
        "gpus": {"0": "GPU-1"},
        "counters": {"step": [3], "rank": [0], "name": ["gpu_clock_mhz"], "value": [1200.5]},
    },
]


def test_side_evidence_is_merged(any_root: str) -> None:
    """Documents of all files as one: later names hold, tables add up."""
    objects = Objects(any_root)
    bodies = [json.dumps(document, indent=2).encode() for document in DOCUMENTS]
    write_context(objects, "events/a.jsonl.zst", bodies)
    write_context(objects, "events/b.jsonl.zst", bodies[1:])
    context = read_context(objects, ["events/a.jsonl.zst", "events/b.jsonl.zst"])
    assert context.hosts == {0: "a", 1: "c"}
    assert (context.switches, context.gpus) == ({"a": "leaf-1"}, {0: "GPU-1"})
    assert context.counters.value.tolist() == [1200.5]
    assert context.ignored == 0
    assert not read_context(objects, [])


def test_a_malformed_document_is_counted_and_left_out(root: str) -> None:
    """One agent's nonsense does not take the evidence of the others."""
    objects = Objects(root)
    bodies = [b"[1]", b"{", b'{"schema": "other"}', json.dumps(DOCUMENTS[0]).encode()]
    write_context(objects, "events/a.jsonl.zst", bodies)
    context = read_context(objects, ["events/a.jsonl.zst"])
    assert context.hosts == {0: "a", 1: "b"}
    assert context.ignored == 3


def test_damaged_side_evidence_is_a_store_error(root: str) -> None:
    """A file that is not zstd, or missing."""
    objects = Objects(root)
    objects.put("events/a.jsonl.zst", b"no zstd")
    for name in ("a", "b"):
        with pytest.raises(StoreError, match=rf"events/{name}\.jsonl\.zst"):
            read_context(objects, [f"events/{name}.jsonl.zst"])
