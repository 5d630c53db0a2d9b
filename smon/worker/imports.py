"""Uploaded trace files become a job attempt with one stream and one window.

Flow: table ``imports`` and ``imports/<id>/<n>`` → **here** (`smon.trace.load`) → event files,
`smon.store.commit` → a window that is ready. Of files without ops (collectives, dumps, step times)
the report is made and stored at once, as that of a capture. The names that a user gave never become
paths as they are.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from smon.errors import (
    ConflictError,
    FencedError,
    MissingError,
    SMonError,
    StoreError,
    TraceError,
)
from smon.ops import LABELS
from smon.reports import TraceKind, kind_of
from smon.store import work
from smon.store.captures import add_capture
from smon.store.commit import CONTEXT, OPS, BatchNote, NewFile, commit
from smon.store.events import context_path, ops_path, write_context, write_ops
from smon.store.findings import Source
from smon.store.models import (
    Attempt,
    Import,
    Mode,
    Stream,
    TimeBase,
    Window,
    WindowKind,
    WindowState,
    WorkState,
    new_uuid,
)
from smon.store.models import (
    Job as JobRow,
)
from smon.store.results import NewResult, ResultKey, fresh_id
from smon.store.streams import StreamInfo, StreamRequest, register
from smon.store.windows import Ready, set_ready
from smon.store.work import Claim
from smon.topology import parse_layout
from smon.trace.context import Context, context_beside
from smon.trace.context import write_context as write_context_file
from smon.trace.load import Trace, fitted, load
from smon.trace.table import OpTable
from smon.wire import BatchKind
from smon.wire.arrow import record_batch
from smon.worker.material import notes_of_rows
from smon.worker.service import Service
from smon.worker.tasks import without_folder, working_folder
from smon.worker.traced import bounds_of, made_of_trace, store_made
from smon.worker.windows import CODE_VERSION, write_recorded_findings

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]

#: Ops of one event file: some 20 MB.
FILE_ROWS: Final = 2_000_000

#: Longest part of a user's file name that is kept.
_MAX_NAME: Final = 100
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_PIECE: Final = 8 << 20

#: Files that describe a trace and are none: a single trace beside them is still a single one.
_BESIDE: Final = re.compile(
    r"context\.json|truth\.json|(meta([-_.].*)?|.*\.meta)\.(yaml|yml|json)", re.IGNORECASE
)

#: Folder of the files, and stem of the meta file: what a job is called that has no name.
_UNNAMED: Final = "trace"

#: What people are told instead of a folder.
_PLACE: Final = "the upload"

#: Parts of the work, and how much of it is done when they begin.
_READING: Final = ("reading the files", 0.1)
_STORING: Final = ("storing the events", 0.6)


@dataclass(frozen=True, slots=True)
class _Asked:
    """An import as its owner asked for it; `files` are (number, name)."""

    id: str
    tenant_id: str
    options: Mapping[str, Any]
    files: tuple[tuple[int, str], ...]
    created_ns: int

    def option(self, name: str) -> str | None:
        """An option as text; None if it was not given."""
        value = self.options.get(name)
        return None if value is None or value == "" else str(value)


def run_import(service: Service, claim: Claim, check: Check) -> WorkState:
    """Read an import and store it as a job.

    Returns
    -------
    WorkState
        DONE, or FAILED with an error in the table.

    Raises
    ------
    FencedError
        Another worker has taken over.
    MissingError
        The import does not exist any more.
    StoreError
        The database or an object cannot be used: worth another try.
    """
    asked = _asked(service, claim)
    with working_folder(service) as folder:
        try:
            _import(service, claim, asked, folder, check)
        except (ConflictError, SMonError) as error:
            if isinstance(error, StoreError) and not isinstance(error, ConflictError):
                raise
            with service.database.write() as session:
                work.fail(
                    session, claim, without_folder(str(error), folder, _PLACE), service.clock()
                )
            return WorkState.FAILED
    for number, _ in asked.files:
        service.objects.delete(object_path(asked.id, number))
    return WorkState.DONE


def object_path(import_id: str, number: int) -> str:
    """Where an uploaded file lies."""
    return f"imports/{import_id}/{number}"


def _asked(service: Service, claim: Claim) -> _Asked:
    with service.database.read() as session:
        row = session.get(Import, claim.id)
        if row is None:
            raise MissingError(f"import {claim.id}: it does not exist any more")
        files = [
            (int(file.get("n", place)), str(file.get("name", "")))
            for place, file in enumerate(row.files)
        ]
        return _Asked(row.id, row.tenant_id, row.options, tuple(files), row.created_ns)


def _import(service: Service, claim: Claim, asked: _Asked, folder: Path, check: Check) -> None:
    _say(service, claim, "fetching the files", 0.0)
    files = fetch(service, asked.id, asked.files, folder / _UNNAMED)
    meta = _meta(asked, folder)
    check()
    _say(service, claim, *_READING)
    layout, attempt = asked.option("layout"), asked.option("attempt")
    trace = load(
        files,
        meta=meta,
        layout=None if layout is None else parse_layout(layout),
        format_name=asked.option("format"),
        progress=_steps(service, claim, check),
    )
    trace = replace(
        trace, notes=tuple(without_folder(note, folder, _PLACE) for note in trace.notes)
    )
    context = trace.evidence(context_beside(files))
    job = replace(trace.job, job_id=asked.option("job") or _name(asked, trace.job.job_id, files))
    trace = replace(trace, job=job if attempt is None else replace(job, attempt=int(attempt)))
    check()
    if kind_of(trace) is not TraceKind.OPS:
        _store_report(service, claim, asked, (trace, context), check)
        return
    documents = []
    if context:
        target = folder / "context.out"
        write_context_file(context, target)
        documents.append(target.read_bytes())
    check()
    _say(service, claim, *_STORING)
    with service.database.write() as session:
        stream = _stream(service, session, asked, trace, chosen=attempt is not None)
    _store(service, claim, asked, _Content(stream, trace, tuple(documents)), check)


def _name(asked: _Asked, found: str, files: Sequence[Path]) -> str:
    """The job's name as found in the files, else after the one file, else after the import."""
    if found != _UNNAMED:
        return found
    stem = files[0].name.split(".")[0].removeprefix("trace").lstrip("-_") if len(files) == 1 else ""
    return stem or f"import-{asked.id}"


