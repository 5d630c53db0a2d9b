"""What a page asks for and takes too long for a request: the timeline of a window.

Flow: table ``tasks`` → **here** (`smon.timeline`) → ``tasks/<id>.json.gz``, which the API streams.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select

from smon.errors import ConfigError, FencedError, MissingError, SMonError, StoreError
from smon.prepare import prepare
from smon.store import work
from smon.store.models import Task, WorkState
from smon.store.work import Claim
from smon.timeline import Kind, write_timeline
from smon.worker.material import job_of
from smon.worker.service import Service
from smon.worker.windows import gather, load_window

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]

TIMELINE: Final = "timeline"

_GZIP_LEVEL: Final = 3

#: What says of one line of a timeline whose event it is.
_EVENT: Final = re.compile(r'"cat":"(\w+)')
_PLACE: Final = re.compile(r'"dp":(\d+),"stage":(\d+)')
_PROCESS: Final = re.compile(r'"pid":(\d+)')
_THREAD: Final = re.compile(r'"tid":(\d+)')
_METADATA: Final = '{"ph":"M"'


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """Which part of a window is drawn; `dp` and `stage` empty: all."""

    window_id: str
    kinds: frozenset[str]
    dp: frozenset[int]
    stage: frozenset[int]


def timeline_options(options: Mapping[str, Any]) -> TimelineOptions:
    """The options of a task, as the API writes them.

    Raises
    ------
    ConfigError
        They are none.
    """
    kind = options.get("kind", "both")
    labels = {each.label for each in Kind}
    kinds = labels if kind == "both" else {kind} & labels
    window_id = options.get("window_id")
    if not isinstance(window_id, str) or not kinds:
        raise ConfigError("expected a window, and actual, ideal or both")
    return TimelineOptions(
        window_id, frozenset(kinds), _numbers(options.get("dp")), _numbers(options.get("stage"))
    )


def _numbers(value: object) -> frozenset[int]:
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) for one in values):
        raise ConfigError("expected numbers of DP ranks and stages")
    return frozenset(values)


def run_task(service: Service, claim: Claim, check: Check) -> WorkState:
    """Do a task and write its result.

    Returns
    -------
    WorkState
        DONE, or FAILED with an error in the table.

    Raises
    ------
    FencedError
        Another worker has taken over.
    StoreError
        The database or an object cannot be used: worth another try.
    """
    with service.database.read() as session:
        query = select(Task.kind, Task.options).where(Task.id == claim.id)
        row = session.execute(query).first()
    if row is None:
        raise MissingError(f"task {claim.id}: it does not exist any more")
    path = f"tasks/{claim.id}-{claim.fence}.json.gz"
    try:
        if row.kind != TIMELINE:
            raise ConfigError(f"expected a task of kind {TIMELINE}, found {row.kind!r}")
        draw(service, timeline_options(row.options), path, check)
    except (MissingError, SMonError) as error:
        if isinstance(error, StoreError) and not isinstance(error, MissingError):
            raise
        with service.database.write() as session:
            work.fail(session, claim, str(error), service.clock())
        return WorkState.FAILED
    _finish(service, claim, path)
    return WorkState.DONE


def _finish(service: Service, claim: Claim, path: str) -> None:
    values = {"state": WorkState.DONE.value, "path": path, "finished_ns": service.clock()}
    try:
        with service.database.write() as session:
            work.finish(session, claim, values)
    except FencedError:
        service.objects.delete(path)
        raise


def draw(service: Service, options: TimelineOptions, path: str, check: Check) -> int:
    """Draw a part of a window; how many ops are in the file.

    Raises
    ------
    NothingUsableError
        The window has no step that can be drawn, or its events are gone.
    StoreError
        A file cannot be read or written.
    """
    material = gather(service, options.window_id)
    ops, _, context = load_window(service, material)
    check()
    prepared = prepare(ops, job_of(material.attempt), context)
    with working_folder(service) as folder:
        whole = folder / "timeline.json"
        write_timeline(prepared, whole, progress=check)
        with (
            whole.open(encoding="utf-8") as lines,
            service.objects.create(path) as out,
            gzip.GzipFile(fileobj=out, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed,
        ):
            chosen = _Chosen(options)
            for piece in chosen.pieces(lines):
                packed.write(piece.encode())
    return chosen.count


class _Chosen:
    """Events of the wanted kinds and workers; names of processes and threads only if they have any.

    Attributes
    ----------
    count
        Events that were kept.
    """

    def __init__(self, options: TimelineOptions) -> None:
        self.count = 0
        self._options = options
        self._processes: set[str] = set()
        self._threads: set[tuple[str, str]] = set()
        self._names: list[str] = []

    def pieces(self, lines: Iterator[str]) -> Iterator[str]:
        """The file in pieces, from the lines of the whole one: one event in each."""
        yield next(lines).rstrip("\n")
        separator = "\n"
        for line in lines:
            event = line.rstrip(",\n")
            if event.startswith(_METADATA):
                self._names.append(event)
            elif event.startswith("{") and self._keeps(event):
                yield separator + event
                separator = ",\n"
        for name in self._names:
            if self._has_events(name):
                yield separator + name
                separator = ",\n"
        yield "\n]}\n"

    def _keeps(self, event: str) -> bool:
        kind, place = _EVENT.search(event), _PLACE.search(event)
        if kind is None or place is None:
            return False
        options = self._options
        kept = (
            kind[1] in options.kinds
            and (not options.dp or int(place[1]) in options.dp)
            and (not options.stage or int(place[2]) in options.stage)
        )
        if kept:
            self.count += 1
            process = _found(_PROCESS, event)
            self._processes.add(process)
            self._threads.add((process, _found(_THREAD, event)))
        return kept

    def _has_events(self, name: str) -> bool:
        process, thread = _found(_PROCESS, name), _found(_THREAD, name)
        return (process, thread) in self._threads if thread else process in self._processes


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


@contextmanager
def working_folder(service: Service) -> Iterator[Path]:
    """A folder for large files that are needed for a while.

    Raises
    ------
    StoreError
        It cannot be made.
    """
    base = service.settings.data_dir / "work"
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=base))
    except OSError as error:
        raise StoreError(f"cannot make a folder in {base}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
