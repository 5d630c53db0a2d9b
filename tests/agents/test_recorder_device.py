"""The recorder on the clock of a GPU: durations are the GPU's, and nobody ever waits for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ingest_agents.payload import gap_of
from ingest_agents.recorder import Recorder
from ingest_agents.recorder.device import ANCHOR_NS, Cuda, DeviceClock, Runtime, find_cuda
from ingest_agents.recorder.pending import CAPACITY, PATIENCE_NS
from smon.ops import OpType
from smon.wire import BatchKind
from tests.agents.gpu_fake import ASIDE, MS, START_NS, Gpu, S
from tests.agents.test_recorder import IDENTITY, ops, settings, written

F, B = OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE

#: Between recording and passing an event, and what float32 milliseconds lose.
NEAR = 20_000


@contextmanager
def recording(
    root: Path, gpu: Gpu, runtime: Runtime | None = None, **changed: object
) -> Iterator[Recorder]:
    """A recorder of a process with this GPU, closed at the end."""
    recorder = Recorder(
        IDENTITY,
        settings(root, **changed),
        wall=gpu.wall,
        monotonic=gpu.monotonic,
        find_device=lambda: runtime or gpu,
    )
    try:
        yield recorder
    finally:
        # A GPU of a test does not go on while it is waited for.
        recorder.close(0.02)
        recorder._thread.join()


def gaps(root: Path) -> list[tuple[str, int]]:
    """Reason and number of all losses."""
    found = [gap_of(batch) for batch in written(root) if batch.kind is BatchKind.GAP]
    return [(gap.reason, gap.events) for gap in found]


def done(root: Path) -> int:
    """The last step that was said to be done."""
    return max(batch.steps_done for batch in written(root) if batch.steps_done is not None)


def test_times_are_those_of_the_gpu(tmp_path: Path) -> None:
    """The host launches both ops at once; the GPU takes 5 and 7 ms, one after the other."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder, recorder.step(0):
        began = gpu.now
        for op, duration in ((F, 5 * MS), (B, 7 * MS)):
            with recorder.op(op):
                gpu.work(duration)
        gpu.finish()
    first, second = ops(tmp_path)
    assert first["duration_ns"] == pytest.approx(5 * MS, abs=NEAR)
    assert second["duration_ns"] == pytest.approx(7 * MS, abs=NEAR)
    assert first["start_ns"] == pytest.approx(START_NS + began, abs=NEAR)
    assert second["start_ns"] == pytest.approx(first["start_ns"] + 5 * MS, abs=NEAR)


def test_a_step_is_done_only_when_the_gpu_has_passed_it(tmp_path: Path) -> None:
    """The host is a step ahead: what it has launched is not written, and not said to be done."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        with recorder.step(0), recorder.op(F):
            gpu.work(5 * MS)
        gpu.finish()
        with recorder.step(1), recorder.op(F):
            gpu.work(5 * MS)
        recorder._journal.write()
        assert [op["step"] for op in ops(tmp_path)] == [0]
        assert done(tmp_path) == 0
        gpu.finish()
    assert [op["step"] for op in ops(tmp_path)] == [0, 1]
    assert done(tmp_path) == 1


def test_streams_that_finish_out_of_order_are_all_read(tmp_path: Path) -> None:
    """The op that ended first on the GPU waits for the one that was begun first."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        with recorder.step(0):
            with recorder.op(F):
                gpu.work(50 * MS)
            gpu.stream = 8
            with recorder.op(B):
                gpu.work(MS)
        gpu.now += 10 * MS
        recorder.begin_step(1)
        recorder._journal.write()
        assert not ops(tmp_path)
        gpu.finish()
    assert [op["optype"] for op in ops(tmp_path)] == ["forward-compute", "backward-compute"]
    assert not gaps(tmp_path)


def test_what_the_gpu_never_passes_is_given_up_and_counted(tmp_path: Path) -> None:
    """One op that hangs forever costs itself, and nothing that comes later."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        with recorder.step(0):
            gpu.stream = 9
            with recorder.op(F):
                gpu.busy[9] = 2**62
            gpu.stream = 7
        gpu.now += PATIENCE_NS
        with recorder.step(1), recorder.op(F):
            gpu.work(MS)
        gpu.now += 2 * S
    assert [op["step"] for op in ops(tmp_path)] == [1]
    assert gaps(tmp_path) == [("device-never-passed", 1)]
    assert done(tmp_path) == 1


def test_a_gpu_that_stands_still_takes_no_memory(tmp_path: Path) -> None:
    """Ops that wait for it are bounded; beyond, they are counted. Closing does not wait."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder, recorder.step(0):
        gpu.busy[7] = 2**62
        for _ in range(CAPACITY + 10):
            recorder.end(recorder.begin(F))
    assert sorted(gaps(tmp_path)) == [("device-behind", 10), ("device-never-passed", CAPACITY)]
    assert done(tmp_path) == 0


