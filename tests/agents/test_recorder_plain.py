"""`attach`: a plain training loop is recorded without a change to it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ingest_agents.recorder
from ingest_agents.recorder import Attached, Recorder, attach
from ingest_agents.recorder.meshes import layout_of
from smon.errors import SMonError
from smon.ops import OpType
from smon.topology import Layout
from tests.agents.test_recorder import IDENTITY, context, ops, settings
from tests.agents.torch_fake import (
    MS,
    START_NS,
    Block,
    DistributedDataParallel,
    FSDPModule,
    Module,
    Optimizer,
    Tensor,
    World,
)

#: Op, microbatch, begin since the start of the first step, duration; ms.
Row = tuple[str, int, float, float]


@pytest.fixture
def world() -> World:
    """Time, and no backward."""
    return World()


@pytest.fixture
def recorder(tmp_path: Path, world: World) -> Iterator[Recorder]:
    """A recorder with the world's clock."""
    one = Recorder(IDENTITY, settings(tmp_path), wall=world.wall, monotonic=world.monotonic)
    yield one
    one.close()


def rows(root: Path, recorder: Recorder) -> list[Row]:
    """All ops, after the end."""
    recorder.close()
    found = [{"microbatch": -1, **op} for op in ops(root)]
    first = found[0]["start_ns"]
    return [
        (
            op["optype"],
            op["microbatch"],
            (op["start_ns"] - first) / MS,
            op["duration_ns"] / MS,
        )
        for op in found
    ]


def model_of(world: World) -> Module:
    """Two blocks: 30 ms forward, 70 ms backward."""
    return Module(Block(world, 10, 30), Block(world, 20, 40))


def train(
    world: World, model: Module, optimizer: Optimizer, steps: int = 1, microbatches: int = 1
) -> None:
    """The loop of a user: 3 ms for a batch, 2 for the loss, 4 before the optimizer."""
    for _ in range(steps):
        for _ in range(microbatches):
            world.spend(3)
            output = model(Tensor())
            world.spend(2)
            world.backward(output)
        world.spend(4)
        optimizer.step()


def attached(
    recorder: Recorder,
    world: World,
    model: Any,  # noqa: ANN401  # also wrong ones
    optimizer: Any,  # noqa: ANN401  # also wrong ones
    **more: Any,  # noqa: ANN401  # as `attach`
) -> Attached:
    """Attach with the world's autograd."""
    return attach(model, optimizer, recorder=recorder, autograd=world.autograd, **more)


