"""Record a plain PyTorch training loop: attach once, and leave the loop as it is.

Flow: hooks on model, optimizer and loader → **here** → `ingest_agents.recorder.loop`. Imports no
torch: the trainer has, or there is nothing to attach to. Nothing of torch is replaced, and the
hooks that make up ``DistributedDataParallel`` and ``fully_shard`` stay as they are.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, NamedTuple

from ingest_agents.recorder.batches import Counts, count_tokens, watch
from ingest_agents.recorder.loop import Loop
from ingest_agents.recorder.meshes import layout_of
from ingest_agents.recorder.recorder import Recorder
from ingest_agents.recorder.sharded import Quiet, is_a, sharded_in, tensors_in, watch_waits
from smon.errors import ConfigError

_DDP: Final = "DistributedDataParallel"
_OLD_FSDP: Final = "FullyShardedDataParallel"

#: Batches that a loader gave and no forward has used: a loader may be ahead, but not by that much.
_MAX_AHEAD: Final = 64


class Autograd(NamedTuple):
    """What is needed of torch.

    Attributes
    ----------
    enabled
        Whether gradients will be computed.
    at_end
        Calls a function at the end of the backward that runs, after those that were given before.
    """

    enabled: Callable[[], bool]
    at_end: Callable[[Callable[[], None]], None]


class Attached:
    """What `attach` has done.

    Attributes
    ----------
    recorder
        Of this process, e.g. for ``recorder.timed("checkpoint")``.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._undo: list[Callable[[], object]] = []

    def detach(self) -> None:
        """Leave model, optimizer and loader as they were; may be repeated, and at any time."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception as error:  # noqa: BLE001  # training goes on
                self.recorder.failed(error)

    def close(self) -> None:
        """Detach, write what is left, and end the stream; runs by itself at exit."""
        self.detach()
        self.recorder.close()

    def also(self, undo: Callable[[], object]) -> None:
        """Have this called by `detach`."""
        self._undo.append(undo)


def attach(  # noqa: PLR0913  # each is named at the call
    model: Any,  # noqa: ANN401  # torch's
    optimizer: Any,  # noqa: ANN401  # torch's
    *,
    loader: Any = None,  # noqa: ANN401  # of any kind
    tokens: Callable[[Any], Counts | None] = count_tokens,
    layout: Any = None,  # noqa: ANN401  # a mesh is torch's
    first_step: int | None = None,
    recorder: Recorder | None = None,
    autograd: Autograd | None = None,
) -> Attached:
    """Record forward, backward, reduction of gradients and optimizer of a training loop.

    A step ends with the optimizer; each forward of the model in it is a microbatch. Forwards
    without gradients, and those of a model in evaluation mode, are left out.

    Parameters
    ----------
    model
        As the loop calls it: after ``DistributedDataParallel``, ``fully_shard`` or
        ``torch.compile``.
    optimizer
        One, or a sequence: the step ends when each has stepped.
    loader
        If given, tokens are counted in the batches that it gives, one for each forward. Otherwise
        in the arguments of the model; of those, only the shape counts if they are on a GPU.
    tokens
        Counts tokens, and the sum of the squared sequence lengths, in a batch; None if it cannot.
    layout
        Of the job: a `smon.topology.Layout`, text such as ``tp2-dp4``, or a ``DeviceMesh`` of all
        ranks. Without, and without ``SMON_LAYOUT``, each rank is a DP rank.
    first_step
        Number of the first step, after a restart from a checkpoint. By default 0, or the number
        that follows on the recorder's last step.
    recorder
        By default, that of this process, as the environment says.
    autograd
        By default, that of torch.

    Returns
    -------
    Attached
        To detach. If something is not as expected, one warning says so, and nothing is recorded.
    """
    if recorder is None:
        recorder = _recorder(layout)
    attached = Attached(recorder)
    if recorder.on:
        try:
            engine = autograd or _torch()
            optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
            first = recorder.next_step if first_step is None else first_step
            loop = _loop(recorder, model, len(optimizers), first, engine)
            attached.also(loop.leave)
            hooks = _Hooks(attached, loop, engine, tokens)
            hooks.on_model(model)
            hooks.on_optimizers(optimizers)
            hooks.on_loader(loader)
        except Exception as error:  # noqa: BLE001  # training goes on
            attached.detach()
            recorder.failed(error)
    return attached


def _recorder(layout: Any) -> Recorder:  # noqa: ANN401  # a mesh is torch's
    try:
        return Recorder.from_env(layout=layout_of(layout))
    except Exception as error:  # noqa: BLE001  # training goes on
        return Recorder.off(error)


def _torch() -> Autograd:
    """Of the torch that the trainer has imported."""
    torch: Any = sys.modules["torch"]
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP and FSDP do it
    return Autograd(torch.is_grad_enabled, engine.queue_callback)


def _loop(
    recorder: Recorder,
    model: Any,  # noqa: ANN401  # torch's
    optimizers: int,
    first_step: int,
    engine: Autograd,
) -> Loop:
    replicas = [module for module in model.modules() if is_a(module, _DDP)]
    sharded = bool(sharded_in(model))

    def reduces() -> bool:
        return sharded or any(replica.require_backward_grad_sync for replica in replicas)

    quiet = _quieter(recorder)
    return Loop(
        recorder,
        first_step=first_step,
        optimizers=optimizers,
        reduces=reduces,
        at_end=lambda call: engine.at_end(quiet(call)),
    )


def _quieter(recorder: Recorder) -> Quiet:
    """Makes a hook harmless: it never raises, and changes nothing."""

    def quiet(hook: Callable[..., object]) -> Callable[..., None]:
        @wraps(hook)
        def call(*args: object) -> None:
            try:
                hook(*args)
            except Exception as error:  # noqa: BLE001  # training goes on
                recorder.failed(error)

        return call

    return quiet


class _Hooks:
    """The hooks of one attachment: harmless, whatever happens in them."""

    def __init__(
        self,
        attached: Attached,
        loop: Loop,
        engine: Autograd,
        tokens: Callable[[Any], Counts | None],
    ) -> None:
        self._attached, self._recorder = attached, attached.recorder
        self._loop, self._engine, self._tokens = loop, engine, tokens
        self._quiet = _quieter(self._recorder)
        self._ahead: deque[Counts | None] | None = None
        self._counted = False

    # --- model ------------------------------------------------------------------------------------

    def on_model(self, model: Any) -> None:  # noqa: ANN401  # torch's
        """Around forward and backward of the whole, and where its parts wait."""
        if any(is_a(module, _OLD_FSDP) for module in model.modules()):
            raise ConfigError(f"expected fully_shard instead of {_OLD_FSDP}: its waits are hidden")
        for module in sharded_in(model):
            self._undo_all(watch_waits(module, self._loop, self._quiet_on(module)))
        for module in model.modules():
            if is_a(module, _DDP):
                self._on_replica(module)
        # Last, so that these come before all others that are to come first.
        quiet = self._quiet_on(model)
        begins, computed = quiet(self._forward_begins), quiet(self._forward_computed)
        self._undo_all(
            [
                model.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
                model.register_forward_hook(computed, prepend=True),
                model.register_forward_hook(quiet(self._forward_ends)),
            ]
        )

    def _on_replica(self, replica: Any) -> None:  # noqa: ANN401  # torch's
        """Buffers come from rank 0 before each forward."""
        if replica.broadcast_buffers and next(replica.module.buffers(), None) is not None:
            begins = self._quiet(lambda *_: self._loop.wait_begins())
            ends = self._quiet(lambda *_: self._loop.wait_ends())
            inner = replica.module
            self._undo_all(
                [
                    replica.register_forward_pre_hook(begins),
                    inner.register_forward_pre_hook(ends, prepend=True),
                ]
            )

    def _forward_begins(self, model: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401  # torch's
        self._counted = bool(model.training and self._engine.enabled())
        if self._counted:
            self._loop.forward_begins(self._counts(args, kwargs))

    def _counts(self, args: Any, kwargs: Any) -> Counts | None:  # noqa: ANN401  # of any kind
        if self._ahead:
            return self._ahead.popleft()
        return self._count(kwargs) or self._count(args)

    def _forward_computed(self, _model: object, _args: object, output: object) -> None:
        if not self._counted:
            return
        microbatch = self._loop.microbatch
        begins = self._quiet(lambda *_: self._loop.backward_begins(microbatch))
        for tensor in tensors_in(output):
            tensor.register_hook(begins)

    def _forward_ends(self, *_: object) -> None:
        if self._counted:
            self._loop.forward_ends()
            self._counted = False

    # --- optimizer, loader ------------------------------------------------------------------------

    def on_optimizers(self, optimizers: list[Any]) -> None:
        """Before and after each step."""
        begins = self._quiet(lambda *_: self._loop.optimizer_begins())
        ends = self._quiet(lambda *_: self._loop.optimizer_ends())
        for optimizer in optimizers:
            self._undo_all(
                [
                    optimizer.register_step_pre_hook(begins),
                    optimizer.register_step_post_hook(ends),
                ]
            )

    def on_loader(self, loader: Any) -> None:  # noqa: ANN401  # of any kind
        """See its batches, before they go to a GPU."""
        if loader is None:
            return
        ahead: deque[Counts | None] = deque(maxlen=_MAX_AHEAD)
        seen = self._quiet(lambda batch: ahead.append(self._count(batch)))
        try:
            self._attached.also(watch(loader, seen))
        except TypeError:
            kind = type(loader).__name__
            self._recorder.failed(ConfigError(f"loader: batches of a {kind} cannot be watched"))
            return
        self._ahead = ahead

    def _count(self, batch: Any) -> Counts | None:  # noqa: ANN401  # of any kind
        try:
            return self._tokens(batch)
        except Exception as error:  # noqa: BLE001  # training goes on
            self._recorder.failed(error)
            return None

    # --- all --------------------------------------------------------------------------------------

    def _undo_all(self, handles: list[Any]) -> None:
        for handle in handles:
            self._attached.also(handle.remove)

    def _quiet_on(self, module: Any) -> Quiet:  # noqa: ANN401  # torch's
        """For hooks of this module: if that is compiled, they are not."""
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if not compiled and not is_a(module, "OptimizedModule"):
            return self._quiet
        disable: Quiet = sys.modules["torch"].compiler.disable
        return lambda hook: disable(self._quiet(hook))
