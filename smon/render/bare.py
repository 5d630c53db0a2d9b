"""A report that knows the layout of a job and nothing else: for sentences about one finding."""

from __future__ import annotations

from dataclasses import replace

from smon.report import JobReport, WindowPart, job_part, report_without_numbers
from smon.topology import Layout


def bare_report(layout: Layout) -> JobReport:
    """A report without numbers, as `smon.render.words` wants it beside a finding."""
    window = WindowPart(0, 0, 0, 0, (), 0.0)
    return replace(report_without_numbers(job_part("", 0, layout), window), verdict="none")
