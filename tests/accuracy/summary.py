"""From judged windows to numbers: rates, limits, confusions, and what failed.

Flow: `tests.accuracy.score` → **here** → `tests.accuracy.page`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from smon.synth.truth import CauseName
from tests.accuracy.score import Match, Scored
from tests.accuracy.windows import Found

#: From this share of the step on the cause of a single fault has to be right.
BIG_SHARE: Final = 0.1
#: A cost that is further off is a failure of its own.
MAX_ERROR: Final = 0.2
#: The detection limit: from this share of the step on so many are found.
LIMIT_FOUND: Final = 0.9
#: Edges of the bands of shares.
BANDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, math.inf)

_HALVINGS: Final = 60


@dataclass(frozen=True, slots=True)
class Rate:
    """So many of so many."""

    hits: int
    of: int

    @property
    def ratio(self) -> float | None:
        """None of nothing."""
        return self.hits / self.of if self.of else None


@dataclass(frozen=True, slots=True)
class CauseRow:
    """How one cause does when it is alone in its window.

    Attributes
    ----------
    windows, due
        Those that can be told; of these those that cost enough to be reported.
    found, place, kind
        Of those due: found; of these the place is right, and the spread over time.
    error_median, error_p90
        Relative error of the cost, where the place is right.
    limit
        Of all that cost at least this share of the step, nine in ten are found.
    tried
        The smallest share there was.
    bands
        Found of those due, by share of the step.
    """

    cause: str
    windows: int
    due: int
    found: int
    place: int
    kind: int
    error_median: float | None
    error_p90: float | None
    limit: float | None
    tried: float
    bands: tuple[Rate, ...]


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """One thing that is wrong with what was said about one window.

    Attributes
    ----------
    share
        Of the step, that the true cause costs; None of a finding that stands for none.
    """

    cause: str
    what: str
    group: str
    seed: int
    share: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Windows of two causes, both large enough and tellable."""

    both_found: Rate
    both_placed: Rate
    extra: Rate
    missed: tuple[tuple[str, Rate], ...]


@dataclass(frozen=True, slots=True)
class Silences:
    """Windows of a cause that is due and tellable, and about which little was said.

    Attributes
    ----------
    failed
        The analysis gave up.
    nothing, unknown
        No finding; none but ``unknown``.
    clocks
        Of all windows: clocks were not aligned, so the network was not judged.
    """

    windows: int
    failed: int
    nothing: int
    unknown: int
    clocks: int


@dataclass(frozen=True, slots=True)
class Summary:
    """All numbers of the study."""

    clean: Rate
    recording: Rate
    big_cause: Rate
    big_place: Rate
    rows: tuple[CauseRow, ...]
    confusion: Counter[tuple[str, str]]
    pairs: Pairs
    silences: Silences
    rings: Counter[str]
    failures: tuple[Failure, ...]


def summarise(scored: Sequence[Scored]) -> Summary:
    """All numbers; the order of the windows does not matter."""
    clean, recording, alone, pairs = (
        _group(scored, name) for name in ("clean", "recording", "alone", "pair")
    )
    big = [one for one in alone if _is_big(one.matches[0])]
    return Summary(
        clean=_count(clean, _says_something),
        recording=_count(recording, _says_something),
        big_cause=_count(big, lambda one: one.first in one.matches[0].real.accepted),
        big_place=_count(big, lambda one: one.matches[0].place),
        rows=_rows(alone),
        confusion=confusion(scored),
        pairs=_pairs(pairs),
        silences=_silences(scored),
        rings=Counter(one.first for one in alone if not one.matches[0].real.tellable),
        failures=tuple(sorted(failure for one in scored for failure in failures(one))),
    )


def upper_bound(hits: int, of: int, confidence: float = 0.95) -> float:
    """Clopper–Pearson: with a higher rate so few hits would be less likely than 1 - confidence.

    Without hits this is the rule of three, 3 / `of`.
    """
    if hits >= of:
        return 1.0
    low, high = hits / of, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_most(hits, of, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(hits: int, of: int, rate: float) -> float:
    """Binomial chance of at most so many."""
    if rate >= 1.0:
        return 0.0
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(rate)
        + (of - k) * math.log1p(-rate)
        for k in range(hits + 1)
    )
    return math.fsum(math.exp(value) for value in logs)


def detection_limit(matches: Iterable[Match]) -> float | None:
    """The smallest share of the step such that nine in ten that cost at least this are found."""
    limit = None
    found = 0
    for number, match in enumerate(sorted(matches, key=lambda match: -match.real.share), 1):
        found += match.found is not None
        if found >= LIMIT_FOUND * number:
            limit = match.real.share
    return limit


def confusion(scored: Iterable[Scored]) -> Counter[tuple[str, str]]:
    """(true cause, cause of the first finding) of windows with one cause that is due, or none."""
    counted: Counter[tuple[str, str]] = Counter()
    for one in scored:
        case = one.outcome.case
        if case.group == "clean":
            counted["none", one.first] += 1
        elif case.group == "recording":
            counted[str(case.causes[0]), one.first] += 1
        elif case.group == "alone" and _is_due(one.matches[0]):
            counted[one.matches[0].real.cause, one.first] += 1
    return counted


