"""Communicators: how long transfers take against peers, and who arrives last.

Flow: a stored report → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dashboards.web.text import times

#: Below this, a group is as fast as its peers: 1 + `LINK_RATIO` of the diagnosis, which pages do
#: not know.
NORMAL: Final = 1.25

#: Shown at once, and behind it.
FIRST_GROUPS: Final = 8
MAX_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One communicator; `against` is its transfer over that of its peers."""

    name: str
    members: int
    ranks: tuple[int, ...]
    transfer_p50_s: float | None
    transfer_p99_s: float | None
    peers_p50_s: float | None
    against: float | None
    last_rank: int | None
    last_share: float | None


@dataclass(frozen=True, slots=True)
class GroupsView:
    """Groups, slowest against their peers first; `count` is how many there are."""

    words: str
    first: tuple[GroupLine, ...]
    rest: tuple[GroupLine, ...]
    count: int

    @property
    def lines(self) -> tuple[GroupLine, ...]:
        """All that are shown."""
        return self.first + self.rest


def groups_view(document: Mapping[str, Any]) -> GroupsView | None:
    """Groups of a report; None of a report that does not know them."""
    groups = document.get("groups")
    if groups is None:
        return None
    lines = tuple(sorted((_line(group) for group in groups), key=_order))[:MAX_GROUPS]
    count = document.get("groups_count") or len(lines)
    return GroupsView(_words(lines), lines[:FIRST_GROUPS], lines[FIRST_GROUPS:], count)


def _words(lines: tuple[GroupLine, ...]) -> str:
    if not lines or lines[0].against is None:
        return ""
    worst = lines[0]
    if worst.against is None or worst.against < NORMAL:
        return "Transfers take as long as those of comparable groups: the network is normal."
    return (
        f"Slowest: {worst.name}: its transfers take {times(worst.against)} those of comparable "
        "groups."
    )


def _line(group: Mapping[str, Any]) -> GroupLine:
    middle, peers = group["transfer_p50_s"], group["peers_p50_s"]
    return GroupLine(
        name=_name(group),
        members=group["members"],
        ranks=tuple(group["ranks"]),
        transfer_p50_s=middle,
        transfer_p99_s=group["transfer_p99_s"],
        peers_p50_s=peers,
        against=middle / peers if middle is not None and peers else None,
        last_rank=group["last_rank"],
        last_share=group["last_share"],
    )


def _name(group: Mapping[str, Any]) -> str:
    """Its kind, and where it is: a link leads to a stage, a collective is within one."""
    parts = [str(group["kind"])]
    if group["dp"] is not None:
        parts.append(f"DP rank {group['dp']}")
    if group["stage"] is not None:
        into = "into stage" if group["dp"] is not None else "stage"
        parts.append(f"{into} {group['stage']}")
    return ", ".join(parts)


def _order(line: GroupLine) -> tuple[float, float]:
    return -(line.against or 0.0), -(line.transfer_p50_s or 0.0)
