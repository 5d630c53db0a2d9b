"""The recorder on schedules of torch's pipelining: what is recorded, and that it can be undone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingest_agents.recorder import Recorder
from ingest_agents.recorder.device import Mark
from ingest_agents.recorder.pending import Open
from ingest_agents.recorder.pipelining import attach_schedule
from smon.ops import OpType
from tests.agents.pipelining_fake import (
    BACKWARD_MS,
    FORWARD_MS,
    LOSS_MS,
    MS,
    POST_MS,
    WEIGHT_MS,
    Clock,
    InOrder,
    Looped,
    Message,
    Stage,
)
from tests.agents.test_recorder import IDENTITY, ops, settings


@contextmanager
def recording(root: Path, clock: Clock, **changed: object) -> Iterator[Recorder]:
    """A recorder on this clock, closed at the end."""
    given = settings(root, **changed)
    recorder = Recorder(IDENTITY, given, wall=clock.wall, monotonic=clock.monotonic)
    try:
        yield recorder
    finally:
        recorder.close()


def record(root: Path, schedule: InOrder | Looped, clock: Clock) -> list[dict[str, Any]]:
    """Ops of one step, by start; times in ms."""
    with recording(root, clock) as recorder:
        attach_schedule(recorder, schedule, monotonic=clock.monotonic)
        begin = clock.wall()
        with recorder.step(0):
            schedule.step()
    found = ops(root)
    for op in found:
        op["start"] = (op["start_ns"] - begin) / MS
        op["duration"] = op["duration_ns"] / MS
    return sorted(found, key=lambda op: (op["start_ns"], op["optype"]))


def of(found: list[dict[str, Any]], op: OpType) -> list[dict[str, Any]]:
    """Those of one type, by their number."""
    return sorted((each for each in found if each["optype"] == op.label), key=lambda e: e["seq"])


def durations(found: list[dict[str, Any]], op: OpType) -> list[float]:
    """How long those of one type took, ms."""
    return [each["duration"] for each in of(found, op)]


def test_computes_and_transfers_of_each_microbatch_are_ops(tmp_path: Path) -> None:
    """A stage in the middle: six types, each with its microbatches in order."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock)), clock)
    for op in (
        OpType.FORWARD_RECV,
        OpType.FORWARD_COMPUTE,
        OpType.FORWARD_SEND,
        OpType.BACKWARD_RECV,
        OpType.BACKWARD_COMPUTE,
        OpType.BACKWARD_SEND,
    ):
        assert [(each["seq"], each["microbatch"]) for each in of(found, op)] == [(0, 0), (1, 1)]
    assert len(found) == 12
    assert durations(found, OpType.FORWARD_COMPUTE) == [FORWARD_MS] * 2
    assert durations(found, OpType.BACKWARD_COMPUTE) == [BACKWARD_MS] * 2
    assert not any("chunk" in each for each in found)


def test_a_transfer_that_is_waited_for_lasts_until_it_is_there(tmp_path: Path) -> None:
    """Waited for at once: from posting to the end of the wait."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock)), clock)
    assert durations(found, OpType.FORWARD_RECV) == [8.0, 8.0]
    assert durations(found, OpType.BACKWARD_SEND) == [8.0, 8.0]
    first = of(found, OpType.FORWARD_COMPUTE)[0]
    assert first["start"] == 8.0


def test_a_transfer_that_had_ended_before_its_wait_counts_as_posted_only(tmp_path: Path) -> None:
    """The first send ends during the second forward: its wait is short, and says nothing."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock)), clock)
    first, last = durations(found, OpType.FORWARD_SEND)
    assert first == pytest.approx(POST_MS)
    assert last == 8.0


def test_sends_under_way_at_once_come_one_after_the_other(tmp_path: Path) -> None:
    """The peer takes 50 ms for each: the second one has begun when the first had ended."""
    clock = Clock()
    stage = Stage(clock, stage_index=0, message_ms=50.0)
    found = of(record(tmp_path, InOrder(stage), clock), OpType.FORWARD_SEND)
    first, second = found
    assert first["start"] + first["duration"] == pytest.approx(second["start"])
    assert second["start"] + second["duration"] == pytest.approx(2 * FORWARD_MS + 50 + POST_MS)


def test_sends_waited_for_in_reverse_begin_when_they_were_posted(tmp_path: Path) -> None:
    """The later one is known to end late; the earlier one did not wait for it."""
    clock = Clock()
    stages = [Stage(clock, index, num_stages=4, message_ms=200.0) for index in (0, 1)]
    first, second = of(record(tmp_path, Looped(stages), clock), OpType.FORWARD_SEND)
    assert first["start"] == pytest.approx(FORWARD_MS + POST_MS)
    assert first["duration"] == pytest.approx(POST_MS)
    assert second["duration"] == 200.0


class Marks:
    """A recorder on a GPU's clock: moments are marks, not times."""

    on = True

    def __init__(self) -> None:
        self.ended: list[tuple[str, int, bool]] = []
        self._count = 0

    def begin(self, op: OpType, *, microbatch: int, chunk: int) -> Open:
        """Of any op."""
        begun = Open(op.label, 0, microbatch, microbatch, chunk)
        begun.begin = self.stamp()
        return begun

    def stamp(self) -> Mark:
        """A moment on the GPU."""
        return cast("Mark", object())

    def end(self, begun: Open, at: Mark | None = None) -> None:
        """Type, microbatch, and whether it counts as posted only."""
        self.ended.append((begun.label, begun.microbatch, at is not None))