def failures(one: Scored) -> list[Failure]:
    """What is wrong with the answer to one window."""
    case = one.outcome.case
    made: list[tuple[str, str, float | None]] = []
    if one.outcome.error:
        made.append((_blamed(one), "analysis gave up", None))
    left = list(one.false)
    for match in one.matches:
        real = match.real
        if _is_due(match):
            made += [(real.cause, what, real.share) for what in _wrong(one, match, left)]
        elif not real.tellable:
            # Nobody can name it; that something is slow may be said.
            left = [found for found in left if found.cause != "unknown"]
    kind = "extra finding" if one.matches else "false alarm"
    made += [(_blamed(one), f"{kind}: {found.cause}", None) for found in left]
    return [Failure(cause, what, case.group, case.seed, share) for cause, what, share in made]


def _wrong(one: Scored, match: Match, left: list[Found]) -> list[str]:
    """What is wrong about one cause; a finding that was meant for it is taken from `left`."""
    if match.found is None:
        if not left:
            return ["missed"]
        return [f"called {left.pop(0).cause}"]
    wrong = [] if match.place else ["wrong place"]
    if not match.kind:
        wrong.append(f"{match.found.kind} instead of {match.real.kinds[0]}")
    if match.place and (match.error or 0.0) > MAX_ERROR:
        wrong.append(f"cost off by more than {MAX_ERROR * 100:.0f} %")
    if one.outcome.case.group == "alone" and one.first not in match.real.accepted:
        wrong.append("not the first finding")
    return wrong


def _blamed(one: Scored) -> str:
    causes = one.outcome.case.causes
    return "none" if not causes else str(causes[0]) if len(causes) == 1 else "pair"


def _group(scored: Iterable[Scored], name: str) -> list[Scored]:
    return [one for one in scored if one.outcome.case.group == name]


def _says_something(one: Scored) -> bool:
    return bool(one.outcome.findings)


def _count(scored: Sequence[Scored], test: Callable[[Scored], bool]) -> Rate:
    return Rate(sum(test(one) for one in scored), len(scored))


def _is_due(match: Match) -> bool:
    return match.real.due and match.real.tellable


def _is_big(match: Match) -> bool:
    """A hang has no step time, hence no share."""
    costs = match.real.cause != CauseName.HANG and match.real.share >= BIG_SHARE
    return costs and _is_due(match)


def _rows(alone: Iterable[Scored]) -> tuple[CauseRow, ...]:
    by_cause: dict[str, list[Match]] = {}
    for one in alone:
        match = one.matches[0]
        if match.real.tellable:
            by_cause.setdefault(match.real.cause, []).append(match)
    order = [str(name) for name in CauseName]
    return tuple(_row(cause, by_cause[cause]) for cause in order if cause in by_cause)


def _row(cause: str, matches: Sequence[Match]) -> CauseRow:
    due = [match for match in matches if match.real.due]
    found = [match for match in due if match.found is not None]
    errors = [match.error or 0.0 for match in found if match.place]
    hang = cause == CauseName.HANG
    return CauseRow(
        cause,
        windows=len(matches),
        due=len(due),
        found=len(found),
        place=sum(match.place for match in found),
        kind=sum(match.kind for match in found),
        error_median=float(np.median(errors)) if errors and not hang else None,
        error_p90=float(np.quantile(errors, 0.9)) if errors and not hang else None,
        limit=None if hang else detection_limit(matches),
        tried=min(match.real.share for match in matches),
        bands=tuple(_bands(due)),
    )


def _bands(due: Sequence[Match]) -> Iterable[Rate]:
    for low, high in pairwise(BANDS):
        inside = [match for match in due if low <= match.real.share < high]
        yield Rate(sum(match.found is not None for match in inside), len(inside))


def _pairs(pairs: Iterable[Scored]) -> Pairs:
    both = [one for one in pairs if all(_is_due(match) for match in one.matches)]
    hits: Counter[str] = Counter()
    of: Counter[str] = Counter()
    for one in both:
        for match in one.matches:
            of[match.real.cause] += 1
            hits[match.real.cause] += match.found is None
    return Pairs(
        _count(both, lambda one: all(match.found is not None for match in one.matches)),
        _count(both, lambda one: all(match.place for match in one.matches)),
        _count(both, lambda one: bool(one.false)),
        tuple((cause, Rate(hits[cause], of[cause])) for cause in sorted(of)),
    )


def _silences(scored: Sequence[Scored]) -> Silences:
    due = [one for one in scored if any(_is_due(match) for match in one.matches)]
    said = [{found.cause for found in one.outcome.findings} for one in due]
    return Silences(
        len(due),
        sum(bool(one.outcome.error) for one in due),
        sum(not causes for causes in said),
        sum(causes == {"unknown"} for causes in said),
        sum(one.outcome.aligned is False for one in scored),
    )
