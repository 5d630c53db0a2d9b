"""How far the numbers of an attempt can be trusted: what is missing, left out, lost, not in step.

Flow: `smon.store.models` → **here** → the page of the data quality, REST. All lists are bounded,
the worst first; counts are of everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import String, case, cast, func, or_, select
from sqlalchemy.orm import Session

from smon.store.models import ClockSample, Coverage, FileDrop, StepResult, Stream

#: Reasons, clocks, streams and gaps that are shown.
MAX_REASONS: Final = 20
MAX_CLOCKS: Final = 200
MAX_STREAMS: Final = 200
MAX_GAPS: Final = 50

#: Different reasons, places and counts included, that are looked at.
_MAX_TEXTS: Final = 2000
_MAX_EXAMPLES: Final = 3

#: Clocks are compared by the probes of the last hour before the newest.
_CLOCK_NS: Final = 3600 * 10**9

#: Where a step was damaged, and how many more replicas were: the rest is the reason.
_PLACE: Final = re.compile(r"^DP rank \d+(?: stage \d+)?: ")
_MORE: Final = re.compile(r" \(and \d+ more replicas\)$")


@dataclass(frozen=True, slots=True)
class SkipReason:
    """Why steps were left out: how many, which, and a few of the reasons word by word."""

    reason: str
    steps: int
    first_step: int
    last_step: int
    examples: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of an attempt: all that are known, and those left out, most frequent reason first."""

    steps: int
    skipped: int
    reasons: tuple[SkipReason, ...]


@dataclass(frozen=True, slots=True)
class ClockRow:
    """The clock of one host against the server's, as its agents probed it in the last hour.

    Attributes
    ----------
    ahead_s
        By how much it was ahead of the server's at the last probe; negative: behind.
    error_s
        By how much that may be wrong.
    drift_s
        Between the lowest and the highest offset.
    """

    host: str
    ahead_s: float
    error_s: float
    drift_s: float
    probes: int
    last_s: float


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Streams of an attempt taken together."""

    streams: int
    ended: int
    down: int
    events: int
    lost_events: int
    spool_bytes: int


@dataclass(frozen=True, slots=True)
class DropRow:
    """Events that agents dropped for one reason, as of their last heartbeats."""

    reason: str
    events: int
    streams: int


@dataclass(frozen=True, slots=True)
class FileDropRow:
    """Files of ranks that came and were not used for one reason, and the last of them."""

    reason: str
    files: int
    name: str
    last_s: float


@dataclass(frozen=True, slots=True)
class GapRow:
    """Batches of a stream that are not there.

    Attributes
    ----------
    holes
        Numbers that are missing between those that have come; the first few of `holes_count`.
    awaited
        Numbers that the agent gave up because the server lacked what it had acknowledged; another
        server may still have them in its log.
    """

    host: str
    source: str
    epoch: int
    holes: tuple[tuple[int, int], ...]
    holes_count: int
    awaited: tuple[tuple[int, int], ...]


def step_counts(session: Session, attempt_id: str) -> StepCounts:
    """Steps of an attempt, and why some of them were left out."""
    mine = StepResult.attempt_id == attempt_id
    counted = func.count(), func.count(StepResult.skipped)
    steps, skipped = session.execute(select(*counted).where(mine)).one()
    if not skipped:
        return StepCounts(steps, 0, ())
    count = func.count().label("steps")
    query = (
        select(StepResult.skipped, count, func.min(StepResult.step), func.max(StepResult.step))
        .where(mine, StepResult.skipped.is_not(None))
        .group_by(StepResult.skipped)
        .order_by(count.desc(), StepResult.skipped)
        .limit(_MAX_TEXTS)
    )
    texts = [(str(text), many, first, last) for text, many, first, last in session.execute(query)]
    return StepCounts(steps, skipped, _reasons(texts))


def _reasons(texts: list[tuple[str, int, int, int]]) -> tuple[SkipReason, ...]:
    """Texts that differ only in where the damage was are one reason."""
    grouped: dict[str, list[tuple[str, int, int, int]]] = {}
    for row in texts:
        grouped.setdefault(_MORE.sub("", _PLACE.sub("", row[0])), []).append(row)
    found = [
        SkipReason(
            reason=reason,
            steps=sum(row[1] for row in rows),
            first_step=min(row[2] for row in rows),
            last_step=max(row[3] for row in rows),
            examples=tuple((row[2], row[0]) for row in rows[:_MAX_EXAMPLES]),
        )
        for reason, rows in grouped.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.steps, one.reason))[:MAX_REASONS])


def clocks_of(session: Session, attempt_id: str) -> tuple[ClockRow, ...]:
    """Clocks of the hosts of an attempt, those farthest from the server's first."""
    mine = select(Stream.id).where(Stream.attempt_id == attempt_id).scalar_subquery()
    newest = session.scalar(
        select(func.max(ClockSample.at_ns)).where(ClockSample.stream_id.in_(mine))
    )
    if newest is None:
        return ()
    latest = func.row_number().over(
        partition_by=Stream.host, order_by=(ClockSample.at_ns.desc(), ClockSample.stream_id)
    )
    probes = (
        select(
            Stream.host,
            ClockSample.at_ns,
            ClockSample.offset_ns,
            ClockSample.error_ns,
            latest.label("place"),
        )
        .join(Stream, Stream.id == ClockSample.stream_id)
        .where(Stream.attempt_id == attempt_id, ClockSample.at_ns > newest - _CLOCK_NS)
        .subquery()
    )
    last = probes.c.place == 1
    offset = func.max(case((last, probes.c.offset_ns)))
    query = (
        select(
            probes.c.host,
            offset,
            func.max(case((last, probes.c.error_ns))),
            func.max(probes.c.offset_ns) - func.min(probes.c.offset_ns),
            func.count(),
            func.max(probes.c.at_ns),
        )
        .group_by(probes.c.host)
        .order_by(func.abs(offset).desc(), probes.c.host)
        .limit(MAX_CLOCKS)
    )
    return tuple(
        # A probe says what the server's clock is ahead of the agent's.
        ClockRow(host, -offset / 1e9, error / 1e9, drift / 1e9, count, at / 1e9)
        for host, offset, error, drift, count, at in session.execute(query)
    )


