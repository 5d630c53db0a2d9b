"""What the tests of `smon.synth` share: quiet jobs, and a look at single ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.timing import Durations, Noise
from smon.trace.table import OpTable

QUIET = Noise(compute_ratio=0.0, communication_ratio=0.0)

#: Round numbers for times worked out by hand, s.
BY_HAND = Durations(
    forward_s=0.010,
    backward_s=0.020,
    all_gather_s=0.004,
    reduce_scatter_s=0.006,
    separate_s=0.005,
    p2p_s=0.001,
    embedding_s=0.003,
    clip_s=0.002,
    optimizer_s=0.007,
    layernorm_s=0.001,
)

#: The pipeline alone: everything else takes no time.
PIPELINE_ONLY = Durations(
    all_gather_s=0,
    reduce_scatter_s=0,
    separate_s=0,
    p2p_s=0,
    embedding_s=0,
    clip_s=0,
    optimizer_s=0,
    layernorm_s=0,
)


def quiet(durations: Durations = BY_HAND, **fields: Any) -> Synthetic:  # noqa: ANN401  # of Scenario
    """A job without noise, of one step unless told otherwise, with times from 0 in every step."""
    given = {"steps": 1, "dp": 1, "step_relative": True, "noise": QUIET, **fields}
    return generate(Scenario(durations=durations, **given))


def pick(table: OpTable, *optypes: OpType, **where: int) -> OpTable:
    """Ops of these types, with the given values of other columns."""
    keep: NDArray[np.bool_] = np.isin(table.optype, optypes)
    for name, value in where.items():
        keep = keep & (table.columns[name] == value)
    return table.take(keep)


def ends_ns(table: OpTable) -> NDArray[np.int64]:
    """End of each op, ns."""
    ends: NDArray[np.int64] = table.start_ns + table.duration_ns
    return ends


def spans_ms(table: OpTable, *optypes: OpType, **where: int) -> list[tuple[float, float]]:
    """Start and end of these ops, ms."""
    ops = pick(table, *optypes, **where)
    return list(zip((ops.start_ns / 1e6).tolist(), (ends_ns(ops) / 1e6).tolist(), strict=True))