def _say(service: Service, claim: Claim, phase: str, share: float) -> None:
    with service.database.write() as session:
        work.progress(session, claim, {"phase": phase, "progress": share})


def _steps(service: Service, claim: Claim, check: Check) -> Callable[[str, int, int], None]:
    """Progress of reading: written ten times at most."""
    begin, end = _READING[1], _STORING[1]

    def progress(_phase: str, done: int, total: int) -> None:
        check()
        tenth = max(total // 10, 1)
        if done % tenth == 0:
            _say(service, claim, _READING[0], begin + (end - begin) * done / max(total, 1))

    return progress


# --- files ------------------------------------------------------------------------------------


def safe_name(name: str) -> str:
    """A file name that is one part of a path and nothing else; its suffix stays.

    Formats are recognised by content; the stem becomes the job's name if nothing else says it.
    """
    last = re.split(r"[/\\]", name)[-1]
    plain = _UNSAFE.sub("_", last).lstrip(".-_")
    return plain[-_MAX_NAME:].lstrip(".-") or "file"


def fetch(
    service: Service, import_id: str, files: Sequence[tuple[int, str]], folder: Path
) -> list[Path]:
    """Fetch uploaded files into a folder.

    Returns
    -------
    list of Path
        What to load: the one trace among them, or the folder.

    Raises
    ------
    TraceError
        There is none.
    StoreError
        A file cannot be fetched.
    """
    if not files:
        raise TraceError("the import has no files: upload them first")
    try:
        folder.mkdir(parents=True)
        paths = [_fetch_one(service, import_id, file, folder) for file in files]
    except OSError as error:
        raise StoreError(f"cannot write an uploaded file: {error.strerror}") from error
    traces = [path for path in paths if not _BESIDE.fullmatch(path.name)]
    return traces if len(traces) == 1 else [folder]


def _fetch_one(service: Service, import_id: str, file: tuple[int, str], folder: Path) -> Path:
    number, name = file
    target = folder / safe_name(name)
    if target.exists():
        target = folder / f"{number}-{target.name}"
    with (
        service.objects.open(object_path(import_id, number)) as source,
        target.open("xb") as out,
    ):
        while piece := source.read(_PIECE):
            out.write(piece)
    return target


def _meta(asked: _Asked, folder: Path) -> Path | None:
    """The meta file that was given as an option; None if none was."""
    given = asked.options.get("meta")
    if not given:
        return None
    text = given if isinstance(given, str) else json.dumps(given)
    # JSON is YAML as well.
    path = folder / f"{_UNNAMED}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- the job ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """What is to be stored; `documents` are side evidence as JSON."""

    stream: StreamInfo
    trace: Trace
    documents: tuple[bytes, ...]


def _stream(
    service: Service, session: Session, asked: _Asked, trace: Trace, *, chosen: bool
) -> StreamInfo:
    """The one stream of the import; again the same if a worker before has made it.

    Raises
    ------
    ConflictError
        The attempt that was asked for is there already.
    """
    key = f"import/{asked.id}"
    number = _attempt_of(session, asked.tenant_id, key)
    if number is None:
        number = _free_attempt(session, asked.tenant_id, trace, chosen=chosen)
    layout = trace.job.layout
    per_worker = layout.tp * layout.cp
    request = StreamRequest(
        key=key,
        job=trace.job.job_id,
        attempt=number,
        layout=layout,
        mode=Mode.RECORDED,
        time_base=TimeBase.STEP if trace.table.step_relative else TimeBase.UNIX,
        window_steps=0,
        host="",
        source="import",
        ranks=tuple(range(0, layout.world_size, per_worker)),
        epoch=0,
        notes=tuple(_notes(trace)),
    )
    return register(session, asked.tenant_id, request, service.settings, service.clock())


def _notes(trace: Trace) -> list[str]:
    """Notes of the reader; those that come of table and layout are found again by the analysis."""
    if not len(trace.table):
        return list(trace.notes)
    again = fitted(trace.table, trace.job.layout)[1]
    kept = [note for note in trace.notes if note not in again]
    return [*kept, *notes_of_rows(trace.table.dropped)]


def _attempt_of(session: Session, tenant_id: str, key: str) -> int | None:
    return session.scalar(
        select(Attempt.number)
        .join(Stream, Stream.attempt_id == Attempt.id)
        .where(Stream.tenant_id == tenant_id, Stream.key == key)
    )


def _free_attempt(session: Session, tenant_id: str, trace: Trace, *, chosen: bool) -> int:
    """The attempt's number, or the next free one if nobody insists on it.

    Raises
    ------
    ConflictError
        It was asked for and is taken.
    """
    job, number = trace.job.job_id, trace.job.attempt
    mine = select(Attempt.number).join(JobRow, JobRow.id == Attempt.job_id)
    mine = mine.where(JobRow.tenant_id == tenant_id, JobRow.name == job)
    if session.scalar(mine.where(Attempt.number == number)) is None:
        return number
    if chosen:
        raise ConflictError(
            f"job {job!r} has an attempt {number} already: give another number, or leave it out"
        )
    taken = session.scalar(select(func.max(mine.subquery().c.number)))
    return int(taken or 0) + 1


def _store(service: Service, claim: Claim, asked: _Asked, content: _Content, check: Check) -> None:
    """Write the files, then everything else in one transaction."""
    files = list(_files(service, content, asked.created_ns, check))
    try:
        _register(service, claim, content.stream, files)
    except FencedError:
        for file in files:
            service.objects.delete(file.path)
        raise


def _register(service: Service, claim: Claim, stream: StreamInfo, files: Sequence[NewFile]) -> None:
    now = service.clock()
    with service.database.write() as session:
        # First: whoever has lost the import stores nothing.
        work.progress(session, claim, {"phase": None, "progress": 1.0})
        commit(session, _batches(stream, files, now), files, now)
        window_id = session.scalar(
            select(Window.id).where(
                Window.attempt_id == stream.attempt_id,
                Window.kind == WindowKind.STEPS.value,
                Window.number == 0,
            )
        )
        if window_id is None:
            raise MissingError("the window of the import does not exist any more")
        set_ready(session, Ready(window_id), now)
        _finish(session, claim, stream.job_id, window_id, now)


# --- what has no ops ----------------------------------------------------------------------------


def _store_report(
    service: Service, claim: Claim, asked: _Asked, given: tuple[Trace, Context], check: Check
) -> None:
    """Analyse a trace that has no ops, and store its report: nothing else is kept of it."""
    begin = service.clock()
    trace, context = given
    made = made_of_trace(service, trace, context, check)
    check()
    _say(service, claim, *_STORING)
    seconds = (service.clock() - begin) / 1e9
    source = Source(kind_of(trace).value)
    chosen = asked.option("attempt") is not None
    with service.database.write() as session:
        now = service.clock()
        # First: whoever has lost the import stores nothing.
        work.progress(session, claim, {"phase": None, "progress": 1.0})
        stream = _stream(service, session, asked, trace, chosen=chosen)
        commit(session, _batches(stream, (), now), (), now)
        ids = {
            "tenant_id": stream.tenant_id,
            "job_id": stream.job_id,
            "attempt_id": stream.attempt_id,
        }
        window_id = add_capture(session, ids, bounds_of(made.report), WindowState.DONE, now)
        key = ResultKey(
            **ids, window_id=window_id, code_version=CODE_VERSION, revision=1, fence=claim.fence
        )
        new = NewResult(fresh_id(), made.report, seconds, None)
        store_made(session, key, new, made, now, source)
        write_recorded_findings(session, ids, made, now, source)
        _finish(session, claim, stream.job_id, window_id, now)


def _finish(session: Session, claim: Claim, job_id: str, window_id: str, now: int) -> None:
    ids = {"job_id": job_id, "window_id": window_id}
    work.finish(session, claim, {"state": WorkState.DONE.value, "finished_ns": now, **ids})


def _files(service: Service, content: _Content, day_ns: int, check: Check) -> Iterator[NewFile]:
    """Write the event files; what is known of each."""
    stream, table = content.stream, content.trace.table
    steps = (int(table.step.min()), int(table.step.max()))
    for part in pieces(table, FILE_ROWS):
        check()
        file_id = new_uuid()
        path = ops_path(stream.job_id, day_ns, 0, file_id)
        size = write_ops(
            service.objects,
            path,
            record_batch(part.columns, LABELS),
            step_relative=table.step_relative,
        )
        bounds = (int(part.step.min()), int(part.step.max()))
        yield _new_file(stream, OPS, path, (len(part), size), bounds)
    if content.documents:
        file_id = str(uuid.uuid4())
        path = context_path(stream.job_id, day_ns, 0, file_id)
        size = write_context(service.objects, path, content.documents)
        yield _new_file(stream, CONTEXT, path, (len(content.documents), size), steps)


def _new_file(
    stream: StreamInfo, kind: str, path: str, sizes: tuple[int, int], steps: tuple[int, int]
) -> NewFile:
    return NewFile(
        id=new_uuid(),
        tenant_id=stream.tenant_id,
        job_id=stream.job_id,
        attempt_id=stream.attempt_id,
        window_number=0,
        kind=kind,
        path=path,
        rows=sizes[0],
        bytes=sizes[1],
        first_step=steps[0],
        last_step=steps[1],
    )


def pieces(table: OpTable, most: int) -> Iterator[OpTable]:
    """The table in parts of some rows, each of whole steps."""
    order = np.argsort(table.step, kind="stable")
    step = table.step[order]
    bounds = [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(step)]
    begin = 0
    for place, end in enumerate(bounds[1:], 1):
        last = place == len(bounds) - 1
        if last or bounds[place + 1] - begin > most:
            yield table.take(order[begin:end])
            begin = end


def _batches(stream: StreamInfo, files: Sequence[NewFile], now: int) -> list[BatchNote]:
    """The batches that an agent would have sent: one for each file, and the end."""
    notes = []
    for seq, file in enumerate(files):
        kind = BatchKind.OPS if file.kind == OPS else BatchKind.CONTEXT
        notes.append(_note(stream, seq, kind, file.rows, now))
    notes.append(_note(stream, len(files), BatchKind.END, 0, now))
    return notes


def _note(stream: StreamInfo, seq: int, kind: BatchKind, events: int, now: int) -> BatchNote:
    return BatchNote(
        stream_id=stream.id,
        tenant_id=stream.tenant_id,
        attempt_id=stream.attempt_id,
        epoch=stream.epoch,
        seq=seq,
        last_seq=seq,
        kind=kind,
        events=events,
        steps_done=None,
        received_ns=now,
        reason="imported" if kind is BatchKind.END else None,
    )
