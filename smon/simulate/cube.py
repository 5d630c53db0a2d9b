"""Durations of one op type as an array over (step, DP rank, stage, position).

Structures of a window differ in slots; causes and fixes think in steps, workers and microbatches.
A cube holds the one in terms of the other: all lanes of all structures, NaN where an op does not
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType
from smon.simulate.window import Part, Window

Floats = NDArray[np.float64]


def cube_of(window: Window, optype: OpType, values: Callable[[Part], Floats]) -> Floats:
    """(steps, dp_ranks, stages, positions) values of one op type.

    Parameters
    ----------
    values
        Which (N, L) array of a part to take, e.g. its `work`.

    Returns
    -------
    array
        Position is the sequence number; (steps, dp_ranks, stages, 0) if the type does not occur.
    """
    longest = 0
    for part in window.parts:
        codes = part.graph.structure.optype == optype
        longest = max(longest, int(part.graph.structure.seq[codes].max(initial=-1)) + 1)
    cube = np.full((len(window.steps), window.dp_ranks, window.stages, longest), np.nan)
    for part in window.parts:
        structure = part.graph.structure
        for stage in range(window.stages):
            slots = structure.of(stage, optype)
            if len(slots):
                cube[part.step, part.dp, stage, : len(slots)] = values(part)[slots].T
    return cube


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What undoes a cause, as cubes in ns.

    Attributes
    ----------
    work
        By op type, (steps, dp_ranks, stages, positions) durations: the whole type, changed or not.
    stall
        By op type, the part of the launch delays that would go away; 0 where none.
    """

    work: Mapping[OpType, Floats] = field(default_factory=dict)
    stall: Mapping[OpType, Floats] = field(default_factory=dict)

    def __or__(self, other: Changes) -> Changes:
        """Both; where both change an op, the shorter duration and the larger stall count."""
        return Changes(
            _merged(self.work, other.work, np.fmin), _merged(self.stall, other.stall, np.fmax)
        )


def _merged(
    one: Mapping[OpType, Floats], other: Mapping[OpType, Floats], choose: np.ufunc
) -> dict[OpType, Floats]:
    merged = dict(one)
    for optype, cube in other.items():
        merged[optype] = choose(merged[optype], cube) if optype in merged else cube
    return merged


class Changed:
    """Durations as recorded, except for some changes; and stalls alone as launch delays."""

    what_ifs = 1

    def __init__(self, window: Window, changes: Changes) -> None:
        self.window = window
        self.changes = changes

    def row(self, part: int, op: int) -> Floats:
        """(L,) durations of one op."""
        changed = self._cell(part, op, self.changes.work)
        recorded: Floats = self.window.parts[part].work[op]
        return recorded if changed is None else changed

    def delay(self, part: int, op: int) -> Floats:
        """(L,) stalls of one op."""
        stall = self._cell(part, op, self.changes.stall)
        return np.zeros(self.window.parts[part].lanes) if stall is None else stall

    def _cell(self, part: int, op: int, cubes: Mapping[OpType, Floats]) -> Floats | None:
        lanes = self.window.parts[part]
        structure = lanes.graph.structure
        cube = cubes.get(OpType(int(structure.optype[op])))
        if cube is None:
            return None
        cell: Floats = cube[lanes.step, lanes.dp, structure.stage[op], structure.seq[op]]
        return cell
