"""A trainer of 2 pipeline stages on 2 DP replicas, or alike, with faults that its plan names.

Computes are small matrix products that are padded with sleep, as a host that waits for its GPU:
so several of them share a core, and how long they take is known.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from ingest_agents.recorder import Recorder
from ingest_agents.recorder.pipelining import AttachedSchedule, attach_schedule
from smon.ops import OpType
from tests.torch.batches import Microbatch, balanced, packed
from tests.torch.first import go_first
from tests.torch.plans import PLAN, RESULT, Batches, Collect, PipelinePlan

WIDTH = 64
OPTIMIZER_S = 0.005
BACKWARD = 2.0


@dataclass(slots=True)
class Pace:
    """How long the computes of one stage take.

    Attributes
    ----------
    target_s
        Of a forward, with a microbatch of usual length.
    busy_ratio
        So much longer it takes, with work of the processor.
    weights
        Of the step's microbatches; empty: all alike.
    collects
        Whether its second forward of this step is interrupted by a garbage collection.
    """

    target_s: float
    busy_ratio: float = 0.0
    weights: Sequence[float] = ()
    collects: bool = False
    forwards: int = 0
    backwards: int = 0

    def forward(self, began: float) -> None:
        """Return when the next forward, which began then, is over."""
        number, self.forwards = self.forwards, self.forwards + 1
        self._until(began, self._length(number))
        if self.collects and number == 1:
            gc.collect()

    def backward(self) -> None:
        """Return when the next backward, which begins now, is over."""
        number, self.backwards = self.backwards, self.backwards + 1
        self._until(time.perf_counter(), self._length(number) * BACKWARD)

    def _length(self, number: int) -> float:
        # More computes than microbatches: the first step also tries out what a stage gives.
        weight = self.weights[number % len(self.weights)] if self.weights else 1.0
        return self.target_s * weight

    def _until(self, began: float, length: float) -> None:
        left = began + length - time.perf_counter()
        if left > 0:
            time.sleep(left)
        end = time.perf_counter() + length * self.busy_ratio
        while time.perf_counter() < end:
            pass


class Padded(torch.autograd.Function):  # type: ignore[misc]  # torch is not installed here
    """Its input, after the rest of the stage's forward; its backward takes that of the stage."""

    @staticmethod
    def forward(ctx: Any, x: Any, pace: Pace, began: float) -> Any:  # noqa: ANN401
        """Last in the forward of a stage."""
        ctx.pace = pace
        pace.forward(began)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        """First in the backward of a stage."""
        ctx.pace.backward()
        return grads[0], None, None


class Stage(torch.nn.Module):  # type: ignore[misc]  # as above
    """Some layers of the model."""

    def __init__(self, layers: int, pace: Pace) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.pace = pace

    def forward(self, x: Any) -> Any:  # noqa: ANN401
        """Activations for the next stage."""
        began = time.perf_counter()
        for layer in self.layers:
            x = torch.relu(layer(x))
        return Padded.apply(x, self.pace, began)


