"""The fleet report as text and as CSV, from the document that ``GET fleet/summary`` answers.

Flow: REST document → **here** → ``smon fleet report``, the CSV of the fleet report's page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from smon.render.amounts import dollars, gpu_hours, gpu_time, share
from smon.render.tables import Cell, csv_text
from smon.render.words import CAUSES, printable

_BAR: Final = 24
_NAME: Final = 48

Document = Mapping[str, Any]


def bin_words(above: float, up_to: float) -> str:
    """Which jobs a bin of waste holds."""
    low = "up" if above == 0 else f"{100 * above:.0f}"
    return f"{low} to {100 * up_to:.0f} %"


# --- CSV --------------------------------------------------------------------------------------

#: One table for all: `kind` says what a row is about, and what does not apply is empty.
COLUMNS: Final = (
    *("kind", "name", "id", "cause", "jobs", "gpu_hours_per_day", "cost_per_day"),
    *("gpu_hours", "lost_gpu_hours", "lost_share", "lost_cost", "covered_ratio"),
)


def fleet_csv(document: Document) -> str:
    """The whole report as one table."""
    return csv_text(COLUMNS, fleet_rows(document))


def fleet_rows(document: Document) -> Iterator[dict[str, Cell]]:
    """The rows of `fleet_csv`."""
    period = document["period"]
    yield {
        "kind": "now",
        "jobs": document["jobs"],
        **_picked(document, "gpu_hours_per_day", "cost_per_day"),
    }
    yield {"kind": "slowed", "jobs": document["slowed"]}
    yield {"kind": "analysed", "jobs": document["analysed"]}
    yield {"kind": "running", "jobs": document["running"]}
    for one in document["waste"]:
        name = bin_words(one["above"], one["up_to"])
        yield {"kind": "waste", "name": name, "jobs": one["jobs"]}
    amounts = ("gpu_hours_per_day", "cost_per_day")
    for one in document["causes"]:
        yield {"kind": "cause_now", **_picked(one, "cause", "jobs", *amounts)}
    for one in document["worst_jobs"]:
        finding = one["finding"] or {}
        yield {
            "kind": "job_now",
            "cause": finding.get("cause"),
            **_picked(one, "name", "id", *amounts),
        }
    for one in document["worst_hosts"]:
        causes = " ".join(one["causes"])
        more = ("id", "jobs", *amounts, "lost_gpu_hours", "lost_cost")
        yield {"kind": "host", "name": one["id"], "cause": causes, **_picked(one, *more)}
    lost = ("lost_gpu_hours", "lost_cost")
    names = ("jobs", "gpu_hours", *lost, "lost_share", "covered_ratio")
    yield {"kind": "period", **_picked(period, *names)}
    for one in period["causes"]:
        yield {"kind": "cause_period", **_picked(one, "cause", "jobs", *lost)}
    for one in period["worst"]:
        names = ("name", "cause", "gpu_hours", *lost, "lost_share")
        yield {"kind": "job_period", "id": one["job_id"], **_picked(one, *names)}


def _picked(values: Document, *names: str) -> dict[str, Cell]:
    return {name: values[name] for name in names}


# --- text -------------------------------------------------------------------------------------


def fleet_text(document: Document) -> str:
    """The report for a terminal, most important first."""
    parts = [_head(document), _period(document), _now(document), _waste(document["waste"])]
    parts.append(_worst_jobs(document["worst_jobs"]))
    parts.append(_hosts(document["worst_hosts"]))
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def period_words(document: Document) -> list[str]:
    """What was lost in the period, and how much of the period is known."""
    period = document["period"]
    if not period["jobs"]:
        lines = ["No window of the period has been analysed."]
    else:
        money = "" if period["lost_cost"] is None else f", {dollars(period['lost_cost'])}"
        lines = [
            f"{gpu_time(period['lost_gpu_hours'])} of {gpu_time(period['gpu_hours'])} were lost "
            f"({share(period['lost_share'])}{money}), in {jobs_words(period['jobs'])}."
        ]
    if period["covered_ratio"] is not None:
        lines.append(
            f"Analysed: {share(period['covered_ratio'])} of the {gpu_time(period['ran_gpu_hours'])}"
            " that jobs ran in the period."
        )
    if document["unplaced"]:
        lines.append(
            f"Not in this sum: {jobs_words(document['unplaced'])} whose windows lie outside the "
            "period or have no unix time."
        )
    return lines


def now_words(document: Document) -> list[str]:
    """How many jobs are slowed down, and what is lost while nothing changes."""
    lines = [
        f"{jobs_words(document['jobs'])} with data, {document['running']:,} running, "
        f"{document['analysed']:,} analysed."
    ]
    if document["analysed"]:
        lines.append(
            f"Slowed by 10 % or more: {document['slowed']:,} of {document['analysed']:,} "
            f"({share(document['slowed_share'])})."
        )
    money = document["cost_per_day"]
    lines.append(
        f"Lost per day at the present rate: {gpu_time(document['gpu_hours_per_day'])}"
        f"{'' if money is None else f', {dollars(money)}'}."
    )
    return lines


def jobs_words(count: int) -> str:
    """How many jobs."""
    return f"{count:,} job{'' if count == 1 else 's'}"


def _head(document: Document) -> list[str]:
    period = document["period"]
    return [f"Fleet from {_moment(period['begin_s'])} to {_moment(period['end_s'])}"]


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _period(document: Document) -> list[str]:
    period = document["period"]
    lines = ["Lost in the period", *(f"  {line}" for line in period_words(document))]
    lines += table(
        ("by cause", "jobs", "lost", "money"),
        [
            (
                cause(one),
                f"{one['jobs']:,}",
                *lost(one["lost_gpu_hours"], one["lost_cost"]),
            )
            for one in period["causes"]
        ],
    )
    return lines + table(
        ("worst jobs", "waste", "lost", "money"),
        [
            (
                f"{short(one['name'])}, {cause(one)}",
                share(one["lost_share"]),
                *lost(one["lost_gpu_hours"], one["lost_cost"]),
            )
            for one in period["worst"]
        ],
    )


def _now(document: Document) -> list[str]:
    lines = ["Now", *(f"  {line}" for line in now_words(document))]
    return lines + table(
        ("by cause", "jobs", "per day", "money per day"),
        [
            (
                cause(one),
                f"{one['jobs']:,}",
                *lost(one["gpu_hours_per_day"], one["cost_per_day"]),
            )
            for one in document["causes"]
        ],
    )


def _waste(bins: Sequence[Document]) -> list[str]:
    most = max((one["jobs"] for one in bins), default=0)
    if not most:
        return []
    rows = [
        (
            bin_words(one["above"], one["up_to"]),
            f"{one['jobs']:,}",
            "█" * -(-one["jobs"] * _BAR // most),
        )
        for one in bins
    ]
    width = max(len(row[1]) for row in rows)
    lines = [f"  {name:<14}{count:>{width}}  {bar}".rstrip() for name, count, bar in rows]
    return ["Analysed jobs by the part of GPU time that they lose", *lines]


def _worst_jobs(jobs: Sequence[Document]) -> list[str]:
    return table(
        ("Jobs that lose most now", "slowdown", "per day", "money per day"),
        [
            (
                short(one["name"]),
                f"{one['slowdown']:.3f} ×",
                *lost(one["gpu_hours_per_day"], one["cost_per_day"]),
            )
            for one in jobs
        ],
        indent=0,
    )


def _hosts(hosts: Sequence[Document]) -> list[str]:
    return table(
        ("Suspect hosts", "jobs", "open", "causes"),
        [
            (
                short(one["id"]),
                f"{one['jobs']:,}",
                f"{one['open_findings']:,}",
                ", ".join(CAUSES.get(cause, printable(cause)) for cause in one["causes"]),
            )
            for one in hosts
        ],
        indent=0,
    )


def lost(hours: float, money: float | None) -> tuple[str, str]:
    """A loss in two columns: GPU-hours, and money if there is a price."""
    return gpu_hours(hours), "" if money is None else dollars(money)


def cause(one: Document) -> str:
    """The cause of a part of a document."""
    return CAUSES.get(one["cause"], printable(one["cause"]))


def short(name: str) -> str:
    """A name that fits into a column."""
    text = printable(name)
    return text if len(text) <= _NAME else f"{text[: _NAME - 1]}…"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Aligned columns: the first to the left, the others to the right; empty without rows."""
    if not rows:
        return []
    used = [at for at in range(len(header)) if any(row[at] for row in rows)]
    table = [[row[at] for at in used] for row in (header, *rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(used))]
    lines = []
    for row in table:
        rest = "".join(
            f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        lines.append(" " * indent + f"{row[0]:<{widths[0]}}{rest}".rstrip())
    return lines
