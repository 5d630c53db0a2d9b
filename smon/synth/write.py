"""Write an op table as SMon's own Parquet, with its meta file and all else beside it.

Flow: `smon.synth.scenario` → **here** → files that `smon.trace.formats` and `smon.trace.context`
read back without loss, and the true answer, which the analysis does not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from smon.errors import ConfigError, MetaError
from smon.ops import LABELS
from smon.synth.scenario import Synthetic
from smon.topology import Layout
from smon.trace.context import CONTEXT_NAME, write_context
from smon.trace.meta import Job
from smon.trace.schema import NAMES
from smon.trace.table import OpTable

TRACE_NAME: Final = "trace.parquet"
META_NAME: Final = "meta.yaml"
TRUTH_NAME: Final = "truth.json"

#: Value of the metadata key ``smon.schema``: these columns, in these units.
SCHEMA: Final = "smon.ops/1"

#: Order of rows in the file: neighbours are alike, which is what the encodings live on.
_ORDER: Final = ("step", "dp", "stage", "optype", "seq")

#: Times grow slowly from row to row, so that differences are small; other columns have few values.
_ENCODINGS: Final = {"start_ns": "DELTA_BINARY_PACKED", "duration_ns": "DELTA_BINARY_PACKED"}


def write_synthetic(made: Synthetic, folder: Path) -> list[Path]:
    """Write trace and meta file, ``truth.json``, and ``context.json`` if there is any context.

    Returns
    -------
    list[Path]
        The files.

    Raises
    ------
    ConfigError
        The folder cannot be written.
    """
    paths = write_trace(made.table, made.job, folder)
    truth, context = folder / TRUTH_NAME, folder / CONTEXT_NAME
    try:
        truth.write_text(made.truth.to_json() + "\n", encoding="utf-8")
        context.unlink(missing_ok=True)  # of an earlier job
        if made.context:
            write_context(made.context, context)
    except (OSError, MetaError) as error:
        raise _cannot_write(folder, error) from error
    return [*paths, truth, *([context] if made.context else [])]


def write_trace(table: OpTable, job: Job, folder: Path) -> list[Path]:
    """Write ``trace.parquet`` and ``meta.yaml`` into a folder, which is made if need be.

    Returns
    -------
    list[Path]
        The two files.

    Raises
    ------
    ConfigError
        The folder cannot be written.
    """
    trace, meta = folder / TRACE_NAME, folder / META_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_parquet(_sorted(table), trace)
        meta.write_text(_meta_text(job), encoding="utf-8")
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return [trace, meta]


def _cannot_write(folder: Path, error: OSError | MetaError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"expected a folder that can be written, found {folder}: {reason}: name another folder"
    )


def _write_parquet(table: OpTable, path: Path) -> None:
    columns = {name: pa.array(values) for name, values in table.columns.items()}
    columns["optype"] = _labels(table)
    metadata = {
        b"smon.schema": SCHEMA.encode(),
        b"smon.step_relative": b"true" if table.step_relative else b"false",
    }
    pq.write_table(
        pa.table(columns, metadata=metadata),
        path,
        compression="zstd",
        use_dictionary=[name for name in NAMES if name not in _ENCODINGS],
        column_encoding=_ENCODINGS,
    )


def _labels(table: OpTable) -> pa.DictionaryArray:
    labels = pa.array(LABELS)
    return pa.DictionaryArray.from_arrays(pa.array(table.optype), labels)


def _sorted(table: OpTable) -> OpTable:
    keys = [table.columns[name] for name in _ORDER]
    if _in_order(keys):
        return table
    return table.take(np.lexsort(keys[::-1]))


def _in_order(keys: list[NDArray[np.generic]]) -> bool:
    """Whether rows already stand in the order of `keys`, the first one counting most."""
    tied = np.ones(max(len(keys[0]) - 1, 0), bool)
    for values in keys:
        before, after = values[:-1], values[1:]
        if np.any(tied & (after < before)):  # type: ignore[operator]  # all columns are numbers
            return False
        tied &= after == before
    return True


def _meta_text(job: Job) -> str:
    """YAML of flat keys. A name is written as JSON, which is YAML and quotes what needs it."""
    meta = {"trial_name": job.job_id, "run_id": job.attempt, **_sizes(job.layout)}
    if job.attempt:
        meta["attempt"] = job.attempt
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in meta.items())


def _sizes(layout: Layout) -> Mapping[str, int]:
    sizes = {
        "dp_size": layout.dp,
        "dsp_size": layout.cp,
        "pp_size": layout.pp,
        "tp_size": layout.tp,
        "vpp_size": layout.vpp,
        "world_size": layout.world_size,
    }
    return sizes | ({"ep_size": layout.ep} if layout.ep > 1 else {})
