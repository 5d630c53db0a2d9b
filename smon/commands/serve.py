"""``smon serve``: ingest API, REST, pages, metrics, and by default the analysis worker."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.config import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction

#: Loggers of libraries that tell each step of theirs.
_CHATTY = ("alembic", "uvicorn")

_ROLES = ("all", "api", "worker")

#: Options that are settings too: flag, type, placeholder, help.
_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("host", str, "ADDRESS", "address to listen on (127.0.0.1)"),
    ("port", int, "PORT", "port of API and pages (8080); 0 chooses a free one"),
    ("ops_port", int, "PORT", "port of /healthz, /readyz and /metrics (port + 1)"),
    ("data_dir", Path, "DIR", "folder of database, events and log (smon-data)"),
)


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "serve",
        help="run the server: ingest, REST, pages, metrics, analysis",
        description="Run the server. Every setting can be given in the environment "
        "(smon config show lists them); options go before it.",
    )
    add_settings(parser)
    parser.add_argument(
        "--role",
        choices=_ROLES,
        default="all",
        help="all: everything in one command; api: without the analysis; worker: only it",
    )
    parser.set_defaults(run=_serve)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name where things are."""
    for name, kind, placeholder, text in _OPTIONS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=placeholder, help=text)


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Settings of the environment, with the options of a command before them.

    Raises
    ------
    ConfigError
        A value cannot be used.
    """
    given = {name: getattr(parsed, name, None) for name, _, _, _ in _OPTIONS}
    return Settings.from_env(os.environ, **given)


def log_to_stderr(level: str) -> None:
    """Let everything that is logged from this level on go to stderr, a line each."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def _serve(parsed: argparse.Namespace) -> int:
    settings = settings_of(parsed)
    log_to_stderr(settings.log_level)
    if parsed.role == "worker":
        from smon.commands.worker import run_worker

        own = settings.ops_port if settings.worker_ops_port < 0 else settings.worker_ops_port
        return run_worker(replace(settings, worker_ops_port=own))
    from smon import memory
    from smon.api.serve import Role, Server, bind
    from smon.store.database import Database
    from smon.store.schema import upgrade

    memory.one_arena()
    database = Database(settings.database)
    database.wait(settings.start_wait_s)
    upgrade(database)
    database.close()
    server = Server(settings, bind(settings), os.environ, Role(parsed.role))
    listening = server.listening
    print(f"SMon is at {listening.url} (health and metrics: {listening.ops_url})", flush=True)
    server.run()
    return 0
