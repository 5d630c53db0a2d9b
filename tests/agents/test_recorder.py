"""The recorder inside the trainer: never in the way, and honest about what it drops."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.config import AgentSettings
from ingest_agents.identity import Identity
from ingest_agents.payload import MAX_ROWS, decode, gap_of
from ingest_agents.recorder import Recorder
from ingest_agents.spool.folder import read_spec, streams_in
from smon.ops import OpType
from smon.topology import Layout
from smon.wire import Batch, BatchKind
from tests.agents.test_spool import read_all

IDENTITY = Identity("job", 1, "node-1", 3, 4, Layout(dp=2, pp=2), {})


class Time:
    """Both clocks, which go on by a millisecond at each look."""

    def __init__(self) -> None:
        self.steady, self.ahead = 0, 1_700_000_000_000_000_000

    def monotonic(self) -> int:
        """A clock that never goes back."""
        self.steady += 1_000_000
        return self.steady

    def wall(self) -> int:
        """Unix time."""
        return self.steady + self.ahead


def settings(root: Path, **changed: object) -> AgentSettings:
    """Settings of a recorder that writes only when it is told to."""
    base = AgentSettings(spool_dir=str(root), flush_s=600.0)
    return replace(base, **changed)  # type: ignore[arg-type]  # any field


@contextmanager
def recording(root: Path, time: Time | None = None, **changed: object) -> Iterator[Recorder]:
    """A recorder, closed at the end."""
    clock = time or Time()
    recorder = Recorder(
        IDENTITY, settings(root, **changed), wall=clock.wall, monotonic=clock.monotonic
    )
    try:
        yield recorder
    finally:
        recorder.close()


def written(root: Path) -> list[Batch]:
    """All batches of the one stream."""
    (folder,) = streams_in(root)
    return read_all(folder)


def ops(root: Path) -> list[dict[str, Any]]:
    """All ops, as records."""
    found = []
    for batch in written(root):
        if batch.kind is BatchKind.OPS:
            columns = json.loads(decode(batch))["columns"]
            found += [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
    return found


def context(root: Path) -> dict[str, Any]:
    """All side evidence, part by part."""
    parts: dict[str, Any] = {}
    for batch in written(root):
        if batch.kind is BatchKind.CONTEXT:
            parts.update(json.loads(decode(batch)))
    return parts


def test_ops_are_recorded_with_all_that_the_protocol_needs(tmp_path: Path) -> None:
    """Worker, rank, step, number, times, microbatch and chunk; then an END."""
    with recording(tmp_path) as recorder:
        with recorder.step(7):
            for microbatch in range(2):
                with recorder.op(OpType.FORWARD_COMPUTE, microbatch=microbatch, chunk=1):
                    pass
            begun = recorder.begin(OpType.OPTIMIZER)
            recorder.end(begun)
        with recorder.step(8), recorder.op(OpType.FORWARD_COMPUTE):
            pass
    found = ops(tmp_path)
    assert [(op["optype"], op["step"], op["seq"]) for op in found] == [
        ("forward-compute", 7, 0),
        ("forward-compute", 7, 1),
        ("optimizer", 7, 0),
        ("forward-compute", 8, 0),
    ]
    assert {(op["dp"], op["stage"], op["rank"]) for op in found} == {(1, 1, 3)}
    assert [(op["microbatch"], op["chunk"]) for op in found[:3]] == [(0, 1), (1, 1), (-1, -1)]
    assert all(op["duration_ns"] == 1_000_000 for op in found)
    assert found[0]["start_ns"] > 1_700_000_000_000_000_000
    batches = written(tmp_path)
    assert batches[-1].kind is BatchKind.END
    assert max(batch.steps_done or 0 for batch in batches) == 8


def test_the_stream_says_who_it_is(tmp_path: Path) -> None:
    """`stream.json` has the identity, and names of hosts are side evidence."""
    with recording(tmp_path):
        (folder,) = streams_in(tmp_path)
        spec = read_spec(folder)
    assert (spec.job, spec.attempt, spec.host, spec.ranks) == ("job", 1, "node-1", (3,))
    assert (spec.mode, spec.time, spec.source) == ("live", "unix", "recorder")
    assert context(tmp_path)["hosts"] == {"3": "node-1"}


def test_a_step_is_done_when_all_its_ops_are_written(tmp_path: Path) -> None:
    """No batch says so earlier, and none is missing."""
    with recording(tmp_path) as recorder:
        for step in range(5):
            with recorder.step(step):
                for _ in range(MAX_ROWS // 2):
                    recorder.end(recorder.begin(OpType.FORWARD_COMPUTE))
    seen: set[int] = set()
    total = 0
    for batch in written(tmp_path):
        if batch.kind is BatchKind.OPS:
            steps = json.loads(decode(batch))["columns"]["step"]
            total += len(steps)
            assert not seen & set(steps), "ops after their step was done"
        if batch.steps_done is not None:
            seen |= set(range(batch.steps_done + 1))
    assert total == 5 * (MAX_ROWS // 2)
    assert seen == set(range(5))


def test_tokens_and_events_become_side_evidence(tmp_path: Path) -> None:
    """As `context.json` has them."""
    with recording(tmp_path) as recorder, recorder.step(3):
        recorder.tokens(0, 8192, 12_582_912.0)
        recorder.event("checkpoint", 6.0)
        with recorder.timed("evaluation"):
            pass
    found = context(tmp_path)
    assert found["microbatches"] == {
        "step": [3],
        "dp": [1],
        "microbatch": [0],
        "tokens": [8192],
        "sum_len2": [12_582_912.0],
    }
    assert found["events"]["kind"] == ["checkpoint", "evaluation"]
    assert found["events"]["rank"] == [3, 3]
    assert found["events"]["duration_s"] == [6.0, 0.001]


def test_collections_become_events(tmp_path: Path) -> None:
    """A full collection is recorded by itself, with its pause."""
    with recording(tmp_path) as recorder, recorder.step(3):
        gc.collect()
    events = context(tmp_path)["events"]
    assert "gc" in events["kind"]
    assert not any(
        callback.__self__ is recorder for callback in gc.callbacks if hasattr(callback, "__self__")
    ), "and the callback is gone again"


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    """The trainer never waits; what is dropped is a GAP with its steps, before its step is done."""
    with recording(tmp_path, queue_events=100) as recorder:
        for step in range(2):
            with recorder.step(step):
                for _ in range(100):
                    recorder.end(recorder.begin(OpType.FORWARD_COMPUTE))
    batches = written(tmp_path)
    gaps = [gap_of(batch) for batch in batches if batch.kind is BatchKind.GAP]
    lost = sum(gap.events for gap in gaps)
    assert lost
    assert len(ops(tmp_path)) + lost == 200
    assert {gap.reason for gap in gaps} == {"queue-full"}
    assert gaps[-1].last_step == 1
    done = [batch.seq for batch in batches if batch.steps_done == 1]
    assert min(done) > min(batch.seq for batch in batches if batch.kind is BatchKind.GAP)


def test_nothing_is_recorded_outside_of_a_step(tmp_path: Path) -> None:
    """An op belongs to a step."""
    with recording(tmp_path) as recorder:
        with recorder.op(OpType.OPTIMIZER):
            pass
        recorder.tokens(0, 1, 1.0)
    assert not ops(tmp_path)


def test_switched_off_nothing_happens(tmp_path: Path) -> None:
    """`SMON_ENABLE=0`: no folder, no thread, and every call does nothing."""
    before = threading.active_count()
    environ = {"SMON_ENABLE": "0", "SMON_SPOOL_DIR": str(tmp_path / "spool"), "RANK": "0"}
    recorder = Recorder.from_env(environ)
    with recorder.step(1), recorder.op(OpType.OPTIMIZER):
        recorder.tokens(0, 1, 1.0)
    recorder.flush()
    recorder.close()
    assert not recorder.on
    assert not (tmp_path / "spool").exists()
    assert threading.active_count() == before


CALLS: list[Callable[[Recorder], object]] = [
    lambda recorder: recorder.begin_step("x"),  # type: ignore[arg-type]
    lambda recorder: recorder.begin("no-op-type"),  # type: ignore[arg-type]
    lambda recorder: recorder.end(7),  # type: ignore[arg-type]
    lambda recorder: recorder.tokens("a", -1, float("nan")),  # type: ignore[arg-type]
    lambda recorder: recorder.tokens(0, -1, 1.0),
    lambda recorder: recorder.event("party", 1.0),
    lambda recorder: recorder.event("gc", float("nan")),
    lambda recorder: recorder.measured(recorder.begin(OpType.GC), "x", 1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_never_raises(
    tmp_path: Path, call: Callable[[Recorder], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, said once, and the rest is recorded."""
    with recording(tmp_path) as recorder:
        with recorder.step(1):
            call(recorder)
            call(recorder)
            with recorder.op(OpType.OPTIMIZER):
                pass
        assert recorder.errors == 2
    assert len(caplog.records) == 1
    assert any(op["optype"] == "optimizer" for op in ops(tmp_path))


