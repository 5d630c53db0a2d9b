"""Other windows made of the lanes of one: each replica alone, some replicas left out, one lane.

The planner asks what happens if replicas wait for fewer others, or for none. Durations stay as
recorded; only who meets whom changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from smon.ops import OP_TYPES
from smon.simulate.engine import Engine, Floats
from smon.simulate.ideal import Ideal
from smon.simulate.lanes import meeting
from smon.simulate.whatif import Recorded
from smon.simulate.window import Part, Window

#: Nothing is ideal in a run of the planner.
_NO_IDEAL = Ideal(np.zeros(len(OP_TYPES)))


def engine_of(window: Window) -> Engine:
    """A simulator for runs in which every op has a duration of its own."""
    return Engine(window, _NO_IDEAL)


def alone_ns(window: Window) -> Floats:
    """(steps, dp_ranks) step time of each replica if it waited for no other; NaN where absent.

    Launch delays are left out, and transfers take as long as recorded.
    """
    first = np.cumsum([0, *(part.lanes for part in window.parts)])
    steps = [
        begin + np.arange(part.lanes) for begin, part in zip(first[:-1], window.parts, strict=True)
    ]
    single = _window(window, window.parts, steps, np.arange(first[-1]))
    times = engine_of(single).run(Recorded(single)).step_ns[0]
    result = np.full((len(window.steps), window.dp_ranks), np.nan)
    for begin, part in zip(first[:-1], window.parts, strict=True):
        result[part.step, part.dp] = times[begin : begin + part.lanes]
    return result


def without(window: Window, dropped: NDArray[np.bool_]) -> Window:
    """The window without some replicas.

    Parameters
    ----------
    dropped
        (steps, dp_ranks); every step keeps a replica.
    """
    kept = [(part, ~dropped[part.step, part.dp]) for part in window.parts]
    parts = [_take(part, np.flatnonzero(mask)) for part, mask in kept if mask.any()]
    return _window(window, parts, [part.step for part in parts], window.steps)


def typical(window: Window) -> Window:
    """One lane: the most frequent structure, every op with its median duration."""
    part = window.parts[0]
    middle = replace(
        _take(part, np.zeros(1, np.intp)),
        step=np.zeros(1, np.intp),
        work=np.median(part.work, axis=1, keepdims=True),
    )
    return _window(window, [middle], [middle.step], window.steps[:1])


def _take(part: Part, lanes: NDArray[np.intp]) -> Part:
    """Some lanes with their durations; recorded times are of no use to the planner, and are 0."""
    nothing = np.broadcast_to(0.0, (len(part.graph), len(lanes)))
    return Part(
        program=part.program,
        step=part.step[lanes],
        dp=part.dp[lanes],
        row=np.broadcast_to(np.int32(-1), nothing.shape),
        start=nothing,
        end=nothing,
        work=part.work[:, lanes],
        delay=nothing,
    )


def _window(
    window: Window,
    parts: Sequence[Part],
    steps: Sequence[NDArray[np.intp]],
    numbers: NDArray[np.int64],
) -> Window:
    placed = tuple(replace(part, step=step) for part, step in zip(parts, steps, strict=True))
    return replace(window, steps=numbers, parts=placed, meeting=meeting(steps, len(numbers)))
