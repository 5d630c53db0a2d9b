"""Streams: who sends what of which job attempt, and what of it has come.

Flow: hello and heartbeat of an agent → **here** → `smon.ingest`, which asks for the streams that it
serves. What has come is written by `smon.store.commit` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from sqlalchemy import Row, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import Session

from smon.config import Settings
from smon.errors import ConflictError
from smon.store.models import (
    Attempt,
    Base,
    ClockSample,
    Coverage,
    Job,
    Mode,
    Stream,
    TimeBase,
    new_id,
    new_uuid,
)
from smon.topology import Layout

#: An offset of a clock that is newer than this makes another one needless: drift is some 10 ppm.
CLOCK_PAUSE_NS: Final = 30 * 10**9

#: Source of streams that have files of ranks, and no ops.
_FILES: Final = "files"

#: Parameters of one statement: SQLite takes 32,766.
_CHUNK: Final = 2_000

Ranges = tuple[tuple[int, int], ...]


class LayoutConflictError(ConflictError):
    """The job attempt is known with another layout, mode or time base."""


class StaleEpochError(ConflictError):
    """The stream is in a later epoch than the one that is asked for."""


class KeyConflictError(ConflictError):
    """The key belongs to a stream of another job attempt."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """All that ingest needs to know of a stream.

    Attributes
    ----------
    window_steps
        Steps of a window of its attempt; 0: the whole attempt is window 0.
    ranks
        Global ranks that it delivers; empty: not known.
    covered
        Ranges of sequence numbers that are stored, both ends included, by epoch.
    next_seq
        First sequence number of the present epoch that is not stored.
    """

    id: str
    tenant_id: str
    job_id: str
    attempt_id: str
    host: str
    epoch: int
    layout: Layout
    mode: Mode
    time_base: TimeBase
    window_steps: int
    ranks: tuple[int, ...]
    ended: bool
    covered: dict[int, Ranges]
    next_seq: int


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A stream as its producer describes it in the hello.

    Attributes
    ----------
    key
        Chosen by the producer: who asks again with it gets the same stream.
    window_steps
        None: the server decides.
    notes
        Sentences about the source, for the report.
    """

    key: str
    job: str
    attempt: int
    layout: Layout
    mode: Mode
    time_base: TimeBase
    window_steps: int | None
    host: str
    source: str
    ranks: tuple[int, ...]
    epoch: int
    notes: tuple[str, ...] = ()


def register(
    session: Session, tenant_id: str, request: StreamRequest, settings: Settings, now: int
) -> StreamInfo:
    """The stream of a request; it, its job and its attempt are made if need be.

    The same request again answers the same. A higher epoch moves the stream to it and opens it
    again. The first request for an attempt decides about `window_steps`. An attempt that is new
    ends the earlier ones of its job.

    Raises
    ------
    LayoutConflictError
        The attempt is known with another layout, mode or time base.
    StaleEpochError
        The stream is in a later epoch.
    KeyConflictError
        The key is that of a stream of another job attempt.
    """
    job_id = _job(session, tenant_id, request.job, now)
    attempt = _attempt(session, tenant_id, job_id, request, settings, now)
    _settle_layout(session, attempt, request)
    _check_attempt(attempt, request)
    stream = _stream(session, attempt, request, now)
    if stream.attempt_id != attempt.id:
        raise KeyConflictError(
            "expected a new key for a stream of another job attempt, found one in use: make the "
            "spool anew"
        )
    if request.epoch < stream.epoch:
        raise StaleEpochError(
            f"expected epoch {stream.epoch} or a later one, found {request.epoch}: another process "
            "sends this stream"
        )
    _follow(session, stream, attempt, request, now)
    found = find(session, tenant_id, stream.id)
    if found is None:
        raise ConflictError("the stream was removed in the same moment: ask again")
    return found


def find(session: Session, tenant_id: str, stream_id: str) -> StreamInfo | None:
    """A stream of this tenant by its id; None if there is none."""
    row = session.execute(
        select(Stream, Attempt)
        .join(Attempt, Attempt.id == Stream.attempt_id)
        .where(Stream.id == stream_id, Stream.tenant_id == tenant_id)
        .execution_options(populate_existing=True)
    ).one_or_none()
    if row is None:
        return None
    stream, attempt = row
    covered = {
        epoch: tuple((first, last) for first, last in ranges)
        for epoch, ranges in session.execute(
            select(Coverage.epoch, Coverage.ranges).where(Coverage.stream_id == stream_id)
        )
    }
    return StreamInfo(
        id=stream.id,
        tenant_id=stream.tenant_id,
        job_id=stream.job_id,
        attempt_id=stream.attempt_id,
        host=stream.host,
        epoch=stream.epoch,
        layout=layout_of(attempt),
        mode=Mode(attempt.mode),
        time_base=TimeBase(attempt.time_base),
        window_steps=attempt.window_steps,
        ranks=tuple(stream.ranks),
        ended=stream.ended,
        covered=covered,
        next_seq=next_seq(covered.get(stream.epoch, ())),
    )


