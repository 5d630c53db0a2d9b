"""What the list of hosts shows, ready for its template.

Flow: `smon.store.queries.hosts` → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from smon.api.words import cause_words
from smon.render.tables import Cell
from smon.store.queries.hosts import HostKind, HostRow
from smon.store.queries.paging import Page

#: Causes of a host that are named; there are rarely more.
_MAX_CAUSES: Final = 3

HOSTS_COLUMNS: Final = (
    *("id", "kind", "jobs", "findings", "open_findings", "causes"),
    *("gpu_hours_per_day", "cost_per_day", "lost_gpu_hours", "lost_cost", "first_s", "last_s"),
)


@dataclass(frozen=True, slots=True)
class HostsQuestion:
    """What the list is asked for; `choices`: the numbers of days that can be chosen."""

    name: str
    kind: HostKind
    days: int | None
    choices: tuple[int, ...]

    def link(self, **changes: str | int | None) -> str:
        """Address of the list with some of it changed; None: without it."""
        by = self.kind.value if self.kind is not HostKind.HOST else None
        asked = {"q": self.name or None, "by": by, "days": self.days, **changes}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return f"/hosts?{query}" if query else "/hosts"


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host of the list."""

    host: HostRow
    causes: str


@dataclass(frozen=True, slots=True)
class HostsView:
    """The list of hosts: those that recur, then those seen in one job."""

    question: HostsQuestion
    recurring: tuple[HostLine, ...]
    single: tuple[HostLine, ...]
    more: str | None
    kinds: tuple[tuple[str, str, bool], ...]
    periods: tuple[tuple[str, str, bool], ...]
    csv: str
    rest: str
    noun: str


def hosts_view(page: Page[HostRow], question: HostsQuestion) -> HostsView:
    """The list of hosts or GPUs."""
    lines = [HostLine(row, causes_of(row)) for row in page.items]
    kinds = ((HostKind.HOST, "hosts", None), (HostKind.GPU, "GPUs", "gpu"))
    named = ((f"{days} days", days) for days in question.choices)
    periods: tuple[tuple[str, int | None], ...] = (*named, ("all time", None))
    asked = {"by": question.kind.value, "days": question.days, "name": question.name or None}
    rest = urlencode({name: value for name, value in asked.items() if value is not None})
    return HostsView(
        question=question,
        recurring=tuple(line for line in lines if line.host.recurs),
        single=tuple(line for line in lines if not line.host.recurs),
        more=None if page.next is None else question.link(cursor=page.next),
        kinds=tuple(
            (words, question.link(by=by), question.kind is kind) for kind, words, by in kinds
        ),
        periods=tuple(
            (words, question.link(days=days), question.days == days) for words, days in periods
        ),
        csv=question.link(**{"as": "csv"}),
        rest=f"/api/v1/hosts?{rest}",
        noun="GPU" if question.kind is HostKind.GPU else "host",
    )


def causes_of(row: HostRow) -> str:
    """Causes in words, most frequent first."""
    named = ", ".join(cause_words(cause) for cause in row.causes[:_MAX_CAUSES])
    more = len(row.causes) - _MAX_CAUSES
    return f"{named} and {more} more" if more > 0 else named


def hosts_rows(rows: Iterable[HostRow]) -> Iterator[dict[str, Cell]]:
    """Rows of the CSV file, by `HOSTS_COLUMNS`."""
    for row in rows:
        values = {name: getattr(row, name) for name in HOSTS_COLUMNS}
        yield {**values, "kind": row.kind.value, "causes": " ".join(row.causes)}
