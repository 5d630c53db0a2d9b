"""Work for executors: functions of a module, as they must be."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from smon.errors import TraceError
from smon.topology import Layout

#: Nothing here takes so long.
PATIENCE_S = 60.0


def double(number: int) -> int:
    """Twice as much."""
    return 2 * number


def pause(number: int) -> int:
    """Take a little time."""
    time.sleep(0.02)
    return number


def where(_number: int) -> int:
    """The process that does it."""
    return os.getpid()


def refuse(word: str) -> str:
    """Raise what SMon raises."""
    raise TraceError(word)


def lack(name: str) -> object:
    """Import what is not there."""
    return __import__(name)


def end(_argument: object) -> int:
    """Take its process with it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def end_until(path: str) -> int:
    """Take its process with it, until a file says that it has done so twice; how often it has."""
    file = Path(path)
    begun = len(file.read_bytes()) if file.exists() else 0
    with file.open("ab") as out:
        out.write(b"x")
    return begun if begun == 2 else end(0)


def appear(path: str) -> str:
    """Say that it is under way, and wait until another file appears."""
    file = Path(path)
    file.write_text(str(os.getpid()))
    deadline = time.monotonic() + PATIENCE_S
    while not file.with_suffix(".go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.name


def ranks(layout: Layout) -> int:
    """Ranks of a layout: arguments and values are whatever can be pickled."""
    return layout.world_size
