"""Marks of a timeline, thinned to what a screen can show, and the colours of op types.

Flow: a document of ``smon.marks/1`` → **here** → `smon.api.marks` → ``static/timeline.js``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: A screen shows at most so many marks, and this by default.
MAX_MARKS: Final = 10_000
USUAL_MARKS: Final = 5_000

#: Shorter than this part of the range, an op may join its neighbours; doubled until all fits.
_FIRST_GRAIN: Final = 1 / 2000
#: Neighbours join within runs of so many grains.
_RUN: Final = 4

#: Colour classes of op types, in the order of the style sheet: compute warm, communication cool.
CLASSES: Final = (
    ("forward", "forward compute"),
    ("backward", "backward compute"),
    ("weights", "weight gradients"),
    ("other", "optimizer and other local work"),
    ("send-forward", "send and receive, forward"),
    ("send-backward", "send and receive, backward"),
    ("gather", "parameter all-gather"),
    ("reduce", "gradient and other reductions"),
)

#: Classes up to here are compute, and have a band of their own.
COMPUTE_CLASSES: Final = 4

_CLASS_OF: Final = {
    "forward-compute": 0,
    "backward-compute": 1,
    "weight-grad-compute": 2,
    "forward-send": 4,
    "forward-recv": 4,
    "backward-send": 5,
    "backward-recv": 5,
    "params-all-gather": 6,
    "grads-reduce-scatter": 7,
    "separate-grads-all-reduce": 7,
    "embedding-grads-all-reduce": 7,
    "optimizer-clip-main-grad": 7,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which part of a step is on the screen.

    Attributes
    ----------
    begin_s, end_s
        Since the start of the step; None: from its beginning, to its end.
    kinds
        0: actual, 1: ideal.
    most
        Marks.
    """

    begin_s: float | None = None
    end_s: float | None = None
    kinds: frozenset[int] = frozenset({0, 1})
    most: int = USUAL_MARKS


@dataclass(frozen=True, slots=True, eq=False)
class _Marks:
    """Columns of marks; times in ns; `count` ops in each, `type` of the longest of them."""

    row: NDArray[np.int64]
    kind: NDArray[np.int64]
    type: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    filled: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: NDArray[Any]) -> _Marks:
        return _Marks(*(getattr(self, each.name)[which] for each in fields(self)))


def class_of(label: str) -> int:
    """Number of the colour class of an op type."""
    return _CLASS_OF.get(label, COMPUTE_CLASSES - 1)


def on_screen(document: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The marks of a range, short neighbours of one row and band as one mark with their number.

    Returns
    -------
    dict
        ``begin_s``, ``end_s`` of the range and ``length_s`` of the step; ``ops`` in the range,
        ``alone`` of them with a mark of their own; the marks in columns, times in seconds.
    """
    everything = _read(document["marks"])
    length = int(everything.end_ns.max(initial=0))
    begin, end = _range(wanted, length)
    chosen = np.isin(everything.kind, sorted(wanted.kinds))
    chosen &= (everything.end_ns >= begin) & (everything.start_ns <= end)
    mine = everything.take(chosen)
    classes = np.array([class_of(label) for label in document["types"]], np.int64)
    drawn = _thinned(mine, classes, end - begin, wanted.most)
    return {
        "begin_s": begin / 1e9,
        "end_s": end / 1e9,
        "length_s": length / 1e9,
        "ops": len(mine),
        "alone": int((drawn.count == 1).sum()),
        "marks": _written(drawn),
    }


def _read(columns: Mapping[str, list[int]]) -> _Marks:
    names = [each.name for each in fields(_Marks) if each.name != "count"]
    arrays = {name: np.array(columns[name], np.int64) for name in names}
    return _Marks(**arrays, count=np.ones(len(arrays["row"]), np.int64))


def _range(wanted: Wanted, length: int) -> tuple[int, int]:
    """In ns; never empty, and within the step."""
    begin = round((wanted.begin_s or 0.0) * 1e9)
    end = length if wanted.end_s is None else round(wanted.end_s * 1e9)
    begin = min(max(begin, 0), max(length - 1, 0))
    return begin, max(min(end, length), begin + 1)


def _thinned(marks: _Marks, classes: NDArray[np.int64], span: int, most: int) -> _Marks:
    grain = max(span * _FIRST_GRAIN, 1.0)
    drawn = marks
    while len(drawn) > most and grain < 2 * span:
        drawn = _joined(marks, classes, grain)
        grain *= 2
    return drawn


def _joined(marks: _Marks, classes: NDArray[np.int64], grain: float) -> _Marks:
    """Ops shorter than a grain join others of their row, run, band and stretch of time."""
    small = np.flatnonzero(marks.end_ns - marks.start_ns < grain)
    if not len(small):
        return marks
    band = classes[marks.type[small]] < COMPUTE_CLASSES
    stretch = (marks.start_ns[small] // (_RUN * grain)).astype(np.int64)
    lane = (marks.row[small] * 2 + marks.kind[small]) * 2 + band
    width = int(stretch.max()) - int(stretch.min()) + 1
    _, group = np.unique(lane * width + stretch - stretch.min(), return_inverse=True)
    large = np.setdiff1d(np.arange(len(marks)), small, assume_unique=True)
    return _both(marks.take(large), _groups(marks.take(small), group))


def _groups(marks: _Marks, group: NDArray[np.intp]) -> _Marks:
    """One mark for each group: from the first start to the last end, as its longest op."""
    length = marks.end_ns - marks.start_ns
    order = np.lexsort((length, group))
    last = np.flatnonzero(np.append(group[order][1:] != group[order][:-1], True))
    first = np.concatenate([[0], last[:-1] + 1])
    longest = marks.take(order[last])
    many = np.diff(np.append(first, len(order))) > 1
    start = np.minimum.reduceat(marks.start_ns[order], first)
    end = np.maximum.reduceat(marks.end_ns[order], first)
    wait = np.add.reduceat(marks.wait_ns[order], first)
    return _Marks(
        row=longest.row,
        kind=longest.kind,
        type=longest.type,
        start_ns=start,
        end_ns=end,
        # Waits of ops that run side by side may add up to more than there is.
        wait_ns=np.minimum(wait, end - start),
        microbatch=np.where(many, -1, longest.microbatch),
        filled=np.maximum.reduceat(marks.filled[order], first),
        count=np.add.reduceat(marks.count[order], first),
    )


def _both(one: _Marks, other: _Marks) -> _Marks:
    return _Marks(
        *(
            np.concatenate([getattr(one, each.name), getattr(other, each.name)])
            for each in fields(_Marks)
        )
    )


def _written(marks: _Marks) -> dict[str, list[Any]]:
    """In columns, by row, then start."""
    ordered = marks.take(np.lexsort((marks.start_ns, marks.kind, marks.row)))
    return {
        "row": ordered.row.tolist(),
        "kind": ordered.kind.tolist(),
        "type": ordered.type.tolist(),
        "start_s": (ordered.start_ns / 1e9).tolist(),
        "duration_s": ((ordered.end_ns - ordered.start_ns) / 1e9).tolist(),
        "wait_s": (ordered.wait_ns / 1e9).tolist(),
        "microbatch": [one if one >= 0 else None for one in ordered.microbatch.tolist()],
        "filled": [bool(one) for one in ordered.filled.tolist()],
        "count": ordered.count.tolist(),
    }
