"""The offset of this host's clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.clock import PROBES, ROUND_S, ClockWatch, Sample, sample_of
from ingest_agents.link import TIME_PATH
from ingest_agents.spool.folder import DEAD_NAME
from tests.agents.builders import Hand, chance_of, write
from tests.agents.fake import Fail, Fake

_NS = 10**9


class World:
    """Two clocks, and a way between them that takes time in both directions."""

    def __init__(self, *, offset_ns: int, drift_ppm: float = 0.0, seed: int = 1) -> None:
        self.now, self.offset_ns, self.drift = 0, offset_ns, drift_ppm * 1e-6
        self.chance = chance_of(seed)

    def wall(self) -> int:
        """The clock of this host."""
        return 1_700_000_000 * _NS + self.now

    def server(self) -> int:
        """The server's clock."""
        return self.wall() + self.offset_ns + round(self.now * self.drift)

    def monotonic(self) -> int:
        """The steady clock of this host."""
        return self.now

    def ask(self) -> tuple[int, int]:
        """A request there and back; mostly quick, sometimes slow one way."""
        self.now += round(self.chance.choice([1e5, 1e5, 5e6]) * (1 + self.chance.random()))
        received = self.server()
        self.now += 20_000
        sent = self.server()
        self.now += round(1e5 * (1 + self.chance.random()))
        return received, sent


def watched(world: World, rounds: int) -> ClockWatch:
    """A watch after so many rounds."""
    watch = ClockWatch(world.wall, world.monotonic)
    for _ in range(rounds):
        watch.probe(world.ask)
        world.now += round(ROUND_S * _NS)
    return watch


def test_the_formula_is_that_of_ntp() -> None:
    """Equal ways there and back cancel out; the server's own time does not count as way."""
    sample = sample_of(1000, 300, 5100, 5200)
    assert sample == Sample(1300, 4000, 100)


@pytest.mark.parametrize("offset_ns", [0, 3_000_000, -200_000_000_000])
def test_the_offset_is_found_within_its_error(offset_ns: int) -> None:
    """The shortest of eight probes decides."""
    world = World(offset_ns=offset_ns)
    state = watched(world, 1).state()
    assert state is not None
    assert abs(state.offset_ns - offset_ns) <= state.error_ns
    assert state.error_ns < 400_000


def test_the_drift_is_found() -> None:
    """40 ppm over ten minutes are 24 ms: the offset now is what counts."""
    world = World(offset_ns=1_000_000, drift_ppm=40.0)
    state = watched(world, 60).state()
    assert state is not None
    assert state.drift_ppm == pytest.approx(40.0, abs=2.0)
    assert abs(state.offset_ns - (world.server() - world.wall())) <= state.error_ns


def test_without_answer_there_is_no_offset() -> None:
    """Neither before the first round, nor from a server that does not tell its time."""
    watch = ClockWatch(lambda: 0, lambda: 0)
    assert watch.state() is None
    watch.probe(lambda: None)
    assert watch.state() is None


@pytest.mark.parametrize("jump_ns", [3600 * _NS, -3600 * _NS])
def test_a_jump_of_this_hosts_clock_is_known_at_once(jump_ns: int) -> None:
    """No probe is needed: batches that go out before the next one have the new offset."""
    world, set_by = World(offset_ns=3_000_000), 0
    watch = ClockWatch(lambda: world.wall() + set_by, world.monotonic)
    watch.probe(world.ask)
    set_by = jump_ns
    state = watch.state()
    assert state is not None
    assert abs(state.offset_ns - (3_000_000 - jump_ns)) <= state.error_ns
    watch.probe(world.ask)
    state = watch.state()
    assert state is not None
    assert abs(state.offset_ns - (3_000_000 - jump_ns)) <= state.error_ns


def test_the_offset_of_before_a_jump_is_remembered() -> None:
    """What was recorded before, and is sent now, has times of the old clock."""
    world, set_by = World(offset_ns=0), 3600 * _NS
    watch = ClockWatch(lambda: world.wall() + set_by, world.monotonic)
    watch.probe(world.ask)
    state, before = watch.state(), watch.before()
    assert state is not None
    assert before is not None
    assert before.offset_ns == state.offset_ns
    set_by = 0
    state, before = watch.state(), watch.before()
    assert state is not None
    assert before is not None
    assert abs(state.offset_ns) <= state.error_ns
    assert abs(before.offset_ns + 3600 * _NS) <= state.error_ns
    assert watch.before() == before


def test_a_jump_of_the_servers_clock_voids_the_past() -> None:
    """After somebody has set it, old offsets are wrong."""
    world = World(offset_ns=0)
    watch = watched(world, 10)
    world.offset_ns = 5 * _NS
    watch.probe(world.ask)
    state = watch.state()
    assert state is not None
    assert abs(state.offset_ns - 5 * _NS) <= state.error_ns


def test_a_batch_whose_times_are_refused_is_sent_again_when_clocks_were_compared(
    tmp_path: Path,
) -> None:
    """If the server's clock was set back, its limits fit again once it knows the new offset."""
    fake = Fake()
    write(tmp_path, 6)
    refusals = [Fail(422, "wrong-values")]
    fake.poison = lambda stored: refusals.pop() if stored.seq == 2 and refusals else None
    hand = Hand(fake, tmp_path)
    hand.rounds(4, seconds=0.1)
    puts = [path for method, path in fake.requests if method == "PUT"]
    # Once at the start, and once because of the answer.
    assert sum(path == TIME_PATH for _, path in fake.requests) == 2 * PROBES
    hand.rounds(1, seconds=1.0)
    assert [path for method, path in fake.requests if method == "PUT"] == puts
    hand.until(fake.ended)
    assert len(fake.ops()) == len(set(fake.ops())) == 18
    assert not (tmp_path / DEAD_NAME).exists()
