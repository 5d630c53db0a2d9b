"""Windows and attempts as the worker reads them: what is due, what is ready, what belongs to it.

Flow: `smon.store.commit` → **here** → `smon.worker.assembly`, `smon.worker.windows`,
`smon.worker.live`. Values only: rows of the database stay here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from smon.errors import FencedError, MissingError
from smon.store.models import (
    Attempt,
    EventFile,
    Job,
    Mode,
    Result,
    StepResult,
    Stream,
    TimeBase,
    Window,
    WindowKind,
    WindowState,
)
from smon.store.streams import chunks
from smon.store.work import expired
from smon.topology import Layout
from smon.wire import COUNTERS_SOURCE

#: Of an attempt, so many of its latest steps say how long one takes.
_PACE_STEPS: Final = 8

_ATTEMPT: Final = (
    *(Attempt.id, Attempt.tenant_id, Attempt.job_id, Job.name, Attempt.number),
    *(Attempt.dp, Attempt.pp, Attempt.tp, Attempt.cp, Attempt.ep, Attempt.vpp),
    *(Attempt.mode, Attempt.time_base, Attempt.window_steps, Attempt.notes),
    *(Attempt.created_ns, Attempt.last_data_ns, Attempt.ended_ns, Attempt.revision),
    *(Attempt.ready_step, Attempt.live_step),
)


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """An attempt; see `smon.store.models.Attempt`."""

    id: str
    tenant_id: str
    job_id: str
    job: str
    number: int
    layout: Layout
    mode: Mode
    time_base: TimeBase
    window_steps: int
    notes: tuple[str, ...]
    created_ns: int
    last_data_ns: int
    ended_ns: int | None
    revision: int
    ready_step: int | None
    live_step: int | None


@dataclass(frozen=True, slots=True)
class StreamState:
    """What assembly needs of a stream; `ranks` empty: not known."""

    id: str
    ranks: tuple[int, ...]
    steps_done: int | None
    ended: bool
    last_data_ns: int


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """A window; see `smon.store.models.Window`."""

    id: str
    attempt_id: str
    kind: WindowKind
    number: int
    first_step: int
    last_step: int
    rows: int
    state: WindowState
    updated_ns: int
    revision: int
    missing_count: int
    expired: bool


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of events that counts (is not replaced)."""

    id: str
    window_id: str | None
    path: str
    rows: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A window that is to be analysed, and what there is to say about it.

    Attributes
    ----------
    reason
        Why it is ready although somebody is missing; None if nobody is.
    missing
        The first of the ranks that are missing.
    """

    window_id: str
    reason: str | None = None
    missing: tuple[int, ...] = ()
    missing_count: int = 0


def _attempt_info(row: Any) -> AttemptInfo:  # noqa: ANN401  # a row of a query
    return AttemptInfo(
        id=row.id,
        tenant_id=row.tenant_id,
        job_id=row.job_id,
        job=row.name,
        number=row.number,
        layout=Layout(dp=row.dp, pp=row.pp, tp=row.tp, cp=row.cp, ep=row.ep, vpp=row.vpp),
        mode=Mode(row.mode),
        time_base=TimeBase(row.time_base),
        window_steps=row.window_steps,
        notes=tuple(str(note) for note in row.notes),
        created_ns=row.created_ns,
        last_data_ns=row.last_data_ns,
        ended_ns=row.ended_ns,
        revision=row.revision,
        ready_step=row.ready_step,
        live_step=row.live_step,
    )


#: Captures have their own rules (`smon.store.captures`).
_OF_STEPS: Final = Window.kind == WindowKind.STEPS.value

_WINDOW: Final = (
    *(Window.id, Window.attempt_id, Window.kind, Window.number),
    *(Window.first_step, Window.last_step),
    *(Window.rows, Window.state, Window.updated_ns, Window.revision, Window.missing_count),
    Window.expired_ns,
)


def _window_info(row: Any) -> WindowInfo:  # noqa: ANN401  # a row of a query
    return WindowInfo(
        id=row.id,
        attempt_id=row.attempt_id,
        kind=WindowKind(row.kind),
        number=row.number,
        first_step=row.first_step,
        last_step=row.last_step,
        rows=row.rows,
        state=WindowState(row.state),
        updated_ns=row.updated_ns,
        revision=row.revision,
        missing_count=row.missing_count,
        expired=row.expired_ns is not None,
    )


# --- assembly ---------------------------------------------------------------------------------


def attempts_under_way(session: Session, since_ns: int) -> list[tuple[str, int]]:
    """(id, revision) of attempts with open windows of ops, or with data since a time."""
    waiting = select(Window.attempt_id).where(Window.state == WindowState.OPEN, _OF_STEPS)
    found = session.execute(
        select(Attempt.id, Attempt.revision)
        .where(or_(Attempt.last_data_ns >= since_ns, Attempt.id.in_(waiting)))
        .order_by(Attempt.id)
    )
    return [(row.id, row.revision) for row in found]


def attempt(session: Session, attempt_id: str) -> AttemptInfo | None:
    """An attempt with its job's name; None if it does not exist (any more)."""
    row = session.execute(
        select(*_ATTEMPT).join(Job, Job.id == Attempt.job_id).where(Attempt.id == attempt_id)
    ).first()
    return None if row is None else _attempt_info(row)


