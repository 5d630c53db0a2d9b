"""What every executor does.

Flow: `smon.executors.here`, `smon.executors.pool`, `smon.executors.ray_cluster` → **here** →
`smon.executors.spread`, `smon.worker.flight`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from enum import StrEnum
from typing import Protocol, TypeVar

from smon.errors import TaskLostError

_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")


class ExecutorName(StrEnum):
    """Executors that one can ask for."""

    LOCAL = "local"
    RAY = "ray"


class Executor(Protocol):
    """Carries out work, so many pieces at a time."""

    @property
    def parallel(self) -> int:
        """How many pieces it works on at a time; who hands it more, waits."""

    def submit(self, do: Callable[[_Argument], _Value], argument: _Argument) -> Future[_Value]:
        """Let a function of a module be called with an argument, which is pickled on the way.

        What the function raises, the future raises. If its process or node ends before it, the
        future raises `TaskLostError`.
        """

    def close(self) -> None:
        """End it, and whatever it still works on."""


def passed_on(
    inner: Future[_Value], meaning: Callable[[BaseException], BaseException]
) -> Future[_Value]:
    """A future of the same value, whose errors are in words of SMon."""
    outer: Future[_Value] = Future()

    def pass_on(done: Future[_Value]) -> None:
        try:
            value = done.result()
        except CancelledError:
            outer.set_exception(TaskLostError("this work was given up before it was begun"))
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it, whatever it is
            outer.set_exception(meaning(error))
        else:
            outer.set_result(value)

    inner.add_done_callback(pass_on)
    return outer
