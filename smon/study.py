"""Many traces, each analysed by itself; then what all of them lose, why, and where.

Flow: paths → **here** (`smon.trace.load`, `smon.analysis`, `smon.reports`) → ``smon fleet
analyze``, `smon.render.study`. `analysed` runs anywhere: it gets a path and gives a `Row`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from smon.analysis import Options, analyze_prepared, empty_report
from smon.errors import NothingUsableError, SMonError
from smon.prepare import prepare
from smon.render.words import place, printable
from smon.report import Finding, JobReport, ReportOptions
from smon.reports import report_without_ops
from smon.trace.context import context_beside
from smon.trace.load import load

SCHEMA: Final = "smon.study/1"

#: From here on a job counts as slowed: the published threshold of a straggler, as in the fleet
#: report (``docs/reference/fleet.md``).
SLOW: Final = 1.1

#: The cause of what no finding explains.
UNKNOWN: Final = "unknown"

_HOUR_S: Final = 3600.0
_WORST: Final = 10

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Asked:
    """One trace: a path as ``smon analyze`` takes it, and the price of a GPU for one hour."""

    path: str
    price: float | None = None


@dataclass(frozen=True, slots=True)
class FirstFinding:
    """The dearest finding of a trace: `place` in words, `node` where it is known."""

    severity: str
    cause: str
    scope: str
    place: str
    rank: int | None
    dp: int | None
    stage: int | None
    node: str | None
    excess_s: float
    excess_share: float


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one trace.

    Attributes
    ----------
    error
        Why there is no report; then everything but the path is unknown.
    step_time_s
        Mean of the used steps.
    gpu_hours
        GPUs times the time of all steps, from the first to the last.
    lost_gpu_hours
        The part of them that is above the ideal; never less than 0.
    """

    path: str
    error: str | None = None
    job: str | None = None
    attempt: int | None = None
    gpus: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    steps_used: int | None = None
    step_time_s: float | None = None
    slowdown: float | None = None
    waste_ratio: float | None = None
    verdict: str | None = None
    finding: FirstFinding | None = None
    gpu_hours: float | None = None
    lost_gpu_hours: float | None = None
    lost_cost: float | None = None


def analysed(asked: Asked) -> Row:
    """What a trace says; if it cannot be analysed, the reason."""
    try:
        report = report_of_path(Path(asked.path), asked.price)
    except SMonError as error:
        return Row(asked.path, error=_one_line(error))
    return row_of(asked, report)


def failed(asked: Asked, error: BaseException) -> Row:
    """The row of a trace whose analysis did not come to its end."""
    text = _one_line(error)
    known = isinstance(error, SMonError)
    return Row(asked.path, error=text if known else f"unexpected {type(error).__name__}: {text}")


def report_of_path(path: Path, price: float | None) -> JobReport:
    """The report of one trace, as of ``smon analyze PATH``.

    Raises
    ------
    TraceError
        It cannot be read, or says nothing.
    """
    trace = load([path])
    without = report_without_ops(trace, ReportOptions(trace.notes, price))
    if without is not None:
        return without
    options = Options(notes=trace.notes, price_per_gpu_hour=price)
    try:
        context = trace.evidence(context_beside([path]))
        prepared = prepare(trace.table, trace.job, context)
    except NothingUsableError as error:
        return empty_report(trace.job, error, options)
    return analyze_prepared(prepared, options)


def row_of(asked: Asked, report: JobReport) -> Row:
    """A report in one row."""
    job, window = report.job, report.window
    hours, lost = _hours(report)
    money = None if lost is None or asked.price is None else lost * asked.price
    return Row(
        asked.path,
        job=job.job_id,
        attempt=job.attempt,
        gpus=job.world_size,
        first_step=window.first_step if window.steps else None,
        last_step=window.last_step if window.steps else None,
        steps_used=window.steps_used,
        step_time_s=report.step_time.recorded_s,
        slowdown=report.slowdown.paper,
        waste_ratio=report.waste_ratio,
        verdict=report.verdict,
        finding=_first(report, report.findings[0]) if report.findings else None,
        gpu_hours=hours,
        lost_gpu_hours=lost,
        lost_cost=money,
    )


