"""Which step a reading belongs to, and what becomes of several readings in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.payload import OpRow, context_batch, end_batch, ops_batch
from ingest_agents.sources.counters.ledger import Ledger, Reading, StepValues
from ingest_agents.sources.counters.reading import Values
from ingest_agents.sources.counters.steps import Steps, Tail
from ingest_agents.spool.folder import segments_of
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.wire import Batch
from tests.agents.builders import SMALL, spec

S = 10**9


def step(number: int, *, done: bool = True, begin: int | None = None, length: int = 8) -> Batch:
    """A step that begins at 10 s times its number, with two ops, and lasts 8 s."""
    start = (number * 10 if begin is None else begin) * S
    half = length * S // 2
    ops = [
        OpRow(number, 0, 0, 0, "forward-compute", start, half, 0),
        OpRow(number, 0, 0, 0, "backward-compute", start + half, half, 0),
    ]
    return ops_batch(ops, steps_done=number if done else None)


def steps(*batches: Batch) -> Steps:
    """What these batches say."""
    known = Steps()
    for batch in batches:
        known.add(batch)
    return known


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second, number",
    [(9, None), (10, 1), (17, 1), (19, 1), (20, 2), (28, 2), (29, None), (500, None)],
)
def test_a_time_belongs_to_the_last_step_that_had_begun(second: int, number: int | None) -> None:
    """It is known only once that step is seen to go on, or a later one has begun."""
    assert steps(step(1), step(2)).place(second * S) == number


def test_a_step_ends_with_its_last_op_whichever_that_is() -> None:
    """An op that began first may outlast all others."""
    ops = [
        OpRow(1, 0, 0, 0, "grads-reduce-scatter", 10 * S, 8 * S, 0),
        OpRow(1, 0, 0, 0, "forward-compute", 11 * S, S, 0),
    ]
    assert steps(ops_batch(ops)).place(17 * S) == 1


def test_ops_are_read_only_as_far_back_as_a_time_asks() -> None:
    """What is older than the batch that tells is not opened, and not needed later either."""
    known = steps(*[step(number) for number in range(1, 40)])
    assert known.place(375 * S) == 37
    assert known.first_after(15 * S) == 37


def test_a_time_before_the_first_step_is_known_to_be_so() -> None:
    """And one without any step is not known at all."""
    assert steps(step(3)).first_after(5 * S) == 3
    assert steps(step(3)).first_after(30 * S) is None
    assert Steps().first_after(5 * S) is None
    assert Steps().place(5 * S) is None


def test_a_step_is_over_when_it_is_done_or_a_later_one_has_begun() -> None:
    """Whichever is known first."""
    known = steps(step(1), step(2, done=False))
    assert known.is_over(1)
    assert not known.is_over(2)
    known.add(step(3, done=False))
    assert known.is_over(2)


def test_side_evidence_may_say_that_a_step_is_done() -> None:
    """A recorder without anything else to write says it so."""
    known = steps(step(1, done=False))
    known.add(context_batch({}, rows=0, steps_done=1))
    assert known.is_over(1)


def test_batches_that_are_no_ops_or_cannot_be_read_say_nothing() -> None:
    """Damage in a spool is none of the counters' business."""
    known = Steps()
    known.add(end_batch("closed"))
    sound = step(1, done=False)
    for body in (b"", b"\x28\xb5\x2f\xfd", sound.body[:-3]):
        known.add(Batch(0, sound.kind, sound.content_type, sound.encoding, 2, body))
    known.add(Batch(0, sound.kind, sound.content_type, "identity", 1, b'{"columns": {"step": 1}}'))
    assert known.place(11 * S) is None


def test_only_the_newest_steps_are_remembered() -> None:
    """A job of a million steps takes no more memory than one of a thousand."""
    known = Steps()
    for number in range(1100):
        known.add(step(number))
        known.place(number * 10 * S)
    assert known.first_after(0) == 1100 - 1024


# --- tail -----------------------------------------------------------------------------------------


def test_a_tail_follows_a_stream_over_its_segments(tmp_path: Path) -> None:
    """Every batch once, whenever it is asked."""
    limits = SpoolLimits(segment_bytes=400, segment_s=1e9, cap_bytes=0)
    writer = SpoolWriter(tmp_path, spec(), limits)
    tail = Tail(writer.folder)
    assert list(tail.new()) == []
    seen = []
    for number in range(30):
        writer.append(step(number))
        if number % 7 == 0:
            seen += [batch.seq for batch in tail.new()]
    seen += [batch.seq for batch in tail.new()]
    assert seen == list(range(30))
    assert len(segments_of(writer.folder)) > 3


