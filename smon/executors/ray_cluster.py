"""Work done on a Ray cluster; the only module that knows Ray.

Flow: `smon.executors.open_executor` → **here** (`ray`) → the function, on any node. Nodes need the
same SMon; they find it by name, as nothing of the code travels.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from smon.errors import ConfigError, TaskLostError
from smon.executors.seam import passed_on

_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")

#: Ray's own store of objects, where one is started here: tasks exchange references and outcomes.
_STORE_BYTES: Final = 100 << 20

#: The address of a cluster must answer within so long.
_LOOK_S: Final = 5.0

#: Nothing about this cluster is told to anybody, and Ray does not announce changes of its own.
_ENVIRON: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

#: A lost task is tried again by whoever knows whether it may be.
_TASK: Final = {"max_retries": 0, "num_cpus": 1, "scheduling_strategy": "SPREAD"}


class RayCluster:
    """A connection to a cluster; or a Ray of this machine, which ends with it.

    Parameters
    ----------
    address
        Of the cluster (``host:port``, or ``auto``); this process must run on one of its nodes.
        None: Ray is started here.
    parallel
        Tasks at a time; None: as many as the cluster has cores.

    Raises
    ------
    ConfigError
        Ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str | None, parallel: int | None = None) -> None:
        os.environ.update(_ENVIRON)
        self._ray = _library()
        if address:
            _look_for(address)
        self._folder = None if address else tempfile.mkdtemp(prefix="smon-ray-")
        self._remotes: dict[Callable[..., Any], Any] = {}
        try:
            self._ray.init(**_options(address, parallel, self._folder))
        except Exception as error:
            # Ray raises whatever it met: of the network, of files, of its own.
            self.close()
            where = f"at {address}" if address else "on this machine"
            raise ConfigError(f"cannot use Ray {where}: {_first_line(error)}") from error
        self.parallel = parallel or max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def submit(self, do: Callable[[_Argument], _Value], argument: _Argument) -> Future[_Value]:
        """Let any node call the function."""
        if do not in self._remotes:
            self._remotes[do] = self._ray.remote(do).options(**_TASK)
        future: Future[_Value] = self._remotes[do].remote(argument).future()
        return passed_on(future, self._meaning)

    def _meaning(self, error: BaseException) -> BaseException:
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            cause: BaseException = error.cause
            if isinstance(cause, ImportError):
                cause = ConfigError(f"a node of the cluster lacks what SMon needs: {cause}")
            # Its text has the traceback of the node.
            cause.__cause__ = error
            return cause
        if isinstance(error, errors.RayError):
            lost = TaskLostError(f"the process or node that had this work: {_first_line(error)}")
            lost.__cause__ = error
            return lost
        return error

    def close(self) -> None:
        """Leave the cluster, which ends what is under way; stop Ray if it was started here."""
        self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _library() -> Any:  # noqa: ANN401  # a module that may be absent
    try:
        import ray
    except ImportError as error:
        raise ConfigError("expected Ray, which is not here: pip install 'smon[ray]'") from error
    return ray


def _look_for(address: str) -> None:
    """Ray itself looks for four minutes before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _LOOK_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot use Ray at {address}: {error}") from error


def _options(address: str | None, parallel: int | None, folder: str | None) -> dict[str, Any]:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    if address:
        return {**quiet, "address": address}
    cores = parallel or os.cpu_count() or 1
    # Without "local", Ray would look for a cluster that somebody else has started here.
    own = {"address": "local", "num_cpus": cores, "object_store_memory": _STORE_BYTES}
    return {**quiet, **own, "_temp_dir": folder}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
