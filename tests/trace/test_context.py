from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.errors import MetaError
from smon.trace.context import (
    Context,
    Counters,
    Event,
    EventKind,
    ExpertTokens,
    Microbatches,
    context_beside,
    read_context,
    write_context,
)

EMPTY = {"schema": "smon.context/1"}

COUNTERS = {"step": [1, 1], "rank": [0, 7], "name": ["nic_errors"] * 2, "value": [0, 2.5]}

EVENTS = {
    "kind": ["gc", "checkpoint"],
    "step": [1, 2],
    "rank": [5, None],
    "start_ns": [17, None],
    "duration_s": [0.35, 6],
}


@pytest.fixture
def full() -> Context:
    """Something of everything."""
    return Context(
        hosts={0: "node-0", 1: "node-1 é"},
        switches={"node-0": "leaf-0"},
        gpus={1: "GPU-1"},
        microbatches=Microbatches(
            np.array([3, 3]),
            np.array([0, 1], np.int32),
            np.array([0, 0], np.int32),
            np.array([8192, 2**40]),
            np.array([1.5e7, 0.1]),
        ),
        expert_tokens=ExpertTokens(np.array([3]), np.array([5], np.int32), np.array([70_000])),
        counters=Counters(
            np.array([3]), np.array([1], np.int32), np.array(["gpu_clock_mhz"]), np.array([1980.0])
        ),
        events=(
            Event(EventKind.GC, 3, 1, 1_700_000_000_000_000_001, 0.35),
            Event(EventKind.CHECKPOINT, 4, None, None, 6.0),
        ),
    )


def written(folder: Path, document: object) -> Path:
    """A context file with this content: bytes as they are, all else as JSON."""
    path = folder / "context.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


def test_a_context_that_is_written_reads_back_without_loss(full: Context, tmp_path: Path) -> None:
    """Values and types of all columns, names and events."""
    write_context(full, tmp_path / "context.json")
    read = read_context(tmp_path / "context.json")
    for name in ("hosts", "switches", "gpus", "events", "ignored"):
        assert getattr(read, name) == getattr(full, name)
    for name in ("microbatches", "expert_tokens", "counters"):
        left, right = getattr(read, name), getattr(full, name)
        for column in fields(left):
            values, expected = getattr(left, column.name), getattr(right, column.name)
            assert np.array_equal(values, expected)
            assert values.dtype == expected.dtype


def test_what_nobody_recorded_is_empty(tmp_path: Path) -> None:
    """A file with the schema alone has nothing to say, and so has a context without a file."""
    assert not Context()
    assert not read_context(written(tmp_path, EMPTY))
    write_context(Context(), tmp_path / "context.json")
    assert json.loads((tmp_path / "context.json").read_text()) == EMPTY


@pytest.mark.parametrize("name", ["hosts", "events", "counters"])
def test_a_context_with_any_part_is_not_empty(full: Context, name: str) -> None:
    """Its truth value says whether there is anything in it."""
    assert Context(**{name: getattr(full, name)})


def test_events_may_lack_a_rank_and_a_start(tmp_path: Path) -> None:
    """A checkpoint is the whole job's; a log line has no nanoseconds."""
    events = read_context(written(tmp_path, EMPTY | {"events": EVENTS})).events
    assert events == (
        Event(EventKind.GC, 1, 5, 17, 0.35),
        Event(EventKind.CHECKPOINT, 2, None, None, 6),
    )


def test_keys_that_are_not_known_are_counted_and_left_out(tmp_path: Path) -> None:
    """A newer agent may write more."""
    more = COUNTERS | {"unit": ["", ""]}
    read = read_context(written(tmp_path, EMPTY | {"counters": more, "rails": {}, "x": 1}))
    assert read.ignored == 3
    assert read.counters.value.tolist() == [0.0, 2.5]


