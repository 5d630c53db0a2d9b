"""A report for a terminal, and the sentences of it, which the pages use too.

Knows the report and nothing behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from smon.report import JobReport

__all__ = ["print_report"]


def print_report(report: JobReport, console: Console) -> None:
    """Print everything the report says that helps a person."""
    # Late, because the API takes sentences from `smon.render.words` and does without a terminal.
    from smon.render import terminal

    terminal.print_report(report, console)
