"""The windows of the study: which causes, how severe; generated, analysed, and written down.

Flow: **here** → `tests.accuracy.score` → `tests.accuracy.page`. A window is random in its shape and
its places; `smon.synth.sample.random_scenario` makes it from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from smon.analysis import Options, analyze, empty_report
from smon.attribute.persistence import vote
from smon.errors import NothingUsableError, SMonError
from smon.report import Finding
from smon.synth.evidence import Evidence
from smon.synth.sample import random_scenario
from smon.synth.scenario import Scenario, generate
from smon.synth.truth import Answer, CauseName, Scope, Truth

#: Seeds from here on are for reporting; those below have been looked at while rules were made. Once
#: a failure found here leads to a change, the next report needs seeds further on.
FIRST_SEED: Final = 3_000_000
#: Shares of the step that a cause costs, about.
SEVERITIES: Final = (0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 1.0)
#: The pairs: large enough to be seen, and neither hides the other.
_PAIR_SEVERITIES: Final = (0.05, 0.1, 0.2)
#: Nothing is slow in such a job, only its recording is bad.
RECORDING: Final = (CauseName.CLOCK, CauseName.LOST_DATA)
#: All causes that take time, and can come with others.
CAUSES: Final = tuple(name for name in CauseName if name not in {*RECORDING, CauseName.HANG})
#: Ops of the largest windows: 1,024 workers fit, and two cores get through.
_MAX_OPS: Final = 1_000_000
#: Of a job-wide change the rise of the step time counts, not the mean over the window.
JOB_WIDE_RISE: Final = 0.03
#: Any other cause counts from this share of the step on.
DUE_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """A window that is to be made; `group` is alone, pair, clean or recording."""

    seed: int
    group: str
    causes: tuple[CauseName, ...] = ()
    severity: float | None = None


@dataclass(frozen=True, slots=True)
class Real:
    """What is wrong with a window: one cause, with what it costs.

    Attributes
    ----------
    accepted, kinds
        Names of the cause, and of its spread over time, that are right.
    share
        Of the step time: the larger of its cost alone and of what its removal gains.
    due
        It costs enough to be reported.
    tellable
        The trace can show it; a slow ring has no peers in a job of one stage.
    """

    cause: str
    accepted: tuple[str, ...]
    scope: str
    kinds: tuple[str, ...]
    where: dict[str, int | str]
    ranks: tuple[int, ...]
    excess_s: float
    gain_s: float
    share: float
    due: bool
    tellable: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What the diagnosis says: one finding."""

    verdict: str
    cause: str
    scope: str
    kind: str
    where: dict[str, int | str]
    ranks: tuple[int, ...]
    excess_s: float
    share: float
    severity: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One window: what is true, and what was said. `error` is set if the analysis gave up."""

    case: Case
    shape: dict[str, int]
    step_s: float
    answers: tuple[Real, ...]
    findings: tuple[Found, ...]
    verdict: str
    aligned: bool | None
    error: str = ""


def cases(number: int, seed: int) -> list[Case]:
    """About half of the windows with one cause, a fifth with two, the rest with none."""
    clean, pairs, bad, hangs = number // 4, number // 5, max(number // 20, 2), max(number // 60, 1)
    alone = number - clean - pairs - bad - hangs
    seeds = iter(range(seed, seed + number))
    made = [Case(next(seeds), "clean") for _ in range(clean)]
    made += [
        Case(next(seeds), "recording", (RECORDING[index % len(RECORDING)],)) for index in range(bad)
    ]
    made += [Case(next(seeds), "alone", (CauseName.HANG,)) for _ in range(hangs)]
    rng = np.random.default_rng(seed)
    kinds = list(combinations(CAUSES, 2))
    for index in range(pairs):
        pair = kinds[int(rng.integers(len(kinds)))]
        severity = _PAIR_SEVERITIES[index % len(_PAIR_SEVERITIES)]
        made.append(Case(next(seeds), "pair", pair, severity))
    for index in range(alone):
        severity = SEVERITIES[index // len(CAUSES) % len(SEVERITIES)]
        made.append(Case(next(seeds), "alone", (CAUSES[index % len(CAUSES)],), severity))
    return made


def outcome(case: Case) -> Outcome:
    """Generate the window, analyse it, and write both answers down."""
    scenario = random_scenario(
        case.seed, causes=case.causes, severity=case.severity, max_ops=_MAX_OPS
    )
    made = generate(scenario)
    error = ""
    try:
        report = analyze(made.table, made.job, Options(), made.context)
    except SMonError as failure:
        error = f"{type(failure).__name__}: {failure}"
        report = empty_report(made.job, NothingUsableError("nothing", []))
    return Outcome(
        case,
        _shape(scenario),
        made.truth.faulty_step_s,
        tuple(_real(scenario, one, made.truth) for one in made.truth.answers),
        tuple(_found(finding) for finding in report.findings),
        report.verdict,
        report.quality.clock.aligned,
        error,
    )


def _shape(scenario: Scenario) -> dict[str, int]:
    return {
        "dp": scenario.dp,
        "pp": scenario.pp,
        "microbatches": scenario.microbatches,
        "steps": scenario.steps,
        "first_step": scenario.first_step,
        "ranks_per_host": scenario.machines.ranks_per_host or 0,
    }


def _real(scenario: Scenario, answer: Answer, truth: Truth) -> Real:
    share = max(answer.excess_s, answer.gain_s) / max(truth.faulty_step_s, 1e-9)
    share = share if math.isfinite(share) else 0.0
    ring = answer.cause is CauseName.SLOW_LINK and answer.scope is Scope.DP_GROUP
    return Real(
        str(answer.cause),
        _names(scenario, answer),
        str(answer.scope),
        _kinds(scenario, answer),
        dict(answer.where),
        answer.candidates,
        answer.excess_s,
        answer.gain_s,
        share,
        due=_due(answer, share, truth.healthy_step_s),
        tellable=not (ring and scenario.pp == 1),
    )


def _names(scenario: Scenario, answer: Answer) -> tuple[str, ...]:
    """Without counters heat is one more slow device."""
    if answer.cause is CauseName.THERMAL and Evidence.COUNTERS not in scenario.evidence:
        return (str(CauseName.SLOW_GPU),)
    return (str(answer.cause),)


def _kinds(scenario: Scenario, answer: Answer) -> tuple[str, ...]:
    """That of its nature, and what a vote over the true steps says: one burst is one_off."""
    (cause,) = [cause for cause in scenario.causes if cause.name is answer.cause]
    active = cause.active(scenario.extent).astype(float)
    voted = vote(active, 0.5, np.array(scenario.step_numbers))
    return (str(answer.persistence.kind), *([str(voted.kind)] if voted else []))


def _due(answer: Answer, share: float, healthy_s: float) -> bool:
    if answer.cause in RECORDING:
        return False
    if answer.cause is CauseName.HANG:
        return True
    if answer.cause is CauseName.JOB_WIDE:
        after = max(answer.persistence.share, 1e-9)
        return answer.excess_s / after / healthy_s >= JOB_WIDE_RISE
    return share >= DUE_SHARE


def _found(finding: Finding) -> Found:
    where = {
        name: value
        for name in ("rank", "dp", "stage", "node")
        if (value := getattr(finding.where, name)) is not None
    }
    return Found(
        finding.verdict,
        finding.cause,
        finding.scope,
        finding.persistence.kind,
        where,
        finding.where.ranks,
        finding.excess_s,
        finding.excess_share,
        finding.severity,
    )


def run(todo: list[Case], processes: int) -> Iterator[Outcome]:
    """All outcomes, in order, on some processes."""
    from multiprocessing import get_context

    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(outcome, todo, chunksize=4)
