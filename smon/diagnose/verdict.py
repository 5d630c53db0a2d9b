"""All causes in order, each with what it costs; then the ranking and the verdict.

The order matters (``docs/causes.md``): planned pauses → job-wide → stage → experts → device →
link → data → host stalls. What one cause explains is taken out before the next one looks.

Flow: `smon.diagnose.causes` → **here** → `smon.analysis`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smon.diagnose.causes import (
    breaks,
    contention,
    data,
    device,
    experts,
    hang,
    link,
    loader,
    pause,
    since,
    stage,
    unknown,
    warmup,
    whole,
)
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence
from smon.diagnose.found import Found, combined, own_changes
from smon.diagnose.thresholds import (
    CRITICAL_SHARE,
    CRITICAL_STEPS,
    WARNING_SHARE,
)
from smon.report import MIN_STEPS, Finding, PersistencePart, Victims, Where
from smon.simulate.cube import Changes

#: In the order in which they look.
CAUSES: tuple[Callable[[Evidence], list[Draft]], ...] = (
    hang.find,
    warmup.find,
    breaks.find,
    whole.find,
    since.find,
    stage.find,
    experts.find,
    device.find,
    link.find,
    data.find,
    contention.find,
    pause.find,
    loader.find,
    unknown.find,
)

#: These compare times of different workers.
_NEED_CLOCKS = (link.find, loader.find)

#: So many places of one cause are simulated one by one.
_MAX_DRAFTS = 16
_MAX_RANKS = 16
#: Verdicts that blame nobody and come after those that do.
_CALM = ("planned_pause", "warmup", "none")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings, dearest first, what undoes each of them, and what else is to be said."""

    findings: tuple[Finding, ...]
    found: tuple[Found, ...]
    notes: tuple[str, ...]

    def suspects(self) -> tuple[tuple[int, int], ...]:
        """(dp, stage) of the workers whose devices are slow."""
        return tuple(worker for found in self.found for worker in found.workers)

    @property
    def verdict(self) -> str:
        """That of the first finding, or none."""
        return self.findings[0].verdict if self.findings else "none"


def diagnose(evidence: Evidence) -> Diagnosis:
    """Ask every cause; keep what costs enough."""
    steps = len(evidence.steps)
    if steps < MIN_STEPS:
        return Diagnosis((), (), ())
    asked = _ask(evidence)
    pairs: list[tuple[Finding, Found]] = []
    for (draft, own), cost in zip(asked, _costs(evidence, asked), strict=True):
        finding = _finding(evidence, draft, cost)
        if finding.excess_share >= draft.min_share:
            pairs.append((finding, Found(draft.cause, _where(draft), own, _workers(draft))))
    pairs.sort(key=lambda pair: _order(pair[0]))
    return Diagnosis(
        tuple(finding for finding, _ in pairs),
        tuple(found for _, found in pairs),
        _few_steps(steps),
    )


def _order(finding: Finding) -> tuple[bool, bool, float]:
    """A hang first, then by cost; what blames nobody last."""
    return finding.verdict != "hang", finding.verdict in _CALM, -finding.excess_s


def _ask(evidence: Evidence) -> list[tuple[Draft, Changes]]:
    """Drafts of all causes, each with what undoes it and nothing else."""
    asked: list[tuple[Draft, Changes]] = []
    for find in CAUSES:
        if find in _NEED_CLOCKS and not evidence.aligned:
            continue
        # All drafts of one cause saw the job with the same things undone.
        before = evidence.explained
        for draft in find(evidence)[:_MAX_DRAFTS]:
            own = own_changes(evidence, before, draft.changes)
            asked.append((draft, own))
            evidence = evidence.explaining(draft.changes)
    return asked


def _costs(evidence: Evidence, asked: list[tuple[Draft, Changes]]) -> list[float]:
    """Mean cost of each cause per step, ns: alone, or with all others undone if that is more.

    One cause can hide another: a slow device in a long stage makes the length of the stage free,
    until the device is replaced.
    """
    own = [changes for _, changes in asked]
    costs = [float(np.mean(evidence.cost_ns(changes))) for changes in own]
    if len(own) > 1:
        everything = float(np.mean(evidence.cost_ns(combined(evidence, own))))
        for index in range(len(own)):
            others = combined(evidence, own[:index] + own[index + 1 :])
            # Others that gain nothing by themselves do not add to what this one costs.
            hidden = everything - max(float(np.mean(evidence.cost_ns(others))), 0.0)
            costs[index] = max(costs[index], hidden)
    return costs


def _where(draft: Draft) -> str:
    where = draft.where
    if where.rank is not None:
        return f"rank {where.rank} (DP rank {where.dp}, stage {where.stage})"
    if where.stage is not None:
        return f"stage {where.stage}"
    if draft.scope == "pp_group" and where.dp is not None:
        return f"DP rank {where.dp}"
    return "the whole job" if draft.scope == "job" else draft.scope


def _workers(draft: Draft) -> tuple[tuple[int, int], ...]:
    """The suspect of a slow device."""
    where = draft.where
    if draft.verdict != "straggler" or where.dp is None or where.stage is None:
        return ()
    return ((where.dp, where.stage),)


def _few_steps(steps: int) -> tuple[str, ...]:
    if steps >= CRITICAL_STEPS:
        return ()
    return (
        f"{steps} steps: a finding is at most a warning, and what comes in fewer than one of "
        f"{steps} steps cannot be seen",
    )


def _finding(evidence: Evidence, draft: Draft, cost_ns: float) -> Finding:
    excess = cost_ns + draft.extra_excess_ns
    recorded = float(np.mean(evidence.times.recorded))
    if draft.between_steps:
        recorded += draft.extra_excess_ns
    share = excess / recorded
    lasting = draft.persistence
    return Finding(
        severity=draft.severity or _severity(share, len(evidence.steps), draft.verdict),
        verdict=draft.verdict,
        cause=draft.cause,
        scope=draft.scope,
        where=draft.where,
        phase=draft.phase,
        optypes=draft.optypes,
        excess_s=excess / 1e9,
        excess_share=share,
        persistence=PersistencePart(
            str(lasting.kind), lasting.share, lasting.onset_step, lasting.period
        ),
        confidence=draft.confidence,
        evidence=draft.evidence,
        victims=_victims(evidence, draft.where),
        candidates=draft.candidates,
        next=draft.next,
    )


def _severity(share: float, steps: int, verdict: str) -> str:
    if verdict in _CALM or share < WARNING_SHARE:
        return "info"
    if share >= CRITICAL_SHARE and steps >= CRITICAL_STEPS:
        return "critical"
    return "warning"


def _victims(evidence: Evidence, where: Where) -> Victims | None:
    """Everyone but the one suspect, and how long they wait for others in a typical step."""
    if where.dp is None or where.stage is None:
        return None
    wait = evidence.wait_ns.copy()
    wait[where.dp, where.stage] = np.nan
    waiting = np.argwhere(~np.isnan(wait))
    if len(waiting) == 0:
        return None
    ranks = sorted(evidence.layout.rank(int(dp), int(stage)) for dp, stage in waiting)
    return Victims(len(ranks), tuple(ranks[:_MAX_RANKS]), float(np.nanmedian(wait)) / 1e9)
