from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import (
    ConfigError,
    MetaError,
    NothingUsableError,
    SMonError,
    TraceError,
    UnknownFormatError,
)
from smon.topology import Layout, parse_layout
from smon.trace.formats import BY_NAME
from smon.trace.load import load

META = "trial_name: job-x\ndp_size: 2\npp_size: 2\n"
LAYOUT = Layout(dp=2, pp=2)


@pytest.fixture
def trace(public: dict[str, Any], write_parquet: Callable[..., Path]) -> Path:
    """A public Parquet file without a meta file."""
    return write_parquet("job/trace-X.parquet", public)


# --- what is found --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, layout",
    [("AR", Layout(dp=4, pp=4, tp=4)), ("SE", Layout(dp=32, pp=2, cp=2)), ("ST", Layout(2, 4))],
)
def test_public_traces_load_with_the_meta_file_beside_them(
    traces: Path, name: str, layout: Layout
) -> None:
    """``meta-AR.yaml`` belongs to ``trace-AR.parquet``, and their ranks agree."""
    path = traces / "straggler-analysis" / f"trace-{name}.parquet"
    loaded = load([path])
    assert (loaded.job.job_id, loaded.job.layout) == (name, layout)
    assert loaded.notes == ()
    assert loaded.sources == (path,)


def test_a_folder_is_searched_for_traces(traces: Path) -> None:
    """Files of other formats are named in a note, and meta and text files are passed over."""
    loaded = load([traces / "torch-gloo-2pp2dp" / "healthy"])
    assert len(loaded.table) == 368
    assert loaded.job.job_id == "healthy"
    unknown, kernels, dumps = loaded.notes
    assert "files of unknown format left out" in unknown
    assert kernels == "left out: 4 files of kernels and collectives, beside ops"
    assert dumps == "left out: 4 files of dumps of Flight Recorder, beside ops"


def test_a_folder_of_several_jobs_is_refused(traces: Path) -> None:
    """Their meta files name different jobs."""
    with pytest.raises(MetaError, match="meta files of 3: 'AR', 'SE', 'ST'"):
        load([traces / "straggler-analysis"])


@pytest.mark.parametrize(
    "name", ["meta-X.yaml", "meta-X.yml", "meta-X.json", "trace-X.meta.yaml", "meta.yml"]
)
def test_meta_files_are_found_beside_the_trace(trace: Path, name: str) -> None:
    """By the trace's name first, then by the folder."""
    as_json = json.dumps({"trial_name": "job-x", "dp_size": 2, "pp_size": 2})
    (trace.parent / name).write_text(as_json if name.endswith(".json") else META)
    (trace.parent / "meta.json").write_text('{"trial_name": "other", "dp_size": 2, "pp_size": 2}')
    assert load([trace]).job.job_id == "job-x"
    assert load([trace.parent]).job.job_id == "job-x"


def test_a_given_meta_file_comes_before_one_that_is_found(trace: Path, tmp_path: Path) -> None:
    """The command line wins."""
    (trace.parent / "meta.yaml").write_text("dp_size: 64\npp_size: 1\n")
    given = tmp_path / "given.yaml"
    given.write_text(META)
    assert load([trace], meta=given).job.job_id == "job-x"


def test_a_layout_alone_names_the_job_after_the_file(trace: Path) -> None:
    """``trace-X.parquet`` is job X; ``trace.parquet`` is named after its folder."""
    assert load([trace], layout=LAYOUT).job.job_id == "X"
    plain = trace.rename(trace.parent / "trace.parquet")
    assert load([plain], layout=LAYOUT).job.job_id == "job"


