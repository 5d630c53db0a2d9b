"""Events of a rank as agents ship them: exact, small, and harmless however damaged."""

from __future__ import annotations

import gzip
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.analysis import Options, analyze
from smon.collectives.report import analyze_collectives
from smon.errors import SMonError, TraceError
from smon.report import JobReport
from smon.topology import Layout
from smon.trace.events import EVENT_COLUMNS, ProcessGroup, RankEvents, StepSpan
from smon.trace.formats import rank_events, reader_of
from smon.trace.formats.rank_events import packed
from smon.trace.load import load
from tests.fuzz.mutants import mutants
from tests.kineto_files import Ddp, write_ddp

MUTANTS = int(os.environ.get("SMON_FUZZ_MUTANTS", "60"))
MAX_SECONDS = 5.0


@pytest.fixture
def some(tmp_path: Path) -> RankEvents:
    """Events of a rank with all that such events can have."""
    (path, *_) = write_ddp(tmp_path / "ddp", Ddp(ranks=2, steps=2))
    events = load([path]).events[0]
    return replace(
        events,
        host=None,
        groups=(*events.groups, ProcessGroup("1", "mesh_tp \ud800 é", (3, 5), 2)),
        steps=(*events.steps, StepSpan(-1, 5, 0)),
        dropped=(("event of negative duration", 3),),
        notes=("a note",),
    )


def same(one: RankEvents, other: RankEvents) -> bool:
    """Whether two are equal in every column and field, types included."""
    for field in fields(RankEvents):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in EVENT_COLUMNS:
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


def back(path: Path, content: bytes) -> RankEvents:
    """What a file of this content holds."""
    path.write_bytes(content)
    (events,) = rank_events.read(path).events
    return events


@pytest.mark.parametrize("plain", [False, True])
def test_events_come_back_as_they_were(some: RankEvents, tmp_path: Path, *, plain: bool) -> None:
    """Every column with its type, and every field; gzipped or not."""
    content = packed(some, "kineto")
    content = gzip.decompress(content) if plain else content
    assert same(back(tmp_path / "events", content), some)


def test_a_rank_without_events_comes_back(some: RankEvents, tmp_path: Path) -> None:
    """Empty columns are columns."""
    none = some.take(np.zeros(len(some), bool))
    assert same(back(tmp_path / "events", packed(none, "kineto")), none)


def test_a_column_that_an_older_agent_did_not_know_is_unknown(
    some: RankEvents, tmp_path: Path
) -> None:
    """The head names the columns, so that files that are kept stay readable."""
    kept = [name for name in EVENT_COLUMNS if name != "peer"]
    columns = [getattr(some, name).tobytes() for name in kept]
    events = back(tmp_path / "events", head_of(damaged(some, columns=kept)) + b"".join(columns))
    assert (events.peer == -1).all()
    assert np.array_equal(events.name, some.name)


def test_the_same_events_are_the_same_bytes(some: RankEvents) -> None:
    """So that an agent that was killed half-way goes on with the same file."""
    assert packed(some, "kineto") == packed(replace(some), "kineto")


def test_the_format_is_recognised_by_content(some: RankEvents, tmp_path: Path) -> None:
    """Under any name, gzipped or not, and no other file is taken for it."""
    content = packed(some, "kineto")
    path = tmp_path / "meta-nothing.json"
    assert reader_of(content, path) is rank_events
    assert reader_of(gzip.decompress(content), path) is rank_events
    assert reader_of(b"SMONRANK 2\n", path) is None


def convert(folder: Path, into: Path) -> None:
    """Every profile of a folder as an agent ships it; meta files are copied."""
    into.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".json.gz"):
            (events,) = load_one(path)
            (into / path.name.replace(".json.gz", ".events")).write_bytes(packed(events, "kineto"))
        elif path.name.startswith("meta"):
            (into / path.name).write_bytes(path.read_bytes())


def load_one(path: Path) -> tuple[RankEvents, ...]:
    """What the reader makes of one file."""
    with path.open("rb") as file:
        reader = reader_of(file.read(1 << 16), path)
    assert reader is not None
    return reader.read(path).events


def report_of(folder: Path) -> dict[str, Any]:
    """The report on a folder, as a document."""
    trace = load([folder])
    report: JobReport = (
        analyze_collectives(trace.events, trace.job)
        if trace.events
        else analyze(trace.table, trace.job, Options())
    )
    document: dict[str, Any] = json.loads(report.to_json())
    return document


def kineto_alone(folder: Path, into: Path) -> Path:
    """The Kineto files of a folder that has others, too, and its meta file."""
    into.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name.endswith(".trace.json.gz") or path.name.startswith("meta"):
            (into / path.name).write_bytes(path.read_bytes())
    return into


