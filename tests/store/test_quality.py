"""What is missing, left out and lost: the same on both databases."""

from __future__ import annotations

from sqlalchemy import update

from smon.store.database import Database
from smon.store.models import ClockSample, Coverage, Stream
from smon.store.queries.trust import TrustQuestion, trust_of
from tests.service import add_tenant
from tests.store.rows import NOW, add_row, open_stream

SECOND = 10**9


def test_the_quality_of_an_attempt_is_known(database: Database) -> None:
    """Streams, drops, gaps and clocks of one stream, by what its agent said."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    beat = {"spool_bytes": 7, "dropped": {"full": 3}}
    with database.write() as session:
        session.execute(
            update(Stream).values(
                heartbeat=beat, heartbeat_ns=NOW - 90 * SECOND, events=9, lost_events=1
            )
        )
    lists = {"ranges": [[0, 1], [4, 5]], "awaited": [[4, 4]], "pending_steps": []}
    add_row(database, Coverage, stream_id=stream.id, epoch=0, **lists)
    sample = {"stream_id": stream.id, "offset_ns": -5 * SECOND, "error_ns": SECOND}
    add_row(database, ClockSample, at_ns=NOW, **sample)
    with database.read() as session:
        found = trust_of(session, tenant, TrustQuestion(stream.job_id, 1, NOW, 60 * SECOND))
    counts = found.streams
    assert (counts.streams, counts.down, counts.ended) == (1, 1, 0)
    assert (counts.events, counts.lost_events, counts.spool_bytes) == (9, 1, 7)
    assert [(one.reason, one.events) for one in found.drops] == [("full", 3)]
    assert [(one.host, one.ahead_s) for one in found.clocks] == [("node-1", 5.0)]
    assert [(one.holes, one.awaited) for one in found.gaps] == [(((2, 3),), ((4, 4),))]
    assert (found.steps.steps, found.report, found.windows) == (0, None, ())


def test_an_attempt_without_anything_has_nothing(database: Database) -> None:
    """No row is no error."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    with database.read() as session:
        found = trust_of(session, tenant, TrustQuestion(stream.job_id, None, NOW, 60 * SECOND))
    assert (found.drops, found.gaps, found.clocks) == ((), (), ())
    assert (found.streams.spool_bytes, found.streams.down) == (0, 0)
