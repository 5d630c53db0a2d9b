"""Timers as those of Megatron-LM, and training that calls them in its order.

The order of the calls is that of megatron-core's schedules. Who is at the other end of a combined
transfer is not said here: that is for the recorder to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class Timer:
    """A timer that has a level low enough."""

    def __init__(self, name: str) -> None:
        self.name, self.started, self.count = name, False, 0

    def start(self, barrier: bool = False) -> None:  # noqa: FBT001, FBT002  # Megatron-LM's
        """Start."""
        assert not self.started, "timer has already been started"
        self.started, self.barrier = True, barrier

    def stop(self, barrier: bool = False) -> None:  # noqa: FBT001, FBT002  # as above
        """Stop."""
        assert self.started, "timer is not started"
        self.started = False
        self.count += 1

    def elapsed(self) -> float:
        """Seconds."""
        return float(self.count)


class Dummy:
    """What is there in place of all others."""

    def start(self, barrier: bool = False) -> None:  # noqa: FBT001, FBT002  # Megatron-LM's
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:  # noqa: FBT001, FBT002  # as above
        """Nothing."""


class Timers:
    """All of them."""

    def __init__(self, level: int = 0) -> None:
        self.level, self.timers, self.dummy = level, dict[str, Timer](), Dummy()

    def __call__(self, name: str, log_level: int | None = None) -> Timer | Dummy:
        """The timer of this name."""
        if name not in self.timers:
            if (2 if log_level is None else log_level) > self.level:
                return self.dummy
            self.timers[name] = Timer(name)
        return self.timers[name]

    def log(self, names: list[str]) -> str:
        """Those that were made."""
        return " ".join(name for name in names if name in self.timers)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a job and its steps."""

    stage: int
    stages: int
    microbatches: int
    chunks: int = 1
    group: int = 0

    @property
    def total(self) -> int:
        """Computes of one direction."""
        return self.microbatches * self.chunks

    @property
    def warmup(self) -> int:
        """Forwards before the first backward."""
        behind = self.stages - self.stage - 1
        several = behind * 2 + (self.chunks - 1) * (self.group or self.stages)
        return min(several if self.chunks > 1 else behind, self.total)


def one_forward_one_backward(sizes: Sizes) -> Iterator[str]:
    """Names of the timers of a stage, in their order, without interleaving."""
    first, last = sizes.stage == 0, sizes.stage == sizes.stages - 1
    steady = sizes.total - sizes.warmup
    receive = () if first else ("forward-recv",)
    for _ in range(sizes.warmup):
        yield from (*receive, "forward-compute", *(() if last else ("forward-send",)))
    yield from receive if steady else ()
    for number in range(steady):
        yield "forward-compute"
        yield from () if last else ("forward-send-backward-recv",)
        yield "backward-compute"
        if not first:
            yield "backward-send" if number == steady - 1 else "backward-send-forward-recv"
    for _ in range(sizes.warmup):
        yield from (*(() if last else ("backward-recv",)), "backward-compute")
        yield from () if first else ("backward-send",)


def interleaved(sizes: Sizes) -> Iterator[str]:
    """With several chunks, no transfer beside a compute."""
    steady = sizes.total - sizes.warmup
    yield from () if sizes.stage == 0 else ("forward-recv",)
    for number in range(sizes.warmup):
        yield "forward-compute"
        both = steady and number == sizes.warmup - 1
        yield ALL_FOUR if both else "forward-send-forward-recv"
    for _ in range(steady):
        yield from ("forward-compute", "backward-compute", ALL_FOUR)
    if not steady and sizes.stage < sizes.stages - 1:
        yield "backward-recv"
    for _ in range(sizes.warmup):
        yield from ("backward-compute", "backward-send-backward-recv")


def overlapped(sizes: Sizes) -> Iterator[str]:
    """With several chunks, and transfers beside computes where forwards have their backwards."""
    steady = sizes.total - sizes.warmup
    yield from () if sizes.stage == 0 else ("forward-recv",)
    for _ in range(sizes.warmup):
        yield from ("forward-compute", "forward-send-forward-recv")
    yield from ("backward-send-backward-recv",) if steady else ()
    for _ in range(steady):
        yield from ("forward-compute", "forward-send-forward-recv")
        yield from ("backward-compute", "backward-send-backward-recv")
    if not steady and sizes.stage < sizes.stages - 1:
        yield "backward-recv"
    for _ in range(sizes.warmup):
        yield from ("backward-compute", "backward-send-backward-recv")


def overlapped_everywhere(sizes: Sizes) -> Iterator[str]:
    """The same, at the beginning and at the end, too: there, receives go before the compute."""
    steady = sizes.total - sizes.warmup
    first, last = sizes.stage == 0, sizes.stage == sizes.stages - 1
    forward, backward = "forward-send-forward-recv", "backward-send-backward-recv"
    yield from () if first else ("forward-recv",)
    for _ in range(sizes.warmup):
        yield from (*(() if first else (forward,)), "forward-compute", forward)
    yield from (backward,) if steady else ()
    for _ in range(steady):
        yield from ("forward-compute", forward, "backward-compute", backward)
    if not steady and not last:
        yield "backward-recv"
    for _ in range(sizes.warmup):
        yield from (*(() if last else (backward,)), "backward-compute", backward)


ALL_FOUR = "forward-backward-send-forward-backward-recv"

END = (
    "all-grads-sync",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
)


def time(timers: Any, name: str, inside: Callable[[], object] = lambda: None) -> None:  # noqa: ANN401
    """Start a timer, and stop it."""
    timers(name, log_level=2).start()
    inside()
    timers(name).stop()


def train_step(timers: Any, names: Iterator[str], *, chained: bool = True) -> None:  # noqa: ANN401
    """One step of Megatron-LM, with a distributed optimizer."""

    def whole_pass() -> None:
        for name in names:
            time(timers, name)
        for name in END:
            time(timers, name)

    def optimizer() -> None:
        time(timers, "optimizer-copy-to-main-grad")
        if not chained:
            time(timers, "optimizer-clip-main-grad")
            time(timers, "optimizer-count-zeros")
        time(timers, "optimizer-inner-step")
        time(timers, "optimizer-copy-main-to-model-params")
        time(timers, "params-all-gather")

    time(timers, "forward-backward", whole_pass)
    time(timers, "optimizer", optimizer)


def modules(**given: object) -> dict[str, Any]:
    """Modules of a trainer: rank 3 of 2 stages on 2 replicas, as Megatron-LM tells it."""
    place = {"data": 1, "pipeline_model": 1, "tensor_model": 0, "context": 0}
    sizes = {"data": 2, "pipeline_model": 2, "tensor_model": 1, "context": 1, "expert_model": 1}
    state = SimpleNamespace(get_virtual_pipeline_model_parallel_world_size=lambda: None)
    for name, rank in place.items():
        setattr(state, f"get_{name}_parallel_rank", lambda rank=rank: rank)
    for name, size in sizes.items():
        setattr(state, f"get_{name}_parallel_world_size", lambda size=size: size)
    args = SimpleNamespace(**given)
    return {
        "torch": SimpleNamespace(
            distributed=SimpleNamespace(get_rank=lambda: 3), is_grad_enabled=lambda: True
        ),
        "megatron.core.parallel_state": state,
        "megatron.core.num_microbatches_calculator": SimpleNamespace(
            get_num_microbatches=lambda: 8
        ),
        "megatron.training.global_vars": SimpleNamespace(get_args=lambda: args),
    }
