"""Commands of the product in processes of their own, and what they took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTER = Path(__file__).with_name("starter.py")


@dataclass(frozen=True, slots=True)
class Took:
    """What a command took.

    Attributes
    ----------
    wall_s, cpu_s
        Seconds; of all its threads.
    peak_bytes
        The most memory it had.
    output
        Its standard output.
    """

    code: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: bytes

    def checked(self) -> Took:
        """Itself.

        Raises
        ------
        RuntimeError
            The command failed.
        """
        if self.code:
            raise RuntimeError(f"a command ended with {self.code}: {self.output[-500:]!r}")
        return self


def smon(arguments: Sequence[str], more: Mapping[str, str] | None = None) -> Took:
    """Run ``smon`` with these arguments, and more variables in its environment."""
    return run([sys.executable, "-m", "smon.cli", *arguments], more)


def measured(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a module of measurements prints, one line of JSON, run in a process of its own."""
    found: dict[str, Any] = json.loads(run([sys.executable, "-m", module, *arguments]).output)
    return found


def run(command: Sequence[str], more: Mapping[str, str] | None = None) -> Took:
    """Run a command from the root of the checkout, with more variables in its environment."""
    begin = time.monotonic()
    here, there = os.pipe()
    # A small process starts it: the most memory that the system remembers of a process includes
    # what that had before it became another program.
    starter = [sys.executable, "-S", str(STARTER), str(there), *command]
    with subprocess.Popen(
        starter,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        pass_fds=[there],
        env={**os.environ, **(more or {})},
    ) as process:
        os.close(there)
        output = process.stdout.read() if process.stdout else b""
    with os.fdopen(here, encoding="ascii") as said:
        code, cpu_s, peak_kib = said.read().split()
    return Took(
        code=int(code),
        wall_s=time.monotonic() - begin,
        cpu_s=float(cpu_s),
        peak_bytes=int(peak_kib) << 10,
        output=output,
    )
