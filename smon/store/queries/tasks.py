"""Tasks: what the API wants a worker to compute; who asks again gets the same one.

Flow: `smon.api.routes.timeline`, `smon.api.marks` → **here** → table ``tasks`` →
`smon.worker.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Result, Task, Window, WindowKind, WorkState, new_id
from smon.store.queries.reports import latest_result_id
from smon.store.streams import insert_new

#: Version of the documents that a worker makes of a step (``smon.marks/1``).
MARKS_VERSION: Final = 1

#: Why there is no timeline of a capture.
NO_TIMELINE: Final = (
    "this window is a capture, made of files that hold no ops: there is no timeline of it"
)

#: What failed may be tried again after so long, when somebody asks again.
RETRY_NS: Final = 60 * 10**9


class TaskKind(StrEnum):
    """What a worker is to make; the value is the beginning of the key."""

    TIMELINE = "timeline"
    MARKS = "marks"


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task; `path` is where its result lies below the root of the event files."""

    id: str
    state: str
    error: str | None
    path: str | None

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self.state == WorkState.DONE and self.path is not None

    @property
    def failed(self) -> bool:
        """Whether there will be none."""
        return self.state == WorkState.FAILED


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """Which part of which window is to be drawn: actual, ideal or both.

    No workers: all of them; no steps: all of them. What is too large is bounded by the worker.
    """

    window_id: str
    kind: str
    dp: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None

    def key(self, revision: int) -> str:
        """Name of the task; another one once late data have come to the window."""
        parts = [
            TaskKind.TIMELINE.value,
            self.window_id,
            str(revision),
            self.kind,
            ",".join(map(str, self.dp)),
            ",".join(map(str, self.stage)),
            "-".join(map(str, self.steps or ())),
        ]
        return ":".join(parts)

    def options(self) -> dict[str, Any]:
        """As the worker reads them."""
        return {
            "window_id": self.window_id,
            "kind": self.kind,
            "dp": list(self.dp),
            "stage": list(self.stage),
            "steps": None if self.steps is None else list(self.steps),
        }


@dataclass(frozen=True, slots=True)
class MarksRequest:
    """One step of some workers, (dp, stage) each, for a page."""

    window_id: str
    step: int
    workers: tuple[tuple[int, int], ...]

    def key(self, version: str) -> str:
        """Name of the task; another one once there is another report of the window."""
        places = ",".join(f"{dp}.{stage}" for dp, stage in self.workers)
        return f"{TaskKind.MARKS}:{MARKS_VERSION}:{self.window_id}:{version}:{self.step}:{places}"

    def options(self) -> dict[str, Any]:
        """As the worker reads them."""
        return {
            "window_id": self.window_id,
            "step": self.step,
            "workers": [list(worker) for worker in self.workers],
        }


def window_of(session: Session, tenant_id: str, job_id: str, name: str) -> tuple[str, int]:
    """Id and revision of a window of a job, by id or as the ``latest`` analysed one.

    Raises
    ------
    MissingError
        There is none, it has no ops, or retention has removed its events.
    """
    query = select(Window).where(Window.tenant_id == tenant_id, Window.job_id == job_id)
    if name == "latest":
        query = query.join(Result, Result.window_id == Window.id).where(
            Result.id == latest_result_id(session, tenant_id, job_id)
        )
    else:
        query = query.where(Window.id == name)
    window = session.execute(query).scalar()
    if window is None:
        raise MissingError("expected the id of a window of this job")
    if window.kind == WindowKind.CAPTURE:
        raise MissingError(NO_TIMELINE)
    if window.expired_ns is not None:
        raise MissingError("the events of this window are older than is kept")
    return window.id, window.revision


def newest_window_id(session: Session, tenant_id: str, job_id: str) -> str | None:
    """Id of the ``latest`` analysed window; None if there is none."""
    query = select(Result.window_id).where(
        Result.id == latest_result_id(session, tenant_id, job_id)
    )
    return session.execute(query).scalar()


def workers_path_of(session: Session, window_id: str) -> str | None:
    """Where the file of the workers of a window lies; None without a result that has one."""
    query = (
        select(Result.workers_path)
        .where(Result.window_id == window_id, Result.workers_path.is_not(None))
        .order_by(Result.created_ns.desc())
        .limit(1)
    )
    return session.execute(query).scalar()


def ask(session: Session, tenant_id: str, key: str, options: Mapping[str, Any], now: int) -> str:
    """Id of the task with this key; it is made if there is none.

    One that failed a minute ago or more is tried again: what was in its way may be gone.
    """
    kind = key.partition(":")[0]
    session.execute(
        insert_new(session, Task).values(
            id=new_id(),
            tenant_id=tenant_id,
            key=key,
            kind=kind,
            options=dict(options),
            state=WorkState.QUEUED,
            created_ns=now,
            fence=0,
            lease_ns=0,
            tries=0,
        )
    )
    query = select(Task).where(Task.tenant_id == tenant_id, Task.key == key)
    task = session.execute(query).scalar_one()
    if task.state == WorkState.FAILED and (task.finished_ns or 0) <= now - RETRY_NS:
        retry(session, tenant_id, task.id, now)
    return task.id


def get_task(session: Session, tenant_id: str, task_id: str) -> TaskRow:
    """A task as it stands.

    Raises
    ------
    MissingError
        There is none with this id (any more).
    """
    query = select(Task).where(Task.tenant_id == tenant_id, Task.id == task_id)
    found = session.execute(query).scalar()
    if found is None:
        raise MissingError("expected the id of a task")
    return TaskRow(found.id, found.state, found.error, found.path)


def retry(session: Session, tenant_id: str, task_id: str, now: int) -> None:
    """Let a worker try a task again whose result is gone or that failed."""
    query = select(Task).where(Task.tenant_id == tenant_id, Task.id == task_id)
    found = session.execute(query.with_for_update()).scalar()
    if found is not None and found.state in (WorkState.FAILED, WorkState.DONE):
        found.state = WorkState.QUEUED
        found.error = found.path = found.finished_ns = None
        found.created_ns = now
        found.tries = 0
