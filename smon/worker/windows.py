"""A claimed window: read, analyse, write; exactly one result for each window and code version.

Flow: `smon.worker.loop` → **here** → ``results``, ``steps``, ``findings`` and a file of the
workers, in one transaction that counts only while the claim holds. Recorded windows give exactly
what ``smon analyze --json`` gives for the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import case
from sqlalchemy.orm import Session

from smon import __version__
from smon.analysis import Options, empty_report, evenly, report_of, study
from smon.errors import FencedError, MissingError, NothingUsableError, SMonError, StoreError
from smon.prepare import prepare
from smon.report import MIN_STEPS, JobReport
from smon.store import findings, results, steps, work
from smon.store import windows as table
from smon.store.commit import CONTEXT, OPS
from smon.store.events import read_context, read_ops, steps_of
from smon.store.findings import Source
from smon.store.models import Mode, Window, WindowState
from smon.store.results import NewResult, ResultKey
from smon.store.windows import AttemptInfo, FileInfo, WindowInfo
from smon.store.work import Claim
from smon.trace.context import Context
from smon.trace.meta import Job
from smon.trace.table import OpTable
from smon.worker.life import seen_in
from smon.worker.material import (
    HISTORY_WINDOWS,
    complete,
    history_from,
    job_of,
    starts_of,
    with_hosts,
)
from smon.worker.matrix import workers_file
from smon.worker.service import Service

#: Raised whenever the same ops would give another report.
ANALYSIS_REVISION: Final = 1

#: Reports of other versions are no answer to what this version says of a window.
CODE_VERSION: Final = f"{__version__}+{ANALYSIS_REVISION}"

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Material:
    """What a window consists of, as of one moment."""

    attempt: AttemptInfo
    window: WindowInfo
    ops: tuple[FileInfo, ...]
    context: tuple[FileInfo, ...]
    earlier: tuple[bytes, ...]
    hosts: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What an analysis gives.

    Attributes
    ----------
    starts
        Unix ns of each step, as far as known.
    workers
        File of every worker in each step; None where ops would be needed.
    """

    report: JobReport
    starts: Mapping[int, int]
    context: Context
    workers: pa.Buffer | None = None


def analyse_window(service: Service, claim: Claim, check: Check) -> WindowState:
    """Analyse a window and write its result.

    Parameters
    ----------
    claim
        Of the window.
    check
        Called as the analysis goes on; raises to end it.

    Returns
    -------
    WindowState
        DONE, or FAILED with a reason in the table.

    Raises
    ------
    FencedError
        Another worker has taken over; nothing is written.
    MissingError
        The window does not exist any more.
    StoreError
        The database or an object cannot be used: worth another try.
    """
    begin = service.clock()
    material = gather(service, claim.id)

    def write(made: Made, seconds: float) -> None:
        _write(service, claim, material, made, seconds)

    todo = Work("window", begin, lambda: _analyse(service, material, check), write)
    return carried_out(service, claim, todo)


@dataclass(frozen=True, slots=True)
class Work:
    """What is done with a claim.

    Attributes
    ----------
    kind
        For the metric of its seconds.
    begin_ns
        When it began.
    analyse, write
        What gives a report, and what stores it with the seconds that it took.
    """

    kind: str
    begin_ns: int
    analyse: Callable[[], Made]
    write: Callable[[Made, float], None]


def carried_out(service: Service, claim: Claim, todo: Work) -> WindowState:
    """Analyse and write; what cannot be analysed is a failure of the window, said in the table."""
    try:
        made = todo.analyse()
    except StoreError:
        raise
    except SMonError as error:
        with service.database.write() as session:
            work.fail(session, claim, str(error), service.clock())
        return WindowState.FAILED
    seconds = (service.clock() - todo.begin_ns) / 1e9
    todo.write(made, seconds)
    service.metrics.seconds.labels(todo.kind).observe(seconds)
    skipped = made.report.window.skipped
    service.metrics.count_steps(made.report.window.steps_used, [one.reason for one in skipped])
    return WindowState.DONE


def gather(service: Service, window_id: str) -> Material:
    """All that belongs to a window, from one view of the database.

    Raises
    ------
    MissingError
        The window does not exist (any more).
    """
    with service.database.read() as session:
        window = table.window(session, window_id)
        attempt = table.attempt(session, window.attempt_id)
        if attempt is None:
            raise MissingError(f"window {window_id}: its attempt does not exist any more")
        live = attempt.mode is Mode.LIVE
        first = window.first_step
        earlier = table.earlier_reports(session, attempt, first, HISTORY_WINDOWS) if live else ()
        own = table.files_of(session, window_id, CONTEXT)
        shared = table.files_of_attempt(session, attempt.id, CONTEXT)
        ops = tuple(table.files_of(session, window_id, OPS))
        # Only of a running job: whoever sends a recorded trace need not be where it was made.
        hosts = table.hosts_of(session, attempt.id) if live else {}
        return Material(attempt, window, ops, (*shared, *own), tuple(earlier), hosts)


def load_window(service: Service, material: Material) -> tuple[OpTable, tuple[str, ...], Context]:
    """Ops, notes and side evidence of a window, as for analysis.

    Raises
    ------
    NothingUsableError
        There are no ops.
    MetaError
        They contradict the layout.
    StoreError
        A file cannot be read.
    """
    need_ops(material)
    ops, more = _read(service, material)
    service.metrics.rows.inc(len(ops))
    whole, notes = complete(ops, material.attempt)
    context = read_context(service.objects, [file.path for file in material.context])
    return whole, (*notes, *more), with_hosts(context, material.hosts)


