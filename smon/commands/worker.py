"""``smon worker``: analyse windows, follow live jobs, read imports; any number of them may run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.commands.executing import add_executor, address_of, executor_of
from smon.config import PARENT_VARIABLE, Settings
from smon.errors import ConfigError
from smon.executors import Executor, ExecutorName, Here

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from prometheus_client import CollectorRegistry

    from smon.store.database import Database
    from smon.worker.loop import Worker

_POLL_S = 0.5
_MAX_NAME = 128

#: Where no port was asked for, so many are tried: several workers share a machine.
_PORTS = 16

_LOG = logging.getLogger(__name__)


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "worker",
        help="analyse what the server has taken in",
        description="Analyse windows, follow live jobs, read imports. Any number of workers share "
        "the work of one database and one root of event files.",
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of database and events (smon-data)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of this worker (host, process, random)"
    )
    parser.add_argument(
        "--once", action="store_true", help="do all that is ready, then stop instead of waiting"
    )
    add_executor(parser, "1: in the worker itself")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run a worker as the command line says; the exit code.

    Raises
    ------
    ConfigError
        A setting or the name cannot be used.
    """
    from smon.commands.serve import log_to_stderr

    settings = Settings.from_env(os.environ, data_dir=parsed.data_dir)
    log_to_stderr(settings.log_level)
    _check_shared(settings, parsed)
    with executor_of(parsed, os.environ, default=1) as executor:
        elsewhere = None if isinstance(executor, Here) else executor
        return run_worker(settings, name=parsed.name, once=parsed.once, executor=elsewhere)


def _check_shared(settings: Settings, parsed: argparse.Namespace) -> None:
    """Let nodes of a cluster not look for a file of this machine."""
    if parsed.executor != ExecutorName.RAY or address_of(parsed, os.environ) is None:
        return
    if settings.database.startswith("sqlite"):
        raise ConfigError(
            "expected PostgreSQL (SMON_DATABASE_URL) with a Ray cluster, found SQLite, which is a "
            "file of one machine: without an address, Ray is started on this one"
        )


def run_worker(
    settings: Settings,
    *,
    name: str | None = None,
    once: bool = False,
    executor: Executor | None = None,
) -> int:
    """Run a worker until SIGTERM or SIGINT, or with `once` until nothing is ready; the exit code.

    Parameters
    ----------
    executor
        Where windows are analysed; by default in this process.

    Raises
    ------
    ConfigError
        The name cannot be used.
    StoreError
        With `once`: the database cannot be used.
    """
    from prometheus_client import CollectorRegistry

    from smon import memory
    from smon.metrics.process import register_process
    from smon.store.database import Database
    from smon.store.objects import Objects
    from smon.store.schema import upgrade
    from smon.worker.loop import Worker

    memory.keep()
    database, registry = Database(settings.database), CollectorRegistry()
    database.wait(settings.start_wait_s)
    upgrade(database)
    register_process(registry, "worker")
    worker = Worker(
        settings, database, Objects(settings.traces), name=_name(name), registry=registry
    )
    if executor is not None:
        worker.analyse_with(executor)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: worker.stop())
    try:
        if once:
            worker.drain()
        else:
            _watch_parent(worker, os.environ.get(PARENT_VARIABLE))
            with operations(settings, registry, database):
                worker.run()
    finally:
        database.close()
    return 0


@contextlib.contextmanager
def operations(
    settings: Settings, registry: CollectorRegistry, database: Database
) -> Iterator[int | None]:
    """Health and metrics of a worker, while the context lasts; its port, None if none is free.

    Raises
    ------
    ConfigError
        The port that was asked for cannot be bound.
    """
    from smon.api.ops import OpsServer, bound

    for number in _ports(settings):
        try:
            listener = bound(replace(settings, ops_port=number))
            break
        except ConfigError:
            if settings.worker_ops_port >= 0:
                raise
    else:
        _LOG.warning("no port is free for health and metrics: set SMON_WORKER_OPS_PORT")
        yield None
        return
    server = OpsServer(settings, registry, database.problems, listener)
    server.start()
    _LOG.info("health and metrics of this worker are at port %d", server.port)
    try:
        yield server.port
    finally:
        server.stop()


def _ports(settings: Settings) -> list[int]:
    """Ports to try."""
    if settings.worker_ops_port >= 0:
        return [settings.worker_ops_port]
    first = settings.operations_port + 1
    # A server with any port has told the worker beside it which one; there is none beside this one.
    return list(range(first, first + _PORTS)) if first > 1 else [0]


def _name(given: str | None) -> str:
    if given is None:
        return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    if not 0 < len(given) <= _MAX_NAME or not given.isprintable():
        raise ConfigError(
            f"expected a name of 1 to {_MAX_NAME} printable characters, found another"
        )
    return given


def _watch_parent(worker: Worker, parent: str | None) -> None:
    """Stop when the server that started this worker is gone: nobody would end it."""
    if parent is None or not parent.isdigit():
        return

    def watch() -> None:
        waiting = threading.Event()
        while os.getppid() == int(parent):
            waiting.wait(_POLL_S)
        worker.stop()

    threading.Thread(target=watch, name="parent", daemon=True).start()
