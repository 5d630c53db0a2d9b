"""The life of a finding: opened, still there, cleared, open again, over with its job.

Flow: findings of one analysis of a live attempt, and those of before → **here** → what changes, for
`smon.store.findings`. No input or output. ``docs/reference/windows.md`` section 7 has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from smon.diagnose.thresholds import CRITICAL_SHARE, WARNING_SHARE
from smon.report import Finding, Outline, PersistencePart
from smon.store.findings import Change, Event, Known, Seen, Source
from smon.store.models import FindingState
from smon.trace.context import Context

#: A finding that comes back within so many steps after it cleared is the same one.
REOPEN_STEPS: Final = 50

#: Severity falls only once the excess is below this part of what the higher one needs.
SEVERITY_HYSTERESIS: Final = 0.8

_RANKING: Final = ("info", "warning", "critical")
_FLOOR: Final = {"warning": WARNING_SHARE, "critical": CRITICAL_SHARE}

#: From this share of the step on, a few steps are enough to see a lasting finding: 5 % is twice
#: what the smallest cause of ``docs/causes.md`` costs, and noise of 1 % per op is far below it.
LARGE_SHARE: Final = 0.05

#: While something begins, what it costs is seen before it is known what it is: only what nobody has
#: explained for so many analyses in a row is said.
PUZZLED: Final = 4

#: Verdicts about one device or link, which stands out within any steps.
_OF_ONE_PLACE: Final = frozenset({"straggler", "link"})

#: Kinds of persistence that every few steps show.
_LASTING: Final = frozenset({"persistent", "onset", "ramp"})

#: What a window can only say of steps after the first ones of a job.
_OF_THE_START: Final = "warmup"
_UNEXPLAINED: Final = "unknown"


def key_of(finding: Finding) -> str:
    """Cause, scope and place: what stays the same from one analysis to the next."""
    where = finding.where
    if where.rank is not None:
        place = f"rank={where.rank}"
    else:
        names = ("dp", "stage", "node", "leaf")
        given = [(name, getattr(where, name)) for name in names]
        place = ",".join(f"{name}={value}" for name, value in given if value is not None)
    return f"{finding.cause}|{finding.scope}|{place}"


def seen_in(outline: Outline, context: Context, source: Source = Source.OPS) -> list[Seen]:
    """Findings of a window with what they need to be followed across analyses and jobs.

    Of two findings with one key the first, which is the dearer one, counts.
    """
    found: dict[str, Seen] = {}
    documents = outline.findings_as_dicts()
    for finding, document in zip(outline.findings, documents, strict=True):
        where, key = finding.where, key_of(finding)
        rank = -1 if where.rank is None else where.rank
        found.setdefault(
            key,
            Seen(
                key=key,
                severity=finding.severity,
                finding=finding,
                document=document,
                host=where.node or context.hosts.get(rank),
                gpu_uuid=where.gpu_uuid or context.gpus.get(rank),
                source=source,
            ),
        )
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Terms:
    """When a finding is over.

    Attributes
    ----------
    steps
        Latest steps that have been analysed, ascending.
    clear_steps
        So many of them without a finding clear it.
    """

    steps: Sequence[int]
    clear_steps: int

    @property
    def front(self) -> int:
        """The newest step."""
        return self.steps[-1]

    def over(self, last_step: int) -> bool:
        """Whether there are enough steps after this one."""
        later = sum(step > last_step for step in self.steps)
        return later >= min(self.clear_steps, len(self.steps))

    def first_after(self, last_step: int) -> int:
        """The first of the steps after this one."""
        return next((step for step in self.steps if step > last_step), last_step + 1)


def changes(known: Sequence[Known], seen: Sequence[Seen], terms: Terms) -> list[Change]:
    """What one analysis of a live attempt changes.

    Parameters
    ----------
    known
        Open findings of the attempt, and those that have cleared within `REOPEN_STEPS`.
    seen
        Findings of the present analysis.
    """
    by_key = {one.key: one for one in known if one.state is FindingState.CLEARED}
    by_key |= {one.key: one for one in known if one.state is FindingState.OPEN}
    result = [_seen_change(by_key.get(one.key), one, terms.front) for one in seen]
    there = {one.key for one in seen}
    absent = [
        one for one in by_key.values() if one.state is FindingState.OPEN and one.key not in there
    ]
    over = [one for one in absent if terms.over(one.last_step)]
    return result + [Change(Event.CLEARED, terms.first_after(one.last_step), one) for one in over]


def _seen_change(known: Known | None, seen: Seen, step: int) -> Change:
    if known is None:
        return Change(Event.OPENED, step, seen=seen)
    if known.state is FindingState.CLEARED:
        return Change(Event.REOPENED, step, known, seen)
    severity = settled(known.severity, seen.severity, seen.finding.excess_share)
    event = None if severity == known.severity else Event.SEVERITY
    return Change(event, step, known, replace(seen, severity=severity))


def settled(before: str, now: str, share: float) -> str:
    """Severity as it is shown: it rises at once, and falls once the excess is clearly lower."""
    if _RANKING.index(now) >= _RANKING.index(before):
        return now
    clearly = share < SEVERITY_HYSTERESIS * _FLOOR[before]
    return now if clearly else before


def ended(known: Sequence[Known]) -> list[Change]:
    """What changes when the attempt is over: no finding of it is open any more."""
    return [
        Change(Event.ENDED, one.last_step, one) for one in known if one.state is FindingState.OPEN
    ]


# --- two windows at once ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """What the running diagnosis remembers of its last analysis.

    Attributes
    ----------
    gone
        Keys that the long window still had although they were gone.
    puzzled
        For how many analyses in a row something has been unexplained.
    """

    gone: frozenset[str] = frozenset()
    puzzled: int = 0


def combined(
    long: Sequence[Finding], short: Sequence[Finding], before: Memory, *, from_start: bool
) -> tuple[list[Finding], Memory]:
    """What the running diagnosis holds, from a long window and one of the latest steps.

    The short one sees early what is new and large, and early that it is gone; the long one sees
    what is weak or comes now and then. A large and lasting finding about one place that does not
    show in the latest steps is gone; of what nobody explains, both must speak, and for a while.

    Parameters
    ----------
    before
        As the call before this one has returned it.
    from_start
        Whether the long window begins with the first step of the attempt: only that can warm up.
    """
    latest = {key_of(one): one for one in short}
    found: dict[str, Finding] = {}
    gone: set[str] = set()
    for one in long:
        key = key_of(one)
        if key in latest:
            found[key] = _together(one, latest[key])
        elif one.cause == _UNEXPLAINED:
            continue
        elif key in before.gone or _would_show(one):
            gone.add(key)
        else:
            found[key] = one
    for key, one in latest.items():
        if key not in found and _large(one) and one.cause != _UNEXPLAINED:
            found[key] = one
    unexplained = any(one.cause == _UNEXPLAINED for one in found.values())
    puzzled = before.puzzled + 1 if unexplained else 0
    hidden = {_UNEXPLAINED} if puzzled < PUZZLED else set()
    hidden |= set() if from_start else {_OF_THE_START}
    kept = [one for one in found.values() if one.cause not in hidden]
    return sorted(kept, key=_order), Memory(frozenset(gone), puzzled)


def _large(finding: Finding) -> bool:
    return finding.persistence.kind in _LASTING and finding.excess_share >= LARGE_SHARE


def _would_show(finding: Finding) -> bool:
    """Whether a few steps are enough to see it, if it is still there."""
    return finding.verdict in _OF_ONE_PLACE and _large(finding)


def _together(long: Finding, short: Finding) -> Finding:
    """The one that costs more, with the severity of the graver one, and the onset that is known."""
    dearer = short if short.excess_share > long.excess_share else long
    onset = long.persistence.onset_step
    onset = short.persistence.onset_step if onset is None else onset
    kept = dearer.persistence
    return replace(
        dearer,
        severity=max(long.severity, short.severity, key=_RANKING.index),
        persistence=PersistencePart(kept.kind, kept.share, onset, kept.period),
    )


_BLAMES_NOBODY: Final = frozenset({"planned_pause", "warmup", "none"})


def _order(finding: Finding) -> tuple[bool, bool, float]:
    """As `smon.diagnose.verdict` ranks: a hang first, then by cost, what blames nobody last."""
    calm = finding.verdict in _BLAMES_NOBODY
    return finding.verdict != "hang", calm, -finding.excess_s


def times_of(changed: Sequence[Change], now: int) -> Mapping[int, int]:
    """The present for every step that occurs: a live finding changes when it is noticed."""
    return {change.step: now for change in changed}
