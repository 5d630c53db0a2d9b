"""What one look at one thing gives: values by name, and differences of what only ever grows.

Flow: files and calls → **here** → `ingest_agents.sources.counters.source`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Final

#: Values by the names of `ingest_agents.sources.counters.catalogue`.
Values = dict[str, float]

#: Counters that wrap do so at one of these; below half of it, a smaller value is a fresh start.
_WRAPS: Final = (2**32, 2**64)

_MAX_FILE_BYTES: Final = 64 << 10


def gained(before: int, now: int) -> int:
    """How much a counter grew: it may have wrapped, or begun anew, e.g. with its driver."""
    if now >= before:
        return now - before
    for wrap in _WRAPS:
        if wrap // 2 <= before < wrap:
            return now + wrap - before
    return now


class Growth:
    """Remembers counters that only grow, and says by how much they did.

    What is not looked at any more (an interface that was removed) is forgotten: should it come
    back, it begins anew.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, int] = {}
        self._seen: dict[Hashable, int] = {}

    def of(self, key: Hashable, now: int) -> int | None:
        """Growth since the round before; None if that did not see it."""
        self._seen[key] = now
        before = self._before.get(key)
        return None if before is None else gained(before, now)

    def turn(self) -> None:
        """A round is over."""
        self._before, self._seen = self._seen, {}


def total(parts: Iterable[int | None]) -> float | None:
    """Sum of what is known; None if nothing is."""
    known = [part for part in parts if part is not None]
    return float(sum(known)) if known else None


# --- small files --------------------------------------------------------------------------------


def text_of(path: Path) -> str | None:
    """A small file of ``/proc`` or ``/sys``; None if it is not there or cannot be read."""
    # Drivers answer with any errno: EINVAL of a link that is down, EIO, ENODATA.
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    return None


def number_of(path: Path) -> int | None:
    """The whole number that a file holds, or begins with; None if it holds none."""
    text = text_of(path)
    first = text.split()[0] if text else ""
    return int(first) if first.lstrip("-").isdecimal() else None


def names_in(folder: Path) -> list[str]:
    """Names in a folder, sorted; empty if there is none."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
