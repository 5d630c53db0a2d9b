"""Work done in this process, at once.

Flow: `smon.executors.open_executor` → **here** → the function.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")


class Here:
    """An executor that has done the work when `submit` returns."""

    parallel = 1

    def submit(self, do: Callable[[_Argument], _Value], argument: _Argument) -> Future[_Value]:
        """Call the function; the future has its value, or what it raised."""
        future: Future[_Value] = Future()
        try:
            future.set_result(do(argument))
        except Exception as error:  # noqa: BLE001  # whoever asks the future gets it
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing is left to be ended."""
