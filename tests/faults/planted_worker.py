"""A worker with a defect: it dies of a file that says so, as of a crash in native code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import smon.cli
import smon.worker.imports

#: The command line of such a worker.
COMMAND: Final = (sys.executable, "-m", "tests.faults.planted_worker", "worker")

#: What such a file holds.
DEADLY: Final = b"planted-abort"


def main(arguments: Sequence[str] | None = None) -> int:
    """As `smon.cli`."""
    imports: Any = smon.worker.imports
    load = imports.load

    def deadly(files: Sequence[Path], **options: object) -> object:
        if any(DEADLY in file.read_bytes() for file in files):
            os.abort()
        return load(files, **options)

    imports.load = deadly
    return smon.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
