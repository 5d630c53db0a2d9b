"""What commands about traces share: how a price is read, and a bar that says how far they are.

Flow: `smon.cli`, `smon.commands.fleet_analyze` → **here**.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

#: Told of a phase: its name, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]

#: No GPU costs that per hour; larger numbers are typing errors.
_MAX_PRICE: Final = 1e6


def price(text: str) -> float:
    """A price of one GPU for one hour, as it is typed.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < _MAX_PRICE:
        raise argparse.ArgumentTypeError(f"expected a price such as 2.5, found {text!r}")
    return number


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr if that is a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda _phase, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=done, total=total)

        yield show
