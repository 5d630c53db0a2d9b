"""Megatron-LM's timers as ops: what computes and transfers are about, and what training notices."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.identity import Identity
from ingest_agents.recorder import Recorder
from ingest_agents.recorder.megatron import attach_timers, count_tokens
from ingest_agents.recorder.megatron_job import MegatronJob, Overlap, find_job
from smon.errors import ConfigError
from smon.topology import Layout
from tests.agents.gpu_fake import MS, Gpu
from tests.agents.megatron_fake import (
    Dummy,
    Sizes,
    Timers,
    interleaved,
    modules,
    one_forward_one_backward,
    overlapped,
    overlapped_everywhere,
    time,
    train_step,
)
from tests.agents.test_recorder import Time, context, ops, settings
from tests.agents.test_recorder_device import NEAR, recording


@dataclass(slots=True)
class Trainer:
    """One rank that trains."""

    root: Path
    layout: Layout = field(default_factory=lambda: Layout(dp=2, pp=2))
    rank: int = 3
    microbatches: int = 4
    level: int = 0
    iteration: int | None = None
    training: bool = True
    changed: dict[str, Any] = field(default_factory=dict)

    def job(self) -> MegatronJob:
        """What it says about itself."""
        job = MegatronJob(
            layout=self.layout,
            rank=self.rank,
            iteration=lambda: self.iteration,
            microbatches=lambda: self.microbatches,
            training=lambda: self.training,
        )
        return replace(job, **self.changed)

    def recorder(self) -> Recorder:
        """Of this rank."""
        identity = Identity("job", 0, "node", self.rank, self.layout.world_size, self.layout, {})
        clock = Time()
        return Recorder(identity, settings(self.root), wall=clock.wall, monotonic=clock.monotonic)

    def sizes(self) -> Sizes:
        """For a schedule."""
        return Sizes(
            self.layout.place(self.rank).stage,
            self.layout.pp,
            self.microbatches,
            self.layout.vpp,
            self.changed.get("group", 0),
        )

    def train(self, run: Callable[[Timers, Recorder], None]) -> list[dict[str, Any]]:
        """Train, and give back the ops."""
        recorder = self.recorder()
        timers = attach_timers(Timers(self.level), recorder, job=self.job)
        run(timers, recorder)
        recorder.close()
        assert recorder.errors == 0
        return ops(self.root)


def steps(
    names: Callable[[Sizes], Iterator[str]], trainer: Trainer, count: int = 1
) -> list[dict[str, Any]]:
    """Ops of so many steps of a schedule."""

    def run(timers: Timers, _recorder: Recorder) -> None:
        for _ in range(count):
            train_step(timers, names(trainer.sizes()))

    return trainer.train(run)


def types(found: list[dict[str, Any]]) -> list[str]:
    """Op types by their start."""
    return [op["optype"] for op in sorted(found, key=lambda op: op["start_ns"])]


def test_a_step_of_the_last_stage_is_told_op_by_op(tmp_path: Path) -> None:
    """Computes, transfers with both halves of the combined ones, reductions, clip, optimizer."""
    found = steps(one_forward_one_backward, Trainer(tmp_path, microbatches=2))
    assert types(found) == [
        "forward-recv",
        "forward-compute",
        "backward-compute",
        "backward-send",
        "forward-recv",
        "forward-compute",
        "backward-compute",
        "backward-send",
        "grads-reduce-scatter",
        "embedding-grads-all-reduce",
        "optimizer-clip-main-grad",
        "optimizer",
    ]
    computes = [op for op in found if op["optype"].endswith("-compute")]
    assert {(op["microbatch"], op["seq"]) for op in computes} == {(0, 0), (1, 1)}
    assert {(op["dp"], op["stage"], op["rank"], op["step"]) for op in found} == {(1, 1, 3, 0)}


def test_ops_of_each_type_are_numbered_without_gaps(tmp_path: Path) -> None:
    """From 0 in each step, also where an op began in vain."""

    def run(timers: Timers, _recorder: Recorder) -> None:
        for _ in range(2):
            read = iter(["forward-recv", "forward-compute", "backward-compute"])
            with_batch = (_with_batch(timers, name) for name in read)
            train_step(timers, filter(None, with_batch))

    found = Trainer(tmp_path).train(run)
    assert Counter((op["step"], op["optype"], op["seq"]) for op in found).most_common(1)[0][1] == 1
    assert {op["seq"] for op in found} == {0}
    assert {op["step"] for op in found} == {0, 1}


def _with_batch(timers: Timers, name: str) -> str | None:
    """The name; a forward reads its batch, and is timed here."""
    if name != "forward-compute":
        return name
    time(timers, name, lambda: time(timers, "batch-generator"))
    return None


def test_reading_the_batch_is_no_part_of_a_forward(tmp_path: Path) -> None:
    """So a slow loader does not make a rank look slow: its forward only begins late."""

    def run(timers: Timers, _recorder: Recorder) -> None:
        def forward() -> None:
            time(timers, "batch-generator")

        time(timers, "forward-backward", lambda: time(timers, "forward-compute", forward))
        time(timers, "optimizer")

    (forward, *_rest) = Trainer(tmp_path).train(run)
    # The clock goes on by a millisecond at each look: begin, begin again, end.
    assert forward["duration_ns"] == 1_000_000


def test_on_a_gpu_ops_take_as_long_as_the_gpu_does(tmp_path: Path) -> None:
    """The host only launches: 5 ms after the batch, and 7 ms in the optimizer."""
    gpu = Gpu()
    with recording(tmp_path, gpu) as recorder:
        timers = attach_timers(Timers(), recorder, job=Trainer(tmp_path).job)

        def forward() -> None:
            time(timers, "batch-generator", lambda: gpu.work(3 * MS))
            gpu.work(5 * MS)

        time(timers, "forward-backward", lambda: time(timers, "forward-compute", forward))
        with_clip = partial(time, timers, "optimizer-inner-step", lambda: gpu.work(7 * MS))
        time(timers, "optimizer", with_clip)
        gpu.finish()
    took = {op["optype"]: op["duration_ns"] for op in ops(tmp_path)}
    assert took["forward-compute"] == pytest.approx(5 * MS, abs=NEAR)
    assert took["optimizer"] == pytest.approx(7 * MS, abs=NEAR)
    assert took["optimizer-clip-main-grad"] == pytest.approx(0, abs=NEAR)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_timers_stay_what_they_are_for_everybody_else(level: int, tmp_path: Path) -> None:
    """Same object, names, levels, counts; only start and stop are seen."""
    trainer = Trainer(tmp_path, level=level)
    recorder = trainer.recorder()
    plain, timers = Timers(level), Timers(level)
    assert attach_timers(timers, recorder, job=trainer.job) is timers
    assert attach_timers(timers, recorder, job=trainer.job) is timers
    for each in (plain, timers):
        train_step(each, one_forward_one_backward(trainer.sizes()))
        time(each, "interval-time")
    assert isinstance(timers, Timers)
    assert {name: timer.count for name, timer in timers.timers.items()} == {
        name: timer.count for name, timer in plain.timers.items()
    }
    names = ["optimizer", "forward-compute", "interval-time"]
    assert timers.log(names) == plain.log(names)
    if level == 2:
        watched: Any = timers("optimizer", log_level=1)
        assert watched.elapsed() == 1.0
        watched.count = 7
        assert timers.timers["optimizer"].count == 7
    recorder.close()
    # One attachment only.
    assert sum(op["optype"] == "optimizer" for op in ops(tmp_path)) == 1


def test_what_a_timer_raises_reaches_the_trainer_and_an_error_of_ours_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that cannot be asked: one warning, and training goes on."""

    def nobody() -> MegatronJob:
        raise ConfigError("nobody knows")

    timers = attach_timers(Timers(2), Trainer(tmp_path).recorder(), job=nobody)
    for _ in range(3):
        train_step(timers, iter(["forward-compute", "backward-compute"]))
    assert [record.message for record in caplog.records] == [
        "SMon: no more of Megatron-LM's timers is recorded: nobody knows"
    ]
    with pytest.raises(AssertionError, match="not started"):
        timers("forward-compute").stop()


