"""What a page asks for and takes too long for a request: timelines of a window.

Flow: table ``tasks`` → **here** (`smon.worker.timelines`) → ``tasks/<id>.json.gz``, which the API
reads.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select

from smon.errors import ConfigError, FencedError, MissingError, SMonError, StoreError
from smon.store import work
from smon.store.models import Task, WorkState
from smon.store.queries.tasks import TaskKind
from smon.store.work import Claim
from smon.worker.service import Service
from smon.worker.timelines import marks_options, step_marks, timeline_options, timeline_pieces

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]

_GZIP_LEVEL: Final = 3


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
        _write(service, path, _pieces(service, row.kind, row.options, check))
    except (MissingError, SMonError) as error:
        if isinstance(error, StoreError) and not isinstance(error, MissingError):
            raise
        with service.database.write() as session:
            work.fail(session, claim, str(error), service.clock())
        return WorkState.FAILED
    _finish(service, claim, path)
    return WorkState.DONE


def _pieces(service: Service, kind: str, options: Mapping[str, Any], check: Check) -> Iterator[str]:
    """What a task makes, as text."""
    if kind == TaskKind.TIMELINE:
        return timeline_pieces(service, timeline_options(options), check)
    if kind == TaskKind.MARKS:
        return iter([json.dumps(step_marks(service, marks_options(options), check))])
    known = ", ".join(TaskKind)
    raise ConfigError(f"expected a task of kind {known}, found {kind!r}")


def _write(service: Service, path: str, pieces: Iterator[str]) -> None:
    with (
        service.objects.create(path) as out,
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed,
    ):
        for piece in pieces:
            packed.write(piece.encode())


def _finish(service: Service, claim: Claim, path: str) -> None:
    values = {"state": WorkState.DONE.value, "path": path, "finished_ns": service.clock()}
    try:
        with service.database.write() as session:
            work.finish(session, claim, values)
    except FencedError:
        service.objects.delete(path)
        raise


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


def without_folder(text: str, folder: Path, name: str) -> str:
    """A text for people without the folder in which files were read; `name` stands for it."""
    for place in (*sorted(folder.iterdir(), reverse=True), folder):
        if place.is_dir():
            text = text.replace(f"{place}/", "").replace(str(place), name)
    return text
