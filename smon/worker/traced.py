"""Any trace → its report, and how that is stored where there are no ops.

Flow: `smon.trace.load` → **here** (`smon.reports`, `smon.worker.windows`) → ``results``, ``steps``.
For captures and imports alike: one place that turns a trace into what the store keeps of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sqlalchemy.orm import Session

from smon.analysis import Options
from smon.report import JobReport, ReportOptions
from smon.reports import report_without_ops
from smon.store import captures, results, steps
from smon.store.findings import Source
from smon.store.results import NewResult, ResultKey
from smon.trace.context import Context
from smon.trace.load import Trace
from smon.worker.service import Service
from smon.worker.windows import Check, Made, made_of_ops

#: Unix times are later than this (2001): a clock that counts from the start of its host is none.
_EARLIEST_NS: Final = 10**18


def made_of_trace(service: Service, trace: Trace, context: Context, check: Check) -> Made:
    """The report of any trace, as ``smon analyze`` makes it, and what is stored beside it.

    Raises
    ------
    TraceError
        What there is says nothing.
    """
    price = service.settings.price
    report = report_without_ops(trace, ReportOptions(trace.notes, price))
    if report is not None:
        return Made(report, _starts(trace), _with_hosts(trace, context))
    options = Options(trace.notes, price_per_gpu_hour=price, progress=check)
    return made_of_ops(trace.table, trace.job, trace.evidence(context), options, check)


def _starts(trace: Trace) -> dict[int, int]:
    """Unix ns of the first marker of each step."""
    found: dict[int, int] = {}
    for rank in trace.events:
        for step in rank.steps:
            if step.start_ns > _EARLIEST_NS:
                found[step.number] = min(step.start_ns, found.get(step.number, step.start_ns))
    return found


def _with_hosts(trace: Trace, context: Context) -> Context:
    hosts = {rank.rank: rank.host for rank in trace.events if rank.host}
    return replace(context, hosts={**hosts, **context.hosts})


def bounds_of(report: JobReport) -> tuple[int, int]:
    """First and last step of a report; -1 of one that is of no step."""
    window = report.window
    return (window.first_step, window.last_step) if window.steps else (-1, -1)


def store_made(
    session: Session, key: ResultKey, new: NewResult, made: Made, now: int, source: Source
) -> None:
    """Write the result of a capture, and its steps unless ops tell of them."""
    results.put_result(session, key, new, now)
    ids = {name: getattr(key, name) for name in ("tenant_id", "job_id", "attempt_id")}
    if source is Source.SERIES or captures.has_ops(session, key.attempt_id):
        return
    steps.put_steps(session, ids, steps.rows_of(made.report.outline, made.starts), now)