@pytest.mark.parametrize(
    "document, message",
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        ([], "found no mapping"),
        ({}, "expected 'smon.context/1', found None"),
        ({"schema": "smon.context/2"}, "found 'smon.context/2'"),
        ({"schema": "\x1b[2J" * 1000}, r"\\x1b"),
        (EMPTY | {"hosts": ["node-0"]}, "hosts: expected a mapping, found list"),
        (EMPTY | {"hosts": {"-1": "a"}}, "expected global ranks as keys, found '-1'"),
        (EMPTY | {"hosts": {"٣": "a"}}, "expected global ranks as keys"),
        (EMPTY | {"hosts": {"9" * 99: "a"}}, "expected global ranks as keys"),
        (EMPTY | {"hosts": {"0": 5}}, "hosts: expected names of 1 to 255 characters, found 5"),
        (EMPTY | {"hosts": {"0": ""}}, "found ''"),
        (EMPTY | {"hosts": {"0": "a" * 256}}, "found a long name"),
        (EMPTY | {"switches": {"a\x1b[2J": "b"}}, r"printable names, found 'a\\x1b\[2J'"),
        (EMPTY | {"switches": {"a": "\ud800"}}, "printable names"),
        (EMPTY | {"counters": {"step": [1]}}, "counters: expected rank to be a list, found None"),
        (EMPTY | {"counters": COUNTERS | {"rank": [1]}}, "one length, found step 2, rank 1, name"),
        (EMPTY | {"counters": COUNTERS | {"rank": [1, -1]}}, "whole numbers from 0 to .* found -1"),
        (EMPTY | {"counters": COUNTERS | {"rank": [1, 2**31]}}, "found 2147483648"),
        (EMPTY | {"counters": COUNTERS | {"rank": [True, 1]}}, "found True"),
        (EMPTY | {"counters": COUNTERS | {"rank": [1.0, 1]}}, "found 1.0"),
        (EMPTY | {"counters": COUNTERS | {"rank": [[], 1]}}, "found list"),
        (EMPTY | {"counters": COUNTERS | {"value": [float("nan"), 1]}}, "found nan"),
        (EMPTY | {"counters": COUNTERS | {"value": [float("inf"), 1]}}, "found inf"),
        (EMPTY | {"counters": COUNTERS | {"value": [10**400, 1]}}, "found a huge number"),
        (EMPTY | {"counters": COUNTERS | {"value": ["1" * 999, 1]}}, "found '1+…"),
        (EMPTY | {"counters": COUNTERS | {"name": ["a", {}]}}, "names of 1 to 255"),
        (EMPTY | {"events": EVENTS | {"kind": ["gc", "lunch"]}}, "one of gc, .* found 'lunch'"),
        (EMPTY | {"events": EVENTS | {"kind": ["gc", []]}}, "found list"),
        (EMPTY | {"events": EVENTS | {"rank": [5, "all"]}}, "events.rank: .* found 'all'"),
        (EMPTY | {"events": EVENTS | {"duration_s": [-1, 1]}}, "events.duration_s: .* found -1"),
        (EMPTY | {"events": EVENTS | {"start_ns": [None, 2**63]}}, "found a huge number"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_it(
    document: Any,  # noqa: ANN401  # of every kind
    message: str,
    tmp_path: Path,
) -> None:
    """What was expected and what was found, without control characters."""
    with pytest.raises(MetaError, match=message) as caught:
        read_context(written(tmp_path, document))
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith(str(tmp_path / "context.json"))
    assert len(text) < len(str(tmp_path)) + 400


def test_files_and_tables_have_a_limit(tmp_path: Path) -> None:
    """A file of any size must not fill the memory."""
    zeros = [0] * 2_000_001
    table = {"step": zeros, "rank": zeros, "tokens": zeros}
    path = written(tmp_path, EMPTY | {"expert_tokens": table})
    with pytest.raises(MetaError, match="expert_tokens: expected at most 2,000,000 rows, found"):
        read_context(path)
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(MetaError, match="at most 64 MiB"):
        read_context(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["gc", "node-0", "smon.context/1"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)

COLUMNS = [
    "step",
    "rank",
    "dp",
    "microbatch",
    "tokens",
    "sum_len2",
    "name",
    "value",
    "kind",
    "start_ns",
    "duration_s",
]

TABLE = st.dictionaries(st.sampled_from(COLUMNS), st.lists(JSON, max_size=2) | JSON)


@given(
    parts=st.dictionaries(
        st.sampled_from(
            ["hosts", "switches", "gpus", "microbatches", "expert_tokens", "counters", "events"]
        ),
        TABLE | st.dictionaries(st.sampled_from(["0", "1", "x"]), JSON) | JSON,
    )
)
def test_no_json_makes_the_reader_stumble(
    parts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is read, or refused with a `MetaError`."""
    folder = tmp_path_factory.getbasetemp()
    with suppress(MetaError):
        read = read_context(written(folder, EMPTY | parts))
        write_context(read, folder / "context.json")


@given(content=st.binary(max_size=64))
def test_no_bytes_make_the_reader_stumble(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Anything but JSON with the right schema is refused."""
    with pytest.raises(MetaError):
        read_context(written(tmp_path_factory.getbasetemp(), content))


# --- where it is ----------------------------------------------------------------------------


def test_a_context_file_is_found_beside_the_trace_and_in_its_folder(tmp_path: Path) -> None:
    """Both name the same file, also together."""
    written(tmp_path, EMPTY | {"hosts": {"0": "a"}})
    trace = tmp_path / "trace.parquet"
    for paths in ([trace], [tmp_path], [tmp_path, trace]):
        found = context_beside(paths)
        assert found is not None
        assert found.hosts == {0: "a"}


def test_there_need_not_be_a_context_file(tmp_path: Path) -> None:
    """Not beside a trace, not in a folder, and not where no path can be."""
    (tmp_path / "inner" / "context.json").mkdir(parents=True)
    assert context_beside([tmp_path, tmp_path / "inner" / "trace.parquet"]) is None
    assert context_beside([Path("a\0b") / "trace.parquet"]) is None
    assert context_beside([]) is None


def test_several_context_files_of_one_job_are_refused(tmp_path: Path) -> None:
    """Nobody knows which one is right."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, EMPTY)
    with pytest.raises(MetaError, match=r"expected one context.json, found 2: .*: keep one"):
        context_beside([tmp_path / "a", tmp_path / "b"])


def test_a_file_that_cannot_be_read_or_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    """No foreign exception gets out."""
    with pytest.raises(MetaError, match="absent: cannot read the context file"):
        read_context(tmp_path / "absent")
    with pytest.raises(MetaError, match="cannot read the context file"):
        read_context(Path("a\0b"))
    with pytest.raises(MetaError, match="cannot write the context file"):
        write_context(Context(), tmp_path / "absent" / "context.json")
