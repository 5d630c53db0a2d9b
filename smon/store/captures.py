"""Captures: windows that are made of files of ranks.

Flow: `smon.store.files` (whole files) → **here** ↔ `smon.worker.captures`, which decides what
belongs together and when to look at it. A capture is claimed and analysed as any other window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from smon.errors import MissingError
from smon.store.commit import for_change
from smon.store.files import FileInfo, file, files_of_windows, place
from smon.store.models import Attempt, FileState, SentFile, Window, WindowKind, WindowState, new_id
from smon.store.streams import layout_of
from smon.topology import Layout
from smon.wire.parts import FileFormat

#: A capture takes files until a worker has it.
_TAKES_FILES = (WindowState.OPEN.value, WindowState.READY.value)


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """A capture and its files, of which there is one at least."""

    window_id: str
    takes_files: bool
    files: tuple[FileInfo, ...]


@dataclass(frozen=True, slots=True)
class OpenCapture:
    """A capture that waits for more files.

    Attributes
    ----------
    layout
        Of its attempt.
    over
        Whether the attempt is.
    updated_ns
        When the last file came into it.
    """

    window_id: str
    layout: Layout
    over: bool
    updated_ns: int
    files: tuple[FileInfo, ...]


def lock_attempt(session: Session, attempt_id: str) -> None:
    """Let nobody else change files of an attempt before this transaction ends."""
    wanted = select(Attempt.id).where(Attempt.id == attempt_id)
    session.execute(for_change(session, wanted)).all()


def locked_file(session: Session, found: FileInfo) -> FileInfo | None:
    """A whole file as it is now, with its attempt locked; None if somebody else has placed it."""
    lock_attempt(session, found.attempt_id)
    now = file(session, found.id)
    return now if now is not None and now.state is FileState.WHOLE else None


def latest_captures(
    session: Session, attempt_id: str, format_: FileFormat, limit: int
) -> list[CaptureInfo]:
    """The newest captures of an attempt with files of one format, newest first."""
    of_format = select(SentFile.window_id).where(
        SentFile.attempt_id == attempt_id, SentFile.format == format_.value
    )
    rows = session.execute(
        select(Window.id, Window.state)
        .where(
            Window.attempt_id == attempt_id,
            Window.kind == WindowKind.CAPTURE.value,
            Window.id.in_(of_format),
        )
        .order_by(Window.number.desc())
        .limit(limit)
    ).all()
    files = _by_window(session, [row.id for row in rows])
    return [CaptureInfo(row.id, row.state in _TAKES_FILES, files[row.id]) for row in rows]


def _by_window(session: Session, ids: Sequence[str]) -> dict[str, tuple[FileInfo, ...]]:
    found: dict[str, list[FileInfo]] = {window_id: [] for window_id in ids}
    for each in files_of_windows(session, ids):
        if each.window_id is not None:
            found[each.window_id].append(each)
    return {window_id: tuple(files) for window_id, files in found.items()}


def join(session: Session, into: CaptureInfo, new: FileInfo, now: int) -> bool:
    """Put a file into a capture; False if that takes none any more."""
    first, last = steps_of((*into.files, new))
    changed = session.execute(
        update(Window)
        .where(Window.id == into.window_id, Window.state.in_(_TAKES_FILES))
        .values(first_step=first, last_step=last, updated_ns=now, revision=Window.revision + 1)
        .execution_options(synchronize_session=False)
        .returning(Window.id)
    )
    if changed.first() is None:
        return False
    place(session, new, into.window_id)
    return True


def begin(session: Session, new: FileInfo, now: int) -> str:
    """A new capture with one file; its id."""
    first, last = steps_of((new,))
    window_id = add_capture(
        session,
        {"tenant_id": new.tenant_id, "job_id": new.job_id, "attempt_id": new.attempt_id},
        (first, last),
        WindowState.OPEN,
        now,
    )
    place(session, new, window_id)
    return window_id


def add_capture(
    session: Session,
    ids: dict[str, str],
    steps: tuple[int, int],
    state: WindowState,
    now: int,
) -> str:
    """A capture of an attempt with the next free number; the attempt is locked, or nobody else's.

    Parameters
    ----------
    ids
        ``tenant_id``, ``job_id`` and ``attempt_id``.
    steps
        First and last; -1 where it is of none.
    """
    latest = session.scalar(
        select(func.max(Window.number)).where(
            Window.attempt_id == ids["attempt_id"], Window.kind == WindowKind.CAPTURE.value
        )
    )
    window_id = new_id()
    session.execute(
        insert(Window).values(
            id=window_id,
            **ids,
            kind=WindowKind.CAPTURE.value,
            number=0 if latest is None else latest + 1,
            first_step=steps[0],
            last_step=steps[1],
            rows=0,
            state=state.value,
            opened_ns=now,
            updated_ns=now,
            ready_ns=None if state is WindowState.OPEN else now,
            revision=1,
        )
    )
    return window_id


def steps_of(files: Sequence[FileInfo]) -> tuple[int, int]:
    """First and last step of some files; -1 where none knows its steps."""
    firsts = [each.first_step for each in files if each.first_step is not None]
    lasts = [each.last_step for each in files if each.last_step is not None]
    return min(firsts, default=-1), max(lasts, default=-1)


def open_captures(session: Session, limit: int) -> list[OpenCapture]:
    """Captures that wait for more files, the longest first."""
    rows = session.execute(
        select(Window.id, Window.updated_ns, Attempt)
        .join(Attempt, Attempt.id == Window.attempt_id)
        .where(Window.state == WindowState.OPEN.value, Window.kind == WindowKind.CAPTURE.value)
        .order_by(Window.updated_ns, Window.id)
        .limit(limit)
    ).all()
    files = _by_window(session, [row.id for row in rows])
    return [
        OpenCapture(
            window_id=row.id,
            layout=layout_of(row.Attempt),
            over=row.Attempt.ended_ns is not None,
            updated_ns=row.updated_ns,
            files=files[row.id],
        )
        for row in rows
    ]


def kind_of(session: Session, window_id: str) -> WindowKind:
    """What a window is analysed from.

    Raises
    ------
    MissingError
        It does not exist (any more).
    """
    kind = session.scalar(select(Window.kind).where(Window.id == window_id))
    if kind is None:
        raise MissingError(f"window {window_id}: it does not exist any more")
    return WindowKind(kind)


def has_ops(session: Session, attempt_id: str) -> bool:
    """Whether an attempt has a window of ops."""
    wanted = select(Window.id).where(
        Window.attempt_id == attempt_id, Window.kind == WindowKind.STEPS.value
    )
    return session.execute(wanted.limit(1)).first() is not None
