"""Files of ranks that come in parts: what has come of each, and which capture it belongs to.

Flow: `smon.store.commit` (parts) → **here** → `smon.worker.captures`, which checks whole files and
gathers them. Whoever changes a file has locked its attempt, so nobody else changes one of the same
attempt meanwhile. What is not used is counted here, and its parts go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from smon.store.models import EventFile, FileDrop, FileState, SentFile, new_id
from smon.store.streams import chunks, insert_new
from smon.wire.parts import FileFormat, FilePart

#: Kind of an event file that is a part.
PART: Final = "part"

#: Files count as those of one day for so long.
DAY_NS: Final = 86_400 * 10**9

#: A file of which parts are missing for so long does not become whole: as long as an upload has.
INCOMPLETE_NS: Final = DAY_NS


class Dropped(StrEnum):
    """Why a file was not used; `FileDrop` counts them, and `smon_files_dropped_total`."""

    #: Parts of one file say different things of it.
    CONTRADICTION = "contradiction"
    #: All parts together are not what their digest says.
    DIGEST = "digest"
    #: Parts are missing for too long.
    INCOMPLETE = "incomplete"
    #: A part is not in the store any more.
    LOST = "lost"
    #: Its capture had been analysed when it came.
    LATE = "late"
    #: The attempt has sent too many files, or too many bytes in a day.
    TOO_MANY = "too-many"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one attempt may send; bytes within a day."""

    files: int
    bytes: int


#: Of whoever sends no files.
NOTHING_MORE: Final = FileLimits(0, 0)


@dataclass(frozen=True, slots=True)
class NewPart:
    """A part that has been written as an event file.

    Attributes
    ----------
    part
        What its head says; the content is in the file.
    """

    id: str
    tenant_id: str
    job_id: str
    attempt_id: str
    path: str
    bytes: int
    part: FilePart


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file; see `smon.store.models.SentFile`. `paths` are those of its parts, in order."""

    id: str
    tenant_id: str
    job_id: str
    attempt_id: str
    window_id: str | None
    state: FileState
    name: str
    format: FileFormat
    rank: int | None
    world_size: int | None
    sha256: str
    bytes: int
    first_step: int | None
    last_step: int | None
    start_ns: int | None
    end_ns: int | None
    created_ns: int
    paths: tuple[str, ...]


def key_of(part: FilePart) -> str:
    """The same file has the same key: content, rank and name."""
    return f"{part.sha256}:{'' if part.rank is None else part.rank}:{part.name}"


# --- parts come ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of some parts.

    Attributes
    ----------
    spare
        Paths that no row refers to: parts that were there already, or whose file was dropped.
    dropped
        Reasons of the files that were.
    """

    spare: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def take(session: Session, parts: Sequence[NewPart], limits: FileLimits, now: int) -> Taken:
    """Make parts known; the attempts are locked, and the caller commits."""
    spare: list[str] = []
    dropped: list[Dropped] = []
    kept: list[NewPart] = []
    by_file: dict[tuple[str, str], list[NewPart]] = defaultdict(list)
    for part in parts:
        by_file[part.attempt_id, key_of(part.part)].append(part)
    for (attempt_id, key), group in sorted(by_file.items()):
        row = _row(session, attempt_id, key)
        reason = None
        if row is None and not _has_room(session, attempt_id, group[0].part, limits, now):
            reason = Dropped.TOO_MANY
        elif any(_contradicts(group[0].part if row is None else row, one.part) for one in group):
            reason = Dropped.CONTRADICTION
        if reason is not None:
            dropped.append(reason)
            spare += [one.path for one in group]
            # What is in a capture has been checked: the part that says otherwise is wrong.
            if row is not None and row.state != FileState.PLACED:
                spare += drop_rows(session, attempt_id, [row.id])
            count_drop(session, group[0], group[0].part.name, reason, now)
            continue
        more = _add(session, row, group, now)
        kept += more
        spare += [one.path for one in group if one not in more]
    _add_event_files(session, kept, now)
    return Taken(tuple(spare), tuple(dropped))


def _row(session: Session, attempt_id: str, key: str) -> Any:  # noqa: ANN401  # a row of a query
    query = select(
        *(SentFile.id, SentFile.have, SentFile.state, SentFile.parts),
        *(getattr(SentFile, name) for name in _DESCRIPTION),
    ).where(SentFile.attempt_id == attempt_id, SentFile.key == key)
    return session.execute(query).one_or_none()


#: What all parts of a file say of it, besides what is in its key.
_DESCRIPTION: Final = (
    *("format", "world_size", "bytes", "parts"),
    *("first_step", "last_step", "start_ns", "end_ns"),
)


def _contradicts(known: Any, part: FilePart) -> bool:  # noqa: ANN401  # a row, or another part
    return any(getattr(known, name) != getattr(part, name) for name in _DESCRIPTION)


def _has_room(
    session: Session, attempt_id: str, part: FilePart, limits: FileLimits, now: int
) -> bool:
    mine = SentFile.attempt_id == attempt_id
    today = func.coalesce(func.sum(SentFile.bytes).filter(SentFile.created_ns > now - DAY_NS), 0)
    files, held = session.execute(select(func.count(), today).where(mine)).one()
    return files < limits.files and int(held) + part.bytes <= limits.bytes


