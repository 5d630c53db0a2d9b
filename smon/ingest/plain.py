"""Arrow arrays made of buffers: ``pyarrow.array`` would import pandas, 60 MB in every server.

Flow: `smon.ingest.columns`, `smon.ingest.order` → **here**.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def numbers(values: NDArray[Any]) -> pa.Array:
    """Numbers without nulls; they share the memory of `values`."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def texts(values: Sequence[str]) -> pa.Array:
    """Strings without nulls.

    Raises
    ------
    UnicodeEncodeError
        One holds half of a surrogate pair.
    """
    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.utf8(), len(encoded), buffers)