@dataclass(slots=True)
class Trainer:
    """One rank of the job."""

    plan: PipelinePlan
    rank: int
    recorder: Recorder
    stages: list[Stage] = field(default_factory=list)
    schedule: Any = None
    attached: AttachedSchedule | None = None
    dp_group: Any = None
    optimizer: Any = None
    norm: Any = None

    @property
    def dp(self) -> int:
        """DP rank; ranks of one stage are neighbours."""
        return self.rank % self.plan.dp

    @property
    def pipeline_rank(self) -> int:
        """Which stages are here."""
        return self.rank // self.plan.dp

    def set_up(self) -> None:
        """Groups, model, schedule."""
        dp, pp = self.plan.dp, self.plan.pp
        ranks = [[replica + dp * place for place in range(pp)] for replica in range(dp)]
        pipelines = [dist.new_group(one) for one in ranks]
        replicas = [dist.new_group(list(one)) for one in zip(*ranks, strict=True)]
        self.dp_group = replicas[self.pipeline_rank]
        wrapped = []
        for index, layers in enumerate(self.plan.layers):
            if self.plan.pipeline_rank(index) == self.pipeline_rank:
                stage = Stage(layers, Pace(layers * self.plan.layer_s))
                self.stages.append(stage)
                wrapped.append(
                    PipelineStage(
                        stage,
                        index,
                        len(self.plan.layers),
                        torch.device("cpu"),
                        group=pipelines[self.dp],
                    )
                )
        kind = getattr(schedules, self.plan.schedule)
        given = wrapped[0] if issubclass(kind, schedules.PipelineScheduleSingle) else wrapped
        self.schedule = kind(given, self.plan.microbatches, loss_fn=torch.nn.functional.mse_loss)
        parameters = [each for stage in self.stages for each in stage.parameters()]
        self.norm = torch.zeros(1)
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def train(self) -> list[float]:
        """Run all steps; how long each took."""
        self.step(0)  # the first one also tells stages what they will receive
        heap = _heap(self.plan.heap) if self.plan.collect != Collect.NEVER else []
        dist.barrier()
        took = []
        for number in range(self.plan.steps):
            self._attach(recorded=not self.plan.every_other or number % 2 == 1)
            began = time.perf_counter()
            with self.recorder.step(number):
                self.step(number)
            took.append(time.perf_counter() - began)
        del heap
        return took

    def _attach(self, *, recorded: bool) -> None:
        if recorded and self.attached is None:
            self.attached = attach_schedule(self.recorder, self.schedule)
        elif not recorded and self.attached is not None:
            self.attached.detach()
            self.attached = None

    def step(self, number: int) -> None:
        """One step of training."""
        self._prepare(number)
        if self.rank == self.plan.loader_rank:
            time.sleep(self.plan.loader_s)
        data = torch.randn(2 * self.plan.microbatches, WIDTH)
        last = self.pipeline_rank == self.plan.pipeline_rank(len(self.plan.layers) - 1)
        given = {"target": torch.zeros_like(data)} if last else {}
        self.schedule.step(*([data] if self.pipeline_rank == 0 else []), **given)
        if self.plan.collect == Collect.TOGETHER and number % self.plan.collect_every == 0:
            with self.recorder.op(OpType.GC):
                gc.collect()
        self._reduce()
        # The norm of all gradients: here all stages meet.
        with self.recorder.op(OpType.OPTIMIZER_CLIP_MAIN_GRAD):
            dist.all_reduce(self.norm)
        with self.recorder.op(OpType.OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(OPTIMIZER_S)

    def _reduce(self) -> None:
        grads = [each.grad for stage in self.stages for each in stage.parameters()]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        with self.recorder.op(OpType.GRADS_REDUCE_SCATTER):
            dist.all_reduce(flat, group=self.dp_group)

    def _prepare(self, number: int) -> None:
        """Faults and data of this step."""
        plan = self.plan
        mine = self._microbatches(number)
        slow = self.rank == plan.slow_rank and number >= plan.slow_from
        alone = plan.collect == Collect.ALONE and number % plan.collect_every == self.rank
        for stage in self.stages:
            stage.pace.busy_ratio = plan.slow_ratio if slow else 0.0
            stage.pace.weights = [each.weight for each in mine]
            stage.pace.collects = alone
            stage.pace.forwards = stage.pace.backwards = 0
        for index, each in enumerate(mine if self.pipeline_rank == 0 else ()):
            self.recorder.tokens(index, sum(each.lengths), each.sum_len2)

    def _microbatches(self, number: int) -> list[Microbatch]:
        if self.plan.batches == Batches.EVEN:
            return []
        dealt = packed(number, self.plan.dp, self.plan.microbatches)
        if self.plan.batches == Batches.BALANCED:
            dealt = balanced(dealt, self.plan.order)
        return dealt[self.dp]


def _heap(count: int) -> list[Any]:
    """Lists that refer to themselves: a collection has to look at each of them."""
    heap: list[Any] = []
    for _ in range(count):
        each: list[Any] = []
        each.append(each)
        heap.append(each)
    return heap


def main() -> None:
    """Train, and leave what was measured."""
    go_first()
    gc.disable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = PipelinePlan.from_json(os.environ[PLAN])
    recorder = Recorder.from_env()
    trainer = Trainer(plan, dist.get_rank(), recorder)
    trainer.set_up()
    took = trainer.train()
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    result = {"step_s": took, "recorded": recorder.errors == 0}
    Path(os.environ[RESULT]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
