"""Options of commands whose work can run elsewhere.

Flow: command line → **here** → `smon.executors`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from smon.errors import ConfigError
from smon.executors import Executor, ExecutorName, open_executor

#: More processes than any machine has use for are typing errors.
_MAX_PARALLEL: Final = 100_000


def add_executor(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the options.

    Parameters
    ----------
    default
        What `parallel_of` gives without an option, in words.
    """
    parser.add_argument(
        "--executor",
        choices=[name.value for name in ExecutorName],
        default=ExecutorName.LOCAL.value,
        help="where work is done: local: on this machine; ray: on a Ray cluster",
    )
    parser.add_argument(
        "--parallel",
        type=_parallel,
        metavar="N",
        help=f"tasks at a time ({default}; with ray, the cores of the cluster)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="of the Ray cluster (RAY_ADDRESS); without one, Ray is started on this machine",
    )


def executor_of(
    parsed: argparse.Namespace, environ: Mapping[str, str], default: int
) -> AbstractContextManager[Executor]:
    """The executor that a command line asks for; closed at the end of the context.

    Parameters
    ----------
    default
        Tasks at a time on this machine, if the command line does not say.

    Raises
    ------
    ConfigError
        The options contradict each other; on entry: Ray is not installed or not there.
    """
    name = ExecutorName(parsed.executor)
    if name is ExecutorName.RAY:
        return open_executor(name, parsed.parallel, address_of(parsed, environ))
    if parsed.ray_address:
        raise ConfigError("--ray-address goes with --executor ray")
    return open_executor(name, parsed.parallel or default)


def address_of(parsed: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Where the Ray cluster is; None: nowhere yet."""
    return parsed.ray_address or environ.get("RAY_ADDRESS") or None


def _parallel(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MAX_PARALLEL:
        raise argparse.ArgumentTypeError(
            f"expected a number of tasks from 1 to {_MAX_PARALLEL}, found {text!r}"
        )
    return int(text)
