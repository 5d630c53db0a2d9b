"""What only reports of files without ops have: collectives one by one, step times of a whole job.

Flow: a stored report → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dashboards.web.text import duration, percent

#: Collectives that are shown, those that were waited for most; parts of a step.
MAX_COLLECTIVES: Final = 12
MAX_SECTIONS: Final = 20

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CollectiveLine:
    """One collective: who came last, and what the others waited for it."""

    step: int
    index: int
    kind: str
    group: str
    members: int
    last_rank: int
    late_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class CollectivesView:
    """The collectives that were waited for most, in the order of their calls; `count`: of all."""

    words: str
    lines: tuple[CollectiveLine, ...]
    count: int


@dataclass(frozen=True, slots=True)
class StretchLine:
    """A stretch of step times: a burst, or a level."""

    what: str
    first_step: int
    last_step: int
    points: int
    slow_points: int
    median_s: float


@dataclass(frozen=True, slots=True)
class SeriesView:
    """Step times of a whole job."""

    facts: tuple[tuple[str, str], ...]
    stretches: tuple[StretchLine, ...]
    sections: tuple[tuple[str, float, float], ...]


def collectives_view(document: Document) -> CollectivesView | None:
    """Collectives of a report; None of a report that lists none."""
    listed = document.get("collectives") or ()
    if not listed:
        return None
    most = sorted(listed, key=lambda one: -sum(one["waits_s"]))[:MAX_COLLECTIVES]
    lines = [
        CollectiveLine(
            step=one["step"],
            index=one["index"],
            kind=one["kind"],
            group=one["group"],
            members=one["members"],
            last_rank=one["last_rank"],
            late_s=one["late_s"],
            transfer_s=one["transfer_s"],
        )
        for one in most
    ]
    count = document.get("collectives_count") or len(listed)
    return CollectivesView(
        f"The {len(lines)} of {count:,} that were waited for most. The last to arrive waits for "
        "nobody, so its time is that of the transfer.",
        tuple(sorted(lines, key=lambda line: (line.step, line.index))),
        count,
    )


def series_view(document: Document) -> SeriesView | None:
    """The step times of a report; None of a report of something else."""
    part = document.get("series")
    if part is None:
        return None
    levels = part["levels"] if len(part["levels"]) > 1 else ()
    return SeriesView(
        facts=tuple(_facts(part)),
        stretches=(
            *(_stretch("burst", one) for one in part["bursts"]),
            *(_stretch("level", one) for one in levels),
        ),
        sections=tuple(
            (one["name"], one["low_s"], one["high_s"]) for one in part["sections"][:MAX_SECTIONS]
        ),
    )


def _facts(part: Document) -> list[tuple[str, str]]:
    used = part["points"] - part["warmup_points"]
    return [
        ("values", f"{used:,} after warm-up of {part['warmup_points']:,}"),
        ("median", duration(part["median_s"])),
        ("5 % to 95 %", f"{duration(part['p05_s'])} to {duration(part['p95_s'])}"),
        ("99 %", duration(part["p99_s"])),
        ("longest", f"{duration(part['max_s'])}, step {part['max_step']}"),
        (
            f"above {part['slow_ratio']:g} × the median",
            f"{part['slow_points']:,} ({percent(part['slow_points'] / max(used, 1))})",
        ),
    ]


def _stretch(what: str, part: Document) -> StretchLine:
    return StretchLine(
        what=what,
        first_step=part["first_step"],
        last_step=part["last_step"],
        points=part["points"],
        slow_points=part["slow_points"],
        median_s=part["median_s"],
    )


def without_numbers(document: Document) -> str:
    """Why a report of a capture has no slowdown of anybody; empty if it has one."""
    if document["slowdown"]["paper"] is not None:
        return ""
    if document.get("series") is not None:
        return (
            "Not known: the file has step times of the whole job only, so no worker can be told "
            "from another, and there is no ideal to compare with."
        )
    if not document["window"]["steps"]:
        return (
            "Not known: dumps say who has called which collective, not how long anything took. "
            "There are no step times."
        )
    return "Not known: no step of these files can be compared over the ranks; the notes say why."