def stream_counts(session: Session, attempt_id: str, down_before_ns: int) -> StreamCounts:
    """Streams of an attempt; down: without a sign of life since then, and not ended."""
    seen = func.coalesce(Stream.heartbeat_ns, Stream.created_ns)
    down = Stream.ended.is_(False) & (seen < down_before_ns)
    spool = func.sum(Stream.heartbeat["spool_bytes"].as_integer())
    query = select(
        func.count(),
        func.count().filter(Stream.ended),
        func.count().filter(down),
        func.coalesce(func.sum(Stream.events), 0),
        func.coalesce(func.sum(Stream.lost_events), 0),
        func.coalesce(spool, 0),
    ).where(Stream.attempt_id == attempt_id)
    counts = [int(value) for value in session.execute(query).one()]
    return StreamCounts(*counts)


def drops_of(session: Session, attempt_id: str) -> tuple[DropRow, ...]:
    """What agents dropped, by reason, most first."""
    said = Stream.heartbeat["dropped"]
    query = (
        select(said)
        .where(Stream.attempt_id == attempt_id, Stream.heartbeat.is_not(None))
        .where(cast(said.as_string(), String) != "{}")
        .limit(_MAX_TEXTS)
    )
    events: dict[str, int] = {}
    streams: dict[str, int] = {}
    for counts in session.execute(query).scalars():
        for reason, count in _counts(counts).items():
            events[reason] = events.get(reason, 0) + count
            streams[reason] = streams.get(reason, 0) + 1
    found = [DropRow(reason, count, streams[reason]) for reason, count in events.items() if count]
    return tuple(sorted(found, key=lambda one: (-one.events, one.reason))[:MAX_REASONS])


def file_drops_of(session: Session, attempt_id: str) -> tuple[FileDropRow, ...]:
    """Files of an attempt that were not used, by reason, most first."""
    query = (
        select(FileDrop.reason, FileDrop.files, FileDrop.name, FileDrop.last_ns)
        .where(FileDrop.attempt_id == attempt_id)
        .order_by(FileDrop.files.desc(), FileDrop.reason)
    )
    return tuple(
        FileDropRow(reason, files, name, last / 1e9)
        for reason, files, name, last in session.execute(query)
    )


def gaps_of(session: Session, attempt_id: str) -> tuple[GapRow, ...]:
    """Streams of which batches are missing."""
    query = (
        select(Stream.host, Stream.source, Coverage.epoch, Coverage.ranges, Coverage.awaited)
        .join(Stream, Stream.id == Coverage.stream_id)
        .where(Stream.attempt_id == attempt_id)
        .where(
            or_(func.json_array_length(Coverage.ranges) > 1, cast(Coverage.awaited, String) != "[]")
        )
        .order_by(Stream.host, Stream.id, Coverage.epoch)
        .limit(MAX_GAPS)
    )
    found = []
    for host, source, epoch, ranges, awaited in session.execute(query):
        runs = _runs(ranges)
        holes = [(end + 1, begin - 1) for (_, end), (begin, _) in pairwise(runs)]
        found.append(
            GapRow(host, source, epoch, tuple(holes[:5]), len(holes), tuple(_runs(awaited)[:5]))
        )
    return tuple(found)


def _counts(said: Any) -> dict[str, int]:  # noqa: ANN401  # what an agent said
    if not isinstance(said, dict):
        return {}
    return {str(name): value for name, value in said.items() if isinstance(value, int)}


def _runs(ranges: list[Any]) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in ranges]
