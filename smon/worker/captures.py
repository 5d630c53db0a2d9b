"""A claimed capture: files of ranks, read and analysed as ``smon analyze`` would, once.

Flow: `smon.worker.intake` → **here** (`smon.trace.load`, `smon.worker.traced`) → ``results``,
``steps``, ``findings`` of a window that has no ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy.orm import Session

from smon.errors import MissingError, StoreError, TraceError
from smon.report import JobReport
from smon.store import files, findings, steps, work
from smon.store import windows as table
from smon.store.files import FileInfo
from smon.store.findings import Source
from smon.store.models import Mode, WindowState
from smon.store.results import NewResult, ResultKey
from smon.store.windows import AttemptInfo, WindowInfo
from smon.store.work import Claim
from smon.topology import Layout
from smon.trace.context import Context
from smon.trace.load import Trace, load
from smon.wire.parts import FileFormat
from smon.worker import life
from smon.worker.imports import safe_name
from smon.worker.material import with_hosts
from smon.worker.service import Service
from smon.worker.tasks import without_folder, working_folder
from smon.worker.traced import bounds_of, made_of_trace, store_made
from smon.worker.windows import (
    CODE_VERSION,
    Check,
    Made,
    Work,
    carried_out,
    write_recorded_findings,
    written_workers,
)

#: What people are told instead of a folder.
_PLACE: Final = "the capture"


@dataclass(frozen=True, slots=True)
class Material:
    """What a capture consists of, as of one moment; `hosts`: of ranks, as the streams say."""

    attempt: AttemptInfo
    window: WindowInfo
    files: tuple[FileInfo, ...]
    hosts: Mapping[int, str]

    @property
    def source(self) -> Source:
        """What it says of findings."""
        dumps = self.files[0].format is FileFormat.FLIGHT_RECORDER
        return Source.DUMPS if dumps else Source.EVENTS

    @property
    def ids(self) -> dict[str, str]:
        """Of tenant, job and attempt."""
        attempt = self.attempt
        return {
            "tenant_id": attempt.tenant_id,
            "job_id": attempt.job_id,
            "attempt_id": attempt.id,
        }


def analyse_capture(service: Service, claim: Claim, check: Check) -> WindowState:
    """Analyse a capture and write its result.

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
    material = _gather(service, claim.id)

    def write(made: Made, seconds: float) -> None:
        with written_workers(service, material.attempt.job_id, made, seconds) as new:
            _write(service, claim, material, made, new)

    todo = Work("capture", begin, lambda: _analyse(service, material, check), write)
    return carried_out(service, claim, todo)


def _gather(service: Service, window_id: str) -> Material:
    with service.database.read() as session:
        window = table.window(session, window_id)
        attempt = table.attempt(session, window.attempt_id)
        found = tuple(files.files_of_windows(session, [window_id]))
        if attempt is None or not found:
            raise MissingError(f"window {window_id}: its files do not exist any more")
        live = attempt.mode is Mode.LIVE
        return Material(attempt, window, found, table.hosts_of(session, attempt.id) if live else {})


def _analyse(service: Service, material: Material, check: Check) -> Made:
    with working_folder(service) as folder:
        for place, file in enumerate(material.files):
            _fetch(service, file, folder / str(place))
            check()
        try:
            trace = _load(material, folder, check)
        except TraceError as error:
            raise TraceError(without_folder(str(error), folder, _PLACE)) from error
        notes = tuple(without_folder(note, folder, _PLACE) for note in trace.notes)
    check()
    context = with_hosts(Context(), material.hosts)
    return made_of_trace(service, replace(trace, notes=notes), context, check)


def _fetch(service: Service, file: FileInfo, folder: Path) -> None:
    """Write a file into a folder of its own, under a name that says its rank."""
    name = safe_name(file.name) if file.rank is None else f"rank-{file.rank}"
    try:
        folder.mkdir(parents=True)
        with (folder / name).open("xb") as out:
            for path in file.paths:
                out.write(service.objects.get(path))
    except OSError as error:
        raise StoreError(f"cannot write a file of a capture: {error.strerror}") from error


def _load(material: Material, folder: Path, check: Check) -> Trace:
    attempt = material.attempt
    trace = load(
        [folder],
        layout=None if is_flat(attempt.layout) else attempt.layout,
        # Both sides use the same words.
        format_name=material.files[0].format.value,
        progress=check,
    )
    job = replace(trace.job, job_id=attempt.job, attempt=attempt.number)
    notes = (*_coverage(material), *trace.notes)
    return replace(trace, job=job, notes=notes)


def is_flat(layout: Layout) -> bool:
    """Whether a layout says no more than how many ranks there are: files may know better."""
    return layout == Layout(dp=layout.dp, pp=1)


def _coverage(material: Material) -> list[str]:
    """A note on ranks that sent no file; a report of dumps has its own."""
    if material.window.missing_count == 0 or material.source is Source.DUMPS:
        return []
    count = material.window.missing_count
    return [f"{count:,} {'rank' if count == 1 else 'ranks'} sent no file of this capture"]


# --- writing ------------------------------------------------------------------------------------


def _write(service: Service, claim: Claim, material: Material, made: Made, new: NewResult) -> None:
    window, now = material.window, service.clock()
    with service.database.write() as session:
        work.finish(session, claim, _finished(window, made.report))
        key = ResultKey(
            **material.ids,
            window_id=window.id,
            code_version=CODE_VERSION,
            revision=window.revision,
            fence=claim.fence,
        )
        store_made(session, key, new, made, now, material.source)
        if material.attempt.mode is Mode.RECORDED:
            write_recorded_findings(session, material.ids, made, now, material.source)
        else:
            _write_findings(service, session, material, made, now)


def _finished(window: WindowInfo, report: JobReport) -> dict[str, Any]:
    values = {"state": WindowState.DONE.value, "analysed_revision": window.revision}
    return {**values, **dict(zip(("first_step", "last_step"), bounds_of(report), strict=True))}


def _write_findings(
    service: Service, session: Session, material: Material, made: Made, now: int
) -> None:
    """Follow the findings of a live attempt from one capture to the next."""
    if made.report.verdict == "insufficient_data":
        return
    attempt_id, source = material.attempt.id, material.source
    known = findings.known_findings(session, attempt_id, None, source)
    seen = life.seen_in(made.report.outline, made.context, source)
    numbers = [part.step for part in made.report.per_step]
    terms = life.Terms(numbers, service.settings.clear_steps)
    if not numbers:
        # Dumps are of a moment: what they do not show any more is gone.
        latest = steps.latest_steps(session, attempt_id, 1)
        terms = life.Terms(latest or [0], 0)
    changed = life.changes(known, seen, terms)
    findings.write_changes(session, material.ids, changed, life.times_of(changed, now))