def heartbeat(
    session: Session,
    tenant_id: str,
    stream_id: str,
    document: dict[str, Any],
    clock: tuple[int, int] | None,
    now: int,
) -> bool:
    """Note that the agent of a stream is alive; False if this tenant has no such stream.

    Parameters
    ----------
    document
        What the agent says of itself and of the stream, as JSON.
    clock
        (offset to the server's clock, its error), ns.
    """
    done = session.execute(
        update(Stream)
        .where(Stream.id == stream_id, Stream.tenant_id == tenant_id)
        .values(heartbeat_ns=now, heartbeat=document)
        .execution_options(synchronize_session=False)
        .returning(Stream.id)
    )
    if done.first() is None:
        return False
    if clock is not None:
        add_clock_samples(session, [(stream_id, now, *clock)])
    return True


def count_open(session: Session, tenant_id: str) -> int:
    """Streams of this tenant that have not ended, of attempts that have not ended."""
    return int(
        session.scalar(
            select(func.count())
            .select_from(Stream)
            .join(Attempt, Attempt.id == Stream.attempt_id)
            .where(
                Stream.tenant_id == tenant_id, Stream.ended.is_(False), Attempt.ended_ns.is_(None)
            )
        )
        or 0
    )


def add_clock_samples(session: Session, samples: Sequence[tuple[str, int, int, int]]) -> None:
    """Keep offsets of agents' clocks: (stream, time, offset, error), ns.

    Of each stream one in half a minute is enough; the others are passed over.
    """
    latest = {stream: (at, offset, error) for stream, at, offset, error in samples}
    if not latest:
        return
    times = [at for at, _, _ in latest.values()]
    known: dict[str, list[int]] = {}
    for part in chunks(sorted(latest)):
        rows = session.execute(
            select(ClockSample.stream_id, ClockSample.at_ns).where(
                ClockSample.stream_id.in_(part),
                ClockSample.at_ns > min(times) - CLOCK_PAUSE_NS,
                ClockSample.at_ns < max(times) + CLOCK_PAUSE_NS,
            )
        )
        for stream, at in rows:
            known.setdefault(stream, []).append(at)
    fresh = [
        {"stream_id": stream, "at_ns": at, "offset_ns": offset, "error_ns": error}
        for stream, (at, offset, error) in sorted(latest.items())
        if all(abs(at - other) >= CLOCK_PAUSE_NS for other in known.get(stream, ()))
    ]
    if fresh:
        session.execute(insert_new(session, ClockSample), fresh)


def layout_of(attempt: Attempt) -> Layout:
    """The parallel layout of an attempt."""
    return Layout(
        dp=attempt.dp,
        pp=attempt.pp,
        tp=attempt.tp,
        cp=attempt.cp,
        ep=attempt.ep,
        vpp=attempt.vpp,
    )


def next_seq(ranges: Sequence[Sequence[int]]) -> int:
    """First number from 0 that ascending ranges do not cover."""
    return ranges[0][1] + 1 if ranges and ranges[0][0] == 0 else 0


def chunks(values: Iterable[Any], size: int = _CHUNK) -> Iterable[list[Any]]:
    """Lists of at most `size`: a statement takes a bounded number of parameters."""
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


def insert_new(session: Session, table: type[Base]) -> Any:  # noqa: ANN401  # Insert of either dialect
    """An INSERT that passes over rows that are there already, also if somebody adds them now."""
    insert = sqlite_insert if session.get_bind().dialect.name == "sqlite" else postgres_insert
    return insert(table).on_conflict_do_nothing()


def _job(session: Session, tenant_id: str, name: str, now: int) -> str:
    wanted = select(Job.id).where(Job.tenant_id == tenant_id, Job.name == name)
    found = session.scalar(wanted)
    if found is None:
        values = {
            "id": new_id(),
            "tenant_id": tenant_id,
            "name": name,
            "created_ns": now,
            "last_data_ns": now,
            "pinned": False,
        }
        session.execute(insert_new(session, Job).values(**values))
        found = session.scalars(wanted).one()
    return found


