"""What a cause hands on: a finding without its cost, and the change that would undo it."""

from __future__ import annotations

from dataclasses import dataclass, field

from smon.attribute.persistence import Persistence
from smon.diagnose.thresholds import MIN_EXCESS_SHARE
from smon.report import Candidate, Where
from smon.simulate.cube import Changes


@dataclass(frozen=True, slots=True)
class Draft:
    """A possible finding.

    Attributes
    ----------
    verdict, cause, scope, phase
        Words of ``docs/causes.md``.
    optypes
        Labels of the op types that are slow.
    where
        The coordinates that apply.
    changes
        What undoes it: simulating the job with these changes gives the cost.
    persistence
        When it was there.
    confidence
        From 0 to 1.
    evidence
        Sentences, each with its number.
    candidates
        What it could be instead, or one of which it is.
    next
        What to type or to change.
    min_share
        Cheaper than this share of the step it is not worth a line.
    severity
        Instead of the one by cost.
    extra_excess_ns
        Cost that no change of durations undoes; mean per step.
    between_steps
        That cost lies outside the recorded steps.
    """

    verdict: str
    cause: str
    scope: str
    phase: str
    persistence: Persistence
    where: Where = field(default_factory=Where)
    optypes: tuple[str, ...] = ()
    changes: Changes = field(default_factory=Changes)
    confidence: float = 0.5
    evidence: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    next: tuple[str, ...] = ()
    extra_excess_ns: float = 0.0
    between_steps: bool = False
    min_share: float = MIN_EXCESS_SHARE
    severity: str | None = None