def streams(
    session: Session, attempt_id: str, known: Mapping[str, tuple[int, ...]]
) -> list[StreamState]:
    """Streams of an attempt that bring ops; the ranks of those that are `known` are not read again.

    A stream of counters says nothing of how far anybody has come, nor that a rank is still there.
    """
    rows = session.execute(
        select(Stream.id, Stream.steps_done, Stream.ended, Stream.last_data_ns)
        .where(Stream.attempt_id == attempt_id, Stream.source != COUNTERS_SOURCE)
        .order_by(Stream.id)
    ).all()
    ranks = dict(known)
    for part in chunks(row.id for row in rows if row.id not in known):
        found = session.execute(select(Stream.id, Stream.ranks).where(Stream.id.in_(part)))
        ranks.update((row.id, tuple(row.ranks)) for row in found)
    return [
        StreamState(row.id, ranks[row.id], row.steps_done, row.ended, row.last_data_ns)
        for row in rows
    ]


def undecided(session: Session, attempt_id: str) -> list[WindowInfo]:
    """Windows of ops that are not ready, and those that became so without everybody."""
    rows = session.execute(
        select(*_WINDOW)
        .where(
            Window.attempt_id == attempt_id,
            _OF_STEPS,
            Window.state.in_((WindowState.OPEN, WindowState.READY)),
            or_(Window.state == WindowState.OPEN, Window.missing_count > 0),
        )
        .order_by(Window.number)
    )
    return [_window_info(row) for row in rows]


def last_step_seen(session: Session, attempt_id: str) -> int | None:
    """Highest step of which there is any op."""
    return session.scalar(
        select(Window.last_step)
        .where(Window.attempt_id == attempt_id, _OF_STEPS, Window.rows > 0)
        .order_by(Window.number.desc())
        .limit(1)
    )


def first_step_seen(session: Session, attempt_id: str) -> int | None:
    """Lowest step of which there is anything."""
    return session.scalar(
        select(Window.first_step)
        .where(Window.attempt_id == attempt_id, _OF_STEPS)
        .order_by(Window.number)
        .limit(1)
    )


def longest_step_s(session: Session, attempt_id: str) -> float:
    """The longest of the latest steps, as analysed; 0 if none has been."""
    latest = (
        select(StepResult.recorded_s)
        .where(StepResult.attempt_id == attempt_id, StepResult.recorded_s.is_not(None))
        .order_by(StepResult.step.desc())
        .limit(_PACE_STEPS)
        .subquery()
    )
    return float(session.scalar(select(func.max(latest.c.recorded_s))) or 0.0)


def set_ready_step(session: Session, attempt_id: str, step: int) -> bool:
    """Say that an attempt is complete up to a step; False if it was known to be."""
    changed = session.execute(
        update(Attempt)
        .where(
            Attempt.id == attempt_id,
            or_(Attempt.ready_step.is_(None), Attempt.ready_step < step),
        )
        .values(ready_step=step)
        .execution_options(synchronize_session=False)
        .returning(Attempt.id)
    )
    return changed.first() is not None


def set_ready(session: Session, ready: Ready, now: int) -> bool:
    """Let a window be analysed; False if somebody else has done that meanwhile."""
    changed = session.execute(
        update(Window)
        .where(Window.id == ready.window_id, Window.state == WindowState.OPEN)
        .values(
            state=WindowState.READY.value,
            ready_ns=now,
            lease_ns=0,
            tries=0,
            reason=ready.reason,
            missing=list(ready.missing) or None,
            missing_count=ready.missing_count,
        )
        .execution_options(synchronize_session=False)
        .returning(Window.id)
    )
    return changed.first() is not None


def set_complete(session: Session, window_id: str) -> None:
    """Nobody is missing any more in a window that waits to be analysed again."""
    session.execute(
        update(Window)
        .where(Window.id == window_id, Window.state == WindowState.READY)
        .values(reason=None, missing=None, missing_count=0)
        .execution_options(synchronize_session=False)
    )


# --- analysis ---------------------------------------------------------------------------------


def window(session: Session, window_id: str) -> WindowInfo:
    """A window.

    Raises
    ------
    MissingError
        It does not exist (any more).
    """
    row = session.execute(select(*_WINDOW).where(Window.id == window_id)).first()
    if row is None:
        raise MissingError(f"window {window_id}: it does not exist any more")
    return _window_info(row)


def files_of(session: Session, window_id: str, kind: str) -> list[FileInfo]:
    """Files of one window, in a stable order."""
    return _files(session, EventFile.window_id == window_id, EventFile.kind == kind)


