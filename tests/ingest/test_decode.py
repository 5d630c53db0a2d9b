from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.errors import WireError
from smon.ingest.decode import check, decode
from smon.ingest.limits import MAX_STEP, MAX_WINDOWS
from smon.ingest.values import Producer, columns_of
from smon.topology import Layout
from smon.wire.arrow import SCHEMA, ipc_body
from smon.wire.problems import KINDS, Problem
from tests.ingest.batches import (
    LAYOUT,
    LIMITS,
    NOW,
    columns,
    head_of,
    ipc_claiming,
    json_ops,
    ops,
    record_batch,
)
from tests.ingest.judging import LIVE, SECOND, accepted, raw_ops, refused

# --- Arrow ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2**31, 2**31 - 1, 2**62, -1, 100_001])
def test_an_ipc_body_that_claims_other_rows_never_reaches_arrow(rows: int) -> None:
    """Arrow believes any number of rows, so it is compared before."""
    batch = raw_ops(ipc_claiming(rows))
    assert refused(batch) in {Problem.TOO_MANY_EVENTS, Problem.MALFORMED_BODY}
    honest = dataclasses.replace(batch, events=max(rows, 0))
    assert KINDS[refused(honest)].status in {400, 422}


def test_rows_that_their_buffers_cannot_hold_are_refused() -> None:
    """Even if the claim is within the limit."""
    claims = dataclasses.replace(raw_ops(ipc_claiming(5000)), events=5000)
    assert refused(claims) is Problem.MALFORMED_BODY


@pytest.mark.parametrize("events, problem", [(11, "malformed-body"), (13, "malformed-body")])
def test_the_event_count_of_the_header_must_be_right(events: int, problem: str) -> None:
    """The header is what limits and metrics count by."""
    assert refused(dataclasses.replace(ops(), events=events)) == problem


def test_the_number_of_events_has_a_limit() -> None:
    """Below and at the limit a batch is taken, above it is refused; as Arrow and as JSON."""
    for make in (ops, json_ops):
        accepted(make(rows=11), events=12)
        accepted(make(rows=12), events=12)
        assert refused(make(rows=13), events=12) is Problem.TOO_MANY_EVENTS


def test_an_empty_batch_is_sound() -> None:
    """A step may be done without an op."""
    assert accepted(ops(rows=0)).ops.num_rows == 0
    assert accepted(json_ops(rows=0)).ops.num_rows == 0


def _schema(**changed: pa.DataType) -> pa.Schema:
    return pa.schema(
        [pa.field(f.name, changed.get(f.name, f.type), nullable=False) for f in SCHEMA]
    )


def _written(batch: pa.RecordBatch, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _cast(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            array.cast(field.type, safe=False)
            for array, field in zip(record_batch(columns()).columns, schema, strict=True)
        ],
        schema=schema,
    )


@pytest.mark.parametrize(
    "schema",
    [
        _schema(step=pa.int32()),
        _schema(dp=pa.int64()),
        _schema(duration_ns=pa.uint64()),
        _schema(start_ns=pa.float64()),
        _schema(start_ns=pa.timestamp("ns")),
        _schema(optype=pa.utf8()),
        _schema(optype=pa.dictionary(pa.int32(), pa.utf8())),
        _schema(optype=pa.dictionary(pa.int8(), pa.large_utf8())),
        _schema(optype=pa.dictionary(pa.uint8(), pa.utf8())),
        pa.schema([f.with_nullable(nullable=True) for f in SCHEMA]),
        SCHEMA.with_metadata({"pandas": "{}"}),
        pa.schema([f.with_metadata({"ARROW:extension:name": "x"}) for f in SCHEMA]),
    ],
)
def test_only_the_exact_schema_is_read(schema: pa.Schema) -> None:
    """Names, types, nullability; nothing that only looks like it, no metadata."""
    assert refused(raw_ops(_written(_cast(schema)))) in {
        Problem.WRONG_SCHEMA,
        Problem.MALFORMED_BODY,
    }


def test_columns_have_one_order() -> None:
    """A schema in another order is another schema; so is one more or one fewer column."""
    batch = record_batch(columns())
    names = SCHEMA.names
    for chosen in (names[::-1], names[:-1], [*names, "step"]):
        other = pa.RecordBatch.from_arrays(
            [batch.column(name) for name in chosen],
            schema=pa.schema([SCHEMA.field(name) for name in chosen]),
        )
        assert KINDS[refused(raw_ops(_written(other)))].status in {400, 422}


def test_nulls_are_refused() -> None:
    """Also where the schema says that there are none."""
    batch = record_batch(columns())
    arrays = [*batch.columns]
    arrays[0] = pa.array([None, *range(11)], pa.int64())
    spoiled = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    assert refused(raw_ops(_written(spoiled))) is Problem.WRONG_SCHEMA


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression_inside_arrow_is_refused(codec: str) -> None:
    """It would be a second way to decompress, without a count."""
    raw = _written(record_batch(columns()), compression=codec)
    # The dictionary comes first and is compressed as well.
    assert refused(raw_ops(raw)) in {Problem.UNSUPPORTED_ENCODING, Problem.MALFORMED_BODY}


