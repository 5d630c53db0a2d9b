"""Lists come in pages: some items, and a cursor for the next ones."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from smon.errors import WireError
from smon.wire.problems import Problem

Item = TypeVar("Item")
Other = TypeVar("Other")

#: Lists end here: whoever wants more narrows the question.
MAX_OFFSET: Final = 1_000_000

_MARK: Final = b"o"


@dataclass(frozen=True, slots=True)
class Slice:
    """Which items of a list are asked for."""

    limit: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some items of a list; `next` is the cursor of those that follow, None at the end."""

    items: tuple[Item, ...]
    next: str | None


def slice_of(limit: int, cursor: str | None) -> Slice:
    """What a limit and a cursor of `Page.next` mean.

    Raises
    ------
    WireError
        The cursor is none that was given out.
    """
    if cursor is None:
        return Slice(limit)
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True)
        offset = int(text.removeprefix(_MARK)) if text.startswith(_MARK) else -1
    except (binascii.Error, ValueError):
        offset = -1
    if not 0 <= offset <= MAX_OFFSET:
        raise WireError(Problem.INVALID, "expected a cursor as the member next of a page gave it")
    return Slice(limit, offset)


def page_of(found: Sequence[Item], wanted: Slice) -> Page[Item]:
    """A page of what a query with ``LIMIT limit + 1 OFFSET offset`` found."""
    more = len(found) > wanted.limit and wanted.offset + wanted.limit <= MAX_OFFSET
    cursor = _cursor(wanted.offset + wanted.limit) if more else None
    return Page(tuple(found[: wanted.limit]), cursor)


def cut(everything: Sequence[Item], wanted: Slice) -> Page[Item]:
    """A page of a list that is there as a whole."""
    return page_of(everything[wanted.offset : wanted.offset + wanted.limit + 1], wanted)


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(_MARK + str(offset).encode()).decode().rstrip("=")


def seconds(ns: int) -> float:
    """Unix time in seconds; a float holds it to a microsecond."""
    return ns / 1e9


def seconds_or_none(ns: int | None) -> float | None:
    """As `seconds`."""
    return None if ns is None else ns / 1e9


def step_or_none(step: int) -> int | None:
    """A step of a row; None where -1 stands for none."""
    return step if step >= 0 else None