def test_exceptions_of_the_trainer_pass_through(tmp_path: Path) -> None:
    """They are the trainer's; the op that was open is recorded."""
    with (
        recording(tmp_path) as recorder,
        pytest.raises(RuntimeError, match="mine"),
        recorder.step(1),
        recorder.op(OpType.OPTIMIZER),
    ):
        raise RuntimeError("mine")
    assert len(ops(tmp_path)) == 1


def test_ops_that_a_server_would_refuse_are_left_out_and_counted(tmp_path: Path) -> None:
    """One of them would cost its whole batch."""
    with recording(tmp_path) as recorder, recorder.step(1):
        recorder.measured(recorder.begin(OpType.OPTIMIZER), 1, -5)
        recorder.measured(recorder.begin(OpType.OPTIMIZER), 1, 10**15)
        recorder.measured(recorder.begin(OpType.OPTIMIZER), 1, 5)
    assert [op["duration_ns"] for op in ops(tmp_path)] == [5]
    gaps = [gap_of(batch) for batch in written(tmp_path) if batch.kind is BatchKind.GAP]
    assert [(gap.reason, gap.events) for gap in gaps] == [("duration-out-of-range", 2)]


def test_a_spool_that_cannot_be_written_leaves_training_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The recorder is off, and says so once."""
    place = tmp_path / "file"
    place.write_text("x")
    with recording(place) as recorder, recorder.step(1), recorder.op(OpType.OPTIMIZER):
        assert not recorder.on
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "environ, word",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "SMON_JOB_ID"),
        ({"SMON_JOB_ID": "a", "WORLD_SIZE": "2"}, "SMON_RANK"),
        ({"SMON_JOB_ID": "a", "RANK": "9", "SMON_LAYOUT": "dp2-pp2"}, "layout"),
        ({"RANK": "x"}, "RANK"),
        ({"SMON_LAYOUT": "zz9"}, "layout"),
        ({"SMON_SEGMENT_BYTES": "many"}, "SMON_SEGMENT_BYTES"),
    ],
)
def test_an_environment_that_does_not_say_enough(
    tmp_path: Path, environ: dict[str, str], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The recorder is off, and the sentence names what is missing or wrong."""
    recorder = Recorder.from_env({**environ, "SMON_SPOOL_DIR": str(tmp_path)})
    assert not recorder.on
    assert word in caplog.text


