"""The loop, and the threads that send."""

from __future__ import annotations

import threading
from pathlib import Path

from ingest_agents.agent import Agent
from ingest_agents.link import Link
from ingest_agents.pace import Pace
from ingest_agents.sender import Crew
from ingest_agents.shipping import Shipper
from ingest_agents.spool.folder import FLUSH_NAME, GONE, read_json, streams_in
from tests.agents.builders import Clock, Hand, settings, write
from tests.agents.fake import Fake, Wire


def shippers(root: Path, count: int) -> list[Shipper]:
    """So many streams."""
    return [
        Shipper(write(root, 2, key=f"key-{number}"), Pace(0.5, 60.0, Clock()), dead_bytes=0)
        for number in range(count)
    ]


def test_a_stream_with_a_backlog_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """After its turn it goes behind those that wait."""
    order: list[str] = []
    both = threading.Event()
    done = threading.Event()
    long, short = shippers(tmp_path, 2)

    def work(shipper: Shipper) -> bool:
        both.wait(30)
        order.append("long" if shipper is long else "short")
        if order.count("long") == 3:
            done.set()
        return shipper is long and order.count("long") < 3

    crew = Crew(1, work, lambda _error: None)
    crew.give(long)
    crew.give(short)
    both.set()
    assert done.wait(30)
    assert crew.wait_idle(30)
    assert order == ["long", "short", "long", "long"]
    crew.close()


def test_senders_rest_when_they_are_asked_to(tmp_path: Path) -> None:
    """A stream that never runs dry lets eviction in after its turn."""
    (endless,) = shippers(tmp_path, 1)
    turns = threading.Semaphore(0)

    def work(_shipper: Shipper) -> bool:
        turns.release()
        return True

    crew = Crew(2, work, lambda _error: None)
    crew.give(endless)
    assert turns.acquire(timeout=30)
    with crew.rest(30.0):
        assert not crew.is_busy(endless)
    crew.close()


def test_a_stream_that_fails_stops_nothing(tmp_path: Path) -> None:
    """Whatever is raised is told, and the thread goes on with the next."""
    first, second = shippers(tmp_path, 2)
    errors: list[Exception] = []
    seen = threading.Event()

    def work(shipper: Shipper) -> bool:
        if shipper is first:
            raise ValueError("odd")
        seen.set()
        return False

    crew = Crew(1, work, errors.append)
    crew.give(first)
    crew.give(second)
    assert seen.wait(30)
    assert crew.wait_idle(30)
    assert [str(error) for error in errors] == ["odd"]
    assert first.pace.failures == 1
    crew.close()


class Broken:
    """A source that fails."""

    def __init__(self, stop: threading.Event) -> None:
        self.polls, self.stop = 0, stop

    def poll(self) -> None:
        """Fail twice, then end the test."""
        self.polls += 1
        if self.polls > 2:
            self.stop.set()
            return
        raise RuntimeError("a bug")

    def close(self) -> None:
        """Nothing to let go of."""


def test_the_agent_outlives_a_round_that_fails(tmp_path: Path) -> None:
    """It says so, and goes on."""
    fake, stop = Fake(), threading.Event()
    said: list[str] = []
    source = Broken(stop)
    write(tmp_path, 3)
    agent = Agent(
        settings(tmp_path, retry_min_s=0.001, retry_max_s=0.001),
        Link(lambda: Wire(fake), lambda: None, "host"),
        [source],
        lambda _name, text: said.append(text),
    )
    agent.run(stop)
    assert source.polls == 3
    assert any("a bug" in text for text in said)
    assert len(fake.ops()) == 9


def test_hosts_send_at_their_own_phase(tmp_path: Path) -> None:
    """Once per interval, when the time is the phase that the server gave."""
    fake = Fake(flush_s=10.0)
    hand = Hand(fake, tmp_path)
    hand.rounds(1, seconds=1.0)
    write(tmp_path, 1, key="late", end=False)
    sent_at = []
    for _ in range(25):
        before = len(fake.ops())
        hand.rounds(1, seconds=1.0)
        if len(fake.ops()) > before:
            sent_at.append((hand.clock.now - 1.0) % 10.0)
    assert sent_at == [0.0]


def test_recorders_learn_how_often_to_write(tmp_path: Path) -> None:
    """Writing more often than the agent sends would only make small batches."""
    hand = Hand(Fake(flush_s=7.0), tmp_path)
    write(tmp_path, 1)
    hand.rounds(2)
    assert read_json(tmp_path / FLUSH_NAME) == {"interval_s": 7.0}


def test_half_removed_streams_are_swept(tmp_path: Path) -> None:
    """A folder whose removal was cut short by a kill is no stream."""
    folder = write(tmp_path, 3)
    folder.rename(tmp_path / f"{GONE}{folder.name}")
    assert streams_in(tmp_path) == []
    Hand(Fake(), tmp_path).kill()
    assert not list(tmp_path.glob(f"{GONE}*"))
