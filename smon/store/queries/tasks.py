"""Tasks: what the API wants a worker to compute; who asks again gets the same one.

Flow: `smon.api.routes.timeline` → **here** → table ``tasks`` → `smon.worker.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.models import Result, Task, Window, WorkState, new_id
from smon.store.streams import insert_new


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task; `path` is where its result lies below the root of the event files."""

    id: str
    state: str
    error: str | None
    path: str | None


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """Which part of which window is to be drawn: actual or ideal; no workers: all of them."""

    window_id: str
    kind: str
    dp: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()

    def key(self, revision: int) -> str:
        """Name of the task; another one once late data have come to the window."""
        places = ",".join(map(str, self.dp)), ",".join(map(str, self.stage))
        return f"timeline:{self.window_id}:{revision}:{self.kind}:{places[0]}:{places[1]}"

    def options(self) -> dict[str, Any]:
        """As the worker reads them."""
        return {
            "window_id": self.window_id,
            "kind": self.kind,
            "dp": list(self.dp),
            "stage": list(self.stage),
        }


def window_of(session: Session, tenant_id: str, job_id: str, name: str) -> tuple[str, int]:
    """Id and revision of a window of a job, by id or as the ``latest`` analysed one.

    Raises
    ------
    MissingError
        There is none, or retention has removed its events.
    """
    query = select(Window).where(Window.tenant_id == tenant_id, Window.job_id == job_id)
    if name == "latest":
        query = (
            query.join(Result, Result.window_id == Window.id)
            .order_by(Result.created_ns.desc())
            .limit(1)
        )
    else:
        query = query.where(Window.id == name)
    window = session.execute(query).scalar()
    if window is None:
        raise MissingError("expected the id of a window of this job")
    if window.expired_ns is not None:
        raise MissingError("the events of this window are older than is kept")
    return window.id, window.revision


def ask(session: Session, tenant_id: str, key: str, options: Mapping[str, Any], now: int) -> str:
    """Id of the task with this key; it is made if there is none, and made anew if it failed."""
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
    return session.execute(query).scalar_one().id


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