def test_a_loop_is_recorded_as_it_runs(tmp_path: Path, world: World, recorder: Recorder) -> None:
    """Each op begins and lasts as it does; what is between two ops stays between them."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer, steps=2, microbatches=2)
    step = [
        ("forward-compute", 0, 0, 30),
        ("backward-compute", 0, 32, 70),
        ("forward-compute", 1, 105, 30),
        ("backward-compute", 1, 137, 70),
        ("optimizer", -1, 211, 9),
    ]
    later = [(op, microbatch, begin + 223, length) for op, microbatch, begin, length in step]
    assert rows(tmp_path, recorder) == step + later
    assert [op["step"] for op in ops(tmp_path)] == [0] * 5 + [1] * 5
    assert recorder.errors == 0


def test_under_ddp_the_wait_for_reductions_is_not_the_backward(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """It begins when all gradients of this rank are there, and ends with the last reduction."""
    model = DistributedDataParallel(model_of(world), world, reduce_ms=200)
    optimizer = Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer)
    assert rows(tmp_path, recorder) == [
        ("forward-compute", 0, 0, 30),
        ("backward-compute", 0, 32, 70),
        ("grads-reduce-scatter", -1, 102, 200),
        ("optimizer", -1, 306, 9),
    ]


def test_a_microbatch_that_does_not_reduce_has_no_reduction(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """With `no_sync`, gradients are added up until the last microbatch."""
    model = DistributedDataParallel(model_of(world), world, reduce_ms=200)
    optimizer = Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    model.require_backward_grad_sync = False
    world.backward(model(Tensor()))
    model.require_backward_grad_sync = True
    world.backward(model(Tensor()))
    optimizer.step()
    assert [row for row in rows(tmp_path, recorder) if row[1] == -1] == [
        ("grads-reduce-scatter", -1, 200, 200),
        ("optimizer", -1, 400, 9),
    ]


def test_reductions_of_every_microbatch_are_one_at_the_end(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """Without `no_sync` ranks wait after each backward; computes stand without these waits."""
    model = DistributedDataParallel(model_of(world), world, reduce_ms=200)
    optimizer = Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer, microbatches=2)
    assert rows(tmp_path, recorder) == [
        ("forward-compute", 0, 0, 30),
        ("backward-compute", 0, 32, 70),
        ("forward-compute", 1, 105, 30),
        ("backward-compute", 1, 137, 70),
        ("grads-reduce-scatter", -1, 207, 400),
        ("optimizer", -1, 611, 9),
    ]


def test_buffers_that_come_from_rank_0_are_waited_for(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """DDP sends them before the forward of the module itself."""
    inner = model_of(world)
    inner.buffers = lambda: iter([object()])  # type: ignore[method-assign]
    model = DistributedDataParallel(inner, world, reduce_ms=200)
    model.broadcast_ms = 50
    optimizer = Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer)
    assert rows(tmp_path, recorder) == [
        ("forward-compute", 0, 0, 30),
        ("backward-compute", 0, 32, 70),
        ("grads-reduce-scatter", -1, 102, 250),
        ("optimizer", -1, 356, 9),
    ]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_of_a_sharded_model_only_compute_counts_as_compute(
    tmp_path: Path, world: World, recorder: Recorder, microbatches: int
) -> None:
    """Gathers and reductions inside of forward and backward are moved behind them.

    The root gathers 5 ms, twice; each block 7 ms, twice; they reduce 11 and 13 ms.
    """
    blocks = [
        FSDPModule(Block(world, f, b), world=world, gather_ms=7, reduce_ms=13)
        for f, b in ((10, 30), (20, 40))
    ]
    model = FSDPModule(*blocks, world=world, gather_ms=5, reduce_ms=11)
    optimizer = Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer, microbatches=microbatches)
    waits = 2 * 5 + 2 * 2 * 7 + 11 + 2 * 13
    computes: list[Row] = []
    for number in range(microbatches):
        computes += [
            ("forward-compute", number, 105 * number, 30),
            ("backward-compute", number, 105 * number + 32, 70),
        ]
    end = 105 * microbatches - 3
    assert rows(tmp_path, recorder) == [
        *computes,
        ("grads-reduce-scatter", -1, end, waits * microbatches),
        ("optimizer", -1, end + waits * microbatches + 4, 9),
    ]
    assert recorder.errors == 0


def test_evaluation_is_no_part_of_a_step(tmp_path: Path, world: World, recorder: Recorder) -> None:
    """Neither a forward without gradients, nor one of a model that is not trained."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer)
    world.grad = False
    model(Tensor())
    world.grad, model.training = True, False
    model(Tensor())
    model.training = True
    train(world, model, optimizer)
    recorder.close()
    assert [op["optype"] for op in ops(tmp_path)] == [
        *["forward-compute", "backward-compute", "optimizer"] * 2
    ]


