"""Profiles are read in a process of their own: the agent stays small, whatever a file holds.

One such process at a time, with the lowest priority, little memory and a deadline. It gets orders,
a JSON line each, and answers each with one. If it dies, the order it was at is to blame: that file
is given up, and the others go to the next process.

Flow: sources of files → **here** → `ingest_agents.sources.reduce` (the process) → **here**.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

#: What a reader of profiles needs.
NEEDS: Final = ("numpy", "pyarrow", "orjson")

#: Name of the folder in the spool for what was read and is not yet shipped.
FOLDER_NAME: Final = ".reduced"

#: Why a file is given up, if the process that read it says nothing.
DIED: Final = "reader-died"
TIMEOUT: Final = "reader-too-slow"

_COMMAND: Final = (sys.executable, "-m", "ingest_agents.sources.reduce")

#: Libraries that start threads of their own get one: address space is limited.
_ONE_THREAD: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Order:
    """A file to read; `details` are for the process.

    Attributes
    ----------
    key
        Of the file; comes back with the answer.
    """

    key: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order.

    Attributes
    ----------
    fault
        Why nothing came of it, as a word; None if something did.
    detail
        The same as a sentence.
    details
        What the process says.
    """

    key: str
    fault: str | None = None
    detail: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """A process at work."""

    process: subprocess.Popen[bytes]
    orders: list[Order]
    until: float
    text: bytes = b""


def missing_libraries(needed: Sequence[str] = NEEDS) -> list[str]:
    """Those of some libraries that are not installed; none is loaded for that."""
    return [name for name in needed if importlib.util.find_spec(name) is None]


class Reducer:
    """Has profiles read, one after the other.

    Parameters
    ----------
    spool
        Results lie in a folder of it until they are shipped.
    memory_bytes, seconds
        What the process may use, and for how long for one order.
    command, needs
        The process, and the libraries that it needs.
    clock
        Seconds that never go back.
    """

    def __init__(
        self,
        spool: Path,
        memory_bytes: int,
        seconds: float,
        *,
        command: Sequence[str] = _COMMAND,
        needs: Sequence[str] = NEEDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Of its own: what a process of an agent that was killed still writes is in another's way.
        self.folder = spool / FOLDER_NAME / uuid.uuid4().hex
        self._limits = {"memory_bytes": memory_bytes, "seconds": seconds}
        self._seconds, self._command, self._clock = seconds, tuple(command), clock
        self._needs = tuple(needs)
        self._run: _Run | None = None
        self._owner: object = None
        self._left: list[Order] = []
        self._answers: list[Answer] = []
        # Of an agent that was killed: what was not shipped is read again.
        shutil.rmtree(spool / FOLDER_NAME, ignore_errors=True)

    def place(self, name: str) -> Path:
        """Where a result of this name lies; the folder is made if need be.

        Raises
        ------
        OSError
            It cannot be made.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / name

    @property
    def is_free(self) -> bool:
        """Whether orders can be given."""
        return self._owner is None

    def lacking(self) -> list[str]:
        """Libraries that this host lacks to read profiles."""
        return missing_libraries(self._needs)

    def works_for(self, owner: object) -> bool:
        """Whether orders of this one are not answered yet."""
        return owner is self._owner

    def give(self, owner: object, orders: Sequence[Order]) -> None:
        """Have files read; `take` by the same owner gets the answers.

        Raises
        ------
        OSError
            No process can be started.
        """
        self._left, self._answers = list(orders), []
        self._start()
        self._owner = owner

    def take(self, owner: object) -> list[Answer]:
        """Answers that have come since; of one's own orders only."""
        if owner is not self._owner:
            return []
        if self._run is not None:
            self._listen(self._run)
        answers, self._answers = self._answers, []
        if self._run is None:
            self._next()
        return answers

    def close(self) -> None:
        """End the process; what it was at is read again by the next agent."""
        if self._run is not None:
            self._end(self._run)
        self._owner, self._left = None, []

    def _next(self) -> None:
        """Go on with what a process has left behind; if none can be started, it is ordered anew."""
        if self._left:
            with contextlib.suppress(OSError):
                self._start()
        if self._run is None:
            self._owner, self._left = None, []

    def _start(self) -> None:
        orders = self._left
        lines = [self._limits, *({"key": order.key, **order.details} for order in orders)]
        # Not a pipe: what is longer than one would have to wait for the process.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            stdin.seek(0)
            process = subprocess.Popen(  # noqa: S603  # this interpreter, a module of ours
                self._command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        self._run = _Run(process, list(orders), self._clock() + self._seconds)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)

    def _listen(self, run: _Run) -> None:
        ended = self._read(run)
        *lines, run.text = run.text.split(b"\n")
        for line in lines:
            self._answered(run, line)
        if ended or not run.orders:
            self._end(run)
            self._blame(run, DIED, _how(run.process.returncode))
        elif self._clock() > run.until:
            self._end(run)
            self._blame(run, TIMEOUT, f"not within {self._seconds:g} s")

    @staticmethod
    def _read(run: _Run) -> bool:
        """Take in what the process says; whether it has ended."""
        stdout = run.process.stdout
        if stdout is None:
            return True
        while True:
            try:
                data = os.read(stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                return True
            run.text += data

    def _answered(self, run: _Run, line: bytes) -> None:
        try:
            details = json.loads(line)
            answer = Answer(
                str(details["key"]), details.get("fault"), str(details.get("detail", "")), details
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if run.orders and run.orders[0].key == answer.key:
            run.orders.pop(0)
            run.until = self._clock() + self._seconds
            self._answers.append(answer)

    def _blame(self, run: _Run, fault: str, detail: str) -> None:
        """Give up the order that a process has not survived, and keep those behind it."""
        if run.orders:
            self._answers.append(Answer(run.orders[0].key, fault, detail))
        self._left = run.orders[1:]

    def _end(self, run: _Run) -> None:
        run.process.kill()
        run.process.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()
        self._run = None


def _how(code: int | None) -> str:
    return f"ended by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """Of the process: as the agent's, without what is secret."""
    kept = {name: value for name, value in os.environ.items() if name != "SMON_TOKEN"}
    return {**kept, **dict.fromkeys(_ONE_THREAD, "1")}
