"""What there is to say of a finding, and whether now is the time.

Flow: `smon.store.notices` (what is, what has been said) → **here** → `smon.notify.notifier`. No
input or output. The rules stand in ``docs/notify.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from smon.store.models import WorkState
from smon.store.notices import Standing, Subject, Told, Truth
from smon.store.queries.jobs import COMPLETE_RATIO

#: Least grave first.
SEVERITIES: Final = ("info", "warning", "critical")

_NS: Final = 10**9


class Event(StrEnum):
    """What a message says of a finding."""

    OPENED = "opened"
    SEVERITY = "severity"
    CLEARED = "cleared"
    #: Somebody wants to see whether messages arrive.
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is said, and how often.

    Attributes
    ----------
    severity
        The least that is told.
    cooldown_s
        A finding that comes back is told so long after it was told to be there.
    """

    severity: str
    cooldown_s: float


@dataclass(frozen=True, slots=True)
class Wish:
    """Something to say.

    Attributes
    ----------
    not_before_ns
        Before that, it would be said too often.
    """

    event: Event
    severity: str
    not_before_ns: int = 0

    @property
    def name(self) -> str:
        """The same wish has the same name."""
        return f"{self.event}:{self.severity}"


def wish(told: Told | None, truth: Truth | None, rules: Rules) -> Wish | None:
    """What a channel is to be told, so that it knows how a finding stands; None: it does."""
    said = told.severity if told is not None else None
    if truth is None or not truth.is_open:
        return None if said is None or truth is None else Wish(Event.CLEARED, said)
    if _rank(truth.severity) < _rank(rules.severity):
        return None
    if said is None:
        last_ns = told.opened_ns if told is not None else 0
        quiet_ns = int(rules.cooldown_s * _NS) if last_ns else 0
        return Wish(Event.OPENED, truth.severity, last_ns + quiet_ns)
    # It has been said how grave it was: that it is less so now is seen on the page.
    return Wish(Event.SEVERITY, truth.severity) if _rank(truth.severity) > _rank(said) else None


def to_queue(standing: Standing, rules: Rules, *, afresh: bool) -> Wish | None:
    """What is to be noted as waiting; None if nothing, or if that is noted or given up already.

    Parameters
    ----------
    afresh
        Whether what was given up is tried again.
    """
    told, wanted = standing.told, wish(standing.told, standing.truth, rules)
    if wanted is None or told is None:
        return wanted
    if told.state in (WorkState.QUEUED, WorkState.RUNNING):
        return None
    same = told.given_up in (None, wanted.name)
    return None if told.state is WorkState.FAILED and same and not afresh else wanted


def withheld(subject: Subject) -> str | None:
    """Why nothing is said of a finding for now: what is missing could change it; None if it may be.

    A hang is told: it is what data that stops coming means. So is the end of an attempt.
    """
    if subject.finding["verdict"] == "hang" or (subject.attempt_over and not subject.truth.is_open):
        return None
    if subject.coverage_ratio is not None and subject.coverage_ratio < COMPLETE_RATIO:
        return "the data is incomplete"
    return "the clocks are not aligned" if subject.aligned is False else None


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else 0