def test_a_tail_passes_over_damage_and_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """A damaged record costs itself; half a record is none yet."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    tail = Tail(writer.folder)
    writer.append(step(0))
    list(tail.new())
    path = segments_of(writer.folder)[0][1]
    begin = path.stat().st_size
    writer.append(step(1))
    writer.append(step(2))
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[begin + 40] ^= 0xFF
    path.write_bytes(bytes(broken[:-5]))
    assert [batch.seq for batch in tail.new()] == []
    path.write_bytes(bytes(broken))
    assert [batch.seq for batch in tail.new()] == [2]
    assert list(tail.new()) == []


def test_a_tail_of_a_stream_that_is_gone_is_empty(tmp_path: Path) -> None:
    """Acknowledged segments are removed at any moment."""
    writer = SpoolWriter(tmp_path, spec(), SMALL)
    tail = Tail(writer.folder)
    writer.append(step(0))
    assert len(list(tail.new())) == 1
    for _, path in segments_of(writer.folder):
        path.unlink()
    assert list(tail.new()) == []
    assert list(Tail(tmp_path / "nowhere").new()) == []


# --- ledger ---------------------------------------------------------------------------------------


def ledger(*readings: tuple[float, Values]) -> Ledger:
    """Readings of rank 0 at these seconds, the first only to count from."""
    made = Ledger()
    for number, (second, values) in enumerate(readings):
        made.add(Reading("host", int(second * S), {0: values} if number else {}))
    return made


def said(found: StepValues) -> dict[str, float]:
    """Values of rank 0 by name."""
    assert set(found.columns["rank"]) == {0}
    assert set(found.columns["step"]) == {found.step}
    return dict(zip(found.columns["name"], found.columns["value"], strict=True))


def test_gauges_are_the_mean_of_their_step() -> None:
    """Several readings in one long step are one value."""
    clocks = ledger((11, {}), (12, {"gpu_clock_mhz": 1980.0}), (16, {"gpu_clock_mhz": 1000.0}))
    (found,) = clocks.settle(steps(step(1)))
    assert (found.step, said(found)) == (1, {"gpu_clock_mhz": 1490.0})


def test_counts_are_per_step_since_the_reading_before() -> None:
    """Sixty errors in three steps are twenty a step, and said of the last of them."""
    errors = ledger((11, {}), (45, {"nic_errors": 60.0}), (55, {"nic_errors": 7.0}))
    known = steps(*[step(number, length=9) for number in range(1, 7)])
    found = [(each.step, said(each)) for each in errors.settle(known)]
    assert found == [(4, {"nic_errors": 20.0}), (5, {"nic_errors": 7.0})]


def test_between_two_steps_counts_count_and_gauges_do_not() -> None:
    """During a checkpoint the GPU idles: its clock then says nothing of the step."""
    known = steps(step(1), step(2), step(3))
    idle = {"gpu_clock_mhz": 345.0, "nic_errors": 3.0}
    busy = {"gpu_clock_mhz": 1980.0, "nic_errors": 1.0}
    made = ledger((11, {}), (19, idle), (21, busy))
    (found,) = made.settle(known)
    assert found.step == 2
    assert said(found) == {"gpu_clock_mhz": 1980.0, "nic_errors": 4.0}


def test_facts_are_said_once_and_when_they_change() -> None:
    """A power limit that somebody lowers is news; one that stays is not."""
    limits = [700.0, 700.0, 500.0]
    readings = [(10.0 * n + 11, {"gpu_power_limit_w": limit}) for n, limit in enumerate(limits)]
    found = list(ledger((10.5, {}), *readings).settle(steps(step(1), step(2), step(3))))
    assert [(each.step, said(each)) for each in found] == [
        (1, {"gpu_power_limit_w": 700.0}),
        (3, {"gpu_power_limit_w": 500.0}),
    ]


def test_a_step_that_goes_on_is_waited_for() -> None:
    """Its later readings belong to the same mean; when the job ends, it is over."""
    known = steps(step(1, done=False))
    made = ledger((11, {}), (12, {"gpu_power_w": 400.0}))
    assert list(made.settle(known)) == []
    made.add(Reading("host", 14 * S, {0: {"gpu_power_w": 600.0}}))
    (found,) = made.settle(known, closing=True)
    assert said(found) == {"gpu_power_w": 500.0}


def test_readings_before_the_first_step_are_of_none() -> None:
    """They are counted as such; what is counted from then on is of the first step."""
    made = ledger((1, {}), (2, {"gpu_power_w": 90.0}), (11, {"gpu_power_w": 600.0}))
    (found,) = made.settle(steps(step(1)))
    assert said(found) == {"gpu_power_w": 600.0}
    assert made.unplaced == 2


def test_a_job_that_stops_does_not_fill_the_memory() -> None:
    """Of readings that wait for a step for hours, the latest stay."""
    made = ledger(*[(float(second), {"gpu_power_w": 1.0}) for second in range(1500)])
    assert made.unplaced == 1500 - 1024