def _add(
    session: Session,
    row: Any,  # noqa: ANN401  # a row of a query, or None
    group: Sequence[NewPart],
    now: int,
) -> list[NewPart]:
    """Add parts to their file, which is made if need be; those that were new."""
    have: dict[int, str] = {} if row is None else dict(row.have)
    more: list[NewPart] = []
    for one in group:
        if one.part.part not in have:
            have[one.part.part] = one.path
            more.append(one)
    part = group[0].part
    whole = len(have) == part.parts
    state = FileState.WHOLE if whole else FileState.GATHERING
    listed = [[number, have[number]] for number in sorted(have)]
    if row is None:
        values = {**_new(group[0], now), "state": state.value, "have": listed}
        session.execute(insert(SentFile).values(**values))
    elif more:
        session.execute(
            update(SentFile)
            .where(SentFile.id == row.id)
            .values(state=state.value, have=listed)
            .execution_options(synchronize_session=False)
        )
    return more


def _new(one: NewPart, now: int) -> dict[str, Any]:
    part = one.part
    return {
        "id": new_id(),
        "tenant_id": one.tenant_id,
        "job_id": one.job_id,
        "attempt_id": one.attempt_id,
        "key": key_of(part),
        "name": part.name,
        "rank": part.rank,
        "sha256": part.sha256,
        **{name: getattr(part, name) for name in _DESCRIPTION},
        "created_ns": now,
    }


def _add_event_files(session: Session, parts: Sequence[NewPart], now: int) -> None:
    rows = [
        {
            "id": one.id,
            "tenant_id": one.tenant_id,
            "job_id": one.job_id,
            "attempt_id": one.attempt_id,
            "window_id": None,
            "kind": PART,
            "path": one.path,
            "rows": 1,
            "bytes": one.bytes,
            "first_step": -1 if one.part.first_step is None else one.part.first_step,
            "last_step": -1 if one.part.last_step is None else one.part.last_step,
            "created_ns": now,
        }
        for one in parts
    ]
    if rows:
        session.execute(insert(EventFile), rows)


# --- files go -----------------------------------------------------------------------------------


def drop_rows(session: Session, attempt_id: str, ids: Iterable[str]) -> list[str]:
    """Remove files and the rows of their parts; paths of these, which go once this is committed."""
    wanted = list(ids)
    found = session.execute(
        select(SentFile.have).where(SentFile.attempt_id == attempt_id, SentFile.id.in_(wanted))
    )
    paths = [str(path) for have in found.scalars() for _, path in have]
    for part in chunks(paths):
        session.execute(
            delete(EventFile)
            .where(EventFile.path.in_(part))
            .execution_options(synchronize_session=False)
        )
    session.execute(
        delete(SentFile)
        .where(SentFile.attempt_id == attempt_id, SentFile.id.in_(wanted))
        .execution_options(synchronize_session=False)
    )
    return paths


def count_drop(
    session: Session, of: NewPart | FileInfo, name: str, reason: Dropped, now: int
) -> None:
    """Note that a file of an attempt is not used."""
    place = {"attempt_id": of.attempt_id, "reason": reason.value}
    ids = {"tenant_id": of.tenant_id, "job_id": of.job_id}
    session.execute(
        insert_new(session, FileDrop).values(**place, **ids, files=0, name=name, last_ns=now)
    )
    session.execute(
        update(FileDrop)
        .where(FileDrop.attempt_id == of.attempt_id, FileDrop.reason == reason.value)
        .values(files=FileDrop.files + 1, name=name, last_ns=now)
        .execution_options(synchronize_session=False)
    )


# --- reading ------------------------------------------------------------------------------------

_FILE_FIELDS: Final = (*(each.name for each in fields(FileInfo) if each.name != "paths"), "paths")
_FILE: Final = (*(getattr(SentFile, name) for name in _FILE_FIELDS[:-1]), SentFile.have)


def _info(row: Any) -> FileInfo:  # noqa: ANN401  # a row of a query
    known = dict(zip(_FILE_FIELDS, row, strict=True))
    paths = tuple(str(path) for _, path in sorted(row.have))
    states = {"state": FileState(row.state), "format": FileFormat(row.format), "paths": paths}
    return FileInfo(**{**known, **states})


def file(session: Session, file_id: str) -> FileInfo | None:
    """A file; None if it is gone."""
    row = session.execute(select(*_FILE).where(SentFile.id == file_id)).one_or_none()
    return None if row is None else _info(row)


def whole_files(session: Session, limit: int) -> list[FileInfo]:
    """Files of which all parts have come and that are in no capture, oldest first."""
    query = (
        select(*_FILE)
        .where(SentFile.state == FileState.WHOLE)
        .order_by(SentFile.created_ns, SentFile.id)
        .limit(limit)
    )
    return [_info(row) for row in session.execute(query)]


def incomplete_files(session: Session, before_ns: int, limit: int) -> list[FileInfo]:
    """Files of which parts are still missing, though the first came before a time."""
    query = (
        select(*_FILE)
        .where(SentFile.state == FileState.GATHERING, SentFile.created_ns < before_ns)
        .order_by(SentFile.created_ns, SentFile.id)
        .limit(limit)
    )
    return [_info(row) for row in session.execute(query)]


def files_of_windows(session: Session, window_ids: Sequence[str]) -> list[FileInfo]:
    """Files of some captures, by rank."""
    query = (
        select(*_FILE)
        .where(SentFile.window_id.in_(window_ids))
        .order_by(SentFile.rank, SentFile.name, SentFile.id)
    )
    return [_info(row) for row in session.execute(query)]


def place(session: Session, file: FileInfo, window_id: str) -> None:
    """Put a file into a capture."""
    session.execute(
        update(SentFile)
        .where(SentFile.id == file.id)
        .values(state=FileState.PLACED.value, window_id=window_id)
        .execution_options(synchronize_session=False)
    )
    session.execute(
        update(EventFile)
        .where(EventFile.path.in_(file.paths))
        .values(window_id=window_id)
        .execution_options(synchronize_session=False)
    )
