"""Values of labels: of bounded length, printable, and each job its own.

Flow: `smon.store.queries.running` → **here** → `smon.metrics.samples`. Names of jobs are what their
owners like; a label that broke the text format would cost the whole scrape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from smon.render.words import printable
from smon.store.queries.running import RunningJob
from smon.store.tenants import DEFAULT

#: Longer values are cut, and the job's id is put behind them.
MAX_LENGTH: Final = 120

Labels = dict[str, str]


def bounded(text: str) -> str:
    """A text as the value of a label."""
    shown = text if text.isprintable() else printable(text)
    return shown if len(shown) <= MAX_LENGTH else f"{shown[: MAX_LENGTH - 1]}…"


def job_labels(jobs: Iterable[RunningJob]) -> dict[str, Labels]:
    """Labels that name each job, by its id: `train_job`, and `tenant` unless it is the default.

    Of two jobs whose names look the same, the one that was there first has the name as it is.
    """
    taken: set[tuple[str, str]] = set()
    found: dict[str, Labels] = {}
    for job in sorted(jobs, key=lambda one: (one.created_ns, one.job_id)):
        tenant = "" if job.tenant == DEFAULT else bounded(job.tenant)
        name = _name(job)
        if (tenant, name) in taken:
            name = f"{name}~{job.job_id}"
        taken.add((tenant, name))
        found[job.job_id] = {"train_job": name} | ({"tenant": tenant} if tenant else {})
    return found


def _name(job: RunningJob) -> str:
    name = bounded(job.name) or job.job_id
    return f"{name}~{job.job_id}" if len(job.name) > MAX_LENGTH else name
