"""As much of torch as a recorder sees: hooks of modules, tensors, nodes and optimizers.

A model is a chain of blocks, each of which takes time; the order in which hooks run is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ingest_agents.recorder.plain import Autograd

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000

Hook = Callable[..., Any]


@dataclass
class World:
    """The clock that all of it moves, and the backward that runs."""

    now: int = 5_000 * MS
    grad: bool = True
    callbacks: list[Hook] = field(default_factory=list)

    def spend(self, milliseconds: float) -> None:
        """Time passes."""
        self.now += round(milliseconds * MS)

    def monotonic(self) -> int:
        """A clock that never goes back."""
        return self.now

    def wall(self) -> int:
        """Unix time."""
        return self.now + START_NS

    @property
    def autograd(self) -> Autograd:
        """For `attach`."""
        return Autograd(lambda: self.grad, self.callbacks.append)

    def backward(self, tensor: Tensor) -> None:
        """From the loss to the inputs; then the callbacks, and those that they add."""
        try:
            _run(tensor)
        except RuntimeError:
            self.callbacks.clear()
            raise
        while self.callbacks:
            self.callbacks.pop(0)()


def _run(tensor: Tensor) -> None:
    at: Tensor | None = tensor
    while at is not None:
        for hook in list(at.hooks):
            hook(None)
        node = at.grad_fn
        if node is not None:
            node.run()
        at = None if node is None else node.before


class Handle:
    """What a registration gives."""

    def __init__(self, hooks: list[Any], hook: object) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Undo it."""
        self._hooks.remove(self._hook)


@dataclass
class Node:
    """A step of the backward."""

    kind: str
    work: Callable[[], None]
    before: Tensor | None
    pre: list[Hook] = field(default_factory=list)
    post: list[Hook] = field(default_factory=list)

    def name(self) -> str:
        """Of its class."""
        return self.kind

    def register_prehook(self, hook: Hook) -> None:
        """Before it."""
        self.pre.append(hook)

    def register_hook(self, hook: Hook) -> None:
        """After it."""
        self.post.append(hook)

    def run(self) -> None:
        """All of it."""
        for hook in self.pre:
            hook(())
        self.work()
        for hook in self.post:
            hook((), ())


class Tensor:
    """A tensor that needs a gradient, if something has computed it."""

    def __init__(self, grad_fn: Node | None = None, shape: tuple[int, ...] = (2, 8)) -> None:
        self.grad_fn, self.shape = grad_fn, shape
        self.requires_grad = grad_fn is not None
        self.hooks: list[Hook] = []

    def register_hook(self, hook: Hook) -> None:
        """When its gradient is there."""
        assert self.requires_grad
        self.hooks.append(hook)


class Module:
    """A module, with hooks in torch's order."""

    def __init__(self, *children: Module) -> None:
        self.children, self.training = children, True
        self.pre: list[tuple[Hook, bool]] = []
        self.post: list[Hook] = []

    def modules(self) -> Iterator[Module]:
        """Itself, and all below."""
        yield self
        for child in self.children:
            yield from child.modules()

    def buffers(self) -> Iterator[object]:
        """None, mostly."""
        return iter(())

    def register_forward_pre_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> Handle:
        """Before the forward."""
        entry = (hook, with_kwargs)
        self.pre.insert(0 if prepend else len(self.pre), entry)
        return Handle(self.pre, entry)

    def register_forward_hook(self, hook: Hook, *, prepend: bool = False) -> Handle:
        """After it."""
        self.post.insert(0 if prepend else len(self.post), hook)
        return Handle(self.post, hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as torch's
        """Forward, with hooks."""
        for hook, with_kwargs in list(self.pre):
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            args = args if changed is None else changed
        output = self.forward(*args, **kwargs)
        for hook in list(self.post):
            assert hook(self, args, output) is None
        return output

    def forward(self, tensor: Tensor) -> Tensor:
        """Its children, one after the other."""
        for child in self.children:
            tensor = child(tensor)
        return tensor


class Block(Module):
    """Computes for so many milliseconds."""

    def __init__(self, world: World, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.world, self.forward_ms, self.backward_ms = world, forward_ms, backward_ms

    def forward(self, tensor: Tensor) -> Tensor:
        """Compute."""
        self.world.spend(self.forward_ms)
        if not self.world.grad:
            return Tensor()
        return Tensor(Node("Block", lambda: self.world.spend(self.backward_ms), tensor))


class DistributedDataParallel(Module):
    """Reduces after the backward, beside which it has begun to; known by its name."""

    def __init__(self, module: Module, world: World, reduce_ms: float) -> None:
        super().__init__(module)
        self.module, self.world, self.reduce_ms = module, world, reduce_ms
        self.require_backward_grad_sync, self.broadcast_buffers = True, True
        self.broadcast_ms = 0.0

    def forward(self, tensor: Tensor) -> Tensor:
        """Buffers come from rank 0; gradients of the first block are the last."""
        if self.broadcast_ms:
            self.world.spend(self.broadcast_ms)
        first = Tensor(Node("First", self._last_is_ready, tensor))
        output: Tensor = self.module(first)
        return output

    def _last_is_ready(self) -> None:
        if self.require_backward_grad_sync:
            self.world.callbacks.append(lambda: self.world.spend(self.reduce_ms))


class FSDPModule(Module):
    """Gathers before forward and backward, reduces after the backward; known by its name."""

    def __init__(self, *children: Module, world: World, gather_ms: float, reduce_ms: float) -> None:
        super().__init__(*children)
        self.world, self.gather_ms, self.reduce_ms = world, gather_ms, reduce_ms
        self.register_forward_pre_hook(self._before, prepend=True)
        self.register_forward_hook(self._after)

    def _before(self, _module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.world.spend(self.gather_ms)
        (tensor,) = args
        if not tensor.requires_grad:
            return args
        work = lambda: self.world.spend(self.reduce_ms)  # noqa: E731
        return (Tensor(Node("RegisterPostBackwardFunctionBackward", work, tensor)),)

    def _after(self, _module: object, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        output.register_hook(lambda _grad: self._backward_begins(args[0]))

    def _backward_begins(self, given: Tensor) -> None:
        self.world.spend(self.gather_ms)
        if not given.requires_grad:
            # Nothing tells that its backward has ended: it reduces after all of them.
            self.world.callbacks.append(lambda: self.world.spend(self.reduce_ms))


class Optimizer:
    """Steps for so many milliseconds."""

    def __init__(self, world: World, step_ms: float) -> None:
        self.world, self.step_ms = world, step_ms
        self.pre: list[Hook] = []
        self.post: list[Hook] = []

    def register_step_pre_hook(self, hook: Hook) -> Handle:
        """Before a step."""
        self.pre.append(hook)
        return Handle(self.pre, hook)

    def register_step_post_hook(self, hook: Hook) -> Handle:
        """After it."""
        self.post.append(hook)
        return Handle(self.post, hook)

    def step(self) -> None:
        """Step."""
        for hook in self.pre:
            hook(self, (), {})
        self.world.spend(self.step_ms)
        for hook in self.post:
            hook(self, (), {})