def test_files_of_a_folder_become_one_table(
    records: list[dict[str, Any]], write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    """One file per rank, in folders per host; numbers are counted over all files."""
    for index, record in enumerate(records):
        write_lines([record], f"run/host{index % 2}/part{index}.jsonl")
    (tmp_path / "run" / "README.md").write_text("about")
    (tmp_path / "run" / ".hidden").write_text("hidden")
    whole = load([write_lines(records)])
    loaded = load([tmp_path / "run"])
    assert len(loaded.sources) == len(records)
    assert len(loaded.notes) == 1
    for name, values in whole.table.columns.items():
        assert sorted(loaded.table.columns[name].tolist()) == sorted(values.tolist())


def test_parts_of_a_step_in_several_files_are_counted_together(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """A rank that starts a new file in mid-step goes on counting."""
    later = {**records[0], "start_ts": [1_790_000_009.9], "duration": [0.1], "model_chunk": 0}
    paths = [write_lines(records, "a.jsonl"), write_lines([later], "b.jsonl")]
    table = load(paths).table
    assert table.seq[-1] == table.microbatch[-1] == 2


def test_a_file_given_twice_counts_once(trace: Path, tmp_path: Path) -> None:
    """By itself, by its folder and by a link."""
    link = tmp_path / "link.parquet"
    link.symlink_to(trace)
    assert len(load([trace, trace.parent, link], layout=LAYOUT).sources) == 1


def test_the_layout_of_ndtimeline_is_inferred_with_a_note(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """The ranks say what is there, but not what is absent."""
    for record in records:
        record["rank"] *= 2
    twins = [{**record, "rank": record["rank"] + 1, "tp_rank": 1} for record in records]
    loaded = load([write_lines(records + twins)])
    assert loaded.job.layout == Layout(dp=2, pp=2, tp=2)
    assert loaded.job.job_id == "run-a"
    assert "inferred" in loaded.notes[0]


def test_global_chunks_are_filled_in_for_computes(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Chunk c of stage s is chunk c · PP + s of the model."""
    for record in records:
        record["model_chunk"] = [0, 1]
    table = load([write_lines(records)], layout=Layout(dp=2, pp=2, vpp=2)).table
    assert np.array_equal(table.global_chunk, table.chunk * 2 + table.stage)


def test_more_chunks_than_the_layout_says_is_a_note(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """The graph goes by the ops; the layout's vpp is only compared."""
    for record in records:
        record["model_chunk"] = [0, 1]
    notes = load([write_lines(records)], layout=LAYOUT).notes
    assert notes == ("the trace has 2 model chunks per stage, the layout says vpp1",)


@pytest.mark.parametrize(
    "steps, kept",
    [(None, [7, 8, 9]), ((8, None), [8, 9]), ((None, 8), [7, 8]), ((8, 8), [8])],
)
def test_steps_are_cut_at_both_ends(
    trace: Path, steps: tuple[int | None, int | None] | None, kept: list[int]
) -> None:
    """Both ends are included, and an absent one is open."""
    table = load([trace], layout=LAYOUT, steps=steps).table
    assert np.unique(table.step).tolist() == kept


def test_progress_is_told_after_each_file(trace: Path) -> None:
    """What is done, how much of it, of how much."""
    shutil.copy(trace, trace.parent / "more.parquet")
    told: list[tuple[str, int, int]] = []
    load([trace.parent], layout=LAYOUT, progress=lambda *values: told.append(values))
    assert told == [("read", 1, 2), ("read", 2, 2)]


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off", b"what is this", b"\x80\x04."])
def test_one_bad_file_of_a_folder_is_a_note(trace: Path, content: bytes) -> None:
    """The other ranks are analysed, and the report says what was left out."""
    (trace.parent / "rank7.parquet").write_bytes(content)
    (trace.parent / "gone.parquet").symlink_to("nowhere")
    loaded = load([trace.parent], layout=LAYOUT)
    assert len(loaded.sources) == 1
    notes = " ".join(loaded.notes)
    assert "rank7.parquet" in notes
    assert "gone.parquet" in notes


# --- what is refused ------------------------------------------------------------------------


def _refused(kind: type[SMonError], *paths: Path, **options: Any) -> str:  # noqa: ANN401  # those of `load`
    with pytest.raises(SMonError) as caught:
        load(paths, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    return message


@pytest.mark.parametrize(
    "content, kind, says",
    [
        (b"", TraceError, "the file is empty"),
        (b"PAR1", TraceError, "damaged or truncated"),
        (b"PAR1" + b"\0" * 100 + b"PAR1", TraceError, "damaged or truncated"),
        (b"hello", UnknownFormatError, "unknown format: it is text of another kind; looked for"),
        (b"a\0b", UnknownFormatError, "it is binary"),
        (b'{"traceEvents": []}', UnknownFormatError, "it is JSON of another kind"),
        (pickle.dumps([1]), UnknownFormatError, "a Python pickle, which SMon never opens"),
        (gzip.compress(pickle.dumps([1]), mtime=0), UnknownFormatError, "a Python pickle"),
        (
            gzip.compress(b"PAR1", mtime=0),
            UnknownFormatError,
            "Parquet inside gzip: unpack it first",
        ),
        (b"\x1f\x8bbroken", UnknownFormatError, "it is binary"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_files_that_are_no_trace(
    tmp_path: Path, content: bytes, kind: type[SMonError], says: str, *, folder: bool
) -> None:
    """Each is one sentence; the only file of a folder is as fatal as one that was given."""
    path = tmp_path / "run" / "trace.parquet"
    path.parent.mkdir()
    path.write_bytes(content)
    message = _refused(kind, path.parent if folder else path, layout=LAYOUT)
    assert "trace.parquet" in message
    if not folder or kind is TraceError:
        assert says in message


def test_a_truncated_trace(traces: Path, tmp_path: Path) -> None:
    """A copy that did not finish."""
    path = tmp_path / "t.parquet"
    path.write_bytes((traces / "straggler-analysis" / "trace-ST.parquet").read_bytes()[:50_000])
    assert "damaged or truncated" in _refused(TraceError, path, layout=LAYOUT)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """Absent, empty, special and impossible paths."""
    assert "no such file" in _refused(TraceError, tmp_path / "absent")
    assert "holds no trace file" in _refused(TraceError, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "device or pipe" in _refused(TraceError, tmp_path / "pipe")
    assert "device or pipe" in _refused(TraceError, tmp_path)
    assert "device or pipe" in _refused(TraceError, Path("/dev/null"))
    assert "null byte" in _refused(TraceError, Path("a\0b"))
    assert "cannot be read" in _refused(TraceError, Path("x" * 5000))
    assert "no trace given" in _refused(TraceError)


@contextmanager
def _without_privileges() -> Iterator[None]:
    """As user nobody, if the tests run as root, who may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_paths_without_permission(trace: Path) -> None:
    """The system's own reason is given."""
    trace.chmod(0)
    with _without_privileges():
        assert "Permission denied" in _refused(TraceError, trace, layout=LAYOUT)
        assert "Permission denied" in _refused(TraceError, trace.parent, layout=LAYOUT)


def test_files_that_fail_while_they_are_read() -> None:
    """A broken disk, here the first page of a process."""
    path = Path("/proc/self/mem")
    assert _refused(TraceError, path) == f"{path}: cannot be read: Input/output error"


def test_control_characters_of_a_name_are_escaped(tmp_path: Path) -> None:
    """A file name can hold terminal escapes, new lines and broken UTF-8."""
    name = b"\x1b[31mred\n\xff.parquet"
    path = tmp_path / os.fsdecode(name)
    assert "\\x1b[31mred\\n\\udcff" in _refused(TraceError, path)
    path.write_bytes(b"PAR1")
    _refused(TraceError, path, layout=LAYOUT)
    _refused(TraceError, tmp_path, layout=LAYOUT)
    _refused(MetaError, path)
    _refused(MetaError, path, meta=path)


def test_a_name_in_broken_utf8_is_read(trace: Path) -> None:
    """What the name is does not matter for the content."""
    path = trace.rename(trace.parent / os.fsdecode(b"\xff.parquet"))
    assert len(load([path], layout=LAYOUT).table) == 48


def test_formats_that_are_forced(
    trace: Path, records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """A name must be known, and the file must be what it is said to be."""
    lines = write_lines(records)
    assert len(load([lines], format_name="ndtimeline").table) == 32
    says = _refused(ConfigError, lines, format_name="pickle")
    known = ", ".join(sorted(BY_NAME))
    assert says == f"unknown format 'pickle': expected one of {known}"
    says = _refused(UnknownFormatError, lines, format_name="parquet")
    assert "not parquet (looked for" in says
    assert "not ndtimeline" in _refused(UnknownFormatError, trace, format_name="ndtimeline")


def test_parquet_needs_a_meta_file_or_a_layout(trace: Path) -> None:
    """The message names what was looked for, and both ways out."""
    message = _refused(MetaError, trace)
    for part in ("meta-X", "trace-X.meta", "meta,", "--meta FILE", "--layout tp4-dp4-pp4"):
        assert part in message


def test_some_files_of_a_folder_without_meta_file(trace: Path) -> None:
    """They may be of another job."""
    (trace.parent / "meta-X.yaml").write_text(META)
    shutil.copy(trace, trace.parent / "trace-Y.parquet")
    assert "trace-Y.parquet: the layout is unknown" in _refused(MetaError, trace.parent)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "dp_size: 2",
        "dp_size: 2\npp_size: x",
        "dp_size: 2\npp_size: 2\nworld_size: 5",
        "a: [",
        "a: \x1b",
        "a: !!bool maybe",
        "a: !!int ''",
        "a: !!timestamp x",
        "a: !!python/object:os.system {}",
        "[" * 5000,
        "dp_size: 1048576\npp_size: 1048576",
    ],
)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_meta_files_that_cannot_be_used(trace: Path, text: str, suffix: str) -> None:
    """Whatever a meta file holds, the answer is one sentence."""
    (trace.parent / f"meta.{suffix}").write_text(text)
    _refused(MetaError, trace)


def test_a_given_meta_file_that_does_not_exist(trace: Path) -> None:
    """Said at once, before anything is read."""
    assert "no such meta file" in _refused(MetaError, trace, meta=trace.parent / "absent.yaml")


def test_layout_and_meta_file_must_agree(trace: Path) -> None:
    """Neither wins in silence."""
    (trace.parent / "meta.yaml").write_text(META)
    assert load([trace], layout=LAYOUT).job.job_id == "job-x"
    message = _refused(MetaError, trace, layout=parse_layout("dp2-pp2-tp2"))
    assert "dp2-pp2-tp2 and the meta file's dp2-pp2 differ" in message


@pytest.mark.parametrize(
    "layout, says",
    [
        ("dp1-pp2", "the trace has dp_rank 1, but layout dp1-pp2 allows 0 to 0"),
        ("dp2-pp1", "the trace has stage 1, but layout dp2-pp1 allows 0 to 0"),
        ("dp3-pp2", "puts rank 3 at dp_rank 0, stage 1, but the trace has rank 2 there"),
        ("dp2-pp2-tp2", "puts rank 4 to 5 at dp_rank 0, stage 1, but the trace has rank 2 there"),
    ],
)
def test_the_layout_must_fit_the_trace(trace: Path, layout: str, says: str) -> None:
    """The first contradiction is named: expected, found, what to do."""
    assert says in _refused(MetaError, trace, layout=parse_layout(layout))


def test_files_of_several_jobs(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Two trials are two jobs, whatever the layout."""
    other = [{**record, "trial": "run-b"} for record in records]
    paths = [write_lines(records, "a.jsonl"), write_lines(other, "b.jsonl")]
    message = _refused(TraceError, *paths, layout=LAYOUT)
    assert message == "expected files of one job, found those of 2: 'run-a', 'run-b'"


def test_relative_and_absolute_times_do_not_mix(
    trace: Path, records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """One table has one kind of time."""
    assert "separately" in _refused(TraceError, trace, write_lines(records), layout=LAYOUT)


@pytest.mark.parametrize("rank", [5, 2**30])
def test_a_layout_is_not_inferred_from_a_stray_rank(
    records: list[dict[str, Any]], write_lines: Callable[..., Path], rank: int
) -> None:
    """One wrong number must not make a job of a million workers."""
    path = write_lines([*records, {**records[0], "dp_rank": rank, "stage": rank, "rank": 3}])
    assert "give --layout or --meta" in _refused(MetaError, path)


def test_steps_that_are_not_there(trace: Path) -> None:
    """The message says which are."""
    message = _refused(NothingUsableError, trace, layout=LAYOUT, steps=(100, None))
    assert message == "no step in 100-: the trace has steps 7 to 9"
    message = _refused(NothingUsableError, trace, layout=LAYOUT, steps=(None, 10**30 * -1))
    assert "the trace has steps 7 to 9" in message


def test_a_trace_without_rows(public: dict[str, Any], write_parquet: Callable[..., Path]) -> None:
    """Empty, or nothing but unknown op types: said, and never "no straggler"."""
    empty = write_parquet("empty.parquet", {name: values[:0] for name, values in public.items()})
    assert "no row at all" in _refused(NothingUsableError, empty, layout=LAYOUT)
    public["optype"] = ["renamed"] * 48
    renamed = write_parquet("renamed.parquet", public)
    message = _refused(NothingUsableError, renamed, layout=LAYOUT)
    assert message == "the trace has no usable op; found 48 × unknown op type"
