"""What a proof says: figures, and goals that they meet or miss. One line of JSON each."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class Form(StrEnum):
    """Short runs in CI, and shows that the proof itself works; the long form is what counts."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Goal:
    """Something that must hold.

    Attributes
    ----------
    what
        In words, with the unit.
    measured
        The figure.
    limit
        What it must be, in words: "≤ 60", "0".
    met
        Whether it holds.
    timed
        Whether it is about speed: such goals are asserted nowhere, since machines are shared.
    """

    what: str
    measured: float
    limit: str
    met: bool
    timed: bool = False


def at_most(what: str, measured: float, limit: float, *, timed: bool = False) -> Goal:
    """A goal that is met up to the limit."""
    return Goal(what, rounded(measured), f"≤ {limit:g}", bool(measured <= limit), timed)


def at_least(what: str, measured: float, limit: float, *, timed: bool = False) -> Goal:
    """A goal that is met from the limit on."""
    return Goal(what, rounded(measured), f"≥ {limit:g}", bool(measured >= limit), timed)


def exactly(what: str, measured: int, wanted: int) -> Goal:
    """A goal that only one number meets."""
    return Goal(what, measured, f"{wanted}", measured == wanted)


def rounded(number: float) -> float:
    """Four significant digits; whole numbers as they are."""
    return number if isinstance(number, int) else float(f"{number:.4g}")


def machine() -> str:
    """Cores, memory and Python of this machine; nothing that tells whose it is."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    python = platform.python_version()
    return f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.machine()}, Python {python}"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one proof.

    Attributes
    ----------
    figures
        Everything else that was measured, by name.
    """

    proof: str
    form: Form
    goals: tuple[Goal, ...]
    figures: Mapping[str, Any]
    seconds: float
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    machine: str = field(default_factory=machine)

    @property
    def holds(self) -> bool:
        """Whether all goals are met that are not about speed."""
        return all(goal.met for goal in self.goals if not goal.timed)

    def to_json(self) -> str:
        """The line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def line_of(text: str) -> Line:
    """Read a line back."""
    raw = json.loads(text)
    goals: Sequence[Mapping[str, Any]] = raw.pop("goals")
    form = Form(raw.pop("form"))
    return Line(goals=tuple(Goal(**goal) for goal in goals), form=form, **raw)
