"""A trainer that runs the schedules, gradient buffers, optimizer and timers of megatron-core.

Megatron-LM's own training loop is not part of that package: `Loop` stands for it, and names the
timers that it has. megatron-core takes it for granted that there is a GPU: `OnCpu` says otherwise.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.overrides import TorchFunctionMode

from ingest_agents.recorder import Recorder
from ingest_agents.recorder.megatron import attach_timers, count_tokens
from tests.torch.megatron_plan import MegatronPlan
from tests.torch.pipeline_trainer import Pace, Padded
from tests.torch.plans import PLAN, RESULT

SEQUENCE, WIDTH = 16, 64
PADDING_S = 0.005


class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed here
    """Puts on the CPU what megatron-core puts on a GPU.

    It asks for one in ``schedules.py`` (token counts), ``p2p_communication.py`` (receive buffers),
    ``param_and_grad_buffer.py`` (gradients), ``optimizer.py`` and ``clip_grads.py``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Call it with another device; clipping wants to see tensors of a GPU."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        is_type = isinstance(found, str) and found == "torch.FloatTensor"
        return "torch.cuda.FloatTensor" if is_type else found


class Chunk(MegatronModule):  # type: ignore[misc]  # as above
    """Some layers, with an embedding at both ends of the model."""

    def __init__(self, config: Any, plan: MegatronPlan, number: int, pace: Pace) -> None:  # noqa: ANN401
        super().__init__(config)
        last = plan.pp * plan.chunks - 1
        self.pre_process, self.post_process = number == 0, number == last
        self.share_embeddings_and_output_weights = True
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.embedding = torch.nn.Linear(WIDTH, WIDTH) if number in (0, last) else None
        self.pace, self.given = pace, None

    def set_input_tensor(self, given: Any) -> None:  # noqa: ANN401
        """What the stage before has sent."""
        self.given = given[0]

    def shared_embedding_or_output_weight(self) -> Any:  # noqa: ANN401
        """What first and last stage have in common."""
        assert self.embedding is not None
        return self.embedding.weight

    def forward(self, x: Any) -> Any:  # noqa: ANN401
        """Activations for the next chunk."""
        began = time.perf_counter()
        if not self.pre_process:
            x = self.given
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return Padded.apply(x, self.pace, began)


@dataclass(slots=True)
class Loop:
    """Megatron-LM's training loop, as far as timers see it."""

    plan: MegatronPlan
    timers: Timers
    args: SimpleNamespace
    chunks: list[Any] = field(default_factory=list)
    paces: list[Pace] = field(default_factory=list)
    config: Any = None
    optimizer: Any = None

    def set_up(self) -> None:
        """Groups, model, optimizer."""
        plan = self.plan
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=plan.pp,
            virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
        )
        self.config = _config(plan)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for chunk in range(plan.chunks):
            pace = Pace(plan.forward_s / plan.chunks)
            model = Chunk(self.config, plan, chunk * plan.pp + stage, pace)
            model.model_type = ModelType.encoder_or_decoder
            ddp = DistributedDataParallelConfig(overlap_grad_reduce=False)
            self.chunks.append(DistributedDataParallel(self.config, ddp, model))
            self.paces.append(pace)
        settings = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0)
        settings.timers = self.timers
        self.optimizer = get_megatron_optimizer(settings, self.chunks)
        self.config.timers = self.timers
        self.config.finalize_model_grads_func = finalize_model_grads

    def train(self) -> list[float]:
        """Run all steps; how long each took."""
        self.timers("interval-time", log_level=0).start(barrier=True)
        took = []
        for number in range(self.plan.first, self.plan.first + self.plan.steps):
            began = time.perf_counter()
            self.args.curr_iteration = number
            self._step()
            took.append(time.perf_counter() - began)
            if number == self.plan.first + self.plan.steps // 2:
                self._evaluate()
        self.timers("interval-time").elapsed(barrier=True)
        return took

    def _step(self) -> None:
        slow = dist.get_rank() == self.plan.slow_rank
        for pace in self.paces:
            pace.busy_ratio = self.plan.slow_ratio if slow else 0.0
            pace.forwards = pace.backwards = 0
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._pass(forward_only=False)
        self.timers("optimizer", log_level=1).start(barrier=False)
        self.optimizer.step()
        time.sleep(PADDING_S)
        self.timers("optimizer").stop()

    def _evaluate(self) -> None:
        self.timers("eval-time", log_level=0).start(barrier=True)
        with torch.no_grad():
            self._pass(forward_only=True)
        self.timers("eval-time").stop()

    def _pass(self, *, forward_only: bool) -> None:
        several = self.plan.chunks > 1
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(())] * self.plan.chunks if several else iter(()),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=num_microbatches_calculator.get_num_microbatches(),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, _data: Any, model: Any) -> Any:  # noqa: ANN401
        self.timers("batch-generator", log_level=2).start()
        if dist.get_rank() == self.plan.loader_rank:
            time.sleep(self.plan.loader_s)
        x = torch.randn(SEQUENCE, 1, WIDTH)
        self.timers("batch-generator").stop()
        count_tokens(self.timers, SEQUENCE, float(SEQUENCE**2))
        return model(x), lambda output: (output.square().mean(), {"loss": 0.0})


def _config(plan: MegatronPlan) -> Any:  # noqa: ANN401  # megatron-core's
    overlap = plan.overlap != ""
    return TransformerConfig(
        num_layers=plan.pp * plan.chunks,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=not overlap,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=plan.overlap == "everywhere",
        microbatch_group_size_per_vp_stage=plan.group or plan.pp,
        gradient_accumulation_fusion=False,
    )


def _arguments(plan: MegatronPlan) -> SimpleNamespace:
    """Arguments where Megatron-LM keeps them."""
    args = SimpleNamespace(
        clip_grad=1.0,
        untie_embeddings_and_output_weights=False,
        overlap_p2p_comm=plan.overlap != "",
        overlap_p2p_comm_warmup_flush=plan.overlap == "everywhere",
        microbatch_group_size_per_vp_stage=plan.group or plan.pp,
    )
    module: Any = ModuleType("megatron.training.global_vars")
    module.get_args = lambda: args
    sys.modules[module.__name__] = module
    return args


def main() -> None:
    """Train, and leave what was measured."""
    warnings.simplefilter("ignore")
    gc.disable()
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_args: None
    dist.init_process_group("gloo")
    plan = MegatronPlan.from_json(os.environ[PLAN])
    size = plan.microbatches * plan.dp
    num_microbatches_calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, size, 1, plan.dp
    )
    recorder = None if plan.by_itself else Recorder.from_env()
    timers = attach_timers(Timers(plan.log_level, "minmax"), recorder)
    loop = Loop(plan, timers, _arguments(plan))
    with OnCpu():
        loop.set_up()
        took = loop.train()
    if recorder is not None:
        recorder.close()
    dist.barrier()
    dist.destroy_process_group()
    Path(os.environ[RESULT]).write_text(json.dumps({"step_s": took}))


if __name__ == "__main__":
    main()
