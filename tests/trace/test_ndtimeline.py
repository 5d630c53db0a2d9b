from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import TraceError
from smon.ops import OpType
from smon.trace.formats import ndtimeline
from smon.trace.table import OpTable


def _rows(table: OpTable) -> list[tuple[int, ...]]:
    return sorted(zip(*(values.tolist() for values in table.columns.values()), strict=True))


def _with(record: dict[str, Any], **changes: object) -> dict[str, Any]:
    changed = {**record, **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def test_records_become_ops(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Parallel arrays become rows, with sequence number and microbatch by start."""
    reading = ndtimeline.read(write_lines(records))
    table = reading.table
    assert len(table) == 2 * len(records)
    assert not table.step_relative
    assert (reading.tp, reading.job_id) == (1, "run-a")
    first = (table.step == 4) & (table.rank == 0) & (table.optype == OpType.FORWARD_COMPUTE)
    ops = table.take(first)
    expected = np.array([1_790_000_008_000_000_000, 1_790_000_008_250_000_000])
    # float64 holds these nanoseconds in steps of 256
    assert np.abs(ops.start_ns - expected).max() <= 128
    assert ops.duration_ns.tolist() == [125_000_000] * 2
    assert ops.seq.tolist() == ops.microbatch.tolist() == [0, 1]
    assert ops.chunk.tolist() == [0, 0]


@pytest.mark.parametrize("form", ["array", "pretty", "pretty lines", "glued", "blank", "bom"])
@pytest.mark.parametrize("packed", [False, True])
def test_all_forms_of_json_give_the_same_table(
    records: list[dict[str, Any]],
    write_lines: Callable[..., Path],
    tmp_path: Path,
    form: str,
    *,
    packed: bool,
) -> None:
    """JSON array or lines, glued or stretched, gzipped or not, whatever the file's name."""
    lines = [json.dumps(record) for record in records]
    texts = {
        "array": json.dumps(records),
        "pretty": json.dumps(records, indent=2),
        "pretty lines": "\n".join(json.dumps(record, indent=1) for record in records),
        "glued": "".join(lines),
        "blank": "\n\r\n" + "\n\n".join(lines),
        "bom": "\ufeff" + "\n".join(lines),
    }
    path = tmp_path / "trace.dat"
    raw = texts[form].encode()
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert ndtimeline.recognises(path.read_bytes(), path)
    table = ndtimeline.read(path).table
    assert _rows(table) == _rows(ndtimeline.read(write_lines(records)).table)
    assert table.dropped == ()


def test_old_metric_names_are_known(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Two collectives have other names in ndtimeline."""
    names = ("grad-reduce-scatter", "unshard-all-gather", "optimizer")
    table = ndtimeline.read(write_lines([_with(records[0], metric=name) for name in names])).table
    assert set(table.optype.tolist()) == {
        OpType.GRADS_REDUCE_SCATTER,
        OpType.PARAMS_ALL_GATHER,
        OpType.OPTIMIZER,
    }
    assert set(table.microbatch.tolist()) == {-1}


@pytest.mark.parametrize(
    "metric, ops",
    [
        ("forward-send-backward-recv", {OpType.FORWARD_SEND, OpType.BACKWARD_RECV}),
        ("backward-send-forward-recv", {OpType.BACKWARD_SEND, OpType.FORWARD_RECV}),
    ],
)
def test_a_combined_send_and_receive_is_two_ops(
    records: list[dict[str, Any]], write_lines: Callable[..., Path], metric: str, ops: set[OpType]
) -> None:
    """Both have the same times, and a note says that they include waiting."""
    reading = ndtimeline.read(write_lines([_with(records[0], metric=metric)]))
    assert set(reading.table.optype.tolist()) == ops
    assert len(reading.table) == 4
    assert len(set(reading.table.start_ns.tolist())) == 2
    assert "waiting" in reading.notes[0]


def test_sequence_numbers_count_over_all_records(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Records of one metric and step may be several, in any order; chunks count on their own."""
    late = _with(records[0], start_ts=[1_790_000_009.5], duration=[0.1], model_chunk=[1])
    table = ndtimeline.read(write_lines([late, records[0]])).table
    assert table.seq.tolist() == [2, 0, 1]
    assert table.microbatch.tolist() == [0, 0, 1]
    assert table.chunk.tolist() == [1, 0, 0]


def test_ranks_of_one_worker_count_apart(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Each tensor-parallel rank has its own sequence."""
    other = _with(records[0], rank=9, tp_rank=3)
    reading = ndtimeline.read(write_lines([records[0], other]))
    assert reading.table.seq.tolist() == [0, 1, 0, 1]
    assert reading.tp == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"step": ...},
        {"step": None},
        {"tp_rank": ...},
        {"tp_rank": "None"},
        {"stage": 0.0},
        {"model_chunk": 0},
        {"model_chunk": [0]},
        {"ip": "\udc80", "value": "\x1b[31m"},
    ],
)
def test_other_spellings_are_read_alike(
    records: list[dict[str, Any]], write_lines: Callable[..., Path], changes: dict[str, Any]
) -> None:
    """Step falls back on iteration; scalars and single values stand for all ops."""
    table = ndtimeline.read(write_lines([_with(records[0], **changes)])).table
    assert _rows(table) == _rows(ndtimeline.read(write_lines([records[0]])).table)


def test_a_record_without_rank_or_chunk_has_none(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """What a record does not say is -1."""
    table = ndtimeline.read(write_lines([_with(records[0], rank=..., model_chunk=None)])).table
    assert set(table.rank.tolist()) == set(table.chunk.tolist()) == {-1}
    assert table.microbatch.tolist() == [0, 1]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"metric": ...}, "record without metric"),
        ({"metric": 3}, "record without metric"),
        ({"stage": ...}, "record without stage"),
        ({"dp_rank": None}, "record without dp_rank"),
        ({"dp_rank": -1}, f"record whose dp_rank is not a number from 0 to {2**31 - 1}"),
        ({"dp_rank": True}, f"record whose dp_rank is not a number from 0 to {2**31 - 1}"),
        ({"dp_rank": 2**31}, f"record whose dp_rank is not a number from 0 to {2**31 - 1}"),
        ({"stage": "x"}, f"record whose stage is not a number from 0 to {2**31 - 1}"),
        ({"step": 2**63}, f"record whose step is not a number from 0 to {2**63 - 1}"),
        ({"step": None, "iteration": None}, "record without iteration"),
        ({"start_ts": ...}, "record without start_ts"),
        ({"duration": None}, "record without duration"),
        ({"duration": [0.1]}, "record whose start_ts and duration differ in length"),
        ({"model_chunk": [0, 0, 0]}, "record whose model_chunk and start_ts differ in length"),
    ],
)
def test_malformed_records_are_counted_by_reason(
    records: list[dict[str, Any]],
    write_lines: Callable[..., Path],
    changes: dict[str, Any],
    reason: str,
) -> None:
    """A record that cannot be used is left out, and the others are read."""
    table = ndtimeline.read(write_lines([*records, _with(records[0], **changes)])).table
    assert len(table) == 2 * len(records)
    assert table.dropped == ((reason, 1),)


def test_unusable_values_drop_their_op_only(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Strings, nulls, lists and endless numbers among the times; numbers in quotes are numbers."""
    values = ["nan", None, [1], 10**400, -0.5, "0.125", 0.125, 0]
    record = _with(records[0], start_ts=list(range(8)), duration=values, model_chunk=0)
    table = ndtimeline.read(write_lines([record])).table
    assert table.duration_ns.tolist() == [125_000_000, 125_000_000, 0]
    assert table.dropped == (("duration is not a number", 4), ("negative duration", 1))


def test_unknown_metrics_are_counted(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Every op of an unknown metric is dropped and counted."""
    table = ndtimeline.read(write_lines([*records, _with(records[0], metric="p2p-magic")])).table
    assert table.dropped == (("unknown op type", 2),)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_cut_off_last_line_is_counted(
    records: list[dict[str, Any]], write_lines: Callable[..., Path], end: str
) -> None:
    """A run that was killed leaves half a line."""
    path = write_lines(records)
    path.write_text(path.read_text()[:-200] + end)
    table = ndtimeline.read(path).table
    assert len(table) == 2 * (len(records) - 1)
    assert table.dropped == (("record that is not JSON, or is cut off", 1),)


def test_a_cut_off_array_gives_its_whole_records(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An array without its end is read up to there."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(records)[:-50])
    table = ndtimeline.read(path).table
    assert len(table) == 2 * (len(records) - 1)
    assert table.dropped == (("record that is not JSON, or is cut off", 1),)


@pytest.mark.parametrize("array", [False, True])
def test_a_cut_off_gzip_gives_what_it_holds(
    records: list[dict[str, Any]], tmp_path: Path, *, array: bool
) -> None:
    """Everything that was unpacked before the damage is used."""
    lines = json.dumps(records) if array else "\n".join(map(json.dumps, records))
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=0)[:-300])
    table = ndtimeline.read(path).table
    assert 0 < len(table) < 2 * len(records)
    assert dict(table.dropped)["end of a damaged gzip"] == 1


@pytest.mark.parametrize("between", ["", "\n", ", ", '{"metric": "forward-com', "}} oops {\n"])
def test_garbage_between_records_costs_only_itself(
    records: list[dict[str, Any]], tmp_path: Path, between: str
) -> None:
    """Half a record glued to a whole one, in lines and in an array: the whole one is read."""
    first, second = json.dumps(records[0]), json.dumps(records[1])
    for text in (f"{first}{between}{second}\n", f"[{first}{between}{second}]"):
        path = tmp_path / "trace"
        path.write_text(text)
        assert len(ndtimeline.read(path).table) == 4


def test_lines_without_a_record_are_counted(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Log lines among the records are no reason to stop, but are counted."""
    path = write_lines(records)
    path.write_text("INFO started\n" + path.read_text() + '"x"\n')
    table = ndtimeline.read(path).table
    assert len(table) == 2 * len(records)
    assert table.dropped == (("line that holds no record", 2),)


def test_endless_nesting_and_endless_garbage_end(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Hostile texts are given up in bounded time, and what they held before is used."""
    first = json.dumps(records[0])
    path = tmp_path / "trace"
    for hostile in ('{"a":' * 100_000, "{" * 100_000, '{"step":' + "9" * 100_000 + "}"):
        for text in (f"{first}\n{hostile}", f"[{first},{hostile}]"):
            path.write_text(text)
            table = ndtimeline.read(path).table
            assert len(table) == 2
            assert table.dropped


@pytest.mark.parametrize(
    "text", ['{"metric": "forward-compute", "start_ts": []}', '[{"metric": 1, "start_ts": 1}]']
)
def test_a_file_without_a_usable_record_fails_loudly(tmp_path: Path, text: str) -> None:
    """The message says what was looked for, and what was found instead."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"no usable ndtimeline record: looked for .*; found 1 × "):
        ndtimeline.read(path)


def test_only_unknown_metrics_fail_loudly(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """A renamed kernel must not look like a healthy job."""
    path = write_lines([_with(record, metric="renamed") for record in records])
    with pytest.raises(TraceError, match="found 32 × unknown op type"):
        ndtimeline.read(path)


def test_records_of_two_trials_are_refused(
    records: list[dict[str, Any]], write_lines: Callable[..., Path]
) -> None:
    """Two jobs in one file have nothing to do with each other."""
    path = write_lines([records[0], _with(records[1], trial="run-b")])
    with pytest.raises(TraceError, match="expected one job, found 2 trials: 'run-a', 'run-b'"):
        ndtimeline.read(path)


@pytest.mark.parametrize(
    "head",
    [b"", b"PAR1", b"\x80\x04metric", b'{"traceEvents": []}', b"\x1f\x8b\0", b'{"metric":1}'],
)
def test_other_files_are_not_recognised(head: bytes) -> None:
    """Recognition goes by the keys of a record, never by the name."""
    assert not ndtimeline.recognises(head, Path("trace.ndtimeline.json"))
