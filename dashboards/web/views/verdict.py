"""Findings as an on-call person reads them: what, how sure, what it is not, what to type.

Flow: a stored report → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from dashboards.web.links import host_link
from dashboards.web.text import duration, percent
from smon.api.words import cause_words
from smon.nodes import cordon, is_drain
from smon.render.words import headline, printable
from smon.report import Candidate, Finding, JobReport, Where

_MAX_EVIDENCE: Final = 4
_MAX_CANDIDATES: Final = 8
_MAX_RANKS: Final = 4

#: A factor of the ledger with a smaller part of the loss is named as what it is not.
_SMALL_SHARE: Final = 0.05

_SURE: Final = 0.85
_LIKELY: Final = 0.6

#: What kind of answer it is: icon, word, and what that means for whom to wake.
KINDS: Final = {
    "straggler": ("◆", "Straggler", "one place is slow, and the others wait for it"),
    "imbalance": ("▥", "Imbalance", "work is dealt out unevenly; no machine is at fault"),
    "link": ("⇄", "Network", "transfers are slow, not the workers"),
    "host_stall": ("◷", "Host stalls", "GPUs wait for their hosts"),
    "job_wide": ("▬", "Job-wide", "all ranks alike; no rank is to blame"),
    "planned_pause": ("❚❚", "Planned pause", "no straggler; the job stops by itself"),
    "warmup": ("◌", "Warm-up", "no straggler; the job has just begun"),
    "hang": ("✕", "Hang", "a step does not end"),
    "data_quality": ("≠", "Data quality", "the data cannot be trusted"),
    "insufficient_data": ("…", "Insufficient data", "too few steps to tell"),
    "none": ("✓", "No straggler", "nothing stands out"),
    "unknown": ("?", "Slow, cause unknown", "time is lost, and no known cause explains it"),
}

#: Verdicts about which nobody needs to be woken.
CALM: Final = frozenset({"planned_pause", "warmup", "none"})

#: Factors of the ledger in words; some hold more than their name says.
FACTORS: Final = {
    "communication": "communication and other",
    "launch_delay": "launch delays",
    "stage": "stages of uneven length",
    "worker": "slow workers",
    "step": "whole steps",
    "microbatch": "uneven microbatches",
}


@dataclass(frozen=True, slots=True)
class Command:
    """Something to type; `label` says for which system, if there are several."""

    text: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Where to look further."""

    words: str
    address: str


@dataclass(frozen=True, slots=True)
class FindingView:
    """A finding in words.

    Attributes
    ----------
    kind
        Icon, word and meaning, see `KINDS`.
    calm
        Whether nobody needs to be woken.
    rank
        Of the worker that is named; None if none is.
    not_it
        What it is not.
    since
        Step since which it is there, as far back as the job was followed; None if not known.
    """

    severity: str
    verdict: str
    cause: str
    calm: bool
    kind: tuple[str, str, str]
    headline: str
    rank: int | None
    excess_s: float
    evidence: tuple[str, ...]
    victims: str
    not_it: str
    confidence: float
    sure: str
    candidates: tuple[str, ...]
    more_candidates: int
    commands: tuple[Command, ...]
    links: tuple[Link, ...]
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where links lead: the page of the job, and the runbooks of all causes; None without."""

    job: str
    runbooks: str | None


def finding_view(report: JobReport, finding: Finding, addresses: Addresses) -> FindingView:
    """A finding in words."""
    candidates = tuple(_candidate(each) for each in finding.candidates[:_MAX_CANDIDATES])
    return FindingView(
        severity=finding.severity,
        verdict=finding.verdict,
        cause=finding.cause,
        calm=finding.verdict in CALM,
        kind=KINDS.get(finding.verdict, KINDS["unknown"]),
        headline=headline(report, finding) + ".",
        rank=finding.where.rank,
        excess_s=finding.excess_s,
        evidence=finding.evidence[:_MAX_EVIDENCE],
        victims=_victims(report, finding),
        not_it="" if finding.verdict in CALM else _not_it(report),
        confidence=finding.confidence,
        sure=_sure(finding.confidence),
        candidates=candidates,
        more_candidates=len(finding.candidates) - len(candidates),
        commands=tuple(_commands(finding)),
        links=tuple(_links(finding, addresses)),
    )


def kind_of(report: JobReport, *, slow: bool) -> tuple[str, str, str]:
    """What kind of answer a report gives as a whole."""
    if report.findings:
        return KINDS.get(report.findings[0].verdict, KINDS["unknown"])
    if report.slowdown.paper is None or report.verdict == "insufficient_data":
        return KINDS["insufficient_data"]
    return KINDS["unknown" if slow else "none"]


def _sure(confidence: float) -> str:
    if confidence >= _SURE:
        return "high"
    return "medium" if confidence >= _LIKELY else "low"


def _victims(report: JobReport, finding: Finding) -> str:
    victims = finding.victims
    if victims is None:
        return ""
    workers = report.job.layout.dp * report.job.layout.pp
    who = "all" if victims.count == workers - 1 else f"{victims.count:,} of the"
    waits = "" if victims.wait_s is None else f", typically {duration(victims.wait_s)} a step"
    number = f"{victims.count:,} " if who == "all" else ""
    return f"{who} {number}other workers only wait{waits}"


def _not_it(report: JobReport) -> str:
    small = [
        f"{FACTORS.get(part.factor, part.factor.replace('_', ' '))} ({percent(part.share)})"
        for part in sorted(report.ledger, key=lambda part: -part.excess_s)
        if 0 <= part.share < _SMALL_SHARE
    ]
    return f"{', '.join(small)} of the loss" if small else ""


def _candidate(candidate: Candidate) -> str:
    words = cause_words(candidate.cause)
    tell = f": {printable(candidate.tell_apart)}" if candidate.tell_apart else ""
    return f"{_place_of(candidate.where)}{words}{tell}"


def _place_of(where: Where) -> str:
    parts = []
    if where.rank is not None:
        parts.append(f"rank {where.rank}")
    if where.dp is not None and where.stage is not None:
        parts.append(f"DP rank {where.dp}, stage {where.stage}")
    elif where.stage is not None:
        parts.append(f"stage {where.stage}")
    if where.node:
        parts.append(printable(where.node))
    return f"{', '.join(parts)}: " if parts else ""


# --- what to type, where to look -------------------------------------------------------------


def _commands(finding: Finding) -> Iterator[Command]:
    """What the report says to do, in its order; a host is drained in Slurm or Kubernetes."""
    for line in finding.next:
        drains = is_drain(line)
        yield Command(printable(line), "Slurm" if drains else "")
        if drains and (cordoned := cordon(finding.where.node)) is not None:
            yield Command(cordoned, "Kubernetes")


def _links(finding: Finding, addresses: Addresses) -> Iterator[Link]:
    where = finding.where
    ranks = [where.rank] if where.rank is not None else list(where.ranks[:_MAX_RANKS])
    yield from (Link(f"rank {rank}", f"{addresses.job}/ranks/{rank}") for rank in ranks)
    if where.node:
        yield Link(f"host {printable(where.node)}", host_link(where.node))
    if where.gpu_uuid:
        yield Link(f"GPU {printable(where.gpu_uuid)}", host_link(where.gpu_uuid))
    if addresses.runbooks:
        yield Link("runbook", f"{addresses.runbooks}/{quote(finding.cause, safe='')}")
