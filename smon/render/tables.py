"""Tables as CSV, for spreadsheets and programs.

Names come from other people's files, and a spreadsheet takes a cell that begins with ``=``, ``+``,
``-`` or ``@`` for a formula: such text gets an apostrophe in front. Numbers stay as they are.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

Cell = str | int | float | bool | None

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> str:
    """Rows under a line of names; None and what a row does not have is an empty cell."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return sink.getvalue()


def _cell(value: Cell) -> Cell:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