def test_events_are_used_again(tmp_path: Path) -> None:
    """A step takes those of the one before."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        for step in range(50):
            with recorder.step(step):
                for _ in range(10):
                    with recorder.op(F):
                        gpu.work(MS)
            gpu.finish()
    assert len(ops(tmp_path)) == 500
    assert gpu.events <= 20 + 2 + 50 * 10 * MS // ANCHOR_NS


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_clocks_that_drift_are_put_right(tmp_path: Path, drift: float) -> None:
    """After an hour, 50 ppm would be 180 ms."""
    gpu = Gpu(drift=drift)
    truth = []
    with recording(tmp_path, gpu) as recorder:
        for step in range(0, 3600, 4):
            with recorder.step(step), recorder.op(F):
                truth.append(gpu.wall())
                gpu.work(MS)
            gpu.now += 4 * S
    errors = [op["start_ns"] - true for op, true in zip(ops(tmp_path), truth, strict=True)]
    # Since the anchor before, at most a step ago, the clocks have drifted by 200 µs.
    assert max(map(abs, errors)) < 4 * S * 5e-5 + NEAR


def test_an_anchor_that_comes_late_does_no_harm(tmp_path: Path) -> None:
    """Something else runs on its stream for 300 ms: the bound of the anchors before holds."""
    gpu = Gpu()
    truth = []
    with recording(tmp_path, gpu) as recorder:
        for step in range(20):
            if step == 10:
                gpu.busy[ASIDE] = gpu.now + 300 * MS
            with recorder.step(step), recorder.op(F):
                truth.append(gpu.wall())
                gpu.work(MS)
            gpu.now += 2 * S
    errors = [op["start_ns"] - true for op, true in zip(ops(tmp_path), truth, strict=True)]
    assert max(map(abs, errors)) < 1_000_000


def test_the_error_of_the_clock_is_bounded_from_both_sides() -> None:
    """No event is passed before it was recorded, or after it was seen to be passed."""
    gpu = Gpu(latency=40_000)
    clock = DeviceClock(gpu, gpu.monotonic, 0)
    before = clock.error_ns
    assert before is None
    mark = clock.mark()
    assert mark is not None
    gpu.now += 100_000
    assert clock.passed(mark)
    assert clock.error_ns is not None
    assert 40_000 <= clock.error_ns <= 100_000
    assert abs(clock.unix_ns(mark) - (gpu.now - 60_000)) <= clock.error_ns


def test_starts_never_go_back_on_a_stream(tmp_path: Path) -> None:
    """However the comparison of the clocks changes from anchor to anchor."""
    gpu = Gpu(drift=9e-5)
    with recording(tmp_path, gpu) as recorder:
        for step in range(400):
            gpu.latency = 1_000 if step % 3 else 900_000
            with recorder.step(step):
                for _ in range(3):
                    with recorder.op(F):
                        gpu.work(1_000)
            gpu.now += ANCHOR_NS // 2
    starts = [op["start_ns"] for op in ops(tmp_path)]
    assert len(starts) == 1200
    assert starts == sorted(starts)


@pytest.mark.parametrize("method", ["event", "record", "anchor", "query", "elapsed_time"])
def test_a_driver_that_fails_leaves_training_alone(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The recorder says so once, and is off; what was recorded before is written."""
    gpu = Gpu()
    threads = threading.active_count()
    with recording(tmp_path, gpu) as recorder:
        for step in range(6):
            if step == 3:
                gpu.failing = {method}
            with recorder.step(step):
                for _ in range(30):  # as a pool of events is used up
                    with recorder.op(F):
                        gpu.work(MS)
                    if step >= 3:
                        recorder.stamp()
            gpu.finish()
            gpu.now += ANCHOR_NS
        assert not recorder.on
    assert len(caplog.records) == 1
    assert method in caplog.text
    assert {0, 1} <= {op["step"] for op in ops(tmp_path)} <= {0, 1, 2}
    assert written(tmp_path)[-1].kind is BatchKind.END
    assert threading.active_count() == threads
    assert not any(getattr(call, "__self__", None) is recorder for call in gc.callbacks)


def test_a_driver_that_fails_at_the_first_op_leaves_training_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is recorded, and that is said."""
    gpu = Gpu(failing={"event"})
    with recording(tmp_path, gpu) as recorder, recorder.step(0):
        assert recorder.begin(F) is None
        assert not recorder.on
    assert len(caplog.records) == 1


def test_while_a_graph_is_captured_nothing_is_marked_or_read(tmp_path: Path) -> None:
    """What is captured has no time: it is counted, so its step is known to lack it."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        with recorder.step(0), recorder.op(F):
            gpu.work(MS)
        gpu.finish()
        with recorder.step(1):
            gpu.captures = True
            assert recorder.begin(F) is None
            gpu.captures = False
            begun = recorder.begin(B)
            gpu.captures = True
            recorder.end(begun)
        gpu.captures = False
    assert [op["step"] for op in ops(tmp_path)] == [0]
    assert gaps(tmp_path) == [("stream-capture", 2)]


