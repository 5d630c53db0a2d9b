"""Work that is shared out as rows: windows, imports, tasks, notices; one worker at a time has each.

Flow: `smon.worker.loop`, `smon.notify` → **here** → the table of that work. A claim is a
lease with a fence: a worker that is silent for longer than its lease loses the row to another one,
whose fence is higher, and whatever the first one still wants to write is refused
(``docs/reference/windows.md`` section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from smon.errors import FencedError
from smon.store.models import Attempt, Import, Mode, Notice, Task, Window, WindowState, WorkState

#: A table of work.
Work = type[Window] | type[Import] | type[Task] | type[Notice]

#: A window that has been analysed before waits until its late data have been silent for so long.
SETTLE_NS: Final = 2 * 10**9

_NS: Final = 10**9


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms rows are claimed.

    Attributes
    ----------
    lease_s
        Silence after which somebody else may take the row over.
    max_tries
        Claims after which a row that never got finished is given up.
    """

    lease_s: float
    max_tries: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A row that this worker has, until its lease runs out.

    Attributes
    ----------
    fence
        Grows with every claim of the row: an older one is worth nothing.
    tries
        How often the row has been claimed since it became ready, this time included.
    """

    work: Work
    id: str
    owner: str
    fence: int
    tries: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a table of work names its states."""

    waiting: str
    busy: str
    failed: str
    error: str


_WINDOWS: Final = _Kind(WindowState.READY, WindowState.CLAIMED, WindowState.FAILED, "reason")
_OTHERS: Final = _Kind(WorkState.QUEUED, WorkState.RUNNING, WorkState.FAILED, "error")


def _kind(work: Work) -> _Kind:
    return _WINDOWS if work is Window else _OTHERS


def claim(
    session: Session,
    work: Work,
    owner: str,
    now: int,
    terms: Terms,
    *only: ColumnElement[bool],
) -> Claim | None:
    """Take the next row that waits, or whose worker has been silent for too long; None if none.

    Live windows go before recorded ones, then the oldest first. A row that has been claimed too
    often fails, with a reason, and the next one is taken. The session must be of
    `smon.store.database.Database.write`.

    Parameters
    ----------
    only
        Conditions on the rows that are taken; by default all of the table.
    """
    while True:
        row = session.execute(_next(session, work, now, terms).where(*only)).first()
        if row is None:
            return None
        if row.tries < terms.max_tries:
            mine = Claim(work, row.id, owner, row.fence + 1, row.tries + 1)
            _change(session, work, row.id, _taken(mine, now, terms))
            return mine
        _change(session, work, row.id, _given_up(work, row.tries, now))


def _taken(claimed: Claim, now: int, terms: Terms) -> dict[str, Any]:
    return {
        "state": _kind(claimed.work).busy,
        "owner": claimed.owner,
        "fence": claimed.fence,
        "tries": claimed.tries,
        "lease_ns": now + int(terms.lease_s * _NS),
    }


def _given_up(work: Work, tries: int, now: int) -> dict[str, Any]:
    reason = (
        f"given up after {tries} tries: every worker that took it stopped before it was done, "
        "perhaps for lack of memory"
    )
    return _failure(work, reason, now)


def _failure(work: Work, reason: str, now: int) -> dict[str, Any]:
    kind = _kind(work)
    values: dict[str, Any] = {"state": kind.failed, kind.error: reason, "lease_ns": 0}
    if work is Window:
        return {**values, "analysed_revision": Window.revision}
    return {**values, "finished_ns": now}


def expired(lease_ns: InstrumentedAttribute[int], now: int, lease_s: float) -> ColumnElement[bool]:
    """Whether a lease has run out.

    So has one that ends later than any can: the clock was set back since, and whoever has it would
    have renewed it.
    """
    return or_(lease_ns <= now, lease_ns > now + int(2 * lease_s * _NS))


