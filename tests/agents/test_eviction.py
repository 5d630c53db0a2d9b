"""The cap of the spool: the oldest whole steps go, and every event is accounted for."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from ingest_agents.payload import Gap, context_batch, gap_of
from ingest_agents.spool.eviction import evict, make_room
from ingest_agents.spool.folder import (
    AGENT_LOCK_NAME,
    CHECKPOINT_NAME,
    Lock,
    segments_of,
    spool_bytes,
    write_json,
)
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.wire import Batch, BatchKind
from tests.agents.builders import SMALL, Hand, batch, spec, write
from tests.agents.fake import Fail, Fake
from tests.agents.test_spool import read_all


def events(batches: list[Batch], kind: BatchKind) -> int:
    """Events of the batches of a kind."""
    return sum(each.events for each in batches if each.kind is kind)


def steps(batches: list[Batch]) -> Counter[int | None]:
    """Number of batches of ops by step."""
    return Counter(each.first_step for each in batches if each.kind is BatchKind.OPS)


def test_the_oldest_steps_go_and_a_gap_stays(tmp_path: Path) -> None:
    """Nothing vanishes uncounted: what is there and what is lost make up what was written."""
    folder = write(tmp_path, 100, each=200)
    before = spool_bytes(tmp_path)
    evict(tmp_path, before // 2, {})
    found = read_all(folder)
    assert spool_bytes(tmp_path) <= before // 2
    lost = events(found, BatchKind.GAP)
    assert lost
    assert events(found, BatchKind.OPS) + lost == 20_000
    left = [each.first_step for each in found if each.kind is BatchKind.OPS]
    assert left == list(range(100 - len(left), 100)), "the oldest went first"
    gaps = [gap_of(each) for each in found if each.kind is BatchKind.GAP]
    assert {gap.reason for gap in gaps} == {"spool-full"}
    assert [gap.first_step for gap in gaps] == list(range(len(gaps)))


def test_a_step_goes_as_a_whole_over_all_streams_of_its_job(tmp_path: Path) -> None:
    """A step without one of its ranks is of no use, so it goes in the others too."""
    writers = [SpoolWriter(tmp_path, spec(key), SMALL) for key in ("one", "two")]
    for step in range(40):
        for writer in writers:
            # Two batches of one step.
            for part in range(2):
                writer.append(batch(step * 1000 + part * 100, 100, step=step))
    for writer in writers:
        writer.close()
    evict(tmp_path, spool_bytes(tmp_path) * 2 // 3, {})
    both = [steps(read_all(writer.folder)) for writer in writers]
    assert both[0].keys() == both[1].keys()
    assert set(both[0].values()) == {2}


def test_another_job_keeps_its_steps(tmp_path: Path) -> None:
    """Steps of different jobs have nothing to do with each other: the older files go first."""
    old = write(tmp_path, 60, each=200)
    other = SpoolWriter(tmp_path, spec("other"), SMALL)
    other.close()
    for _, path in segments_of(old):
        os.utime(path, (1, 1))
    evict(tmp_path, spool_bytes(tmp_path) - 20_000, {})
    assert events(read_all(old), BatchKind.GAP)
    assert not events(read_all(other.folder), BatchKind.GAP)


def test_what_the_server_has_is_left_alone(tmp_path: Path) -> None:
    """A batch that was acknowledged is no loss, so no GAP may stand in its place."""
    folder = write(tmp_path, 60, each=200)
    write_json(folder / CHECKPOINT_NAME, {"next_seq": 30})
    evict(tmp_path, 1, {})
    gaps = [gap_of(each) for each in read_all(folder) if each.kind is BatchKind.GAP]
    assert min(gap.first_seq for gap in gaps) == 30


def test_the_last_segment_is_never_touched(tmp_path: Path) -> None:
    """Its writer appends to it."""
    folder = write(tmp_path, 60, each=200, end=False)
    _, last = segments_of(folder)[-1]
    before = last.read_bytes()
    evict(tmp_path, 1, {})
    assert last.read_bytes() == before


def test_side_evidence_goes_after_all_ops(tmp_path: Path) -> None:
    """It is small and says why; it goes only when there are no ops left to go."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    for step in range(60):
        writer.append(batch(step, 200, step=step))
        counters = {"step": [step], "rank": [0], "name": ["x"], "value": [1.0]}
        writer.append(context_batch({"counters": counters}, rows=1))
    writer.close()
    evict(tmp_path, spool_bytes(tmp_path) * 3 // 4, {})
    assert events(read_all(writer.folder), BatchKind.CONTEXT) == 60
    evict(tmp_path, 1, {})
    assert events(read_all(writer.folder), BatchKind.CONTEXT) < 20


def test_a_writer_makes_room_itself_if_no_agent_runs(tmp_path: Path) -> None:
    """The spool stays bounded also while the agent is down."""
    limits = SpoolLimits(16_384, 1e9, cap_bytes=200_000)
    folder = write(tmp_path, 400, each=200, limits=limits)
    found = read_all(folder)
    assert events(found, BatchKind.OPS) + events(found, BatchKind.GAP) == 80_000
    big = sum(len(each.body) for each in found if each.kind is BatchKind.OPS)
    assert big <= 200_000


def test_a_writer_leaves_it_to_the_agent(tmp_path: Path) -> None:
    """Two processes must not replace the same segments."""
    write(tmp_path, 60, each=200)
    before = spool_bytes(tmp_path)
    lock = Lock.take(tmp_path / AGENT_LOCK_NAME)
    assert lock is not None
    make_room(tmp_path, before // 2)
    assert spool_bytes(tmp_path) == before
    lock.release()
    make_room(tmp_path, before // 2)
    assert spool_bytes(tmp_path) < before


def test_evicting_while_the_server_is_down_loses_nothing_uncounted(tmp_path: Path) -> None:
    """The agent drops what is oldest, and the server learns of every event in the end."""
    fake = Fake()
    hand = Hand(fake, tmp_path / "spool", cap_bytes=1 << 16)
    writer = SpoolWriter(tmp_path / "spool", spec(), SpoolLimits(16_384, 1e9, 0))
    for step in range(40):
        writer.append(batch(step * 200, 200, step=step))
    hand.rounds(3)
    down = fake.handle
    fake.handle = lambda *_request: (_ for _ in ()).throw(ConnectionError())  # type: ignore[method-assign]
    for step in range(40, 300):
        writer.append(batch(step * 200, 200, step=step))
    fake.handle = down  # type: ignore[method-assign]
    hand.agent.make_room()
    writer.end("complete")
    writer.close()
    hand.until(fake.ended)
    assert len(fake.ops()) == len(set(fake.ops()))
    assert fake.lost()
    assert len(fake.ops()) + fake.lost() == 60_000
    assert hand.agent.sender.events == 60_000


def test_a_batch_whose_answer_is_open_is_not_dropped(tmp_path: Path) -> None:
    """The server may have it: a GAP under its number would be a conflict."""
    fake = Fake()
    folder = write(tmp_path, 60, each=200)
    hand = Hand(fake, tmp_path)
    fake.fails.append(Fail(drop="after"))
    hand.rounds(1)
    shipper = hand.agent.shippers[folder.name]
    assert shipper.pending is not None
    open_seq = shipper.pending.seq
    evict(tmp_path, 1, {folder.name: shipper.keep})
    shipper.forget()
    hand.until(fake.ended)
    assert not [key for key in fake.only.stored if key[0] > 0], "no new epoch was needed"
    assert fake.only.stored[0, open_seq].kind is BatchKind.OPS
    assert len(fake.ops()) + fake.lost() == 12_000


def test_gaps_of_one_reason_are_sent_as_one(tmp_path: Path) -> None:
    """A long outage must not end in a storm of small requests."""
    fake = Fake()
    write(tmp_path, 100, each=200)
    evict(tmp_path, 1, {})
    hand = Hand(fake, tmp_path)
    hand.until(fake.ended)
    assert len(fake.gaps()) == 1
    gap = Gap(**fake.gaps()[0])
    assert (gap.first_seq, gap.first_step) == (0, 0)
    assert len(fake.ops()) + gap.events == 20_000
