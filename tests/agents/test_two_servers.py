"""One stream and two servers behind a balancer, at random: nothing is given up before its time.

A model of what `smon.ingest` promises: a server acknowledges what is in its own log, moves it to
the shared store later, and knows of the other's batches only what it has last looked up there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ingest_agents.pace import Pace
from ingest_agents.shipping import Shipper
from ingest_agents.spool.folder import streams_in
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.wire import BatchKind
from tests.agents.builders import SMALL, Clock, Hand, batch, chance_of, spec
from tests.agents.fake import Fake, Stream

#: Every batch is a segment of its own, and gone from the spool once it is acknowledged.
EACH = SpoolLimits(segment_bytes=1, segment_s=1e9, cap_bytes=0)

#: Plays of each test. Few meet what is rare; a defect of one in 3,000 is in these.
PLAYS = 200


@dataclass
class Server:
    """One of the two: its log, and what it believes to be stored."""

    log: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    alive: bool = True

    @property
    def next_seq(self) -> int:
        """The first number that it lacks."""
        return next(number for number in range(len(self.known) + 1) if number not in self.known)


class Play:
    """Chance decides what happens next; time stands still, so nothing may be given up."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = chance_of(seed)
        self.writer = SpoolWriter(folder, spec(), EACH)
        self.clock = Clock()
        self.stored: set[int] = set()
        self.servers = [Server(), Server()]
        self.written = 0
        self.told: list[object] = []
        self.agent = self._agent()

    def _agent(self) -> Shipper:
        pace = Pace(0.5, 60.0, self.clock)
        folder = self.writer.folder
        return Shipper(folder, pace, dead_bytes=0, wall=self.clock, clock=self.clock)

    def _one(self) -> Server:
        return self.chance.choice([server for server in self.servers if server.alive])

    def go(self) -> None:
        """Some while; raises AssertionError if something is given up."""
        # Agents that have just begun and ask often: what they send again moves to and fro.
        moves = {self.write: 4, self.send: 5, self.ask: 6, self.drain: 1, self.save: 3,
                 self.restart: 2, self.fall: 0.2}  # fmt: skip
        for _ in range(self.chance.randint(20, 160)):
            (move,) = self.chance.choices(list(moves), list(moves.values()))
            self.told.append(move.__name__)
            move()
        self._come_to_rest()
        self.writer.close()
        self.agent.forget()

    def _come_to_rest(self) -> None:
        """Both servers are there and store what they have: then every batch is stored."""
        for server in self.servers:
            server.alive = True
        for _ in range(4):
            for server in self.servers:
                self.stored |= server.log
                server.log.clear()
                server.known |= self.stored
            self.ask()
            while self.agent.waiting:
                self.send()
        assert self.stored == set(range(self.written)), self.told
        assert self.agent.next_seq == self.written, self.told

    def write(self) -> None:
        """A batch comes into the spool."""
        self.writer.append(batch(3 * self.written))
        self.written += 1

    def send(self) -> None:
        """What waits goes out; the request or the answer may be lost."""
        message = self.agent.message()
        if message is None:
            return
        assert message.kind is BatchKind.OPS, (message.seq, self.told)
        self.told.append(message.seq)
        if self.chance.random() < 0.1:
            return
        server = self._one()
        server.log.add(message.seq)
        server.known.add(message.seq)
        if self.chance.random() < 0.9:
            self.agent.acknowledged(server.next_seq)

    def ask(self) -> None:
        """A heartbeat, and a hello if something is missing; the server looks into the store."""
        self.agent.wants_hello |= self.agent.lagging
        if self.agent.wants_hello:
            server = self._one()
            server.known |= self.stored | server.log
            answer = {"stream_id": "s", "epoch": 0, "next_seq": server.next_seq}
            self.told.append(server.next_seq)
            self.agent.greeted(answer)
            assert self.agent.numbering.epoch == 0, self.told

    def drain(self) -> None:
        """A server moves its log to the store."""
        server = self._one()
        self.stored |= server.log
        server.log.clear()

    def save(self) -> None:
        """The agent writes its checkpoint."""
        self.agent.save()

    def restart(self) -> None:
        """The agent is killed, and another one begins."""
        if self.chance.random() < 0.5:
            self.agent.forget()
            self.agent = self._agent()

    def fall(self) -> None:
        """One server goes with its log, or comes back with it and with nothing else."""
        server = self.servers[0]
        if self.chance.random() < 0.3:
            server.alive = not server.alive
            server.known = set(server.log)


@pytest.mark.parametrize("first", range(0, 5 * PLAYS, PLAYS))
def test_what_the_other_server_has_is_never_given_up(tmp_path: Path, first: int) -> None:
    """Every batch that goes out is one of the spool; no GAP, no new epoch."""
    for seed in range(first, first + PLAYS):
        Play(tmp_path / str(seed), seed).go()


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A server that lacks number 2, as another one that is down may have it; until it is told."""
    whole, lacks = Stream.next_seq, [2]

    def next_seq(stream: Stream) -> int:
        return min([whole(stream), *lacks])

    monkeypatch.setattr(Stream, "next_seq", next_seq)
    return lacks.clear


def test_a_stream_that_waits_for_another_server_sends_on(
    tmp_path: Path, forgetful: Callable[[], None]
) -> None:
    """Each heartbeat asks again where it stands; what is new goes out all the same, and one END."""
    fake = Fake()
    writer = SpoolWriter(tmp_path, spec(source="recorder"), SMALL)
    for number in range(40):
        writer.append(batch(number))
    hand = Hand(fake, tmp_path)
    hand.rounds(5, seconds=1.0)
    hand.kill()
    # The agent that comes next has not seen the acknowledgements, nor has it the segments.
    hand = Hand(fake, tmp_path)
    hand.rounds(5, seconds=1.0)
    for number in range(40, 60):
        writer.append(batch(number))
    writer.end("finished")
    writer.close()
    hand.rounds(20, seconds=1.0)
    assert [each.seq for each in fake.batches()] == list(range(61))
    assert fake.batches()[-1].document == {"reason": "finished"}
    assert streams_in(tmp_path)
    forgetful()
    hand.rounds(5, seconds=1.0)
    assert len(fake.batches()) == 61
    assert not streams_in(tmp_path)
    assert not fake.gaps()
