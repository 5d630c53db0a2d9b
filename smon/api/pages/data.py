"""What a page is asked for in its query, and its numbers as CSV: the address with ``as=csv``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from smon.render.tables import Cell, csv_text

#: Longer numbers are no numbers of attempts.
_MAX_DIGITS: Final = 9


def wants_csv(request: Request) -> bool:
    """Whether a page is asked for as a table for programs."""
    return request.query_params.get("as") == "csv"


def csv_answer(name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> Response:
    """A table as a file of this name."""
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Cache-Control": "private, no-cache",
    }
    return Response(csv_text(columns, rows), 200, headers, "text/csv; charset=utf-8")


def attempt_asked(request: Request) -> int | None:
    """Number of the attempt that a page is asked for; None: the newest."""
    text = request.query_params.get("attempt", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