def need_ops(material: Material) -> None:
    """Let it pass if the window has ops.

    Raises
    ------
    NothingUsableError
        None have come, or they are gone.
    """
    if material.window.expired:
        raise NothingUsableError("the event files of this window have expired")
    if not material.ops:
        raise NothingUsableError("no op of this window has come")


def steps_present(service: Service, material: Material) -> dict[int, int]:
    """Rows of each step of a window, by step, ascending.

    Raises
    ------
    StoreError
        A file cannot be read.
    """
    present: dict[int, int] = {}
    for file in material.ops:
        for step, count in steps_of(service.objects, file.path).items():
            present[step] = present.get(step, 0) + count
    return dict(sorted(present.items()))


def _read(service: Service, material: Material) -> tuple[OpTable, list[str]]:
    """All ops; of a window that is too large, those of some steps, evenly spread."""
    paths = [file.path for file in material.ops]
    rows, most = sum(file.rows for file in material.ops), service.settings.max_window_ops
    if rows <= most:
        return read_ops(service.objects, paths), []
    present = steps_present(service, material)
    chosen = evenly(list(present), max(int(len(present) * most / rows), MIN_STEPS))
    note = (
        f"{len(chosen)} of {len(present)} steps were analysed, evenly spread: the window has "
        f"{rows:,} ops, more than {most:,}"
    )
    return read_ops(service.objects, paths, only=chosen), [note]


def _analyse(service: Service, material: Material, check: Check) -> Made:
    attempt = material.attempt
    price = service.settings.price
    try:
        ops, notes, context = load_window(service, material)
    except NothingUsableError as error:
        options = Options(attempt.notes, price_per_gpu_hour=price)
        return Made(empty_report(job_of(attempt), error, options), {}, Context())
    check()
    options = Options(
        notes=notes,
        price_per_gpu_hour=price,
        history=history_from(material.earlier, attempt.job),
        progress=check,
    )
    return made_of_ops(ops, job_of(attempt), context, options, check)


def made_of_ops(ops: OpTable, job: Job, context: Context, options: Options, check: Check) -> Made:
    """The analysis of a table that fits its layout; where nothing is usable, a report of that."""
    starts = starts_of(ops)
    try:
        studied = study(prepare(ops, job, context), check, options.history)
    except NothingUsableError as error:
        return Made(empty_report(job, error, options), starts, context)
    return Made(report_of(studied, options), starts, context, workers_file(studied))


def _write(service: Service, claim: Claim, material: Material, made: Made, seconds: float) -> None:
    """Result, steps and findings, and the end of the claim: all or nothing."""
    with written_workers(service, material.attempt.job_id, made, seconds) as new:
        stale = _transaction(service, claim, material, made, new)
    _remove(service, stale)


@contextmanager
def written_workers(
    service: Service, job_id: str, made: Made, seconds: float
) -> Iterator[NewResult]:
    """The result to be stored; its file is there, and goes again if the claim turns out lost."""
    new = NewResult(results.fresh_id(), made.report, seconds, None)
    if made.workers is not None:
        path = results.workers_path(job_id, new.id)
        new = NewResult(new.id, made.report, seconds, path)
        service.objects.put(path, made.workers)
    try:
        yield new
    except FencedError:
        _remove(service, new.workers_path)
        raise


def _remove(service: Service, path: str | None) -> None:
    if path is not None:
        service.objects.delete(path)


def _transaction(
    service: Service, claim: Claim, material: Material, made: Made, new: NewResult
) -> str | None:
    attempt, window, now = material.attempt, material.window, service.clock()
    ids = {
        "tenant_id": attempt.tenant_id,
        "job_id": attempt.job_id,
        "attempt_id": attempt.id,
    }
    with service.database.write() as session:
        work.finish(session, claim, _finished(window))
        key = ResultKey(
            **ids,
            window_id=window.id,
            code_version=CODE_VERSION,
            revision=window.revision,
            fence=claim.fence,
        )
        stale = results.put_result(session, key, new, now)
        steps.put_steps(session, ids, steps.rows_of(made.report.outline, made.starts), now)
        if attempt.mode is Mode.RECORDED:
            write_recorded_findings(session, ids, made, now)
    return stale


def write_recorded_findings(
    session: Session,
    ids: Mapping[str, str],
    made: Made,
    now: int,
    source: Source = Source.OPS,
) -> None:
    """Findings of a recorded window, with the times of its steps if they are unix times."""
    seen = seen_in(made.report.outline, made.context, source)
    bounds = (made.report.window.first_step, made.report.window.last_step)
    onsets = [one.finding.persistence.onset_step for one in seen]
    named = [step for step in (*bounds, *onsets) if step is not None]
    times = {step: made.starts.get(step, now) for step in named}
    findings.write_recorded(session, ids, seen, bounds, times)


def _finished(window: WindowInfo) -> dict[str, Any]:
    """DONE, or READY again if more has come while it was analysed."""
    more: Any = case(
        (Window.revision > window.revision, WindowState.READY.value), else_=WindowState.DONE.value
    )
    return {"state": more, "analysed_revision": window.revision}
