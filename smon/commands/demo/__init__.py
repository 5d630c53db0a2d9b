"""``smon demo``: a real server, real agents, and a synthetic job that runs while you look."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="watch SMon find the straggler of a synthetic job, live",
        description="Start a server and agents, and run a synthetic training job in which one "
        "worker becomes slow after a few steps. Ctrl-C ends everything.",
    )
    parser.add_argument(
        "--once", action="store_true", help="stop as soon as the straggler is named"
    )
    parser.add_argument(
        "--port", type=int, default=8080, metavar="PORT", help="port of the pages (8080)"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="keep the data here; by default it goes with the demo",
    )
    parser.set_defaults(run=_demo)


def _demo(parsed: argparse.Namespace) -> int:
    from smon.commands.demo.show import show

    if parsed.data_dir is not None:
        try:
            parsed.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {parsed.data_dir}: {error.strerror}") from error
        return show(parsed.data_dir, port=parsed.port, once=parsed.once)
    with tempfile.TemporaryDirectory(prefix="smon-demo-", ignore_cleanup_errors=True) as name:
        return show(Path(name), port=parsed.port, once=parsed.once)
