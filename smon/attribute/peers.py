"""Each against the others: medians that leave one out.

Flow: arrays of `smon.simulate.cube` → **here** → `smon.attribute.groups`, `smon.diagnose`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def peers(values: Floats, axis: int = 1) -> Floats:
    """Median of the others along an axis (its own value left out); NaN where there is no other.

    Parameters
    ----------
    values
        Any shape; NaN is nobody.
    """
    count = values.shape[axis]
    moved = np.moveaxis(values, axis, 0)
    result = np.full(moved.shape, np.nan)
    if count > 1:
        ordered = np.sort(moved, axis=0)  # NaN last
        known = np.count_nonzero(~np.isnan(moved), axis=0)
        rank = np.argsort(np.argsort(moved, axis=0), axis=0)
        others = known - 1
        result = _median_without(ordered, rank, others)
        result[np.isnan(moved)] = np.nan
    return np.moveaxis(result, 0, axis)


def _median_without(ordered: Floats, rank: NDArray[np.intp], others: NDArray[np.intp]) -> Floats:
    """Median of a sorted axis without the element of each rank."""
    low = np.maximum((others - 1) // 2, 0)
    high = np.maximum(others // 2, 0)
    last = len(ordered) - 1
    # Left of the element that is left out positions stay, right of it they move by one.
    first = np.minimum(low + (rank <= low), last)
    second = np.minimum(high + (rank <= high), last)
    both = np.take_along_axis(ordered, first, 0) + np.take_along_axis(ordered, second, 0)
    return np.where(others > 0, both / 2, np.nan)
