"""What a job that trains with Megatron-LM says about itself.

Flow: ``parallel_state`` and arguments of Megatron-LM → **here** →
`ingest_agents.recorder.megatron_ops`. Imports no torch: whoever trains has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ingest_agents.recorder.interleaving import Plan
from smon.errors import ConfigError
from smon.ops import OpType
from smon.topology import Layout


class Overlap(Enum):
    """Where an interleaved schedule computes while it sends and receives."""

    NOWHERE = 0
    #: ``overlap_p2p_comm``, the default of Megatron-LM: where each forward has its backward.
    STEADY = 1
    #: ``overlap_p2p_comm_warmup_flush``, too.
    EVERYWHERE = 2


@dataclass(frozen=True, slots=True)
class MegatronJob:
    """What timers do not tell.

    Attributes
    ----------
    layout, rank
        Of the job; of this process.
    iteration
        Number of the step that begins; None if nobody counts, then steps are counted from 0.
    microbatches
        Of that step; asked for only if stages have several chunks.
    training
        Whether a pass that begins is one of training.
    group
        Microbatches that go through one chunk before the next has its turn; 0: as many as stages.
    overlap
        Of an interleaved schedule.
    clips
        Whether gradients are clipped by their norm, for which all ranks wait for each other.
    ties_embeddings
        Whether first and last stage share a weight, and reduce its gradients together.
    """

    layout: Layout
    rank: int
    iteration: Callable[[], int | None]
    microbatches: Callable[[], int]
    training: Callable[[], bool]
    group: int = 0
    overlap: Overlap = Overlap.NOWHERE
    clips: bool = True
    ties_embeddings: bool = True

    @property
    def stage(self) -> int:
        """Pipeline stage of this process."""
        return self.layout.place(self.rank).stage

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what is in a microbatch, for all ranks that compute it."""
        place = self.layout.place(self.rank)
        return place.stage == place.tp == place.cp == 0

    def plan(self) -> Plan:
        """The computes of this stage in the step that begins."""
        chunks = self.layout.vpp
        count = self.microbatches() if chunks > 1 else 0
        return Plan(self.stage, self.layout.pp, chunks, count, self.group)

    def takes_part(self, op: OpType) -> bool:
        """Whether this rank has somebody to reduce gradients with; timers run in any case."""
        layout = self.layout
        if op == OpType.GRADS_REDUCE_SCATTER:
            return layout.dp * layout.cp > 1
        if op == OpType.LAYERNORM_GRADS_ALL_REDUCE:
            return layout.tp > 1
        ends = self.stage in (0, layout.pp - 1)
        return layout.pp > 1 and ends and self.ties_embeddings


#: Where arguments are, now and before Megatron-LM's training loop had a package of its own.
_GLOBALS: Final = ("megatron.training.global_vars", "megatron.global_vars")

_STATE: Final = "megatron.core.parallel_state"
_CALCULATOR: Final = "megatron.core.num_microbatches_calculator"


def find_job(modules: Mapping[str, Any] | None = None) -> MegatronJob:
    """The job of this process, as ``parallel_state`` and the arguments of Megatron-LM say.

    Parameters
    ----------
    modules
        What the process has imported, by name; by default, ``sys.modules``.

    Raises
    ------
    ConfigError
        Megatron-LM is not there, or ranks stand in another order than its default,
        tp-cp-ep-dp-pp.
    """
    found = sys.modules if modules is None else modules
    missing = [name for name in ("torch", _STATE) if name not in found]
    if missing:
        raise ConfigError(f"expected a job that has imported {missing[0]}, found none")
    torch, state = found["torch"], found[_STATE]
    args = _arguments(found)
    layout = _layout(state)
    return MegatronJob(
        layout=layout,
        rank=_rank(state, layout, torch.distributed.get_rank()),
        iteration=lambda: getattr(_arguments(found), "curr_iteration", None),
        microbatches=lambda: _microbatches(found),
        training=torch.is_grad_enabled,
        group=getattr(args, "microbatch_group_size_per_vp_stage", None) or 0,
        overlap=_overlap(args),
        clips=getattr(args, "clip_grad", 1.0) > 0,
        ties_embeddings=not getattr(args, "untie_embeddings_and_output_weights", False),
    )


def _layout(state: Any) -> Layout:  # noqa: ANN401  # a module of Megatron-LM's
    return Layout(
        dp=state.get_data_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        tp=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        vpp=state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def _rank(state: Any, layout: Layout, rank: int) -> int:  # noqa: ANN401  # as above
    """The rank, checked against its place."""
    by_place = layout.rank(
        state.get_data_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_tensor_model_parallel_rank(),
        state.get_context_parallel_rank(),
    )
    if by_place != rank:
        raise ConfigError(
            f"expected ranks in the order tp-cp-ep-dp-pp, by which this is rank {by_place} of "
            f"{layout}; found rank {rank}: leave out --use-tp-pp-dp-mapping"
        )
    return rank


def _arguments(modules: Mapping[str, Any]) -> Any:  # noqa: ANN401  # a namespace of Megatron-LM's
    for name in _GLOBALS:
        if name in modules:
            return modules[name].get_args()
    return None


def _microbatches(modules: Mapping[str, Any]) -> int:
    for name in (_CALCULATOR, *_GLOBALS):
        ask = getattr(modules.get(name), "get_num_microbatches", None)
        if ask is not None:
            return int(ask())
    raise ConfigError(f"expected {_CALCULATOR} to say how many microbatches a step has")


def _overlap(args: object) -> Overlap:
    if not getattr(args, "overlap_p2p_comm", False):
        return Overlap.NOWHERE
    everywhere = getattr(args, "overlap_p2p_comm_warmup_flush", False)
    return Overlap.EVERYWHERE if everywhere else Overlap.STEADY
