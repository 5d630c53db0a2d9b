"""A study of many traces as text and as CSV.

Flow: `smon.study.document` → **here** → ``smon fleet analyze``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from smon.render.amounts import dollars, gpu_time, share
from smon.render.fleet import cause, jobs_words, lost, short, table
from smon.render.tables import Cell, csv_text
from smon.render.words import CAUSES, printable, seconds

Document = Mapping[str, Any]

#: The summary is about all; of rows without a report so many are named.
_MAX_FAILED: Final = 20

_PLAIN: Final = (
    *("path", "error", "job", "attempt", "gpus", "first_step", "last_step", "steps_used"),
    *("step_time_s", "slowdown", "waste_ratio", "verdict"),
)
_FINDING: Final = ("severity", "cause", "scope", "place", "rank", "dp", "stage", "node")
_EXCESS: Final = ("excess_s", "excess_share")
_LOST: Final = ("gpu_hours", "lost_gpu_hours", "lost_cost")

#: One row for each trace; of the finding, those that it has.
COLUMNS: Final = (*_PLAIN, *_FINDING, *_EXCESS, *_LOST)


def study_csv(document: Document) -> str:
    """A row for each trace."""
    return csv_text(COLUMNS, study_rows(document))


def study_rows(document: Document) -> Iterator[dict[str, Cell]]:
    """The rows of `study_csv`."""
    for row in document["rows"]:
        finding = row["finding"] or {}
        told = {name: finding.get(name) for name in (*_FINDING, *_EXCESS)}
        yield {**{name: row[name] for name in (*_PLAIN, *_LOST)}, **told}


def study_text(document: Document) -> str:
    """The study for a terminal: what is lost, why, by whom; then a line for each trace."""
    parts = [
        _head(document),
        _causes(document["causes"]),
        _worst(document["worst"]),
        _hosts(document["hosts"]),
        _traces(document["rows"]),
        _failed(document["rows"]),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _head(document: Document) -> list[str]:
    counts = f"{_traces_words(document['traces'])}, {jobs_words(document['jobs'])} with step times"
    lines = [f"{counts}; slowed by 10 % or more: {document['slowed']:,}."]
    if document["gpu_hours"]:
        money = document["lost_cost"]
        lines.append(
            f"Lost: {gpu_time(document['lost_gpu_hours'])} of {gpu_time(document['gpu_hours'])} "
            f"({share(document['lost_share'])}{'' if money is None else f', {dollars(money)}'})."
        )
    for number, words in (
        (document["insufficient"], "with too little data"),
        (document["failed"], "that could not be analysed"),
    ):
        if number:
            lines.append(f"Not in this sum: {_traces_words(number)} {words}.")
    return lines


def _traces_words(count: int) -> str:
    return f"{count:,} trace{'' if count == 1 else 's'}"


def _causes(causes: Sequence[Document]) -> list[str]:
    return table(
        ("By cause", "jobs", "lost", "money"),
        [
            (cause(one), f"{one['jobs']:,}", *lost(one["lost_gpu_hours"], one["lost_cost"]))
            for one in causes
        ],
        indent=0,
    )


def _worst(jobs: Sequence[Document]) -> list[str]:
    return table(
        ("Worst jobs", "waste", "lost", "money"),
        [
            (
                f"{short(one['name'])}, {cause(one)}",
                share(one["lost_share"]),
                *lost(one["lost_gpu_hours"], one["lost_cost"]),
            )
            for one in jobs
        ],
        indent=0,
    )


def _hosts(hosts: Sequence[Document]) -> list[str]:
    return table(
        ("Suspect hosts", "jobs", "findings", "causes"),
        [
            (
                short(one["host"]),
                f"{one['jobs']:,}",
                f"{one['findings']:,}",
                ", ".join(CAUSES.get(name, printable(name)) for name in one["causes"]),
            )
            for one in hosts
        ],
        indent=0,
    )


def _traces(rows: Sequence[Document]) -> list[str]:
    told = [row for row in rows if row["error"] is None]
    folder = _folder(rows)
    return table(
        (f"Traces in {printable(folder)}", "steps", "step", "slowdown", "waste", "first finding"),
        [
            (
                short(os.path.relpath(row["path"], folder)),
                f"{row['steps_used']:,}",
                seconds(row["step_time_s"]),
                "" if row["slowdown"] is None else f"{row['slowdown']:.3f} ×",
                share(row["waste_ratio"]),
                _finding(row),
            )
            for row in told
        ],
        indent=0,
    )


def _folder(rows: Sequence[Document]) -> str:
    """What the paths of all traces begin with."""
    return os.path.commonpath([Path(row["path"]).parent for row in rows])


def _finding(row: Document) -> str:
    finding = row["finding"]
    if finding is None:
        return printable(row["verdict"]).replace("_", " ")
    return f"{finding['place']}: {cause(finding)}"


def _failed(rows: Sequence[Document]) -> list[str]:
    wrong = [row for row in rows if row["error"] is not None]
    lines = [f"{printable(row['path'])}: {printable(row['error'])}" for row in wrong]
    more = len(wrong) - _MAX_FAILED
    if more > 0:
        lines = [*lines[:_MAX_FAILED], f"and {more:,} more"]
    return ["Not analysed", *lines] if lines else []
