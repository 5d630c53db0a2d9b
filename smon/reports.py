"""From a trace without ops to its report: the one place that knows which analysis reads what.

Flow: `smon.trace.load` → **here** → `smon.collectives`, `smon.hangs`, `smon.series` → `smon.cli`,
`smon.worker`. A trace of ops goes to `smon.analysis`, whose callers want more than the report.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from smon.collectives.report import analyze_collectives
from smon.hangs.report import analyze_hang
from smon.report import JobReport, ReportOptions
from smon.series.report import analyze_series
from smon.trace.load import Trace


class TraceKind(StrEnum):
    """What a trace holds."""

    OPS = "ops"
    EVENTS = "rank-events"
    DUMPS = "flight-recorder"
    SERIES = "step-times"


#: Why a trace has no ops, and so no timeline, no repair and no history.
WITHOUT_OPS: Final = {
    TraceKind.EVENTS: "the trace has kernels and collectives only: annotate the ops "
    "(docs/sources.md)",
    TraceKind.DUMPS: "dumps of Flight Recorder have no times (docs/sources.md)",
    TraceKind.SERIES: "the file has step times of the whole job only (docs/sources.md)",
}


def kind_of(trace: Trace) -> TraceKind:
    """What a trace holds; of a folder with several kinds, what was kept."""
    if trace.events:
        return TraceKind.EVENTS
    if trace.dumps:
        return TraceKind.DUMPS
    return TraceKind.OPS if trace.series is None else TraceKind.SERIES


def report_without_ops(trace: Trace, options: ReportOptions) -> JobReport | None:
    """The report of a trace that has no ops; None of one that has.

    Raises
    ------
    TraceError
        What there is says nothing.
    """
    if trace.events:
        return analyze_collectives(trace.events, trace.job, options)
    if trace.dumps:
        return analyze_hang(trace.dumps, trace.job, options)
    if trace.series is not None:
        return analyze_series(trace.series, trace.job, options)
    return None