def test_timers_that_cannot_be_watched_are_given_back(caplog: pytest.LogCaptureFixture) -> None:
    """A plain function in their place: one warning."""

    def function(_name: str, _log_level: int = 0) -> Dummy:
        return Dummy()

    assert attach_timers(function) is function
    assert "nothing of Megatron-LM's timers" in caplog.text


def test_copies_of_attached_timers_are_plain_timers(tmp_path: Path) -> None:
    """Megatron-LM copies its configuration, and saves it: the recorder stays out of that."""
    trainer = Trainer(tmp_path)
    timers = attach_timers(Timers(2), trainer.recorder(), job=trainer.job)
    time(timers, "forward-backward")
    for other in (copy.deepcopy(timers), pickle.loads(pickle.dumps(timers))):  # noqa: S301  # ours
        assert type(other) is Timers
        assert other.timers["forward-backward"].count == 1


def test_timers_that_are_attached_in_the_midst_of_a_step_record_the_next_one(
    tmp_path: Path,
) -> None:
    """And in the midst of an evaluation, or of a checkpoint: what has no begin is left out."""
    trainer = Trainer(tmp_path, microbatches=1)
    timers = Timers()
    recorder = trainer.recorder()
    for around in ("forward-backward", "forward-compute", "eval-time", "optimizer"):
        timers(around).start()
    attach_timers(timers, recorder, job=trainer.job)
    for around in ("forward-compute", "forward-backward", "eval-time", "optimizer"):
        timers(around).stop()
    train_step(timers, one_forward_one_backward(trainer.sizes()))
    recorder.close()
    assert Counter(op["step"] for op in ops(tmp_path)) == {0: 8}
    assert "evaluation" not in context(tmp_path).get("events", {}).get("kind", [])


