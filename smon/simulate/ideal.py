"""Ideal duration of each op type (``docs/method.md`` section 4; OSDI 2025 paper, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.ops import COMPUTE, OP_TYPES, OpType
from smon.simulate.window import Part


@dataclass(frozen=True, slots=True, eq=False)
class Ideal:
    """Ideal durations in ns.

    Attributes
    ----------
    by_optype
        (op types,) mean of the compute types, median of the transfer times of the others, NaN for
        types that do not occur.
    """

    by_optype: NDArray[np.float64]

    def of_ops(self, optype: NDArray[np.intp]) -> NDArray[np.float64]:
        """(N,) ideal duration of each op."""
        values: NDArray[np.float64] = self.by_optype[optype]
        return values


def measure_ideal(parts: Sequence[Part]) -> Ideal:
    """Over all workers, steps and microbatches; ops that were filled in do not count."""
    by_optype = np.full(len(OP_TYPES), np.nan)
    for op in OP_TYPES:
        values = [_work_of(part, op) for part in parts]
        recorded = np.concatenate(values) if len(values) != 1 else values[0]
        if len(recorded):
            by_optype[op] = recorded.mean() if op in COMPUTE else np.median(recorded)
    return Ideal(by_optype)


def _work_of(part: Part, op: OpType) -> NDArray[np.float64]:
    """(n,) work of the recorded ops of one type; of all, if none was recorded."""
    slots = np.flatnonzero(part.graph.structure.optype == op)
    work = part.work[slots].reshape(-1)
    recorded = part.row[slots].reshape(-1) >= 0
    if recorded.all() or not recorded.any():
        return work
    return work[recorded]
