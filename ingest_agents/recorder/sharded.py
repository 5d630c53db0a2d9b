"""Where a sharded model waits: around the hooks that gather its parameters and reduce gradients.

Flow: modules that were given to ``fully_shard`` → **here** → `ingest_agents.recorder.loop`.

``fully_shard`` works by hooks on each of its modules, and so does this: one hook before and one
after each of them. In between, the module waits for its parameters, or a reduction begins. On a
GPU, these are moments on the stream that computes: what overlaps with it is no wait.

What this cannot tell: which module a rank is slow in. If one rank is slow in one module and another
rank in the next, each waits for the other, and the step has both delays; here, each rank has its
own, and the rest counts as transfer of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from ingest_agents.recorder.loop import Loop

#: Makes a hook harmless: it never raises, and gives nothing back.
Quiet = Callable[[Callable[..., object]], Callable[..., None]]

_SHARDED: Final = "FSDPModule"
_POST_BACKWARD: Final = "RegisterPostBackward"
_DEPTH: Final = 8


def is_a(module: object, name: str) -> bool:
    """Whether a class of this name is among those of the module; torch need not be imported."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def sharded_in(model: Any) -> list[Any]:  # noqa: ANN401  # torch's
    """The modules of a model that were given to ``fully_shard``."""
    return [module for module in model.modules() if is_a(module, _SHARDED)]


def watch_waits(module: Any, loop: Loop, quiet: Quiet) -> list[Any]:  # noqa: ANN401  # torch's
    """Tell the loop when a module waits; gives handles whose ``remove`` undoes it."""
    unit = _Unit(loop, quiet)
    return [
        module.register_forward_pre_hook(quiet(unit.gathers), prepend=True),
        module.register_forward_pre_hook(quiet(unit.gathered), with_kwargs=True),
        module.register_forward_hook(quiet(unit.computed), prepend=True),
        module.register_forward_hook(quiet(unit.left)),
    ]


class _Unit:
    """Hooks of one module, in the order in which they are called around those of torch."""

    def __init__(self, loop: Loop, quiet: Quiet) -> None:
        self._loop, self._quiet = loop, quiet
        self._begins = quiet(lambda *_: loop.wait_begins())
        self._ends = quiet(lambda *_: loop.wait_ends())
        self._outputs: list[Any] = []

    def gathers(self, *_: object) -> None:
        """Before the parameters are gathered."""
        self._loop.wait_begins()

    def gathered(self, _module: object, args: object, kwargs: object) -> None:
        """The parameters are there. In the backward, the node at the inputs reduces gradients."""
        self._loop.wait_ends()
        nodes = {id(t.grad_fn): t.grad_fn for t in tensors_in((args, kwargs)) if t.grad_fn}
        for node in nodes.values():
            if node.name().startswith(_POST_BACKWARD):
                node.register_prehook(self._begins)
                node.register_hook(self._ends)

    def computed(self, _module: object, _args: object, output: object) -> None:
        """Before torch hooks the outputs, to gather parameters again in the backward.

        If they are the outputs of the whole model, the backward begins with that.
        """
        if not self._loop.computing:
            return
        microbatch = self._loop.microbatch
        begins = self._quiet(lambda *_: self._loop.backward_waits(microbatch))
        self._outputs = list(tensors_in(output))
        for tensor in self._outputs:
            tensor.register_hook(begins)

    def left(self, *_: object) -> None:
        """After that."""
        outputs, self._outputs = self._outputs, []
        for tensor in outputs:
            tensor.register_hook(self._ends)


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:  # noqa: ANN401  # of any kind
    """Tensors that need a gradient, in sequences, mappings and dataclasses."""
    if getattr(value, "requires_grad", False) is True:
        yield value
    elif depth and not isinstance(value, str | bytes):
        for part in _parts(value):
            yield from tensors_in(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:  # noqa: ANN401  # of any kind
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