def _hours(report: JobReport) -> tuple[float | None, float | None]:
    """GPU-hours of the window, and how many of them were lost (``docs/reference/fleet.md``)."""
    step_s, waste, window = report.step_time.recorded_s, report.waste_ratio, report.window
    if step_s is None or waste is None:
        return None, None
    steps = window.last_step - window.first_step + 1
    hours = step_s * steps * report.job.world_size / _HOUR_S
    return hours, hours * max(waste, 0.0)


def _first(report: JobReport, finding: Finding) -> FirstFinding:
    where = finding.where
    return FirstFinding(
        severity=finding.severity,
        cause=finding.cause,
        scope=finding.scope,
        place=place(report, finding),
        rank=where.rank,
        dp=where.dp,
        stage=where.stage,
        node=where.node,
        excess_s=finding.excess_s,
        excess_share=finding.excess_share,
    )


def _one_line(error: BaseException) -> str:
    return printable(" ".join(str(error).split()))


# --- all together -----------------------------------------------------------------------------


def document(rows: Iterable[Row]) -> dict[str, Any]:
    """All rows by path, and what they come to; the same whatever the order was.

    Returns
    -------
    dict
        Schema ``smon.study/1`` (``docs/reference/fleet.md`` section 5).
    """
    ordered = sorted(rows, key=lambda row: row.path)
    told = [row for row in ordered if row.error is None]
    enough = [row for row in told if row.verdict != "insufficient_data"]
    timed = [row for row in enough if row.lost_gpu_hours is not None]
    return {
        "schema": SCHEMA,
        "traces": len(ordered),
        "failed": len(ordered) - len(told),
        "insufficient": len(told) - len(enough),
        **_jobs(timed),
        **_sums(timed),
        "causes": _by(timed, _cause, "cause"),
        "worst": _worst(timed),
        "hosts": _hosts(told),
        "rows": [asdict(row) for row in ordered],
    }


def _sums(rows: Sequence[Row]) -> dict[str, float | None]:
    hours = sum(row.gpu_hours or 0.0 for row in rows)
    lost = sum(row.lost_gpu_hours or 0.0 for row in rows)
    money = [row.lost_cost for row in rows if row.lost_cost is not None]
    return {
        "gpu_hours": hours,
        "lost_gpu_hours": lost,
        "lost_share": lost / hours if hours else None,
        "lost_cost": sum(money) if money else None,
    }


def _jobs(rows: Sequence[Row]) -> dict[str, int]:
    """How many jobs there are, and how many of them are slowed in all their windows together."""
    grouped = _grouped(rows, _name)
    shares = [_sums(group)["lost_share"] or 0.0 for group in grouped.values()]
    return {"jobs": len(grouped), "slowed": sum(share >= 1.0 - 1.0 / SLOW for share in shares)}


def _name(row: Row) -> str:
    return row.job or row.path


def _cause(row: Row) -> str:
    return row.finding.cause if row.finding is not None else UNKNOWN


def _grouped(rows: Iterable[Row], key: Callable[[Row], _Key]) -> dict[_Key, list[Row]]:
    groups: dict[_Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _by(rows: Sequence[Row], key: Callable[[Row], str], name: str) -> list[dict[str, Any]]:
    """Sums of groups, the dearest first."""
    groups = [
        {name: value, "jobs": len({_name(row) for row in group}), **_sums(group)}
        for value, group in _grouped(rows, key).items()
    ]
    lossy = [group for group in groups if group["lost_gpu_hours"]]
    return sorted(lossy, key=lambda group: (-group["lost_gpu_hours"], group[name]))


def _worst(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The jobs that lost most, each with the cause of its dearest window."""
    groups = _grouped(rows, _name)
    worst = _by(rows, _name, "name")[:_WORST]
    for one in worst:
        dearest = max(groups[one["name"]], key=lambda row: row.lost_gpu_hours or 0.0)
        one["cause"] = _cause(dearest)
    return worst


def _hosts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Hosts that first findings name, those in most jobs first."""
    found: dict[str, list[FirstFinding]] = defaultdict(list)
    jobs: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.finding is not None and row.finding.node is not None:
            found[row.finding.node].append(row.finding)
            jobs[row.finding.node].add(_name(row))
    hosts = [
        {
            "host": host,
            "jobs": len(jobs[host]),
            "findings": len(findings),
            "causes": sorted({finding.cause for finding in findings}),
        }
        for host, findings in found.items()
    ]
    return sorted(hosts, key=lambda one: (-one["jobs"], -one["findings"], one["host"]))
