"""Every worker in every step: slowdown, computing, waiting; one Parquet file for each window.

Flow: `smon.analysis.Study` → **here** → an object beside the report, for the heat maps of a page.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smon.analysis import Study
from smon.timeline.reference import packed, reference_of

Floats = NDArray[np.float64]

SCHEMA: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("dp", pa.int32(), nullable=False),
        pa.field("stage", pa.int32(), nullable=False),
        pa.field("slowdown", pa.float32()),
        pa.field("compute_s", pa.float32()),
        pa.field("wait_s", pa.float32()),
    ]
)

#: Key of the metadata of the file.
REFERENCE_KEY: Final = b"smon.reference"

#: A reader of one step reads one row group: some 50,000 rows, and never less than a step.
_GROUP_ROWS: Final = 50_000


def workers_file(studied: Study) -> pa.Buffer:
    """The file, sorted by step, DP rank and stage; null where a worker is absent from a step.

    ``slowdown`` is the exact S_w of the step: with only this worker as recorded and all else ideal,
    over all ideal. ``compute_s`` is the time of its forwards and backwards, ``wait_s`` the time
    in which it waits for peers and computes nothing. Its metadata hold what a timeline of some of
    the steps needs (`smon.timeline.reference`).
    """
    window, times = studied.prepared.window, studied.times
    compute, wait = studied.evidence.compute_and_wait_ns
    shape = (len(window.steps), window.dp_ranks, window.stages)
    step, dp, stage = (index.ravel() for index in np.indices(shape))
    columns = [
        pa.array(window.steps[step]),
        pa.array(dp.astype(np.int32)),
        pa.array(stage.astype(np.int32)),
        _floats(times.by_worker / times.ideal),
        _floats(compute / 1e9),
        _floats(wait / 1e9),
    ]
    reference = packed(reference_of(studied.prepared))
    sink = pa.BufferOutputStream()
    per_step = window.dp_ranks * window.stages
    pq.write_table(
        pa.Table.from_arrays(columns, schema=SCHEMA.with_metadata({REFERENCE_KEY: reference})),
        sink,
        compression="zstd",
        row_group_size=max(_GROUP_ROWS // per_step, 1) * per_step,
    )
    return sink.getvalue()


def _floats(values: Floats) -> pa.Array:
    """(dp_ranks, stages, steps) as a column in the order of rows."""
    flat = np.moveaxis(values, 2, 0).astype(np.float32).ravel()
    return pa.array(flat, mask=~np.isfinite(flat))
