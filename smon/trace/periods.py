"""Steps of a trace that marks none: collectives repeat from step to step.

Flow: `smon.trace.formats` → **here** → `smon.trace.events`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

#: A pattern must be seen so often, and hold for this share of all collectives.
_LEAST_REPEATS: Final = 3
_SHARE: Final = 0.95
#: So many lengths are tried, the shortest first.
_MAX_TRIES: Final = 512


def period_of(codes: NDArray[np.int64]) -> int | None:
    """Length of the pattern that repeats in a sequence; None if there is none.

    Parameters
    ----------
    codes
        One number per collective of a communicator, in order; equal for equal kind and payload,
        -1 for one that was lost.
    """
    longest = len(codes) // _LEAST_REPEATS
    if longest < 1:
        return None
    # A pattern ends where its first element comes again.
    again = np.flatnonzero(codes[1 : longest + 1] == codes[0]) + 1
    for length in again[:_MAX_TRIES].tolist():
        known = (codes[length:] >= 0) & (codes[:-length] >= 0)
        same = codes[length:] == codes[:-length]
        if known.any() and float(np.mean(same[known])) >= _SHARE:
            return int(length)
    return None
