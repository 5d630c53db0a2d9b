"""What the agent does about every answer, and that each event arrives exactly once."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from ingest_agents.agent import Agent
from ingest_agents.payload import ops_batch, parts_of
from ingest_agents.shipping import Shipper
from ingest_agents.spool.folder import (
    CHECKPOINT_NAME,
    DEAD_NAME,
    EPOCH_NAME,
    read_json,
    segments_of,
    streams_in,
)
from ingest_agents.spool.writer import SpoolWriter
from smon.errors import StoreError
from smon.wire import BatchKind
from tests.agents.builders import SMALL, Hand, batch, chance_of, rows, spec, write
from tests.agents.fake import Fail, Fake, Stored


def exactly_once(fake: Fake, events: int) -> None:
    """Every op is there once."""
    counts = Counter(fake.ops())
    missing = events - len(counts)
    twice = [start for start, count in counts.items() if count > 1]
    assert (missing, twice) == (0, [])


def test_everything_arrives_in_order(tmp_path: Path) -> None:
    """Numbers, steps and ops are those of the spool; then the folder is removed."""
    fake = Fake()
    write(tmp_path, 50)
    hand = Hand(fake, tmp_path)
    hand.until(lambda: not streams_in(tmp_path))
    assert [each.seq for each in fake.batches()] == list(range(51))
    assert [each.steps_done for each in fake.batches()][:50] == list(range(50))
    assert fake.batches()[-1].kind is BatchKind.END
    assert not fake.gaps()
    exactly_once(fake, 150)


def test_segments_go_when_they_are_acknowledged(tmp_path: Path) -> None:
    """Not before, and the last one stays as long as its stream does."""
    fake = Fake()
    folder = write(tmp_path, 50, end=False)
    fake.fails.extend([Fail(503)] * 2)
    hand = Hand(fake, tmp_path)
    count = len(segments_of(folder))
    hand.rounds(2)
    assert len(segments_of(folder)) == count
    hand.until(lambda: len(fake.ops()) == 150)
    assert len(segments_of(folder)) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504, 507, 408, 418, 302])
def test_a_server_in_trouble_is_tried_again(tmp_path: Path, status: int) -> None:
    """Nothing is given up, however often it fails."""
    fake = Fake()
    write(tmp_path, 5)
    fake.fails.extend([Fail(status)] * 7)
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    exactly_once(fake, 15)
    assert not fake.gaps()
    assert hand.sentences("server")
    assert max(each.attempt for each in fake.batches()) == 8


def test_retry_after_is_kept(tmp_path: Path) -> None:
    """429 and 503 say when to come back; nothing is sent before."""
    for status in (429, 503):
        fake = Fake()
        root = tmp_path / str(status)
        write(root, 2)
        fake.fails.append(Fail(status, retry_after=30))
        hand = Hand(fake, root)
        hand.rounds(1, seconds=29.0)
        puts = [path for method, path in fake.requests if method == "PUT"]
        hand.rounds(1, seconds=2.0)
        assert len(puts) == 1
        assert [path for method, path in fake.requests if method == "PUT"] == puts
        hand.until(fake.ended)
        exactly_once(fake, 6)


@pytest.mark.parametrize("status, slug", [(400, "malformed-body"), (422, "wrong-values")])
def test_a_refused_batch_is_kept_aside_and_told(tmp_path: Path, status: int, slug: str) -> None:
    """It goes to dead/, a GAP takes its number, and the stream goes on."""
    fake = Fake()
    folder = write(tmp_path, 6)

    def poison(stored: Stored) -> Fail | None:
        bad = stored.kind is BatchKind.OPS and stored.seq == 2
        return Fail(status, slug) if bad else None

    fake.poison = poison
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    (gap,) = fake.gaps()
    assert (gap["first_seq"], gap["last_seq"], gap["events"]) == (2, 2, 3)
    assert gap["reason"] == f"refused-{status}-{slug}"
    assert len(fake.ops()) == 15
    assert [path.name for path in (tmp_path / DEAD_NAME).iterdir()] == [
        f"{folder.name}-0-000000000002"
    ]


def test_dead_batches_are_bounded(tmp_path: Path) -> None:
    """The oldest go when there are too many; each is still counted."""
    fake = Fake()
    write(tmp_path, 30)
    fake.poison = lambda stored: Fail(422) if stored.kind is BatchKind.OPS else None
    hand = Hand(fake, tmp_path, dead_bytes=1000)
    hand.until(fake.ended)
    kept = list((tmp_path / DEAD_NAME).iterdir())
    assert sum(path.stat().st_size for path in kept) <= 1000
    assert fake.lost() == 90


def test_a_server_that_refuses_even_gaps_stops_nothing(tmp_path: Path) -> None:
    """The agent goes on behind it in a new epoch, and what it can send arrives."""
    fake = Fake()
    write(tmp_path, 4)

    def poison(stored: Stored) -> Fail | None:
        if stored.kind is BatchKind.GAP:
            return Fail(422)
        starts = stored.document.get("columns", {}).get("start_ns", [])
        return Fail(422) if 3 in starts else None

    fake.poison = poison
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    assert sorted(fake.ops()) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert fake.only.epoch == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_keeps_everything(tmp_path: Path, status: int) -> None:
    """Every 60 s one try, and a sentence; when the token works again, nothing is missing."""
    fake = Fake()
    write(tmp_path, 5)
    fake.fails.extend([Fail(status)] * 3)
    hand = Hand(fake, tmp_path)
    for _ in range(59):
        hand.rounds(1, seconds=1.0)
    assert len(fake.fails) == 2, "one try in a minute"
    assert "data stay in the spool" in hand.sentences("token")[0]
    hand.until(fake.ended)
    exactly_once(fake, 15)
    assert not fake.gaps()


def test_a_token_that_hello_refuses_keeps_everything_too(tmp_path: Path) -> None:
    """The token may be wrong from the start."""
    fake = Fake()
    fake.tokens = {"right"}
    write(tmp_path, 5)
    hand = Hand(fake, tmp_path)
    hand.rounds(3)
    assert hand.sentences("token")
    fake.tokens = set()
    hand.until(fake.ended)
    exactly_once(fake, 15)


def test_a_conflict_begins_a_new_epoch_with_what_is_left(tmp_path: Path) -> None:
    """What was acknowledged is not sent again; the rest is, numbered from 0."""
    fake = Fake()
    folder = write(tmp_path, 6)
    hand = Hand(fake, tmp_path)
    fake.poison = lambda stored: Fail(409, "key-conflict") if stored.seq == 2 else None
    hand.rounds(1)
    puts = [path for method, path in fake.requests if method == "PUT"]
    assert len(puts) == len(set(puts)), "not sent again before the server was asked"
    fake.poison = lambda _stored: None
    hand.until(fake.ended)
    assert sorted(fake.only.stored) == [(0, 0), (0, 1), *((1, seq) for seq in range(5))]
    exactly_once(fake, 18)
    hand.until(lambda: not folder.exists())


def test_a_conflict_about_what_the_server_has_is_none(tmp_path: Path) -> None:
    """If the next hello says that the batch is there, no epoch is wasted."""
    fake = Fake()
    write(tmp_path, 4)
    fake.fails.append(Fail(drop="after"))
    hand = Hand(fake, tmp_path)
    hand.rounds(1)
    fake.fails.append(Fail(409, "key-conflict"))
    hand.until(fake.ended)
    assert fake.only.epoch == 0
    exactly_once(fake, 12)


def test_an_epoch_survives_a_kill(tmp_path: Path) -> None:
    """The numbering is on the disk before it is used."""
    fake = Fake()
    write(tmp_path, 6)
    fake.poison = lambda stored: Fail(409, "key-conflict") if stored.seq == 2 else None
    first = Hand(fake, tmp_path)
    first.rounds(3)
    first.kill()
    fake.poison = lambda _stored: None
    second = Hand(fake, tmp_path)
    second.until(fake.ended)
    exactly_once(fake, 18)


def test_a_lost_epoch_file_does_not_mix_numbers_up(tmp_path: Path) -> None:
    """The server is in an epoch that the spool knows nothing of: a fresh one begins."""
    fake = Fake()
    folder = write(tmp_path, 6)
    fake.poison = lambda stored: Fail(409, "key-conflict") if stored.seq == 2 else None
    first = Hand(fake, tmp_path)
    first.rounds(1)
    fake.poison = lambda stored: Fail(500) if 9 in starts(stored) else None
    first.rounds(3)
    first.kill()
    (folder / EPOCH_NAME).unlink()
    fake.poison = lambda _stored: None
    second = Hand(fake, tmp_path)
    second.until(fake.ended)
    exactly_once(fake, 18)


def starts(stored: Stored) -> list[int]:
    """Starts of the ops in a batch."""
    found: list[int] = stored.document.get("columns", {}).get("start_ns", [])
    return found


@pytest.mark.parametrize("status", [411, 415])
def test_an_encoding_that_is_not_taken_is_changed_once(tmp_path: Path, status: int) -> None:
    """The same batch goes out in the next simpler encoding, under the same number."""
    fake = Fake()
    write(tmp_path, 3)
    fake.fails.append(Fail(status, "unsupported-encoding"))
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    exactly_once(fake, 9)
    assert not fake.gaps()


def test_an_encoding_that_is_never_taken_ends_in_dead(tmp_path: Path) -> None:
    """Changed once, refused again: kept aside and told."""
    fake = Fake()
    write(tmp_path, 2)
    fake.poison = lambda stored: Fail(415) if stored.kind is BatchKind.OPS else None
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    assert fake.lost() == 6
    assert {gap["reason"] for gap in fake.gaps()} == {"refused-415"}


def test_a_batch_that_is_too_large_is_cut(tmp_path: Path) -> None:
    """Its parts have numbers of their own, so a new epoch begins with them; nothing is lost."""
    fake = Fake(body_limit=2000)
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    writer.append(batch(0, 10))
    writer.append(batch(10, 1000, step=1, done=1))
    writer.append(batch(1010, 10, step=2, done=2))
    writer.end("complete")
    writer.close()
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    exactly_once(fake, 1020)
    assert not fake.gaps()
    assert fake.only.epoch == 1
    parts = [each for each in fake.batches() if each.kind is BatchKind.OPS][1:-1]
    assert len(parts) > 2
    assert [each.steps_done for each in parts] == [None] * (len(parts) - 1) + [1]


def test_a_cut_batch_survives_a_kill_between_its_parts(tmp_path: Path) -> None:
    """The parts are the same after a restart, and are counted from where they stopped."""
    fake = Fake(body_limit=2000)
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    writer.append(batch(0, 1000))
    writer.append(batch(1000, 5, step=1))
    writer.end("complete")
    writer.close()
    for stop_at in range(1, 9):
        hand = Hand(fake, tmp_path)
        fake.poison = lambda stored, at=stop_at: Fail(500) if stored.seq >= at else None  # type: ignore[misc]
        hand.rounds(2)
        hand.kill()
    fake.poison = lambda _stored: None
    Hand(fake, tmp_path).until(fake.ended)
    exactly_once(fake, 1005)
    assert not fake.gaps()


def test_a_part_in_conflict_goes_on_from_there(tmp_path: Path) -> None:
    """A new epoch begins with the parts that are left, and no other."""
    fake = Fake(body_limit=2000)
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    writer.append(batch(0, 1000))
    writer.append(batch(1000, 5, step=1))
    writer.end("complete")
    writer.close()
    fake.poison = lambda stored: Fail(409, "key-conflict") if 900 in starts(stored) else None
    hand = Hand(fake, tmp_path)
    hand.rounds(2)
    fake.poison = lambda _stored: None
    hand.until(fake.ended)
    exactly_once(fake, 1005)
    assert fake.only.epoch > 1


def test_what_cannot_be_cut_ends_in_dead(tmp_path: Path) -> None:
    """Parts that are still too large are kept aside and told; what follows arrives."""
    fake = Fake()
    write(tmp_path, 4)
    fake.poison = lambda stored: Fail(413, "too-large") if 4 in starts(stored) else None
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    assert 4 not in fake.ops()
    assert len(fake.ops()) + fake.lost() == 12


def test_parts_are_always_the_same() -> None:
    """Cutting is a function of the batch, and loses no row."""
    whole = batch(0, 101, done=3)
    parts = parts_of(whole, 7)
    assert parts is not None
    assert parts == parts_of(whole, 7)
    assert sum(part.events for part in parts) == 101
    assert parts_of(ops_batch(rows(0, 3)), 4) is None


# --- unknown outcomes ---------------------------------------------------------------------------


def test_a_dropped_connection_after_the_request_was_done_doubles_nothing(tmp_path: Path) -> None:
    """The resend is byte-identical, so the server knows it."""
    fake = Fake()
    write(tmp_path, 30)
    for _ in range(10):
        fake.fails.extend([Fail(drop="after"), Fail(drop="before"), Fail()])
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended, limit=200)
    exactly_once(fake, 90)
    assert fake.duplicates == 10
    assert fake.only.epoch == 0


def test_agents_killed_at_any_answer_lose_and_double_nothing(tmp_path: Path) -> None:
    """Whenever it ends, the next agent asks the server where to go on."""
    fake = Fake()
    write(tmp_path, 60)
    chance = chance_of(5)
    while not fake.ended():
        for _ in range(chance.randrange(4)):
            fake.fails.append(Fail())
        fake.fails.append(Fail(drop=chance.choice(["before", "after"])))
        hand = Hand(fake, tmp_path)
        hand.rounds(2)
        hand.kill()
        fake.fails.clear()
    exactly_once(fake, 180)


def test_a_lost_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """It is advisory: the server knows better."""
    fake = Fake()
    folder = write(tmp_path, 40)
    fake.poison = lambda stored: Fail(500) if stored.seq == 25 else None
    first = Hand(fake, tmp_path)
    first.rounds(2)
    first.kill()
    (folder / CHECKPOINT_NAME).unlink()
    fake.poison = lambda _stored: None
    Hand(fake, tmp_path).until(fake.ended)
    exactly_once(fake, 120)
    assert not fake.gaps()


class Hasty(Shipper):
    """Counts a batch as acknowledged before it is sent: the bug that the harness must see."""

    def message(self) -> object:  # type: ignore[override]
        """The batch, which is gone from the spool when it is sent."""
        message = super().message()
        if message is not None:
            self._advance(message.seq + 1)
            self.save()
            for _, path in segments_of(self.folder)[:-1]:
                path.unlink()
        return message


class HastyAgent(Agent):
    """An agent with that bug."""

    def discover(self) -> None:
        """Streams, with the bug."""
        super().discover()
        for name, shipper in self.shippers.items():
            if not isinstance(shipper, Hasty):
                shipper.forget()
                self.shippers[name] = Hasty(shipper.folder, shipper.pace, dead_bytes=0)


def test_the_harness_sees_a_checkpoint_before_the_acknowledgement(tmp_path: Path) -> None:
    """A planted bug: with it, the count of exactly once fails after a kill."""
    fake = Fake()
    write(tmp_path, 60)
    for _ in range(3):
        fake.fails.extend([Fail(), Fail(), Fail(drop="before")])
        hand = Hand(fake, tmp_path, make=HastyAgent)
        hand.rounds(2)
        hand.kill()
    fake.fails.clear()
    Hand(fake, tmp_path).until(fake.ended)
    with pytest.raises(AssertionError):
        exactly_once(fake, 180)


# --- servers that forget ------------------------------------------------------------------------


def test_a_server_that_lost_its_streams_gets_a_new_hello(tmp_path: Path) -> None:
    """404, and what it lost although it had acknowledged it is a GAP."""
    fake = Fake()
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    for number in range(30):
        writer.append(batch(number * 3))
    hand = Hand(fake, tmp_path)
    hand.until(lambda: len(fake.ops()) == 90)
    fake.streams.clear()
    for number in range(30, 34):
        writer.append(batch(number * 3))
    writer.end("complete")
    writer.close()
    # What is there is sent while the server is waited for.
    hand.until(lambda: not streams_in(tmp_path))
    assert fake.ended()
    (gap,) = fake.gaps()
    assert gap["reason"] == "not-on-server"
    assert gap["first_seq"] == 0
    assert set(range(90, 102)) <= set(fake.ops())


def test_a_heartbeat_tells_of_forgotten_streams(tmp_path: Path) -> None:
    """Also a stream that has nothing to send is made known again."""
    fake = Fake()
    folder = write(tmp_path, 3, end=False)
    hand = Hand(fake, tmp_path)
    hand.until(lambda: len(fake.ops()) == 9)
    fake.streams.clear()
    hand.until(lambda: bool(fake.streams))
    assert folder.exists()


def test_a_spool_made_anew_begins_a_new_epoch(tmp_path: Path) -> None:
    """The server has more than the spool ever held: old numbers are not used again."""
    fake = Fake()
    folder = write(tmp_path, 20, end=False)
    hand = Hand(fake, tmp_path)
    hand.until(lambda: len(fake.ops()) == 60)
    hand.agent.close()
    shutil.rmtree(folder)
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    for number in range(5):
        writer.append(batch(1000 + number * 3))
    writer.close()
    again = Hand(fake, tmp_path)
    again.until(lambda: len(fake.ops()) == 75)
    assert fake.only.epoch == 1
    assert not fake.gaps()


def test_a_stream_that_is_not_taken_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """It stays in the spool, is offered again every minute, and people are told why."""
    fake = Fake()
    write(tmp_path, 3, key="good")
    write(tmp_path, 3, key="bad")
    fake.greet = lambda s: Fail(409, "layout-conflict") if s["key"] == "bad" else None
    hand = Hand(fake, tmp_path)
    hand.rounds(4)
    assert len(fake.ops()) == 9
    assert any("does not take" in text for _, text in hand.said)
    fake.greet = lambda _stream: None
    hand.until(lambda: len(fake.ops()) == 18)


def test_an_answer_of_no_smon_server_acknowledges_nothing(tmp_path: Path) -> None:
    """200 from a captive portal is no acknowledgement."""
    fake = Fake()
    write(tmp_path, 3)
    fake.fails.extend([Fail(200)] * 2)
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    exactly_once(fake, 9)


# --- the agent ----------------------------------------------------------------------------------


def test_heartbeats_say_how_things_are(tmp_path: Path) -> None:
    """Spool bytes, age of what waits, drops, clock: with what the protocol calls them."""
    fake = Fake()
    write(tmp_path, 3, end=False)
    fake.poison = lambda _stored: Fail(500)
    hand = Hand(fake, tmp_path)
    hand.rounds(4)
    beat = fake.heartbeats[-1]
    (stream,) = beat["streams"]
    assert stream["stream_id"] == fake.only.id
    assert stream["spool_bytes"] > 0
    assert stream["oldest_unsent_s"] > 100
    assert (stream["epoch"], stream["next_seq"]) == (0, 0)
    assert beat["clock"].keys() == {"offset_ns", "error_ns", "drift_ppm"}
    assert beat["agent"]["host"] == "host"


def test_batches_carry_the_offset_of_the_clock(tmp_path: Path) -> None:
    """Times are not rewritten: the offset goes beside them."""
    fake = Fake()
    write(tmp_path, 3)
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    clocks = [each.clock for each in fake.batches()]
    assert all(clock is not None and clock[1] >= 0 for clock in clocks)


def test_a_stream_whose_writer_is_gone_is_ended(tmp_path: Path) -> None:
    """A trainer that was killed says no END; its agent says it for it."""
    fake = Fake()
    writer = SpoolWriter(tmp_path, spec(source="recorder"), SMALL)
    writer.append(batch(0))
    hand = Hand(fake, tmp_path)
    hand.rounds(3)
    assert not fake.ended(), "it is still written"
    path = segments_of(writer.folder)[-1][1]
    writer.close()
    with path.open("ab") as file:
        file.write(b"\x30\x00\x00\x00torn")
    hand.until(fake.ended)
    assert fake.gaps()[0]["reason"] == "torn"
    assert fake.batches()[-1].document == {"reason": "producer-gone"}


def test_two_agents_never_ship_one_spool(tmp_path: Path) -> None:
    """The second one is an error."""
    hand = Hand(Fake(), tmp_path)
    with pytest.raises(StoreError, match="another agent"):
        Hand(Fake(), tmp_path)
    hand.kill()


def test_many_streams_are_greeted_in_portions(tmp_path: Path) -> None:
    """A hello stays below the size that a server takes."""
    fake = Fake()
    for number in range(150):
        write(tmp_path, 1, key=f"key-{number}")
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    assert len(fake.streams) == 150
    assert sum(path.endswith("/hello") for _, path in fake.requests) >= 3


def test_finishing_sends_what_is_left(tmp_path: Path) -> None:
    """Also what was written after the last round."""
    fake = Fake()
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    writer.append(batch(0))
    hand = Hand(fake, tmp_path)
    hand.rounds(2)
    writer.append(batch(3))
    writer.close()
    hand.agent.finish()
    exactly_once(fake, 6)


def test_the_checkpoint_is_what_the_server_has(tmp_path: Path) -> None:
    """It is written after the acknowledgement, with the server's id of the stream."""
    fake = Fake()
    folder = write(tmp_path, 5, end=False)
    hand = Hand(fake, tmp_path)
    hand.until(lambda: len(fake.ops()) == 15)
    hand.rounds(1)
    assert read_json(folder / CHECKPOINT_NAME) == {"next_seq": 5, "stream_id": fake.only.id}