def _attempt(
    session: Session,
    tenant_id: str,
    job_id: str,
    request: StreamRequest,
    settings: Settings,
    now: int,
) -> Attempt:
    wanted = (
        select(Attempt)
        .where(Attempt.job_id == job_id, Attempt.number == request.attempt)
        .execution_options(populate_existing=True)
    )
    found = session.scalars(wanted).one_or_none()
    if found is not None:
        return found
    layout = request.layout
    values = {
        "id": new_id(),
        "tenant_id": tenant_id,
        "job_id": job_id,
        "number": request.attempt,
        **{name: getattr(layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")},
        "mode": request.mode.value,
        "time_base": request.time_base.value,
        "window_steps": _window_steps(request, settings),
        "notes": list(request.notes),
        "created_ns": now,
        "last_data_ns": now,
        "revision": 0,
        "live_fence": 0,
        "live_lease_ns": 0,
    }
    session.execute(insert_new(session, Attempt).values(**values))
    session.execute(
        update(Attempt)
        .where(
            Attempt.job_id == job_id, Attempt.number < request.attempt, Attempt.ended_ns.is_(None)
        )
        .values(ended_ns=now, end_reason=f"attempt {request.attempt} began")
        .execution_options(synchronize_session=False)
    )
    return session.scalars(wanted).one()


def _window_steps(request: StreamRequest, settings: Settings) -> int:
    if request.window_steps is not None:
        return request.window_steps
    return settings.window_steps if request.mode is Mode.LIVE else 0


def _settle_layout(session: Session, attempt: Attempt, request: StreamRequest) -> None:
    """Believe a stream that knows the layout better than all before it, which are of files alone.

    Whoever ships files often knows no more than how many ranks there are, or not even that.
    """
    known, asked = layout_of(attempt), request.layout
    better = known != asked and _is_flat(known) and asked.world_size >= known.world_size
    sources = select(Stream.source).where(Stream.attempt_id == attempt.id)
    if better and set(session.scalars(sources)) == {_FILES}:
        for name in ("dp", "pp", "tp", "cp", "ep", "vpp"):
            setattr(attempt, name, getattr(asked, name))
        session.flush()


def _is_flat(layout: Layout) -> bool:
    return layout == Layout(dp=layout.dp, pp=1)


def _check_attempt(attempt: Attempt, request: StreamRequest) -> None:
    known = (layout_of(attempt), Mode(attempt.mode), TimeBase(attempt.time_base))
    asked = (request.layout, request.mode, request.time_base)
    if request.source == _FILES and _is_flat(request.layout):
        asked = (known[0], *asked[1:])
    if known != asked:
        shown, found = (f"{layout}, {mode}, {time} time" for layout, mode, time in (known, asked))
        raise LayoutConflictError(
            f"attempt {attempt.number} is known with {shown}; found {found}: give a restarted job "
            "a new attempt number"
        )


def _stream(session: Session, attempt: Attempt, request: StreamRequest, now: int) -> Row[Any]:
    """(id, attempt_id, epoch, ended, ranks) of the stream with this key, made if need be."""
    wanted = select(Stream.id, Stream.attempt_id, Stream.epoch, Stream.ranks).where(
        Stream.tenant_id == attempt.tenant_id, Stream.key == request.key
    )
    if session.get_bind().dialect.name != "sqlite":
        wanted = wanted.with_for_update(key_share=True)
    found = session.execute(wanted).one_or_none()
    if found is None:
        values = {
            "id": new_uuid(),
            "tenant_id": attempt.tenant_id,
            "job_id": attempt.job_id,
            "attempt_id": attempt.id,
            "key": request.key,
            "host": request.host,
            "source": request.source,
            "ranks": list(request.ranks),
            "epoch": request.epoch,
            "ended": False,
            "events": 0,
            "lost_events": 0,
            "created_ns": now,
            "last_data_ns": now,
        }
        session.execute(insert_new(session, Stream).values(**values))
        _reopen(session, attempt)
        found = session.execute(wanted).one()
    return found


def _follow(
    session: Session, stream: Row[Any], attempt: Attempt, request: StreamRequest, now: int
) -> None:
    """Take over what a later request says differently."""
    changes: dict[str, Any] = {}
    if request.epoch > stream.epoch:
        changes |= {"epoch": request.epoch, "ended": False, "end_reason": None, "last_data_ns": now}
    if request.ranks and list(request.ranks) != stream.ranks:
        changes["ranks"] = list(request.ranks)
    if changes:
        session.execute(
            update(Stream)
            .where(Stream.id == stream.id)
            .values(**changes)
            .execution_options(synchronize_session=False)
        )
    if "epoch" in changes:
        _reopen(session, attempt)


#: Why an attempt ended, if its streams did.
ALL_ENDED: Final = "all streams ended"

#: Why it ended, if its agents went silent; it goes on as soon as one of them sends.
LOST: Final = "nothing is heard of it"


def _reopen(session: Session, attempt: Attempt) -> None:
    """An attempt goes on if its streams had ended or were lost, and one more comes."""
    session.execute(
        update(Attempt)
        .where(Attempt.id == attempt.id, Attempt.end_reason.in_((ALL_ENDED, LOST)))
        .values(ended_ns=None, end_reason=None)
        .execution_options(synchronize_session=False)
    )


def end_lost(session: Session, before_ns: int, now_ns: int) -> list[str]:
    """End the live attempts of which nothing has been heard since; their ids.

    A machine that is switched off sends no END. Its findings would stay open, and its last figures
    would be those of a running job, for ever.
    """
    heard = (
        select(Stream.id)
        .where(
            Stream.attempt_id == Attempt.id,
            or_(
                Stream.heartbeat_ns >= before_ns,
                Stream.last_data_ns >= before_ns,
                Stream.created_ns >= before_ns,
            ),
        )
        .exists()
    )
    ended = session.scalars(
        update(Attempt)
        .where(
            Attempt.mode == Mode.LIVE,
            Attempt.ended_ns.is_(None),
            Attempt.created_ns < before_ns,
            Attempt.last_data_ns < before_ns,
            ~heard,
        )
        .values(ended_ns=now_ns, end_reason=LOST)
        .execution_options(synchronize_session=False)
        .returning(Attempt.id)
    )
    return list(ended)