def test_a_step_that_is_open_stays_the_users(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """Ops go into it, it ends where the user says, and it keeps its number."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    for number in (41, 42):
        with recorder.step(number):
            train(world, model, optimizer)
            with recorder.op(OpType.OPTIMIZER_CLIP_MAIN_GRAD):
                world.spend(1)
    recorder.close()
    found = [(op["step"], op["optype"], op.get("microbatch", -1)) for op in ops(tmp_path)]
    assert found[:4] == [
        (41, "forward-compute", 0),
        (41, "backward-compute", 0),
        (41, "optimizer", -1),
        (41, "optimizer-clip-main-grad", -1),
    ]
    assert found[4:] == [(42, *rest) for _, *rest in found[:4]]


def test_a_step_ends_when_all_optimizers_have_stepped(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """They are one op, from the first to the last."""
    model, optimizers = model_of(world), [Optimizer(world, 9), Optimizer(world, 6)]
    attached(recorder, world, model, optimizers, first_step=7)
    for _ in range(2):
        train(world, model, optimizers[0])
        optimizers[1].step()
    assert [row[3] for row in rows(tmp_path, recorder) if row[0] == "optimizer"] == [15, 15]
    assert [op["step"] for op in ops(tmp_path)] == [7] * 3 + [8] * 3


def test_detaching_leaves_nothing_behind(tmp_path: Path, world: World, recorder: Recorder) -> None:
    """Hooks are gone, the loader is what it was; attaching again goes on with the next step."""
    model = DistributedDataParallel(model_of(world), world, reduce_ms=20)
    optimizer, loader = Optimizer(world, 9), Loader([[0]])
    for _ in range(2):
        handle = attached(recorder, world, model, optimizer, loader=loader)
        assert type(loader) is not Loader
        assert isinstance(loader, Loader)
        train(world, model, optimizer)
        handle.detach()
        handle.detach()
        train(world, model, optimizer)
        assert not any([*hooks_of(model), optimizer.pre, optimizer.post])
        assert type(loader) is Loader
    recorder.close()
    assert {op["step"] for op in ops(tmp_path)} == {0, 1}
    assert len(ops(tmp_path)) == 2 * 4


def hooks_of(model: Module) -> list[list[Any]]:
    """All of them."""
    return [hooks for module in model.modules() for hooks in (module.pre, module.post)]


class Loader:
    """Gives batches, as often as it is asked to."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def sizes(batch: list[int]) -> tuple[int, float]:
    """What a user knows of the batch."""
    return sum(batch), float(sum(length * length for length in batch))


def test_tokens_come_from_the_batches_of_the_loader(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """One for each forward, also if the loop takes the next batch before it is done with this."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    loader = Loader([[3, 4], [5], [6, 1]])
    attached(recorder, world, model, optimizer, loader=loader, tokens=sizes)
    batches = iter(loader)
    next(batches)
    for _ in batches:
        train(world, model, optimizer)
    recorder.close()
    found = context(tmp_path)["microbatches"]
    assert (found["step"], found["tokens"], found["sum_len2"]) == ([0, 1], [7, 5], [25.0, 25.0])


def test_without_a_loader_tokens_come_from_what_the_model_gets(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """A tensor of two rows with 8 tokens."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    train(world, model, optimizer, microbatches=2)
    recorder.close()
    found = context(tmp_path)["microbatches"]
    assert (found["microbatch"], found["tokens"], found["sum_len2"]) == (
        [0, 1],
        [16, 16],
        [128.0, 128.0],
    )


def test_a_loader_that_cannot_be_watched_costs_only_itself(
    tmp_path: Path, world: World, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """A list is no object that can be changed."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer, loader=[1, 2])
    train(world, model, optimizer)
    recorder.close()
    assert "a list cannot be watched" in caplog.text
    assert context(tmp_path)["microbatches"]["tokens"] == [16]
    assert len(ops(tmp_path)) == 3


def broken(_batch: object) -> tuple[int, float]:
    """A count of the user that fails."""
    raise ValueError("mine")


def test_a_count_that_fails_leaves_training_alone(
    tmp_path: Path, world: World, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; ops are recorded without it."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer, tokens=broken)
    train(world, model, optimizer, steps=3)
    recorder.close()
    assert len(ops(tmp_path)) == 9
    assert len(caplog.records) == 1


class Broken(Block):
    """Runs out of memory in one backward."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Compute."""
        output = super().forward(tensor)
        if output.grad_fn is not None and self.backward_ms < 0:
            output.grad_fn.work = self._fail
        return output

    def _fail(self) -> None:
        self.backward_ms = -self.backward_ms
        raise RuntimeError("out of memory")


def test_a_backward_that_is_broken_off_costs_only_itself(
    tmp_path: Path, world: World, recorder: Recorder
) -> None:
    """The trainer tries again with the next batch; that one is recorded."""
    model, optimizer = Module(Broken(world, 10, -30)), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    with pytest.raises(RuntimeError, match="memory"):
        train(world, model, optimizer)
    train(world, model, optimizer)
    assert [row[0] for row in rows(tmp_path, recorder)] == [
        "forward-compute",
        "forward-compute",
        "backward-compute",
        "optimizer",
    ]


class FullyShardedDataParallel(Module):
    """The old one, known by its name."""


@pytest.mark.parametrize(
    "model, optimizer, word",
    [
        (lambda _: object(), lambda world: Optimizer(world, 1), "modules"),
        (model_of, lambda _: object(), "register_step_pre_hook"),
        (lambda _: FullyShardedDataParallel(), lambda world: Optimizer(world, 1), "fully_shard"),
    ],
)
def test_what_cannot_be_recorded_is_left_alone(
    world: World,
    recorder: Recorder,
    model: Callable[[World], Any],
    optimizer: Callable[[World], Any],
    word: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning says what was looked for; no hook stays."""
    made = model(world)
    attached(recorder, world, made, optimizer(world))
    assert word in caplog.text
    if isinstance(made, Module):
        assert not any(hooks_of(made))


def test_a_recorder_that_is_off_costs_nothing(tmp_path: Path, world: World) -> None:
    """No hooks, whatever is given."""
    recorder = Recorder(IDENTITY, settings(tmp_path, enable=False))
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer).close()
    assert not any(hooks_of(model))


def mesh(ranks: list[int], **sizes: int) -> SimpleNamespace:
    """A mesh of devices."""
    tensor = SimpleNamespace(flatten=lambda: SimpleNamespace(tolist=lambda: ranks))
    return SimpleNamespace(
        mesh_dim_names=tuple(sizes) or None, shape=tuple(sizes.values()) or (4,), mesh=tensor
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, None),
        (Layout(dp=2, pp=2), Layout(dp=2, pp=2)),
        ("tp2-dp3", Layout(dp=3, pp=1, tp=2)),
        (mesh(list(range(16)), pp=2, dp=4, tp=2), Layout(dp=4, pp=2, tp=2)),
        (mesh(list(range(8)), dp_replicate=2, dp_shard=4), Layout(dp=8, pp=1)),
        (mesh(list(range(4))), Layout(dp=4, pp=1)),
        (mesh(list(range(4)), whatever=4), Layout(dp=4, pp=1)),
    ],
)
def test_a_layout_can_be_given_as_a_mesh(given: object, expected: Layout | None) -> None:
    """Dimensions by their names, the slowest first."""
    assert layout_of(given) == expected


@pytest.mark.parametrize(
    "given, word",
    [
        (mesh(list(range(8)), dp=4, pp=2), "dp, pp"),
        (mesh([0, 2, 1, 3], pp=2, dp=2), "order"),
        (mesh(list(range(8)), dp=4, spam=2), "spam"),
    ],
)
def test_a_mesh_that_numbers_ranks_differently_is_refused(given: object, word: str) -> None:
    """Its ranks would be given to other stages."""
    with pytest.raises(SMonError, match=word):
        layout_of(given)


@pytest.mark.parametrize("given", [7, "zz9", mesh([1, 0], dp=2)])
def test_a_layout_that_is_none_leaves_training_alone(
    world: World, given: object, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and no hooks."""
    model = model_of(world)
    handle = attach(model, Optimizer(world, 9), layout=given, autograd=world.autograd)
    assert not handle.recorder.on
    assert not any(hooks_of(model))
    assert len(caplog.records) == 1


def test_importing_the_recorder_loads_nothing_of_this() -> None:
    """What is used is imported at its first use."""
    assert "attach" in ingest_agents.recorder.__all__
    assert "torch" not in sys.modules
    assert "import torch" not in inspect.getsource(sys.modules["ingest_agents.recorder.plain"])
    with pytest.raises(AttributeError, match="attack"):
        _ = ingest_agents.recorder.attack


def test_times_are_unix_times(tmp_path: Path, world: World, recorder: Recorder) -> None:
    """As with every recorder."""
    model, optimizer = model_of(world), Optimizer(world, 9)
    attached(recorder, world, model, optimizer)
    began = world.now
    train(world, model, optimizer)
    recorder.close()
    assert ops(tmp_path)[0]["start_ns"] == began + 3 * MS + START_NS
