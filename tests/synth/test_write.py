from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smon.errors import ConfigError
from smon.ops import BY_LABEL
from smon.synth.presets import scenario
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.write import write_synthetic, write_trace
from smon.topology import Layout
from smon.trace.context import context_beside
from smon.trace.meta import Job, read_meta
from smon.trace.schema import COLUMNS
from smon.trace.table import OpTable


@pytest.fixture(scope="module")
def made() -> Synthetic:
    """A small job with every kind of column value."""
    return generate(Scenario(schedule="interleaved", vpp=2, steps=2, tp=2, name="job: 1"))


def _read(path: Path) -> dict[str, np.ndarray]:
    columns = pq.read_table(path).to_pydict()
    columns["optype"] = [BY_LABEL[label] for label in columns["optype"]]
    return {name: np.array(values) for name, values in columns.items()}


def _same(columns: dict[str, np.ndarray], table: OpTable) -> bool:
    return all(np.array_equal(columns[name], values) for name, values in table.columns.items())


def test_a_written_trace_reads_back_without_loss(made: Synthetic, tmp_path: Path) -> None:
    """Parquet holds every column of the schema, by name, with its integer type."""
    trace, meta = write_trace(made.table, made.job, tmp_path / "new" / "folder")
    assert (trace.name, meta.name) == ("trace.parquet", "meta.yaml")
    assert _same(_read(trace), made.table)
    schema = pq.read_schema(trace)
    assert schema.names == [column.name for column in COLUMNS]
    for column in COLUMNS:
        if column.name != "optype":
            assert schema.field(column.name).type == pa.from_numpy_dtype(column.dtype)
    assert schema.field("optype").type == pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize("relative,text", [(True, b"true"), (False, b"false")])
def test_the_file_says_which_schema_and_which_clock_it_has(
    relative: bool,  # noqa: FBT001  # a parameter of the test
    text: bytes,
    tmp_path: Path,
) -> None:
    """Key-value metadata, so that a reader need not guess from the times."""
    made = generate(Scenario(dp=1, steps=1, step_relative=relative))
    trace, _ = write_trace(made.table, made.job, tmp_path)
    metadata = pq.read_schema(trace).metadata
    assert metadata[b"smon.schema"] == b"smon.ops/1"
    assert metadata[b"smon.step_relative"] == text


def test_rows_in_any_order_are_written_in_the_order_of_the_file(
    made: Synthetic, tmp_path: Path
) -> None:
    """By step, dp, stage, op type, seq: the order in which a job is generated."""
    shuffled = np.random.default_rng(0).permutation(len(made.table))
    trace, _ = write_trace(made.table.take(shuffled), made.job, tmp_path)
    assert _same(_read(trace), made.table)


def test_an_empty_table_can_be_written(made: Synthetic, tmp_path: Path) -> None:
    """A window without ops is a file without rows."""
    trace, _ = write_trace(made.table.between(99, None), made.job, tmp_path)
    assert pq.read_metadata(trace).num_rows == 0


@pytest.mark.parametrize(
    "job",
    [
        Job("job: 1 # 'x' \"é\"", Layout(dp=4, pp=2, tp=8, cp=2, ep=4, vpp=3), attempt=2),
        Job("plain", Layout(dp=1, pp=1)),
        Job("2024", Layout(dp=1, pp=1)),
    ],
)
def test_the_meta_file_gives_back_the_job(made: Synthetic, job: Job, tmp_path: Path) -> None:
    """Name, attempt and all sizes, whatever characters the name has."""
    _, meta = write_trace(made.table, job, tmp_path)
    assert read_meta(meta) == job


def test_the_meta_file_has_the_keys_of_the_public_traces(made: Synthetic, tmp_path: Path) -> None:
    """Expert parallelism is named only where there is some."""
    _, meta = write_trace(made.table, made.job, tmp_path)
    assert meta.read_text(encoding="utf-8").splitlines() == [
        'trial_name: "job: 1"',
        "run_id: 0",
        "dp_size: 4",
        "dsp_size: 1",
        "pp_size: 4",
        "tp_size: 2",
        "vpp_size: 2",
        "world_size: 32",
    ]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(
    made: Synthetic, tmp_path: Path
) -> None:
    """Here a file stands where the folder should be."""
    taken = tmp_path / "taken"
    taken.touch()
    with pytest.raises(ConfigError, match=r"taken: .*: name another folder"):
        write_trace(made.table, made.job, taken)


def test_a_job_is_written_with_its_truth_and_its_context(tmp_path: Path) -> None:
    """Four files; the truth is for tests and studies, the analysis does not read it."""
    job = generate(scenario("C02", steps=20))
    paths = write_synthetic(job, tmp_path)
    names = ["trace.parquet", "meta.yaml", "truth.json", "context.json"]
    assert [path.name for path in paths] == names
    truth = json.loads(paths[2].read_text(encoding="utf-8"))
    assert (truth["verdict"], truth["where"]["rank"]) == ("straggler", 9)
    context = context_beside(paths[:1])
    assert context is not None
    assert np.array_equal(context.counters.value, job.context.counters.value)


def test_a_job_without_context_leaves_none_behind(made: Synthetic, tmp_path: Path) -> None:
    """Nor that of an earlier job in the same folder."""
    (tmp_path / "context.json").touch()
    names = [path.name for path in write_synthetic(made, tmp_path)]
    assert names == ["trace.parquet", "meta.yaml", "truth.json"]
    assert not (tmp_path / "context.json").exists()


@pytest.mark.parametrize("name", ["truth.json", "context.json"])
def test_files_beside_the_trace_that_cannot_be_written_are_an_error(
    made: Synthetic, name: str, tmp_path: Path
) -> None:
    """Here folders stand where the files should be."""
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="name another folder"):
        write_synthetic(made, tmp_path)
