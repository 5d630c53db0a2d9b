"""Record the ops of a job that trains with Megatron-LM, through its own timers.

Flow: ``timers(name).start()`` and ``.stop()`` in Megatron-LM → **here** →
`ingest_agents.recorder.megatron_ops`. Imports neither torch nor Megatron-LM.

Names and order of the timers were checked against megatron-core 0.16.1; ``docs/guides/`` has those
of other versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ingest_agents.recorder.megatron_job import MegatronJob, find_job
from ingest_agents.recorder.megatron_ops import Watch
from ingest_agents.recorder.recorder import Recorder

_LOG: Final = logging.getLogger("smon.recorder")

#: Attribute of attached timers.
_WATCH: Final = "_smon_watch"

_T = TypeVar("_T")


def attach_timers(
    timers: _T,
    recorder: Recorder | None = None,
    *,
    job: Callable[[], MegatronJob] = find_job,
) -> _T:
    """Record what these timers time. To everybody else they stay what they are.

    Changes the object that it is given, so it does not matter who holds it already. May be called
    again, even for each microbatch; recording begins with the next step. A timer above
    ``--timing-log-level`` is recorded, too, and still measures nothing for Megatron-LM. No barrier
    and no synchronisation is added. A step begins with ``forward-backward`` and ends with
    ``optimizer``, unless the caller has begun one with `Recorder.step`.

    Parameters
    ----------
    timers
        ``megatron.training.get_timers()``, or what ``config.timers`` holds.
    recorder
        Of this process; by default, as its environment says, with the layout of `job`.
    job
        Asked once, when the first step begins.

    Returns
    -------
    object
        The same timers.
    """
    try:
        if not hasattr(timers, _WATCH):
            _attach(timers, Watch(recorder, job))
    except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
        _LOG.warning("SMon: nothing of Megatron-LM's timers is recorded: %r", error)
    return timers


def count_tokens(timers: object, tokens: int, sum_len2: float) -> None:
    """Tell what is in the microbatch whose forward runs; call it where the batch is read.

    Parameters
    ----------
    timers
        Attached.
    tokens
        In the microbatch.
    sum_len2
        Sum of the squared lengths of its sequences.
    """
    watched = getattr(timers, _WATCH, None)
    if watched is not None:
        watched.watch.tokens(tokens, sum_len2)


def _attach(timers: Any, watch: Watch) -> None:  # noqa: ANN401  # Megatron-LM's
    watched = _watched_class(type(timers))
    setattr(timers, _WATCH, _Watched(watch))
    timers.__class__ = watched


def _watched_class(before: Any) -> type:  # noqa: ANN401  # Megatron-LM's
    """The class, but its timers are watched; copies and pickles are of the class itself."""

    def call(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        timer = before.__call__(self, name, *args, **kwargs)
        return vars(self)[_WATCH].timer(name, timer)

    def reduce(self: Any, protocol: object) -> Any:  # noqa: ANN401, ARG001  # as pickle calls it
        state = {name: value for name, value in vars(self).items() if name != _WATCH}
        return object.__new__, (before,), state

    return type(before.__name__, (before,), {"__call__": call, "__reduce_ex__": reduce})


class _Watched:
    """The timers that were asked for so far, by name."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._timers: dict[str, Any] = {}

    def timer(self, name: str, original: Any) -> Any:  # noqa: ANN401  # Megatron-LM's
        """The timer of this name, watched if what it times is recorded."""
        found = self._timers.get(name)
        if found is None:
            handlers = self.watch.handlers(name)
            found = original if handlers is None else _Timer(original, *handlers)
            self._timers[name] = found
        return found


class _Timer:
    """A timer of Megatron-LM, or its dummy, that tells when it is started and stopped."""

    __slots__ = ("_original", "_started", "_stopped")

    def __init__(
        self,
        original: Any,  # noqa: ANN401  # Megatron-LM's
        started: Callable[[], None],
        stopped: Callable[[], None],
    ) -> None:
        keep = object.__setattr__
        keep(self, "_original", original)
        keep(self, "_started", started)
        keep(self, "_stopped", stopped)

    def start(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # as the original
        """Start it."""
        self._original.start(*args, **kwargs)
        self._started()

    def stop(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # as the original
        """Stop it."""
        self._original.stop(*args, **kwargs)
        self._stopped()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as the original
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._original, name, value)
