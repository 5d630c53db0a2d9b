"""Where work runs that can run anywhere: here, in processes of this machine, or on a Ray cluster.

Flow: `smon.commands` → **here** → `smon.worker.elsewhere`, `smon.study`. A piece of work is a
function of a module and one argument that refers to what it needs (a path, a row, an address):
what is analysed never travels through here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout

from smon.executors.here import Here
from smon.executors.seam import Executor, ExecutorName

__all__ = ["Executor", "ExecutorName", "Here", "open_executor"]


@contextmanager
def open_executor(
    name: ExecutorName, parallel: int | None = None, address: str | None = None
) -> Iterator[Executor]:
    """An executor, which is closed afterwards; what it has not done by then is given up.

    Parameters
    ----------
    parallel
        How many tasks at a time. By default one, and of Ray as many as its cluster has cores.
    address
        Of a Ray cluster; without one, Ray is started on this machine and stopped again.

    Raises
    ------
    ConfigError
        Ray is not installed, or there is no cluster at the address.
    """
    # Ray tells what happens to processes and nodes on stdout, which belongs to the command.
    told: AbstractContextManager[object] = (
        redirect_stdout(sys.stderr) if name is ExecutorName.RAY else nullcontext()
    )
    with told:
        executor = _executor(name, parallel, address)
        try:
            yield executor
        finally:
            executor.close()


def _executor(name: ExecutorName, parallel: int | None, address: str | None) -> Executor:
    if name is ExecutorName.RAY:
        from smon.executors.ray_cluster import RayCluster

        return RayCluster(address, parallel)
    if parallel is None or parallel == 1:
        return Here()
    from smon.executors.pool import Pool

    return Pool(parallel)
