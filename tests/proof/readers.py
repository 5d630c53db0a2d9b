"""Damaged copies of real traces: every reader gives a report or one clear line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from tests.conftest import TRACES
from tests.fuzz.readers import fuzz, read_and_analyse, seeds
from tests.proof.line import Form, Line, at_least, at_most, exactly

_MUTANTS: Final = {Form.SHORT: 150, Form.LONG: 100_000}


def prove(form: Form, folder: Path) -> Line:
    """Read so many mutants, over all public files."""
    begin, files = time.monotonic(), seeds(TRACES)
    outcome = fuzz(
        files, _MUTANTS[form], 1, folder, read=read_and_analyse, processes=os.cpu_count() or 1
    )
    failures = outcome.failures
    goals = (
        exactly("mutants read or refused", outcome.read + outcome.refused, _MUTANTS[form]),
        exactly("crashes and hangs", failures["crash"] + failures["hang"], 0),
        exactly("other exceptions, and messages of several lines",
                failures["exception"] + failures["message"], 0),
        exactly("things done that no reader may do", failures["forbidden"], 0),
        at_most("CPU of the slowest mutant, s", outcome.slowest_s, 5),
        at_most("memory of a process, MiB", outcome.peak_bytes >> 20, 1024),
        at_least("mutants that could still be read", outcome.read, _MUTANTS[form] // 10),
    )  # fmt: skip
    figures = {"files": len(files), "read": outcome.read, "refused": outcome.refused}
    return Line("readers", form, goals, figures, round(time.monotonic() - begin, 1))
