"""Recorded trace files, as whole: read once, shipped as one stream that ends.

Flow: files → `smon.trace.load` → **here** → spool. The only module of the agent that knows trace
formats, numpy and pyarrow. The same files make the same stream with the same batches, so that a
second try goes on where the first one stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ingest_agents.payload import (
    MAX_DURATION_NS,
    UNNUMBERED,
    Gap,
    OpRow,
    clean,
    context_batch,
    encode,
    end_batch,
)
from ingest_agents.spool.folder import StreamSpec, key_of
from smon.errors import MetaError, NothingUsableError
from smon.ops import LABELS, OP_TYPES
from smon.topology import Layout
from smon.trace.context import CONTEXT_NAME, read_context
from smon.trace.load import Trace, load
from smon.trace.table import OpTable
from smon.wire import TYPE_ARROW, Batch, BatchKind
from smon.wire.arrow import ipc_body, record_batch

#: Ops of one batch: about 200 kB once compressed.
MAX_EVENTS: Final = 20_000

#: Of a context, before it is compressed; the server takes 4 MiB after that.
MAX_CONTEXT_BYTES: Final = 3 << 20

_TABLES: Final = ("microbatches", "expert_tokens", "counters", "events")
_MAPS: Final = ("hosts", "switches", "gpus")

#: Bytes of a row of a table, as JSON, before it is measured.
_ROW_BYTES: Final = 64

_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Trace files of one job, read.

    Attributes
    ----------
    trace
        What they hold.
    context
        Path of the side evidence beside them, if there is any.
    digest
        Of the content of all files: the same content is the same recording.
    """

    trace: Trace
    context: Path | None
    digest: str


def read_recording(
    paths: Sequence[Path],
    *,
    meta: Path | None = None,
    layout: Layout | None = None,
    format_name: str | None = None,
) -> Recording:
    """Read the trace files of one job; parameters as of `smon.trace.load.load`.

    Raises
    ------
    TraceError
        They cannot be read, or have no ops.
    """
    trace = load(paths, meta=meta, layout=layout, format_name=format_name)
    if trace.events or trace.dumps or trace.series is not None:
        raise NothingUsableError(
            "the files have no ops, but kernels, collectives, dumps or step times: send them with "
            "`smon import FILE… --server URL` (docs/sources.md)"
        )
    context = _context_beside(paths)
    files = [*trace.sources, *([context] if context else [])]
    return Recording(trace, context, _digest(files))


def _context_beside(paths: Sequence[Path]) -> Path | None:
    """The one context file beside the files, checked.

    Raises
    ------
    MetaError
        It is malformed, or there are several.
    """
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    places = [folder / CONTEXT_NAME for folder in folders]
    found = {place.resolve(): place for place in places if place.is_file()}
    if len(found) > 1:
        raise MetaError(f"expected one {CONTEXT_NAME}, found {len(found)}: keep one")
    for place in found.values():
        read_context(place)
        return place
    return None


def _digest(paths: Sequence[Path]) -> str:
    """Of the contents, in an order that does not depend on where the files lie."""
    digests = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def spec_of_recording(
    recording: Recording, host: str, *, job: str | None = None, attempt: int | None = None
) -> StreamSpec:
    """The stream of a recording.

    Parameters
    ----------
    host
        Of this machine.
    job, attempt
        Instead of what the files say.
    """
    trace = recording.trace
    name = clean(job or trace.job.job_id) or "trace"
    number = trace.job.attempt if attempt is None else attempt
    layout, table = trace.job.layout, trace.table
    workers = sorted({(int(stage), int(dp)) for stage, dp in _workers(table)})
    return StreamSpec(
        key=key_of("recorded", recording.digest, name, number, layout),
        job=name,
        attempt=number,
        layout=layout,
        mode="recorded",
        time="step" if table.step_relative else "unix",
        host=host,
        source="recorded",
        ranks=tuple(layout.rank(dp, stage) for stage, dp in workers),
        notes=trace.notes,
    )


def _workers(table: OpTable) -> NDArray[np.int64]:
    both = np.stack([table.stage, table.dp], axis=1).astype(np.int64)
    unique: NDArray[np.int64] = np.unique(both, axis=0)
    return unique


def batches_of(recording: Recording) -> Iterator[Batch]:
    """All batches of a recording, in order, the END included.

    Raises
    ------
    MetaError
        The side evidence cannot be read.
    """
    table = recording.trace.table
    kept = table.take(table.duration_ns <= MAX_DURATION_NS)
    if recording.context is not None:
        yield from context_batches(json.loads(recording.context.read_bytes()))
    yield from ops_batches(kept)
    if len(kept) < len(table):
        yield Gap(UNNUMBERED, UNNUMBERED, len(table) - len(kept), "duration-out-of-range").batch()
    yield end_batch("complete")


def ops_batches(table: OpTable) -> Iterator[Batch]:
    """Ops in Arrow batches, sorted by step, rank and start."""
    order = np.lexsort((table.start_ns, table.rank, table.dp, table.stage, table.step))
    table = table.take(order)
    for begin in range(0, len(table), MAX_EVENTS):
        end = min(begin + MAX_EVENTS, len(table))
        steps = table.step[begin:end]
        yield _arrow_batch(table, begin, end, _steps_done(table.step, end), steps)


def _steps_done(step: NDArray[np.int64], end: int) -> int | None:
    """The last step of which all ops lie before `end`; None if there is none."""
    if end == len(step) or step[end] != step[end - 1]:
        return int(step[end - 1])
    before = int(np.searchsorted(step, step[end - 1]))
    return int(step[before - 1]) if before else None


def _arrow_batch(
    table: OpTable, begin: int, end: int, steps_done: int | None, steps: NDArray[np.int64]
) -> Batch:
    columns = {name: values[begin:end] for name, values in table.columns.items()}
    encoding, body = encode(ipc_body(record_batch(columns, LABELS)))
    return Batch(
        seq=UNNUMBERED,
        kind=BatchKind.OPS,
        content_type=TYPE_ARROW,
        encoding=encoding,
        events=end - begin,
        body=body,
        steps_done=steps_done,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
    )


def context_batches(document: Mapping[str, Any]) -> Iterator[Batch]:
    """Side evidence in batches below the limits: names of hosts in one, tables in portions."""
    maps = {name: document[name] for name in _MAPS if document.get(name)}
    if maps:
        yield context_batch(maps, rows=0)
    for name in _TABLES:
        columns = document.get(name)
        if not columns:
            continue
        rows = len(columns["step"])
        size = len(json.dumps(columns)) if rows else 0
        each = max(1, rows * MAX_CONTEXT_BYTES // max(2 * size, rows * _ROW_BYTES, 1))
        for begin in range(0, rows, each):
            part = {key: values[begin : begin + each] for key, values in columns.items()}
            yield context_batch({name: part}, rows=min(each, rows - begin))


def read_table(path: Path, layout: Layout) -> tuple[list[OpRow], bool]:
    """The ops of one Parquet file, for a source of growing folders, and whether times restart.

    Raises
    ------
    SMonError
        It cannot be read, or has ranks that the layout has not.
    """
    table = load([path], layout=layout).ops()
    columns = [values.tolist() for values in table.columns.values()]
    rows = [
        OpRow._make((*values[:4], OP_TYPES[values[4]].label, *values[5:]))
        for values in zip(*columns, strict=True)
    ]
    return rows, table.step_relative
