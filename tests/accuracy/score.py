"""Which findings are right: the rules by which the study judges.

Flow: `tests.accuracy.windows` → **here** → `tests.accuracy.page`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.accuracy.windows import RECORDING, Found, Outcome, Real


@dataclass(frozen=True, slots=True)
class Match:
    """One true cause, and the finding that stands for it; None if there is none.

    Attributes
    ----------
    place
        The finding names the right place.
    kind
        And the right spread over time.
    error
        Relative error of its excess.
    """

    real: Real
    found: Found | None
    place: bool = False
    kind: bool = False
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """One window with its matches, and the findings that stand for nothing true."""

    outcome: Outcome
    matches: tuple[Match, ...]
    false: tuple[Found, ...]

    @property
    def first(self) -> str:
        """The cause of the first finding."""
        return self.outcome.findings[0].cause if self.outcome.findings else "none"


def score(outcome: Outcome) -> Scored:
    """Each finding stands for at most one cause: of the same name, best at the same place."""
    left = list(outcome.findings)
    matches = []
    for real in outcome.answers:
        if real.cause in RECORDING:
            continue
        fitting = [found for found in left if found.cause in real.accepted]
        fitting.sort(key=lambda found, real=real: not at_place(found, real))  # type: ignore[misc]
        found = fitting[0] if fitting else None
        if found is not None:
            left.remove(found)
        matches.append(_match(real, found))
    return Scored(outcome, tuple(matches), tuple(left))


def _match(real: Real, found: Found | None) -> Match:
    if found is None:
        return Match(real, None)
    return Match(real, found, at_place(found, real), found.kind in real.kinds, _error(found, real))


def _error(found: Found, real: Real) -> float:
    """Distance from what lies between the cost alone and what its removal gains, relative."""
    low, high = sorted((real.excess_s, real.gain_s))
    off = max(low - found.excess_s, found.excess_s - high, 0.0)
    return off / max(high, 1e-9)


def at_place(found: Found, real: Real) -> bool:
    """Whether a finding names the place: the rank, the node, the stage, or nobody."""
    where = found.where
    if real.scope == "rank":
        return where.get("rank") == real.where.get("rank")
    if real.scope == "node":
        return _at_node(found, real)
    if real.scope == "job":
        return not where and not found.ranks
    return where.get("stage") == real.where.get("stage") and "dp" not in where


def _at_node(found: Found, real: Real) -> bool:
    named: set[int | str | None] = set(found.ranks) or {found.where.get("rank")}
    node = found.where.get("node")
    same = named == set(real.ranks) or (node is not None and node == real.where.get("node"))
    # Without neighbours in a pipeline nothing tells the members of a ring apart.
    ring = real.cause in {"slow_link", "flapping_link"} and found.scope == "dp_group"
    return same or (ring and len(real.ranks) == 1 and real.ranks[0] in found.ranks)