@pytest.mark.parametrize(
    "name",
    ["dlrm-kineto-8rank", "torch-gloo-2pp2dp/healthy", "torch-gloo-2pp2dp/long_last_stage"],
)
def test_a_converted_profile_has_the_same_report(traces: Path, tmp_path: Path, name: str) -> None:
    """All of the report, notes included: nothing is lost on the way."""
    job = Path(name).name
    original = kineto_alone(traces / name, tmp_path / "original" / job)
    convert(original, tmp_path / "converted" / job)
    assert report_of(tmp_path / "converted" / job) == report_of(original)


# --- damage -------------------------------------------------------------------------------------


def damaged(some: RankEvents, **changed: Any) -> bytes:  # noqa: ANN401  # any value of a head
    """A file whose head says something else."""
    data = gzip.decompress(packed(some, "kineto"))
    begin = len(b"SMONRANK 1\n") + 4
    (length,) = struct.unpack_from("<I", data, begin - 4)
    head = json.loads(data[begin : begin + length]) | changed
    text = json.dumps(head).encode()
    return b"".join((data[: begin - 4], struct.pack("<I", len(text)), text, data[begin + length :]))


def head_of(content: bytes) -> bytes:
    """A plain file up to its columns."""
    begin = len(b"SMONRANK 1\n")
    (length,) = struct.unpack_from("<I", content, begin)
    return content[: begin + 4 + length]


@pytest.mark.parametrize(
    "changed",
    [
        {"columns": ["start_ns"]},
        {"columns": ["start_ns", "duration_ns", "colour"]},
        {"columns": 3},
        {"events": 0},
        {"events": -1},
        {"rank": -1},
        {"rank": 2},
        {"rank": True},
        {"rank": 0.0},
        {"world_size": 1 << 21},
        {"names": []},
        {"names": [7]},
        {"groups": []},
        {"groups": [["0", "", [-1], 2]]},
        {"groups": [["0", "", [0]]]},
        {"groups": 7},
        {"steps": [[0, 0, -1]]},
        {"steps": [[0, 1e300, 1]]},
        {"steps": {"0": 1}},
        {"host": 5},
        {"on_gpu": 1},
        {"dropped": [["x", -1]]},
        {"notes": [None]},
    ],
)
def test_a_head_that_cannot_be_true_is_an_error(
    some: RankEvents, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Whatever the analysis could stumble over is looked at first."""
    path = tmp_path / "events"
    path.write_bytes(damaged(some, **changed))
    with pytest.raises(TraceError, match="damaged"):
        rank_events.read(path)


def spoil(column: str, value: int) -> Callable[[RankEvents], RankEvents]:
    """The second event gets a number that it cannot have."""

    def spoiled(events: RankEvents) -> RankEvents:
        values = getattr(events, column).copy()
        values[1] = value
        changed: dict[str, Any] = {column: values}
        return replace(events, **changed)

    return spoiled


@pytest.mark.parametrize(
    "change",
    [
        spoil("start_ns", 2**62 + 1),
        spoil("start_ns", 0),
        spoil("duration_ns", -1),
        spoil("duration_ns", 8 * 86_400 * 10**9),
        spoil("kind", 4),
        spoil("kind", -2),
        spoil("collective", 12),
        spoil("phase", 4),
        spoil("group", 9),
        spoil("name", 10_000),
        spoil("step", -2),
        spoil("seq", -2),
    ],
)
def test_a_number_out_of_its_range_is_an_error(
    some: RankEvents, tmp_path: Path, change: Callable[[RankEvents], RankEvents]
) -> None:
    """Codes stay inside their tables, times inside 64 bits, and events sorted."""
    path = tmp_path / "events"
    path.write_bytes(packed(change(some), "kineto"))
    with pytest.raises(TraceError, match="damaged"):
        rank_events.read(path)


def test_a_file_that_is_cut_off_is_an_error(some: RankEvents, tmp_path: Path) -> None:
    """Anywhere, packed or not; and so is one that unpacks to more than it may."""
    path = tmp_path / "events"
    for content in (packed(some, "kineto"), gzip.decompress(packed(some, "kineto"))):
        for end in range(12, len(content), max(len(content) // 40, 1)):
            path.write_bytes(content[:end])
            with pytest.raises(TraceError):
                rank_events.read(path)
    path.write_bytes(gzip.compress(b"SMONRANK 1\n" + bytes(1 << 28), compresslevel=1))
    with pytest.raises(TraceError, match="more than 256 MiB"):
        rank_events.read(path)


@pytest.mark.parametrize("plain", [False, True])
def test_mutants_are_survived(some: RankEvents, tmp_path: Path, *, plain: bool) -> None:
    """Read and analysed, or one clear line, in time."""
    whole = packed(some, "kineto")
    whole = gzip.decompress(whole) if plain else whole
    path = tmp_path / "mutant"
    for mutant in mutants(11 + plain, whole, MUTANTS):
        path.write_bytes(mutant)
        begin, message = time.process_time(), ""
        try:
            trace = load([path], layout=Layout(dp=2, pp=1))
            analyze_collectives(trace.events, trace.job)
        except SMonError as error:
            message = str(error)
        assert "\n" not in message
        assert time.process_time() - begin < MAX_SECONDS