def _next(session: Session, work: Work, now: int, terms: Terms) -> Select[Any]:
    """The row that is to be taken next, locked; rows that others are looking at are passed over."""
    kind = _kind(work)
    # A lease of a row that waits is a pause before the next try.
    due = or_(
        and_(work.state == kind.waiting, work.lease_ns <= now),
        and_(work.state == kind.busy, expired(work.lease_ns, now, terms.lease_s)),
    )
    columns: Any = (work.id, work.fence, work.tries)
    wanted: Select[Any] = select(*columns).limit(1)
    if work is Window:
        settled = or_(
            Window.analysed_revision.is_(None),
            Window.updated_ns <= now - SETTLE_NS,
            Window.state == kind.busy,
        )
        recorded = case((Attempt.mode == Mode.RECORDED, 1), else_=0)
        wanted = (
            wanted.join(Attempt, Attempt.id == Window.attempt_id)
            .where(due, settled)
            .order_by(recorded, Window.ready_ns, Window.number, Window.id)
        )
    else:
        wanted = wanted.where(due).order_by(_created(work), work.id)
    if session.get_bind().dialect.name == "sqlite":
        return wanted
    return wanted.with_for_update(skip_locked=True, of=work)


def _created(work: Work) -> InstrumentedAttribute[int]:
    if work is Notice:
        return Notice.created_ns
    return Import.created_ns if work is Import else Task.created_ns


def renew(session: Session, claimed: Claim, now: int, lease_s: float) -> None:
    """Prolong the lease.

    Raises
    ------
    FencedError
        Somebody else has the row.
    """
    _change_mine(session, claimed, {"lease_ns": now + int(lease_s * _NS)})


def holds(session: Session, claimed: Claim) -> bool:
    """Whether this claim still holds."""
    return session.execute(select(claimed.work.id).where(*_held(claimed))).first() is not None


def progress(session: Session, claimed: Claim, values: Mapping[str, Any]) -> None:
    """Write how far a row has come.

    Raises
    ------
    FencedError
        Somebody else has the row.
    """
    _change_mine(session, claimed, dict(values))


def finish(session: Session, claimed: Claim, values: Mapping[str, Any]) -> None:
    """End a claim with success, in the transaction that writes what came of it.

    Parameters
    ----------
    values
        Columns to set; the state among them. The next claim begins to count tries anew.

    Raises
    ------
    FencedError
        Somebody else has the row: nothing of this transaction may be kept.
    """
    _change_mine(session, claimed, {"lease_ns": 0, "tries": 0, **values})


def fail(session: Session, claimed: Claim, reason: str, now: int) -> None:
    """End a claim without success, for good; a window becomes ready again with new data.

    Raises
    ------
    FencedError
        Somebody else has the row.
    """
    _change_mine(session, claimed, _failure(claimed.work, reason, now))


def release(session: Session, claimed: Claim, *, not_before_ns: int, counts: bool) -> None:
    """Give a row back, to be claimed by anybody from a time on.

    Parameters
    ----------
    counts
        Whether this was a try at it.

    Raises
    ------
    FencedError
        Somebody else has the row.
    """
    tries = claimed.tries if counts else claimed.tries - 1
    values = {"state": _kind(claimed.work).waiting, "lease_ns": not_before_ns, "tries": tries}
    _change_mine(session, claimed, values)


def _change(session: Session, work: Work, row_id: str, values: Mapping[str, Any]) -> None:
    session.execute(
        update(work)
        .where(work.id == row_id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )


def _change_mine(session: Session, claimed: Claim, values: Mapping[str, Any]) -> None:
    """Change the row if this claim still holds; the check and the change are one statement."""
    work = claimed.work
    changed = session.execute(
        update(work)
        .where(*_held(claimed))
        .values(**values)
        .execution_options(synchronize_session=False)
        .returning(work.id)
    )
    if changed.first() is None:
        raise FencedError(
            f"{work.__tablename__} {claimed.id}: another worker has taken over from "
            f"{claimed.owner}, so nothing is written"
        )


def _held(claimed: Claim) -> tuple[ColumnElement[bool], ...]:
    work = claimed.work
    return (
        work.id == claimed.id,
        work.fence == claimed.fence,
        work.state == _kind(work).busy,
    )