def test_a_stream_holds_one_record_batch() -> None:
    """None, two, or bytes after the end are refused."""
    batch = record_batch(columns())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    two = bytes(sink.getvalue())
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, SCHEMA).close()
    none = bytes(sink.getvalue())
    one = ipc_body(batch)
    for raw in (two, none, one + one, one + b"\0", one[:-8] + one, one[:-9]):
        assert refused(raw_ops(raw)) is Problem.MALFORMED_BODY
    assert accepted(raw_ops(one[:-8])).ops.num_rows == 12


def test_a_replaced_or_growing_dictionary_is_refused() -> None:
    """One dictionary, whole."""
    batches = [record_batch(columns(optype=["a"] * 12)), record_batch(columns(optype=["b"] * 12))]
    for deltas in (False, True):
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
        with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        assert refused(raw_ops(bytes(sink.getvalue()))) is Problem.MALFORMED_BODY


def test_indices_beyond_the_dictionary_are_refused() -> None:
    """Arrow itself does not look unless asked to."""
    raw = ipc_body(record_batch(columns(optype=["a"] * 12)))
    at = raw.rfind(bytes(12))
    positions = [i for i in range(len(raw)) if raw[i : i + 12] == bytes(12)]
    assert at in positions
    spoiled = [raw[:i] + b"\x05" * 12 + raw[i + 12 :] for i in positions]
    outcomes = set()
    for body in spoiled:
        try:
            accepted(raw_ops(body))
            outcomes.add("taken")
        except WireError as error:
            outcomes.add(error.problem)
    assert Problem.MALFORMED_BODY in outcomes


