"""What a server lacks, and the spool has no more: waited for, then told, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.pace import Pace
from ingest_agents.payload import gap_of, last_seq
from ingest_agents.shipping import Shipper
from ingest_agents.spool.folder import segments_of
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.wire import BatchKind
from tests.agents.builders import batch, spec, write

#: A segment for each batch.
LIMITS = SpoolLimits(segment_bytes=1, segment_s=1e9, cap_bytes=0)

LONG_S = 1000.0


class Wall:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def wall() -> Wall:
    """The clock that waits go by."""
    return Wall()


def shipper(folder: Path, wall: Wall) -> Shipper:
    """An agent's view of a stream, as it starts."""
    return Shipper(folder, Pace(0.5, 60.0, wall), dead_bytes=0, clock=wall)


def hello(stream: Shipper, next_seq: int) -> None:
    """The server answers a hello."""
    stream.greeted({"stream_id": "s", "epoch": 0, "next_seq": next_seq})


def deliver(stream: Shipper, next_seq: int | None = None) -> list[int]:
    """Numbers of what is sent until nothing waits; the server says what it needs next."""
    sent: list[int] = []
    while (message := stream.message()) is not None:
        sent.append(message.seq)
        stream.acknowledged(last_seq(message) + 1 if next_seq is None else next_seq)
    return sent


def test_a_number_that_another_server_may_have_is_waited_for(tmp_path: Path, wall: Wall) -> None:
    """All is sent that is there, nothing is given up, and the stream has not ended."""
    stream = shipper(write(tmp_path, 6, limits=LIMITS), wall)
    hello(stream, 0)
    assert deliver(stream, next_seq=0) == [0, 1, 2, 3, 4, 5, 6]
    stream = shipper(stream.folder, wall)
    hello(stream, 0)
    # The last segment is always kept, and is sent again, once.
    assert deliver(stream, next_seq=0) == [6]
    assert not stream.ended
    assert stream.lagging
    hello(stream, 0)
    assert deliver(stream) == []
    hello(stream, 7)
    assert stream.ended


def test_what_was_passed_over_is_found_again(tmp_path: Path, wall: Wall) -> None:
    """Servers that differ in what they lack send the stream to and fro, with nothing in between."""
    writer = SpoolWriter(tmp_path, spec(), LIMITS)
    for number in range(6):
        writer.append(batch(3 * number))
    stream = shipper(writer.folder, wall)
    hello(stream, 0)
    assert deliver(stream) == [0, 1, 2, 3, 4, 5]
    stream.save()
    stream = shipper(writer.folder, wall)
    # One server lacks 4: the last segment is to be sent once more; it asks again before it is.
    hello(stream, 4)
    hello(stream, 4)
    assert stream.message() is None
    hello(stream, 3)
    writer.append(batch(18))
    message = stream.message()
    assert message is not None
    assert (message.seq, message.kind) == (5, BatchKind.OPS)
    stream.acknowledged(6)
    assert deliver(stream) == [6]
    writer.close()


def test_a_number_that_does_not_come_is_given_up_after_a_while(tmp_path: Path, wall: Wall) -> None:
    """Then a GAP says so, and what is still there is sent again."""
    stream = shipper(write(tmp_path, 6, limits=LIMITS), wall)
    hello(stream, 0)
    deliver(stream, next_seq=2)
    stream = shipper(stream.folder, wall)
    hello(stream, 2)
    deliver(stream, next_seq=2)
    wall.now += LONG_S
    hello(stream, 2)
    message = stream.message()
    assert message is not None
    assert message.kind is BatchKind.GAP
    gap = gap_of(message)
    assert (gap.first_seq, gap.last_seq, gap.reason) == (2, 5, "not-on-server")
    stream.acknowledged(6)
    assert deliver(stream) == [6]
    assert stream.ended


def test_a_checkpoint_that_was_not_written_is_no_damage(tmp_path: Path, wall: Wall) -> None:
    """Segments go once they are acknowledged: what is before the first was acknowledged."""
    folder = write(tmp_path, 6, limits=LIMITS, end=False)
    for _, path in segments_of(folder)[:4]:
        path.unlink()
    stream = shipper(folder, wall)
    assert stream.next_seq == 4
    hello(stream, 1)
    assert deliver(stream, next_seq=1) == [4, 5]
    wall.now += LONG_S
    hello(stream, 1)
    message = stream.message()
    assert message is not None
    assert gap_of(message).reason == "not-on-server"


def test_a_server_that_has_all_ends_the_stream(tmp_path: Path, wall: Wall) -> None:
    """Also if the answer that says so is that to another batch than the END."""
    stream = shipper(write(tmp_path, 3), wall)
    hello(stream, 0)
    assert stream.message() is not None
    stream.acknowledged(4)
    assert stream.message() is None
    assert stream.ended
