"""The collectives that are waited for most, for a terminal.

Only reports of traces that have collectives but no ops list them.
"""

from __future__ import annotations

from typing import Final

from rich.table import Table

from smon.render.numbers import titled
from smon.render.words import printable, seconds
from smon.report import JobReport

_MAX_LINES: Final = 10


def collectives(report: JobReport) -> Table:
    """Who came last in them, how long the others waited, and how long the transfer took."""
    most = sorted(report.collectives, key=lambda one: -sum(one.waits_s))[:_MAX_LINES]
    table = titled(f"Waited for most, of {report.collectives_count:,} collectives")
    table.show_header, table.header_style = True, "dim"
    for name in ("step", "no."):
        table.add_column(name, justify="right")
    for name in ("kind", "group"):
        table.add_column(name)
    for name in ("last rank", "others wait", "transfer"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(most, key=lambda one: (one.step, one.index)):
        table.add_row(
            str(one.step),
            str(one.index),
            one.kind,
            printable(one.group),
            str(one.last_rank),
            seconds(one.late_s),
            seconds(one.transfer_s),
        )
    return table
