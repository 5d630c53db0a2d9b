"""Many like pieces of work over an executor, no more at a time than it works on.

Flow: references → **here** (an `Executor`) → values and errors, in the order in which they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final, TypeVar

from smon.errors import TaskLostError
from smon.executors.seam import Executor

_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")

#: Work is begun so often at most, if its process or node ends every time: then it is the work that
#: ends them.
TRIES: Final = 3


def spread(
    executor: Executor, do: Callable[[_Argument], _Value], arguments: Iterable[_Argument]
) -> Iterator[tuple[_Argument, Future[_Value]]]:
    """Do the same with each argument; each with its future, which is done, as they end.

    What is lost with a process or a node is done again, up to `TRIES` times in all.
    """
    waiting = deque((argument, 1) for argument in arguments)
    under_way: dict[Future[_Value], tuple[_Argument, int]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < executor.parallel:
            argument, tries = waiting.popleft()
            under_way[executor.submit(do, argument)] = (argument, tries)
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            argument, tries = under_way.pop(future)
            if tries < TRIES and isinstance(future.exception(), TaskLostError):
                waiting.append((argument, tries + 1))
            else:
                yield argument, future
