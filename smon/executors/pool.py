"""Work done in processes of this machine.

Flow: `smon.executors.open_executor` → **here** (`concurrent.futures`) → the function. Each process
is a pool of one: where several share a pool, the end of one takes the work of all others with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from queue import SimpleQueue
from typing import TypeVar

from smon.errors import TaskLostError
from smon.executors.seam import passed_on

_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")


class Pool:
    """So many processes, which begin when they are needed; each has one task at a time.

    Parameters
    ----------
    parallel
        How many.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel
        self._places = [_Place() for _ in range(parallel)]
        self._idle: SimpleQueue[_Place] = SimpleQueue()
        for place in self._places:
            self._idle.put(place)

    def submit(self, do: Callable[[_Argument], _Value], argument: _Argument) -> Future[_Value]:
        """Let the next idle process call the function; waits until there is one."""
        place = self._idle.get()
        try:
            future = place.submit(do, argument)
        except BaseException:
            self._idle.put(place)
            raise
        # Before whoever waits for the future: it may have the next task at once.
        future.add_done_callback(lambda _: self._idle.put(place))
        return passed_on(future, _meaning)

    def close(self) -> None:
        """Kill the processes: what they still work on is nobody's any more."""
        for place in self._places:
            place.kill()


class _Place:
    """One process, and the next one when it has ended."""

    def __init__(self) -> None:
        self._pool = _process()

    def submit(self, do: Callable[[_Argument], _Value], argument: _Argument) -> Future[_Value]:
        try:
            return self._pool.submit(do, argument)
        except BrokenProcessPool:
            self.kill()
            self._pool = _process()
            return self._pool.submit(do, argument)

    def kill(self) -> None:
        # Python 3.14 has `kill_workers` for it.
        for process in dict(self._pool._processes or {}).values():  # noqa: SLF001
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _process() -> ProcessPoolExecutor:
    # Not forked: this process has threads, and libraries that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin)


def _begin() -> None:
    """In a new process: it ends with the one that made it, and when that one says so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # They may be sent to all processes at once; what is under way gets its time.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _meaning(error: BaseException) -> BaseException:
    if isinstance(error, BrokenProcessPool):
        lost = TaskLostError(
            "the process that had this work ended before it, perhaps for lack of memory"
        )
        lost.__cause__ = error
        return lost
    return error