def test_a_collection_is_timed_on_the_host(tmp_path: Path) -> None:
    """The GPU has nothing to do with it."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder, recorder.step(0):
        recorder.end(recorder.begin(F))
        with recorder.op(OpType.GC):
            gpu.now += 9 * MS
    assert {op["optype"]: op["duration_ns"] for op in ops(tmp_path)}["gc"] == 9 * MS


def test_waits_are_moved_to_the_op_that_settles(tmp_path: Path) -> None:
    """3 ms inside of the forward, 4 ms after it: the reduction has both, and ends when it does."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder, recorder.step(0):
        began = gpu.wall()
        forward = recorder.begin(F)
        gpu.work(5 * MS)
        wait = recorder.stamp()
        gpu.work(3 * MS)
        waited = recorder.stamp()
        assert forward is not None
        assert wait is not None
        assert waited is not None
        forward.waits = [(wait, waited)]
        recorder.end(forward)
        begin = recorder.stamp()
        gpu.work(4 * MS)
        recorder.waited(begin, recorder.stamp())
        with recorder.op(B):
            gpu.work(6 * MS)
        reduction = recorder.begin(OpType.GRADS_REDUCE_SCATTER)
        assert reduction is not None
        reduction.settles = True
        gpu.work(MS)
        recorder.end(reduction)
        with recorder.op(OpType.OPTIMIZER):
            gpu.work(2 * MS)
        gpu.finish()
    times = [((op["start_ns"] - began) / MS, op["duration_ns"] / MS) for op in ops(tmp_path)]
    expected = [(0, 5), (5, 6), (11, 8), (19, 2)]
    for found, wanted in zip(times, expected, strict=True):
        assert found == pytest.approx(wanted, abs=NEAR / MS)


def test_a_process_without_a_gpu_is_timed_on_the_host(tmp_path: Path) -> None:
    """Neither torch nor CUDA is imported or initialised to find out."""
    gpu = Gpu()
    recorder = Recorder(IDENTITY, settings(tmp_path), wall=gpu.wall, monotonic=gpu.monotonic)
    with recorder.step(0), recorder.op(F):
        gpu.now += 5 * MS
    recorder.close()
    assert [op["duration_ns"] for op in ops(tmp_path)] == [5 * MS]
    assert find_cuda() is None


class TorchCuda:
    """As much of `torch.cuda` as is used: one stream of the trainer, and more on request."""

    def __init__(self) -> None:
        self.main = SimpleNamespace(cuda_stream=3)
        self.aside: list[SimpleNamespace] = []
        self.recorded: list[object] = []
        self.captures = False

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:  # noqa: N802  # torch's name
        """An event that remembers its stream."""
        assert enable_timing
        return SimpleNamespace(record=self.recorded.append)

    def Stream(self, *, priority: int) -> SimpleNamespace:  # noqa: N802  # torch's name
        """Another stream."""
        self.aside.append(SimpleNamespace(cuda_stream=4, priority=priority))
        return self.aside[-1]

    def current_stream(self) -> SimpleNamespace:
        """Where the trainer computes."""
        return self.main

    def is_current_stream_capturing(self) -> bool:
        """Whether it records a graph."""
        return self.captures


def test_events_of_torch_are_put_where_they_belong() -> None:
    """Marks on the stream that computes, anchors on a stream of their own."""
    torch = TorchCuda()
    cuda = Cuda(torch)
    assert cuda.record(cuda.event()) == 3
    cuda.anchor(cuda.event())
    assert torch.recorded == [torch.main, *torch.aside]
    assert not cuda.capturing()
    torch.captures = True
    assert cuda.capturing()


def test_the_clock_can_be_chosen(tmp_path: Path) -> None:
    """`SMON_RECORDER_CLOCK=host` leaves the GPU alone."""
    gpu = Gpu(failing={"event", "record"})
    with (
        recording(tmp_path, gpu, recorder_clock="host") as recorder,
        recorder.step(0),
        recorder.op(F),
    ):
        gpu.now += 5 * MS
    assert [op["duration_ns"] for op in ops(tmp_path)] == [5 * MS]


def test_a_clock_that_is_not_there_is_not_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `cuda`, times of the host would pass for those of the GPU."""
    gpu = Gpu()
    chosen = settings(tmp_path, recorder_clock="cuda")
    recorder = Recorder(IDENTITY, chosen, find_device=lambda: None)
    with recorder.step(0), recorder.op(F):
        assert not recorder.on
    unknown = Recorder(IDENTITY, settings(tmp_path, recorder_clock="sundial"))
    assert not unknown.on
    assert "CUDA" in caplog.text
    assert "sundial" in caplog.text
    assert gpu.events == 0