def test_a_process_alone_needs_nothing(tmp_path: Path) -> None:
    """One rank, no launcher: a job named after the host."""
    recorder = Recorder.from_env({"SMON_SPOOL_DIR": str(tmp_path), "SMON_HOSTNAME": "box"})
    recorder.close()
    (folder,) = streams_in(tmp_path)
    spec = read_spec(folder)
    assert (spec.job, spec.ranks, spec.layout) == ("local-box", (0,), Layout(dp=1, pp=1))


def test_a_jump_of_the_clock_takes_effect_at_the_next_step(tmp_path: Path) -> None:
    """Within a step, times go on evenly."""
    time = Time()
    with recording(tmp_path, time) as recorder:
        for step in range(2):
            with recorder.step(step):
                with recorder.op(OpType.FORWARD_COMPUTE):
                    pass
                time.ahead += 5_000_000_000
                with recorder.op(OpType.FORWARD_COMPUTE):
                    pass
    starts = [op["start_ns"] for op in ops(tmp_path)]
    assert starts[1] - starts[0] < 10**9
    assert starts[2] - starts[1] > 4 * 10**9
    assert starts[3] - starts[2] < 10**9


def test_ops_from_several_threads_have_distinct_numbers(tmp_path: Path) -> None:
    """Hooks of the backward run in other threads."""
    with recording(tmp_path) as recorder, recorder.step(0):

        def work() -> None:
            for _ in range(500):
                recorder.end(recorder.begin(OpType.BACKWARD_COMPUTE))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = [op["seq"] for op in ops(tmp_path)]
    assert sorted(numbers) == list(range(2000))


FORKING = """
import os, sys
from ingest_agents.recorder import Recorder
from smon.ops import OpType

recorder = Recorder.from_env()
with recorder.step(0), recorder.op(OpType.OPTIMIZER):
    pass
child = os.fork()
with recorder.step(1), recorder.op(OpType.OPTIMIZER):
    pass
if child == 0:
    assert not recorder.on
    sys.exit(0)
assert recorder.on
os.waitpid(child, 0)
"""


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    """The stream is the parent's; both end in good order, without being told to."""
    environ = {**os.environ, "SMON_SPOOL_DIR": str(tmp_path), "SMON_JOB_ID": "job"}
    done = subprocess.run(
        [sys.executable, "-c", FORKING], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [op["step"] for op in ops(tmp_path)] == [0, 1]
    assert written(tmp_path)[-1].kind is BatchKind.END