def test_on_a_gpu_only_sends_that_are_waited_for_late_count_as_posted() -> None:
    """Where no wait shows on the host, what was computed meanwhile tells them apart."""
    marks = Marks()
    schedule = InOrder(Stage(Clock()))
    attach_schedule(cast("Recorder", marks), schedule)
    schedule.step()
    transfers = [each for each in marks.ended if "compute" not in each[0]]
    assert sorted(transfers) == [
        ("backward-recv", 0, False),
        ("backward-recv", 1, False),
        ("backward-send", 0, False),
        ("backward-send", 1, False),
        ("forward-recv", 0, False),
        ("forward-recv", 1, False),
        ("forward-send", 0, True),
        ("forward-send", 1, False),
    ]


def test_a_forward_of_the_last_stage_includes_its_loss(tmp_path: Path) -> None:
    """And nothing is sent on from there."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock, stage_index=2)), clock)
    assert durations(found, OpType.FORWARD_COMPUTE) == [FORWARD_MS + LOSS_MS] * 2
    assert not of(found, OpType.FORWARD_SEND)
    assert not of(found, OpType.BACKWARD_RECV)


def test_tensors_of_one_microbatch_are_one_transfer(tmp_path: Path) -> None:
    """Three activations are sent on: one send."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock, tensors=3)), clock)
    assert [each["microbatch"] for each in of(found, OpType.FORWARD_SEND)] == [0, 1]


def test_stages_of_one_rank_are_model_chunks(tmp_path: Path) -> None:
    """By their place in the model, in whatever order they come; a split backward is two ops."""
    clock = Clock()
    stages = [Stage(clock, index, num_stages=4) for index in (3, 1)]
    found = record(tmp_path, Looped(stages), clock)
    forwards = of(found, OpType.FORWARD_COMPUTE)
    assert [each["chunk"] for each in forwards] == [1, 0]
    assert [each["global_chunk"] for each in forwards] == [3, 1]
    assert [each["duration"] for each in forwards] == [FORWARD_MS + LOSS_MS, FORWARD_MS]
    assert durations(found, OpType.WEIGHT_GRAD_COMPUTE) == [WEIGHT_MS] * 2
    assert [each["chunk"] for each in of(found, OpType.FORWARD_RECV)] == [1, 0]
    # The second was there when it was waited for; it was received after the first.
    assert durations(found, OpType.FORWARD_RECV) == [8.0, 0.0]


def test_evaluation_is_not_recorded(tmp_path: Path) -> None:
    """Forwards without backward are no part of training."""
    clock = Clock()
    found = record(tmp_path, InOrder(Stage(clock, has_backward=False)), clock)
    assert not of(found, OpType.FORWARD_COMPUTE)


def test_outside_of_a_step_nothing_is_recorded(tmp_path: Path) -> None:
    """The schedule runs as ever."""
    clock = Clock()
    schedule = InOrder(Stage(clock))
    with recording(tmp_path, clock) as recorder:
        attach_schedule(recorder, schedule, monotonic=clock.monotonic)
        schedule.step()
        assert recorder.errors == 0
    assert schedule.outputs == ["output 0", "output 1"]
    assert not ops(tmp_path)


def test_detaching_leaves_no_trace(tmp_path: Path) -> None:
    """Schedule and stages are as they were, even what others had put there; so are all others."""
    clock = Clock()
    schedule, other = InOrder(Stage(clock)), InOrder(Stage(clock))

    def theirs(*_args: object) -> str:
        return "theirs"

    vars(schedule._stage)["forward_one_chunk"] = theirs
    before = [dict(vars(each)) for each in (schedule, schedule._stage, other, other._stage)]
    with recording(tmp_path, clock) as recorder:
        attached = attach_schedule(recorder, schedule)
        assert vars(schedule) != before[0]
        assert [vars(other), vars(other._stage)] == before[2:]
        attached.detach()
        attached.detach()
    assert [dict(vars(each)) for each in (schedule, schedule._stage)] == before[:2]


def test_a_schedule_of_another_kind_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it lacks is said once, and nothing stays changed."""
    clock = Clock()
    schedule = SimpleNamespace(_stage=Stage(clock))
    with recording(tmp_path, clock) as recorder, caplog.at_level(logging.WARNING):
        attach_schedule(recorder, schedule)
    assert "_step_microbatches" in caplog.text
    assert vars(schedule) == {"_stage": schedule._stage}


def test_what_the_recorder_does_not_understand_does_not_stop_training(tmp_path: Path) -> None:
    """A stage that lists nothing for a microbatch without a number: counted, and no op."""
    clock = Clock()
    schedule = InOrder(Stage(clock))

    def unlike(*_args: object) -> list[Message]:
        return [Message(clock, 1.0)]

    vars(schedule._stage)["get_fwd_send_ops"] = unlike
    with recording(tmp_path, clock) as recorder:
        attach_schedule(recorder, schedule, monotonic=clock.monotonic)
        with recorder.step(0):
            schedule._stage.get_fwd_send_ops("not a number")  # type: ignore[arg-type]
            schedule.step()
        assert recorder.errors == 1
    assert len(schedule.outputs) == 2
    assert len(of(ops(tmp_path), OpType.FORWARD_SEND)) == 2


def test_a_recorder_that_is_off_changes_nothing(tmp_path: Path) -> None:
    """With SMON_ENABLE=0 a job runs the code that it would run without SMon."""
    clock = Clock()
    schedule = InOrder(Stage(clock))
    before = dict(vars(schedule))
    with recording(tmp_path, clock, enable=False) as recorder:
        attach_schedule(recorder, schedule)
    assert vars(schedule) == before
