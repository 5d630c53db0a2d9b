"""Ray for tests: whether it is there, and clusters of several nodes on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

import psutil
import pytest

T = TypeVar("T")

#: Ray's own store of objects of each node: tasks exchange references and outcomes.
_STORE_BYTES = 80 << 20

#: A node is begun so often.
_TRIES = 5

#: Ray writes this in front of the name of a function while a process carries it out.
_TITLE = "ray::"


def need_ray() -> None:
    """Skip what cannot be done without Ray."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NO RAY: expected it in the environment: pip install 'smon[ray]'")


def patiently(begin: Callable[[], T], *errors: type[Exception]) -> T:
    """Begin something of Ray, which gives a node 30 s to be there, on however busy a machine."""
    for _ in range(_TRIES - 1):
        with suppress(*errors):
            return begin()
    return begin()


class RayNodes:
    """A cluster of nodes of one core each; the first of them knows the others."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head = {**self._sizes, "include_dashboard": False}
        self._cluster: Any = patiently(
            lambda: Cluster(initialize_head=True, head_node_args=head), Exception
        )
        self.first: Any = self._cluster.head_node

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": _STORE_BYTES}

    @property
    def address(self) -> str:
        """What ``--ray-address`` takes."""
        return str(self._cluster.address)

    def add(self) -> Any:  # noqa: ANN401  # Ray's own
        """One more node."""
        return patiently(lambda: self._cluster.add_node(**self._sizes), Exception)

    def kill(self, node: Any) -> None:  # noqa: ANN401  # as above
        """End a node and all its processes as a power cut does."""
        below = _raylet(node).children(recursive=True)
        self._cluster.remove_node(node, allow_graceful=False)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """End all nodes, and leave nothing behind."""
        folder = self.first.get_session_dir_path()
        self._cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def carrying_out(node: Any, function: str) -> list[psutil.Process]:  # noqa: ANN401  # as above
    """Processes of a node that carry out a function now."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in _raylet(node).children():
            with suppress(psutil.NoSuchProcess):
                if _does(process, function):
                    found.append(process)
    return found


def _raylet(node: Any) -> psutil.Process:  # noqa: ANN401  # as above
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def held(process: psutil.Process, function: str) -> bool:
    """Whether a process, stopped now, is within the function; it stays stopped if it is."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
        if _does(process, function):
            return True
        process.send_signal(signal.SIGCONT)
    return False


def _does(process: psutil.Process, function: str) -> bool:
    title = " ".join(process.cmdline())
    return title.partition("(")[0].strip() == f"{_TITLE}{function}"
