"""What a part of a window needs of the whole, to be drawn as the report of the whole sees it.

Ideal durations and the clocks are measured over a whole window; a timeline of one step reads that
step alone. Without this its ideal would be another one than the report's.

Flow: `smon.prepare` of a window → **here** → the file of its workers → **here** → a part of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.ops import BY_LABEL, OP_TYPES
from smon.prepare import Prepared
from smon.simulate.ideal import Ideal
from smon.trace.table import OpTable

_SCHEMA: Final = "smon.reference/1"


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """By how much clocks were ahead.

    Attributes
    ----------
    steps
        (steps,) step numbers, ascending.
    ahead_ns
        (steps, dp_ranks, stages) what was taken off the times of each worker; 0 where it was absent
        or nothing was.
    """

    steps: NDArray[np.int64]
    ahead_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Ideal durations of a window, and its clocks; None where no clock was corrected."""

    ideal: Ideal
    clocks: Clocks | None

    def put_right(self, table: OpTable) -> OpTable:
        """A part of the window with the times that the whole one was analysed with."""
        clocks = self.clocks
        if clocks is None or not len(table):
            return table
        # A step that was left out has the clocks of the one beside it.
        place = np.searchsorted(clocks.steps, table.step).clip(max=len(clocks.steps) - 1)
        start = table.start_ns - clocks.ahead_ns[place, table.dp, table.stage]
        if table.step_relative:
            steps, inverse = np.unique(table.step, return_inverse=True)
            first = np.full(len(steps), np.iinfo(np.int64).max)
            np.minimum.at(first, inverse, start)
            start = start - first[inverse]
        return replace(table, start_ns=start)


def reference_of(prepared: Prepared) -> Reference:
    """The reference that a prepared window is for its parts."""
    return Reference(prepared.ideal, _clocks(prepared) if prepared.alignment.corrected else None)


def _clocks(prepared: Prepared) -> Clocks:
    """From the first op of each worker in each step, as recorded and as put right."""
    window, table = prepared.window, prepared.table
    shape = (len(window.steps), window.dp_ranks, window.stages)
    right = np.full(shape, np.inf)
    for part in window.parts:
        stage = part.graph.structure.stage
        known = np.where(part.row >= 0, part.start, np.inf)
        for number in range(window.stages):
            right[part.step, part.dp, number] = known[stage == number].min(axis=0, initial=np.inf)
    used = np.isin(table.step, window.steps)
    step = np.searchsorted(window.steps, table.step[used])
    recorded = np.full(shape, np.iinfo(np.int64).max)
    np.minimum.at(recorded, (step, table.dp[used], table.stage[used]), table.start_ns[used])
    known_at = np.isfinite(right) & (recorded < np.iinfo(np.int64).max)
    first = np.where(known_at, recorded, np.iinfo(np.int64).max).min(axis=(1, 2), keepdims=True)
    ahead = np.where(known_at, (recorded - first) - np.where(known_at, right, 0.0), np.nan)
    # Only differences between workers count: each step begins at its earliest op anyway.
    ahead -= np.nanmedian(ahead, axis=(1, 2), keepdims=True)
    return Clocks(window.steps, np.rint(np.nan_to_num(ahead)).astype(np.int64))


# --- as text --------------------------------------------------------------------------------


def packed(reference: Reference) -> bytes:
    """A reference as JSON."""
    clocks = reference.clocks
    ideal = reference.ideal.by_optype.tolist()
    document = {
        "schema": _SCHEMA,
        "ideal_ns": {op.label: ideal[op] for op in OP_TYPES if np.isfinite(ideal[op])},
        "clocks": None
        if clocks is None
        else {
            "steps": clocks.steps.tolist(),
            "workers": list(clocks.ahead_ns.shape[1:]),
            "ahead_ns": base64.b64encode(
                zlib.compress(clocks.ahead_ns.astype("<i8").tobytes())
            ).decode(),
        },
    }
    return json.dumps(document).encode()


def unpacked(text: bytes) -> Reference:
    """The reference that was written by `packed`.

    Raises
    ------
    TraceError
        It is none.
    """
    try:
        return _reference_of(json.loads(text))
    except (ValueError, TypeError, LookupError, binascii.Error, zlib.error) as error:
        raise TraceError(
            f"expected what a window was measured against ({_SCHEMA}), found {error}: analyse the "
            "window again"
        ) from error


def _reference_of(document: Any) -> Reference:  # noqa: ANN401  # JSON
    if document["schema"] != _SCHEMA:
        raise ValueError(document["schema"])
    ideal = np.full(len(OP_TYPES), np.nan)
    for label, value in document["ideal_ns"].items():
        ideal[BY_LABEL[label]] = float(value)
    return Reference(Ideal(ideal), _clocks_of(document["clocks"]))


def _clocks_of(document: Any) -> Clocks | None:  # noqa: ANN401  # JSON
    if document is None:
        return None
    steps = np.array(document["steps"], np.int64)
    raw = zlib.decompress(base64.b64decode(document["ahead_ns"]))
    ahead = np.frombuffer(raw, "<i8").reshape(len(steps), *document["workers"])
    return Clocks(steps, ahead)