def files_of_attempt(session: Session, attempt_id: str, kind: str) -> list[FileInfo]:
    """Files that belong to a whole attempt and to no window."""
    return _files(
        session,
        EventFile.attempt_id == attempt_id,
        EventFile.window_id.is_(None),
        EventFile.kind == kind,
    )


def files_of_steps(
    session: Session, attempt_id: str, kind: str, steps: tuple[int, int]
) -> list[FileInfo]:
    """Files of an attempt's windows with any of these steps, both ends included."""
    windows = select(Window.id).where(
        Window.attempt_id == attempt_id,
        _OF_STEPS,
        Window.first_step <= steps[1],
        Window.last_step >= steps[0],
    )
    return _files(
        session,
        EventFile.window_id.in_(windows),
        EventFile.kind == kind,
        EventFile.first_step <= steps[1],
        EventFile.last_step >= steps[0],
    )


def _files(session: Session, *conditions: Any) -> list[FileInfo]:  # noqa: ANN401  # SQL conditions
    rows = session.execute(
        select(
            *(EventFile.id, EventFile.window_id, EventFile.path, EventFile.rows),
            *(EventFile.first_step, EventFile.last_step),
        )
        .where(EventFile.doomed_ns.is_(None), *conditions)
        .order_by(EventFile.first_step, EventFile.created_ns, EventFile.id)
    )
    return [FileInfo(*row) for row in rows]


def earlier_reports(
    session: Session, of: AttemptInfo, before_step: int, limit: int
) -> Sequence[bytes]:
    """Reports of the windows before a step, of this attempt and of earlier ones of one layout.

    Latest first; JSON in zstd.
    """
    layout = of.layout
    same = [getattr(Attempt, name) == getattr(layout, name) for name in ("dp", "pp", "tp", "cp")]
    return session.scalars(
        select(Result.report)
        .join(Window, Window.id == Result.window_id)
        .join(Attempt, Attempt.id == Result.attempt_id)
        .where(
            Result.job_id == of.job_id,
            _OF_STEPS,
            Attempt.tenant_id == of.tenant_id,
            Attempt.mode == Mode.LIVE,
            *same,
            or_(
                Attempt.number < of.number,
                (Attempt.number == of.number) & (Window.last_step < before_step),
            ),
        )
        .order_by(Attempt.number.desc(), Window.number.desc(), Result.created_ns.desc())
        .limit(limit)
    ).all()


# --- the running diagnosis --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Follow:
    """The lease of a live attempt."""

    attempt_id: str
    owner: str
    fence: int


def live_due(
    session: Session, owner: str, now: int, lease_s: float, skip: Collection[str]
) -> str | None:
    """The live attempt with new steps that has waited longest, if no other worker follows it."""
    found = session.scalars(
        select(Attempt.id)
        .where(
            Attempt.mode == Mode.LIVE,
            Attempt.ready_step.is_not(None),
            or_(Attempt.live_step.is_(None), Attempt.live_step < Attempt.ready_step),
            or_(Attempt.live_owner == owner, expired(Attempt.live_lease_ns, now, lease_s)),
        )
        .order_by(Attempt.live_analysed_ns.is_not(None), Attempt.live_analysed_ns, Attempt.id)
        .limit(len(skip) + 1)
    )
    return next((attempt_id for attempt_id in found if attempt_id not in skip), None)


def live_claim(
    session: Session, attempt_id: str, owner: str, now: int, lease_s: float
) -> Follow | None:
    """Follow an attempt; None if somebody else does."""
    fence = session.execute(
        update(Attempt)
        .where(
            Attempt.id == attempt_id,
            or_(Attempt.live_owner == owner, expired(Attempt.live_lease_ns, now, lease_s)),
        )
        .values(
            live_owner=owner,
            live_fence=Attempt.live_fence + 1,
            live_lease_ns=now + int(lease_s * 10**9),
        )
        .execution_options(synchronize_session=False)
        .returning(Attempt.live_fence)
    ).scalar()
    return None if fence is None else Follow(attempt_id, owner, fence)


def live_update(session: Session, follow: Follow, values: Mapping[str, Any]) -> None:
    """Write to an attempt that this worker follows.

    Raises
    ------
    FencedError
        Somebody else follows it.
    """
    changed = session.execute(
        update(Attempt)
        .where(Attempt.id == follow.attempt_id, Attempt.live_fence == follow.fence)
        .values(**values)
        .execution_options(synchronize_session=False)
        .returning(Attempt.id)
    )
    if changed.first() is None:
        raise FencedError(
            f"attempt {follow.attempt_id}: another worker follows it now, so nothing is written"
        )


def hosts_of(session: Session, attempt_id: str) -> dict[int, str]:
    """Host of each global rank, as the streams of an attempt say; the latest stream counts."""
    rows = session.execute(
        select(Stream.ranks, Stream.host)
        .where(Stream.attempt_id == attempt_id, Stream.host != "")
        .order_by(Stream.created_ns)
    )
    return {int(rank): host for ranks, host in rows for rank in ranks}
