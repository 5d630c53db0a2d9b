"""Columns of an ops batch (``smon.ops/1``): names, types, defaults; the JSON body.

The Arrow body holds exactly these columns, in this order, without nulls, the op type as
``dictionary<int8, utf8>``. In the JSON body, columns with a default may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WireColumn:
    """A column: Arrow type by name, and the value where the JSON body leaves it out."""

    name: str
    type: str
    default: int | None = None


OPTYPE: Final = "optype"

COLUMNS: Final = (
    WireColumn("step", "int64"),
    WireColumn("dp", "int32"),
    WireColumn("stage", "int32"),
    WireColumn("rank", "int32", -1),
    WireColumn(OPTYPE, "dictionary<int8, utf8>"),
    WireColumn("start_ns", "int64"),
    WireColumn("duration_ns", "int64"),
    WireColumn("seq", "int32"),
    WireColumn("chunk", "int16", -1),
    WireColumn("global_chunk", "int16", -1),
    WireColumn("microbatch", "int32", -1),
)

#: Characters that text may have, besides letters and digits; and how many in all.
TEXT_EXTRA: Final = "._:/@+-"
MAX_TEXT: Final = 256


def json_body(columns: Mapping[str, Sequence[int] | Sequence[str]]) -> bytes:
    """The JSON body of a batch: ``{"columns": {name: [values]}}``."""
    return json.dumps({"columns": columns}, separators=(",", ":")).encode()
