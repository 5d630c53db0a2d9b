"""The report of a job's Flight Recorder dumps: a hang and its suspects, or why none can be told.

Dumps have no durations and no steps, so numbers of step times are None. That nothing is unfinished
does not make a job healthy: the verdict is then ``insufficient_data``, not ``none``.

Flow: `smon.trace.load` → **here** (`smon.hangs.findings`) → `smon.report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from smon.errors import TraceError
from smon.hangs.findings import MAX_FINDINGS, Hang, findings_of
from smon.hangs.waits import Waits, waits_of
from smon.report import (
    JobReport,
    ReportOptions,
    WindowPart,
    job_part,
    report_without_numbers,
)
from smon.trace.dumps import RankDump
from smon.trace.meta import Job

_MAX_NAMED: Final = 8

_NO_TIMES: Final = (
    "dumps of Flight Recorder hold no durations and no steps: step times, slowdown and cost are "
    "unknown"
)
_A_MOMENT: Final = (
    "a dump does not say when it was made: dumps made while a job runs show a moment, in which "
    "some ranks are always ahead of others"
)
_NO_HANG: Final = (
    "no evidence of a hang: the dumps list no unfinished call. That does not make the job healthy: "
    "how long calls took is not in them"
)


_DEFAULT: Final = ReportOptions()


def analyze_hang(
    dumps: Sequence[RankDump], job: Job, options: ReportOptions = _DEFAULT
) -> JobReport:
    """Say which ranks a job hangs on.

    Parameters
    ----------
    dumps
        One per rank that has one, by rank.
    job
        Its name and layout.

    Raises
    ------
    TraceError
        There is no dump.
    """
    if not dumps:
        raise TraceError("no dump of Flight Recorder: nothing says who has not arrived")
    waits = waits_of(dumps)
    found = findings_of(Hang(waits, {dump.rank: dump for dump in dumps}, job.layout))
    notes = [*options.notes, *_notes(dumps, job, waits)]
    if len(found) > MAX_FINDINGS:
        notes.append(f"{len(found) - MAX_FINDINGS:,} more suspects are left out of the report")
    if not found:
        notes.append(_no_verdict(dumps))
    blank = report_without_numbers(
        job_part(job.job_id, job.attempt, job.layout),
        WindowPart(0, 0, 0, 0, (), len(dumps) / job.layout.world_size),
        tuple(notes),
        options.price_per_gpu_hour,
    )
    if not found:
        return blank
    return replace(blank, verdict="hang", findings=tuple(found[:MAX_FINDINGS]))


def _notes(dumps: Sequence[RankDump], job: Job, waits: Waits) -> list[str]:
    """What was there, and what it cannot tell."""
    world = job.layout.world_size
    unfinished = sum(1 for dump in dumps if dump.calls or dump.messages)
    notes = [
        _NO_TIMES,
        _A_MOMENT,
        f"{len(dumps):,} of {world:,} ranks have a dump; {unfinished:,} list unfinished calls",
    ]
    have = {dump.rank for dump in dumps}
    missing = [rank for rank in range(world) if rank not in have]
    if missing:
        notes.append(f"without a dump: {_listed(missing)}")
    silent = [dump.rank for dump in dumps if dump.silent]
    if silent:
        notes.append(f"dumps that list nothing at all: {_listed(silent)}")
    unlisted = sum(1 for dump in dumps for group in dump.groups if not group.ranks)
    if unlisted:
        notes.append(
            f"{unlisted:,} groups do not list their members (no pg_config): who belongs to them, "
            "and so who is missing there, cannot be told"
        )
    unclear = {rank for stall in waits.stalls for rank in stall.unclear}
    if unclear:
        notes.append(
            f"{len(unclear):,} ranks have a dump that does not say how far they are in a group "
            "that waits: they are not blamed"
        )
    return notes


def _no_verdict(dumps: Sequence[RankDump]) -> str:
    """Why there is no finding."""
    if any(dump.calls or dump.messages for dump in dumps):
        return (
            "calls are unfinished, but nothing says whom they wait for: no group with listed "
            "members stands still"
        )
    return _NO_HANG


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