def test_3000_mutated_arrow_bodies_are_refused_or_sound() -> None:
    """Whatever the bytes, with a right digest: no crash, no other error, no row out of range."""
    rng = random.Random(20_240)  # noqa: S311  # no secret
    raw = ipc_body(record_batch(columns(48)))
    statuses = set()
    taken = 0
    for _ in range(3000):
        body = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            at = rng.randrange(len(body))
            body[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        if rng.random() < 0.1:
            del body[rng.randrange(len(body)) :]
        batch = raw_ops(bytes(body), rows=48)
        try:
            content = decode(head_of(batch), batch.body, 0, LIMITS)
            check(content, LIVE, LIMITS, NOW)
        except WireError as error:
            statuses.add(KINDS[Problem(error.problem)].status)
            continue
        assert content.ops is not None
        assert content.ops.num_rows == 48
        assert all(len(column) == 48 for column in columns_of(content.ops).values())
        taken += 1
    assert 0 < taken < 3000
    assert statuses <= {400, 413, 415, 422}


@given(st.binary(max_size=600))
def test_no_bytes_at_all_do_harm(raw: bytes) -> None:
    """Noise is refused, as every kind and encoding."""
    for batch in (raw_ops(raw), raw_ops(raw, encoding="zstd"), raw_ops(raw, encoding="gzip")):
        assert KINDS[refused(batch)].status in {400, 413, 422}


def test_reading_arrow_does_not_import_pandas() -> None:
    """It would cost 60 MB in every server; `Array.to_numpy` does it by the way."""
    code = (
        "import sys\n"
        "from smon.ingest.values import columns_of\n"
        "from smon.ingest.columns import read_columns\n"
        "from smon.ingest.ipc import read_ipc\n"
        "from smon.ingest.order import by_window\n"
        "from smon.ingest.limits import TRUSTED\n"
        "from smon.wire.arrow import ipc_body\n"
        "body = sys.stdin.buffer.read()\n"
        "batch = read_columns(body, 12, TRUSTED)\n"
        "batch = read_ipc(ipc_body(batch), 12, TRUSTED)\n"
        "list(by_window([batch], 10))\n"
        "assert 'pandas' not in sys.modules\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], input=json_ops().body, check=True)


# --- values -----------------------------------------------------------------------------------


def _one(name: str, value: int) -> dict[str, Any]:
    values = np.array(columns()[name])
    values[5] = value
    return {name: values}


@pytest.mark.parametrize(
    "name, below, at, above",
    [
        ("step", -1, 0, None),
        ("step", None, MAX_STEP, MAX_STEP + 1),
        ("seq", -1, 0, None),
        ("chunk", -2, -1, None),
        ("global_chunk", -2, -1, None),
        ("microbatch", -2, -1, None),
        ("duration_ns", -1, 0, None),
        ("duration_ns", None, 3600 * SECOND, 3600 * SECOND + 1),
        ("start_ns", NOW - 7 * 86_400 * SECOND - 1, NOW - 7 * 86_400 * SECOND, None),
        ("start_ns", None, NOW + 600 * SECOND, NOW + 600 * SECOND + 1),
        ("rank", -2, -1, None),
    ],
)
def test_each_column_has_its_range(
    name: str, below: int | None, at: int, above: int | None
) -> None:
    """At the bound a value is taken; beyond, the batch is refused with the row named."""
    accepted(ops(**_one(name, at)))
    for outside in (below, above):
        if outside is not None:
            batch = ops(**_one(name, outside))
            with pytest.raises(WireError, match=rf"expected {name} .*row 5") as caught:
                accepted(batch)
            assert caught.value.problem == Problem.WRONG_VALUES
            assert str(outside) not in str(caught.value).split("found")[1]


@pytest.mark.parametrize("name, size", [("dp", 4), ("stage", 2)])
def test_workers_lie_inside_the_layout(name: str, size: int) -> None:
    """Coordinates from 0 to one less than the size."""
    for value in (size - 1, -1, size):
        changed: dict[str, Any] = {name: [value] * 12, "rank": [-1] * 12}
        if value == size - 1:
            accepted(ops(**changed))
        else:
            assert refused(ops(**changed)) is Problem.WRONG_VALUES


def test_a_rank_is_one_of_its_worker() -> None:
    """With TP 2 and CP 2 each worker (dp, stage) has four ranks; -1 is not known."""
    producer = Producer(Layout(dp=4, pp=2, tp=2, cp=2), live_unix=True, window_steps=10)
    worker: dict[str, Any] = {"dp": [3] * 12, "stage": [1] * 12}
    for rank in (28, 29, 31, -1):
        accepted(ops(rank=[rank] * 12, **worker), producer)
    for rank in (27, 32, 0):
        assert refused(ops(rank=[rank] * 12, **worker), producer) is Problem.WRONG_VALUES


def test_ranks_of_a_layout_beyond_32_bits_do_not_wrap_around() -> None:
    """Layouts of a million by a million are allowed; products are made in 64 bits."""
    producer = Producer(Layout(dp=1 << 20, pp=1 << 20), live_unix=True, window_steps=10)
    batch = ops(dp=[0] * 12, stage=[4096] * 12, rank=[0] * 12)
    assert refused(batch, producer) is Problem.WRONG_VALUES


@pytest.mark.parametrize("behind_s", [-3600, 3600, 40 * 86_400])
def test_times_may_be_off_by_as_much_as_the_senders_clock_says_it_is(behind_s: int) -> None:
    """By that clock or by the server's: ops of before it was set are sent with the new offset."""
    producer = dataclasses.replace(LIVE, behind_s=behind_s)
    theirs = NOW - behind_s * SECOND
    for at in (NOW, theirs):
        accepted(ops(start_ns=at + np.arange(12)), producer)
    for outside in (
        max(NOW, theirs) + LIMITS.future_ns + SECOND,
        min(NOW, theirs) - LIMITS.past_ns - SECOND,
    ):
        batch = ops(start_ns=outside + np.arange(12))
        assert refused(batch, producer) is Problem.WRONG_VALUES


def test_times_of_a_step_and_recorded_times_may_be_any() -> None:
    """Only live traces with unix time must be of now."""
    recorded = Producer(LAYOUT, live_unix=False, window_steps=0)
    accepted(ops(start_ns=np.arange(12)), recorded)
    accepted(ops(start_ns=np.arange(12) - 5), recorded)
    assert refused(ops(start_ns=np.arange(12)), LIVE) is Problem.WRONG_VALUES
    assert refused(ops(start_ns=[2**63 - 1] * 12), recorded) is Problem.WRONG_VALUES


def test_a_batch_touches_a_bounded_number_of_windows() -> None:
    """Each window becomes a file."""
    for windows, taken in ((MAX_WINDOWS, True), (MAX_WINDOWS + 1, False)):
        batch = ops(rows=windows, step=10 * np.arange(windows))
        if taken:
            accepted(batch)
        else:
            assert refused(batch) is Problem.WRONG_VALUES
    sparse = ops(rows=4, step=[0, 10**6, 10**9, 10**12])
    accepted(sparse)


@pytest.mark.parametrize(
    "label",
    ["", "a b", "../../evil\0", "ü", "<script>", "a\n", "x" * 257, "'; DROP TABLE jobs; --", "{}"],
)
def test_hostile_op_types_are_refused(label: str) -> None:
    """Text is 1 to 256 of a few harmless characters."""
    labels = [label, *["gc"] * 11]
    assert refused(ops(optype=labels)) is Problem.WRONG_VALUES
    assert refused(json_ops(optype=labels)) is Problem.WRONG_VALUES


@pytest.mark.parametrize("label", ["custom-kernel", "a/b:c@d+e_f.g", "x" * 256, "../../evil"])
def test_op_types_that_smon_does_not_know_are_taken(label: str) -> None:
    """They never become paths, and newer recorders may know more."""
    assert accepted(ops(optype=[label] * 12)).ops is not None
