"""Findings and jobs in sentences, from what is stored of them.

Flow: `smon.store.queries` → **here** → `smon.api.routes`, `dashboards.web`; the words themselves
are those of the command line, `smon.render.words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smon.errors import StoreError
from smon.render.bare import bare_report
from smon.render.words import CAUSES, headline, place, verdict_lines
from smon.report import Cost, Finding, Slowdown
from smon.store.queries.jobs import JobRow
from smon.store.queries.reports import read_finding, read_report
from smon.topology import Layout

_WAITING = "Waiting: nothing has been analysed yet."

_NO_LAYOUT = Layout(dp=1, pp=1)


def cause_words(cause: str) -> str:
    """A cause in words."""
    return CAUSES.get(cause, cause.replace("_", " "))


def headline_of(document: Mapping[str, Any], layout: Layout | None) -> str:
    """Who, why, how much, when: a stored finding in one line."""
    return _of_finding(document, layout, headline)


def short_of(document: Mapping[str, Any], layout: Layout | None) -> str:
    """Who and why: a stored finding in a few words."""
    return _of_finding(
        document, layout, lambda report, one: f"{place(report, one)}: {cause_words(one.cause)}"
    )


def _of_finding(document: Mapping[str, Any], layout: Layout | None, say: Any) -> str:  # noqa: ANN401  # a function
    try:
        return str(say(bare_report(layout or _NO_LAYOUT), read_finding(document)))
    except (StoreError, TypeError, ValueError):
        return cause_words(str(document.get("cause", "unknown")))


def job_lines(row: JobRow) -> list[str]:
    """The verdict of a job, what it costs, and what to do, each in one line."""
    if row.slowdown is None or row.layout is None:
        if row.verdict == "insufficient_data":
            return ["Insufficient data: the last window has too few usable steps."]
        return [_WAITING]
    report = replace(
        bare_report(row.layout),
        slowdown=Slowdown(row.slowdown, None, None, None, None),
        waste_ratio=row.waste_ratio,
        cost=Cost(row.gpu_hours_per_day, row.cost_per_day, None),
        findings=_findings(row),
    )
    return verdict_lines(report)


def job_sentence(row: JobRow) -> str:
    """The verdict of a job in one sentence."""
    if row.finding is not None:
        return headline_of(row.finding.document, row.layout)
    return job_lines(row)[0]


def job_words(row: JobRow) -> str:
    """The verdict of a job in a few words."""
    if row.finding is not None:
        return short_of(row.finding.document, row.layout)
    if row.slowdown is None:
        return "insufficient data" if row.verdict is not None else "nothing analysed yet"
    return {"healthy": "no straggler", "slow": "no known cause"}.get(row.health, "no finding")


def report_lines(document: Mapping[str, Any]) -> list[str]:
    """The verdict of a stored report, each part in one line."""
    return verdict_lines(read_report({**document, "per_step": [], "workers": []}))


def _findings(row: JobRow) -> tuple[Finding, ...]:
    if row.finding is None:
        return ()
    try:
        return (read_finding(row.finding.document),)
    except StoreError:
        return ()
