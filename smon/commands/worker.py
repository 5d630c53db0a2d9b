"""``smon worker``: analyse windows, follow live jobs, read imports; any number of them may run."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.config import PARENT_VARIABLE, Settings
from smon.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from smon.worker.loop import Worker

_POLL_S = 0.5
_MAX_NAME = 128


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
    return run_worker(settings, name=parsed.name, once=parsed.once)


def run_worker(settings: Settings, *, name: str | None = None, once: bool = False) -> int:
    """Run a worker until SIGTERM or SIGINT, or with `once` until nothing is ready; the exit code.

    Raises
    ------
    ConfigError
        The name cannot be used.
    StoreError
        With `once`: the database cannot be used.
    """
    from smon.store.database import Database
    from smon.store.objects import Objects
    from smon.store.schema import upgrade
    from smon.worker.loop import Worker

    database = Database(settings.database)
    upgrade(database)
    worker = Worker(settings, database, Objects(settings.traces), name=_name(name))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: worker.stop())
    try:
        if once:
            worker.drain()
        else:
            _watch_parent(worker, os.environ.get(PARENT_VARIABLE))
            worker.run()
    finally:
        database.close()
    return 0


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
