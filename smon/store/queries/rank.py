"""All that is known of one rank of a job: its steps, side evidence, neighbours, findings.

Flow: `smon.store.queries.series`, `smon.store.queries.evidence`, stored reports → **here** → the
page of a rank, REST. Rows are read in a transaction, files after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from smon.errors import MissingError, TopologyError
from smon.store.models import Attempt, Job, Result, Window
from smon.store.objects import Objects
from smon.store.queries.evidence import (
    MAX_NEIGHBOURS,
    Evidence,
    EvidenceFile,
    evidence_files,
    evidence_of,
)
from smon.store.queries.findings import FindingFilter, FindingRow, list_findings
from smon.store.queries.paging import Slice
from smon.store.queries.reports import current_report, document_of, report_of_window
from smon.store.queries.series import Series, SeriesWindow, series_of, windows_with_workers
from smon.store.streams import layout_of
from smon.topology import Layout, Place

#: Windows whose S_w is shown, the newest, and the most bytes of their reports, packed.
MAX_REPORTS: Final = 8
MAX_REPORT_BYTES: Final = 1 << 20

#: Scopes whose findings blame ranks, not a stage or the whole job.
_OF_RANKS: Final = frozenset({"rank", "tp_group", "node", "leaf"})

#: Findings of the attempt that are looked at, last seen first.
_FINDINGS: Final = 200


@dataclass(frozen=True, slots=True)
class RankQuestion:
    """Which rank of which job; `attempt` None: the newest."""

    job_id: str
    rank: int
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class RankRows:
    """What the database knows of a rank; the rest is in files."""

    job_id: str
    job: str
    attempt: int
    layout: Layout
    rank: int
    place: Place
    document: Mapping[str, Any] | None
    windows: tuple[SeriesWindow, ...]
    files: tuple[EvidenceFile, ...]
    findings: tuple[FindingRow, ...]
    by_window: tuple[WindowSlowdown, ...]


@dataclass(frozen=True, slots=True)
class WindowSlowdown:
    """The exact S_w of the rank's worker over one window; None where it was absent."""

    window_id: str
    number: int
    first_step: int
    last_step: int
    slowdown: float | None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another rank of the same host, with the S_w of its worker."""

    rank: int
    slowdown: float | None


@dataclass(frozen=True, slots=True)
class RankDetail:
    """One rank.

    Attributes
    ----------
    worker_rank
        First rank of its worker: what is measured is measured of the worker.
    slowdown, approx_slowdown
        The exact S_w of its worker in the newest report, and the paper's min(); None without one.
    findings
        In the newest report: those that name it, and those of its stage, group or job.
    history
        Those that named it over the attempt, last seen first.
    """

    rows: RankRows
    worker_rank: int
    host: str | None
    gpu_uuid: str | None
    slowdown: float | None
    approx_slowdown: float | None
    neighbours: tuple[Neighbour, ...]
    neighbours_count: int
    series: Series
    evidence: Evidence
    findings: tuple[Mapping[str, Any], ...]
    history: tuple[FindingRow, ...]


def rank_rows(session: Session, objects: Objects, tenant_id: str, asked: RankQuestion) -> RankRows:
    """What the database knows of a rank.

    Raises
    ------
    MissingError
        There is no such job, attempt or rank.
    """
    attempt, name, newest = _attempt(session, tenant_id, asked)
    layout = layout_of(attempt)
    try:
        place = layout.place(asked.rank)
    except TopologyError as error:
        raise MissingError(f"expected a rank below {layout.world_size:,} of this job") from error
    windows = windows_with_workers(session, objects, tenant_id, asked.job_id, attempt.number)
    wanted = FindingFilter(attempt=attempt.number)
    found = list_findings(session, tenant_id, asked.job_id, wanted, Slice(_FINDINGS))
    return RankRows(
        job_id=asked.job_id,
        job=name,
        attempt=attempt.number,
        layout=layout,
        rank=asked.rank,
        place=place,
        document=_document(session, tenant_id, asked.job_id, windows, newest=newest),
        windows=windows,
        files=evidence_files(session, tenant_id, asked.job_id, attempt.number, None),
        findings=found.items,
        by_window=_by_window(session, attempt.id, (place.dp, place.stage)),
    )


def _attempt(session: Session, tenant_id: str, asked: RankQuestion) -> tuple[Attempt, str, bool]:
    """The attempt, the name of the job, and whether there is no later attempt."""
    query = (
        select(Attempt, Job.name)
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.tenant_id == tenant_id, Attempt.job_id == asked.job_id)
        .order_by(Attempt.number.desc())
    )
    newest = session.execute(query.limit(1)).first()
    if newest is None:
        raise MissingError("expected the id of a job that has sent something")
    if asked.attempt is None or asked.attempt == newest[0].number:
        return newest[0], newest[1], True
    older = session.execute(query.where(Attempt.number == asked.attempt)).first()
    if older is None:
        raise MissingError("expected the number of an attempt of this job")
    return older[0], older[1], False


def _document(
    session: Session,
    tenant_id: str,
    job_id: str,
    windows: Sequence[SeriesWindow],
    *,
    newest: bool,
) -> Mapping[str, Any] | None:
    """The newest report of the attempt."""
    if newest:
        stored = current_report(session, tenant_id, job_id)
        return None if stored is None else document_of(stored.packed)
    closed = next((window.id for window in windows if window.id is not None), None)
    if closed is None:
        return None
    return document_of(report_of_window(session, tenant_id, job_id, closed).packed)


def _by_window(
    session: Session, attempt_id: str, place: tuple[int, int]
) -> tuple[WindowSlowdown, ...]:
    """S_w of one worker over the newest windows, newest first; few enough to be quick."""
    size = func.length(Result.report)
    query = (
        select(Window.id, Window.number, Window.first_step, Window.last_step, Result.id, size)
        .join(Window, Window.id == Result.window_id)
        .where(Result.attempt_id == attempt_id)
        .order_by(Window.kind.desc(), Window.number.desc(), Result.created_ns.desc())
        .limit(2 * MAX_REPORTS)
    )
    found: dict[str, WindowSlowdown] = {}
    left = MAX_REPORT_BYTES
    for window_id, number, first, last, result_id, packed_bytes in session.execute(query).all():
        left -= packed_bytes
        if window_id in found:
            continue
        if len(found) == MAX_REPORTS or (found and left < 0):
            break
        report = session.scalar(select(Result.report).where(Result.id == result_id))
        mine = None if report is None else worker_of(document_of(report), place)
        slowdown = None if mine is None else mine["slowdown"]
        found[window_id] = WindowSlowdown(window_id, number, first, last, slowdown)
    return tuple(found.values())


def worker_of(document: Mapping[str, Any], place: tuple[int, int]) -> Mapping[str, Any] | None:
    """The worker of a report at a (DP rank, stage); None if it is absent."""
    for each in document["workers"]:
        if (each["dp"], each["stage"]) == place:
            mine: Mapping[str, Any] = each
            return mine
    return None


def rank_detail(objects: Objects, rows: RankRows, steps: int | None = None) -> RankDetail:
    """What files and database know of a rank together.

    Parameters
    ----------
    steps
        So many of the latest steps; None: all that are kept.

    Raises
    ------
    StoreError
        A file cannot be read.
    """
    place = rows.place
    series = series_of(rows.windows, (place.dp, place.stage))
    if steps is not None:
        series = Series(series.steps[-steps:], series.windows, series.left_out)
    bounds = (series.steps[0].step, series.steps[-1].step) if series.steps else None
    files = [each for each in rows.files if _of_steps(each, bounds)]
    evidence = evidence_of(objects, files, rows.rank, bounds)
    worker_rank = rows.layout.rank(place.dp, place.stage)
    mine = None
    if rows.document is not None:
        mine = worker_of(rows.document, (place.dp, place.stage))
    host = evidence.host or (None if mine is None else mine["host"])
    neighbours, count = _neighbours(rows, evidence, host)
    return RankDetail(
        rows=rows,
        worker_rank=worker_rank,
        host=host,
        gpu_uuid=evidence.gpu_uuid,
        slowdown=None if mine is None else mine["slowdown"],
        approx_slowdown=None if mine is None else mine["approx_slowdown"],
        neighbours=neighbours,
        neighbours_count=count,
        series=series,
        evidence=evidence,
        findings=() if rows.document is None else tuple(rows.document["findings"]),
        history=tuple(each for each in rows.findings if names(rows, host, each.document)),
    )


def _of_steps(file: EvidenceFile, bounds: tuple[int, int] | None) -> bool:
    """Whether a file has something of these steps, or of the whole attempt."""
    inside = bounds is None or (file.first_step <= bounds[1] and file.last_step >= bounds[0])
    return inside or file.last_step < 0


def names(rows: RankRows, host: str | None, finding: Mapping[str, Any]) -> bool:
    """Whether a finding blames this rank, its worker, or the host that it runs on."""
    where, scope, place = finding["where"], finding["scope"], rows.place
    if scope not in _OF_RANKS:
        return False
    if rows.layout.rank(place.dp, place.stage) in where.get("ranks", ()):
        return True
    if scope == "node" and where.get("node") is not None:
        return bool(where["node"] == host)
    same_tp = where.get("tp") in (None, place.tp)
    return (where.get("dp"), where.get("stage")) == (place.dp, place.stage) and same_tp


def _neighbours(
    rows: RankRows, evidence: Evidence, host: str | None
) -> tuple[tuple[Neighbour, ...], int]:
    """Other ranks of the host, by side evidence; else by what the report says of the workers."""
    workers = () if rows.document is None else rows.document["workers"]
    slowdowns = {(each["dp"], each["stage"]): each["slowdown"] for each in workers}
    ranks: Sequence[int] = evidence.neighbours
    count = evidence.neighbours_count
    if not ranks and host is not None:
        own = rows.layout.rank(rows.place.dp, rows.place.stage)
        here = [each["rank"] for each in workers if each["host"] == host]
        ranks = sorted(rank for rank in here if rank != own)
        count = len(ranks)
    found = []
    for rank in ranks[:MAX_NEIGHBOURS]:
        if rank < rows.layout.world_size:
            place = rows.layout.place(rank)
            found.append(Neighbour(rank, slowdowns.get((place.dp, place.stage))))
    return tuple(found), count
