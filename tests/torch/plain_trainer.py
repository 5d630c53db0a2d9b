"""A plain training loop under DDP or `fully_shard`, as many write it, with faults of its plan.

Layers are small matrix products that are padded with sleep, as a host that waits for its GPU: so
four of them share two cores, and how long they take is known.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ingest_agents.recorder import Attached, Recorder, attach
from tests.torch.plain_plan import PlainPlan, Wrapped
from tests.torch.plans import PLAN, RESULT

WIDTH, LENGTH, ROWS, VOCABULARY = 64, 32, 2, 100
OPTIMIZER_S = 0.01


class Padded(torch.autograd.Function):  # type: ignore[misc]  # torch is not installed here
    """Its input, some time later; its gradient, some time later."""

    @staticmethod
    def forward(ctx: Any, x: Any, forward_s: float, backward_s: float) -> Any:  # noqa: ANN401
        """Wait."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        """Wait."""
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Layer(torch.nn.Module):  # type: ignore[misc]  # as above
    """One layer."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Any) -> Any:  # noqa: ANN401
        """Activations."""
        return Padded.apply(x + torch.relu(self.linear(x)), self.forward_s, self.backward_s)


class Model(torch.nn.Module):  # type: ignore[misc]  # as above
    """Embedding, layers, head."""

    def __init__(self, plan: PlainPlan, rank: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList()
        for number in range(plan.layers):
            # What is slow is in the midst of the model, not at an end of it.
            slow = rank == plan.slow_rank and number == plan.layers // 2
            forward_s = plan.layer_s + (plan.forward_s if slow else 0.0)
            backward_s = 2 * plan.layer_s + (plan.backward_s if slow else 0.0)
            self.layers.append(Layer(forward_s, backward_s))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Any) -> Any:  # noqa: ANN401
        """Logits."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Data(torch.utils.data.Dataset):  # type: ignore[misc]  # as above
    """Rows of tokens that come slowly, if they shall."""

    def __init__(self, rows: int, wait_s: float) -> None:
        self.rows, self.wait_s = rows, wait_s

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.wait_s)
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH // 2 :] = index % 2
        return {"input_ids": torch.randint(0, VOCABULARY, (LENGTH,)), "attention_mask": mask}


def wrapped(model: Any, kind: Wrapped) -> Any:  # noqa: ANN401
    """As the documentation of torch says."""
    if kind is Wrapped.DDP:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class SlowSGD(torch.optim.SGD):  # type: ignore[misc]  # as above
    """Takes as long as that of a larger model."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Step, and wait."""
        time.sleep(OPTIMIZER_S)
        return super().step(*args, **kwargs)


def train(plan: PlainPlan, recorder: Recorder, rank: int) -> dict[str, list[float]]:
    """Run all steps; seconds of each, on the clock and of this thread's processor."""
    torch.manual_seed(0)
    model = wrapped(Model(plan, rank), Wrapped(plan.wrapped))
    optimizer = SlowSGD(model.parameters(), lr=1e-3)
    wait_s = plan.loader_s / ROWS if rank == plan.loader_rank else 0.0
    data = Data((plan.steps + 1) * plan.microbatches * ROWS, wait_s)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    batches = iter(loader)
    one_step(plan, model, optimizer, batches)  # torch sets itself up in the first
    attached: Attached | None = None
    dist.barrier()
    took: dict[str, list[float]] = {"step_s": [], "thread_s": []}
    for number in range(plan.steps):
        if attached is None and _recorded(plan, number):
            attached = attach(model, optimizer, recorder=recorder)
        elif attached is not None and not _recorded(plan, number):
            attached.detach()
            attached = None
        began, used = time.perf_counter(), time.thread_time()
        one_step(plan, model, optimizer, batches)
        took["step_s"].append(time.perf_counter() - began)
        took["thread_s"].append(time.thread_time() - used)
    return took


def _recorded(plan: PlainPlan, number: int) -> bool:
    return not plan.every_other or number // plan.every_other % 2 == 1


def one_step(plan: PlainPlan, model: Any, optimizer: Any, batches: Any) -> None:  # noqa: ANN401
    """Without a word about SMon."""
    for microbatch in range(plan.microbatches):
        batch = next(batches)
        waits = microbatch < plan.microbatches - 1 and plan.wrapped == Wrapped.DDP
        with model.no_sync() if waits else nullcontext():
            loss = model(batch["input_ids"]).float().logsumexp(-1).mean()
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Train, and leave what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = PlainPlan.from_json(os.environ[PLAN])
    recorder = Recorder.from_env()
    took = train(plan, recorder, dist.get_rank())
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    result = {**took, "errors": recorder.errors}
    Path(os.environ[RESULT]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