def test_evaluation_is_an_event_and_no_step(tmp_path: Path) -> None:
    """Passes without gradients are not recorded; the whole time is, once."""
    trainer = Trainer(tmp_path, microbatches=1)

    def run(timers: Timers, _recorder: Recorder) -> None:
        train_step(timers, one_forward_one_backward(trainer.sizes()))
        trainer.training = False

        def evaluate() -> None:
            time(timers, "evaluate", lambda: train_step(timers, iter(["forward-compute"])))

        time(timers, "eval-time", evaluate)
        time(timers, "save-checkpoint")

    found = trainer.train(run)
    assert {op["step"] for op in found} == {0}
    kinds = [kind for kind in context(tmp_path)["events"]["kind"] if kind != "gc"]
    assert kinds == ["evaluation", "checkpoint"]


def test_steps_have_the_numbers_of_the_job_and_none_comes_twice(tmp_path: Path) -> None:
    """They go on after a restart; a pass that is repeated to check its result is left out."""
    trainer = Trainer(tmp_path)

    def run(timers: Timers, _recorder: Recorder) -> None:
        for trainer.iteration in (500, 501, 501, 500, 502):
            train_step(timers, iter(["forward-compute", "backward-compute"]))

    found = trainer.train(run)
    assert [op["step"] for op in found if op["optype"] == "optimizer"] == [500, 501, 502]


def test_steps_of_the_caller_are_used(tmp_path: Path) -> None:
    """If the loop says where steps begin and end, timers do not."""

    def run(timers: Timers, recorder: Recorder) -> None:
        with recorder.step(7):
            train_step(timers, iter(["forward-compute", "backward-compute"]))
            assert recorder.open_step == 7
        train_step(timers, iter(["forward-compute", "backward-compute"]))
        assert recorder.open_step is None

    assert {op["step"] for op in Trainer(tmp_path).train(run)} == {7, 8}


@pytest.mark.parametrize("chained", [True, False])
def test_waits_of_the_optimizer_are_no_work_of_it(chained: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Up to the clip all ranks meet; the gather of parameters comes after the optimizer."""

    def run(timers: Timers, _recorder: Recorder) -> None:
        train_step(timers, iter(["forward-compute", "backward-compute"]), chained=chained)

    found = Trainer(tmp_path).train(run)
    assert types(found)[-2:] == ["optimizer-clip-main-grad", "optimizer"]


def test_without_clipping_the_optimizer_is_one_op(tmp_path: Path) -> None:
    """Then nobody waits for all others in it."""
    trainer = Trainer(tmp_path, changed={"clips": False})
    found = steps(one_forward_one_backward, trainer)
    assert "optimizer-clip-main-grad" not in types(found)
    assert types(found).count("optimizer") == 1


def test_reductions_without_a_peer_are_not_recorded(tmp_path: Path) -> None:
    """Timers run, but nothing happens: DP 1, TP 1, weights that are not tied, middle stages."""
    alone = Trainer(tmp_path / "alone", layout=Layout(dp=1, pp=2), rank=1)
    untied = Trainer(tmp_path / "untied", changed={"ties_embeddings": False})
    middle = Trainer(tmp_path / "middle", layout=Layout(dp=1, pp=3, tp=2), rank=2)
    ends = {
        name: [kind for kind in types(steps(one_forward_one_backward, each)) if "grads" in kind]
        for name, each in (("alone", alone), ("untied", untied), ("middle", middle))
    }
    assert ends == {
        "alone": ["embedding-grads-all-reduce"],
        "untied": ["grads-reduce-scatter"],
        "middle": ["layernorm-grads-all-reduce"],
    }


def test_tokens_belong_to_the_microbatch_whose_forward_runs(tmp_path: Path) -> None:
    """The first stage tells them for all, once for each microbatch."""

    def run(timers: Timers, _recorder: Recorder) -> None:
        count_tokens(timers, 1, 1.0)

        def forwards() -> None:
            for tokens in (10, 20):
                time(timers, "forward-compute", partial(count_tokens, timers, tokens, tokens**2))

        time(timers, "forward-backward", forwards)
        time(timers, "optimizer")

    for rank in (0, 3):
        Trainer(tmp_path / str(rank), rank=rank).train(run)
    told = context(tmp_path / "0")["microbatches"]
    assert (told["microbatch"], told["tokens"]) == ([0, 1], [10, 20])
    assert told["sum_len2"] == [100.0, 400.0]
    assert "microbatches" not in context(tmp_path / "3")
    count_tokens(Timers(), 1, 1.0)


#: Whether a schedule can run a stage like this is up to it: names of timers, in their order.
Names = Callable[[Sizes], Iterator[str]]

SCHEDULES: list[tuple[Names, Overlap, int]] = [
    (one_forward_one_backward, Overlap.NOWHERE, 1),
    (interleaved, Overlap.NOWHERE, 2),
    (interleaved, Overlap.NOWHERE, 3),
    (overlapped, Overlap.STEADY, 2),
    (overlapped_everywhere, Overlap.EVERYWHERE, 2),
    (overlapped_everywhere, Overlap.EVERYWHERE, 3),
]


@pytest.mark.parametrize(
    "size", [(2, 4, 0), (4, 8, 0), (3, 9, 0), (2, 6, 3), (2, 2, 0), (4, 10, 5)]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_send_has_its_receive(
    schedule: tuple[Names, Overlap, int], size: tuple[int, int, int], tmp_path: Path
) -> None:
    """Between two chunks of the model each microbatch is sent once and received once, both ways."""
    (names, overlap, chunks), (stages, microbatches, group) = schedule, size
    layout = Layout(dp=1, pp=stages, vpp=chunks)
    sent: Counter[tuple[str, int, int]] = Counter()
    received: Counter[tuple[str, int, int]] = Counter()
    for rank in range(stages):
        changed = {"group": group, "overlap": overlap}
        trainer = Trainer(tmp_path / str(rank), layout, rank, microbatches, changed=changed)
        found = steps(names, trainer)
        order = [op for op in found if op["optype"] == "forward-recv"]
        assert [op["seq"] for op in order] == list(range(len(order)))
        for op in found:
            way, _, half = op["optype"].partition("-")
            place = op.get("chunk", 0) * stages + rank
            if half == "send":
                after = place + (1 if way == "forward" else -1)
                sent[way, after, op["microbatch"]] += 1
            elif half == "recv":
                received[way, place, op["microbatch"]] += 1
    last = stages * chunks - 1
    expected = Counter(
        [("forward", place, each) for place in range(1, last + 1) for each in range(microbatches)]
        + [("backward", place, each) for place in range(last) for each in range(microbatches)]
    )
    assert received == expected
    assert sent == expected


def test_a_receive_beside_computes_is_the_wait_for_it(tmp_path: Path) -> None:
    """It begins when the stage has nothing else to do, and ends when its compute can begin."""
    layout = Layout(dp=1, pp=2, vpp=2)
    trainer = Trainer(tmp_path, layout, 1, changed={"overlap": Overlap.STEADY})
    found = steps(overlapped, trainer)
    ordered = sorted(found, key=lambda op: op["start_ns"])
    for op in ordered:
        if op["optype"] != "backward-recv" or op["seq"] > 2:
            continue
        (compute,) = (
            each
            for each in ordered
            if each["optype"] == "backward-compute"
            and (each["microbatch"], each["chunk"]) == (op["microbatch"], op["chunk"])
        )
        assert op["start_ns"] + op["duration_ns"] <= compute["start_ns"]
        assert not any(
            op["start_ns"] < each["start_ns"] < compute["start_ns"]
            for each in ordered
            if each["optype"].endswith("compute")
        )


def test_the_job_is_what_megatron_says(tmp_path: Path) -> None:
    """Layout and rank from its groups, the rest from its arguments."""
    args: dict[str, Any] = {
        "curr_iteration": 12,
        "clip_grad": 0.0,
        "untie_embeddings_and_output_weights": True,
        "overlap_p2p_comm": True,
        "microbatch_group_size_per_vp_stage": 5,
    }
    job = find_job(modules(**args))
    assert (job.layout, job.rank, job.stage) == (Layout(dp=2, pp=2), 3, 1)
    assert (job.iteration(), job.microbatches(), job.training()) == (12, 8, True)
    assert (job.clips, job.ties_embeddings, job.group) == (False, False, 5)
    assert job.overlap is Overlap.STEADY
    everywhere = find_job(modules(**args, overlap_p2p_comm_warmup_flush=True))
    assert everywhere.overlap is Overlap.EVERYWHERE
    bare = {key: value for key, value in modules().items() if "training" not in key}
    assert find_job(bare).iteration() is None
    assert not list(tmp_path.iterdir())


def test_ranks_in_another_order_are_told() -> None:
    """SMon numbers ranks as Megatron-LM does by default: others would be mixed up."""
    other = modules()
    other["megatron.core.parallel_state"].get_pipeline_model_parallel_rank = lambda: 0
    with pytest.raises(ConfigError, match="use-tp-pp-dp-mapping"):
        find_job(other)
    with pytest.raises(ConfigError, match="imported torch"):
        find_job({})
