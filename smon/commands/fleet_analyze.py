"""``smon fleet analyze``: many traces, each analysed in a task of its own; what all of them lose.

Flow: paths → **here** (`smon.executors.spread` of `smon.study.analysed`) → `smon.render.study`.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smon.commands.executing import add_executor, executor_of
from smon.commands.shared import price, progress_bar
from smon.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from smon.study import Asked, Row

_MAGIC: Final = frozenset("*?[")


def add(actions: _SubParsersAction[Any]) -> None:
    """Declare the action."""
    parser = actions.add_parser(
        "analyze",
        help="analyse many traces, and say which lose most",
        description="Analyse many traces, each as smon analyze would, in a task of its own; then "
        "say what all of them lose, why, and where.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a trace file, or the folder of the files of all ranks: one trace each; a pattern "
        "with * or ? stands for all that it fits",
    )
    add_executor(parser, "as many as there are cores")
    parser.add_argument(
        "--price",
        type=price,
        metavar="USD_PER_GPU_HOUR",
        help="price of one GPU for one hour: adds what the loss costs",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print a row for each trace as CSV")
    shape.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Analyse all traces, and print what came of them.

    Returns
    -------
    int
        0 if any trace could be read, whatever it says.

    Raises
    ------
    ConfigError
        The executor cannot be used, or a pattern fits nothing.
    TraceError
        No trace could be analysed.
    """
    from smon.study import Asked, document

    asked = [Asked(path, parsed.price) for path in paths_of(parsed.paths)]
    rows = _rows(parsed, asked)
    if all(row.error for row in rows):
        raise TraceError(f"none of {len(rows)} traces could be analysed; the first: {_why(rows)}")
    sys.stdout.write(_printed(parsed, document(rows)))
    return 0


def _why(rows: Sequence[Row]) -> str:
    first = min(rows, key=lambda row: row.path)
    return f"{first.path}: {first.error}"


def _rows(parsed: argparse.Namespace, asked: Sequence[Asked]) -> list[Row]:
    from smon.executors.spread import spread
    from smon.study import analysed, failed

    rows = []
    cores = min(os.cpu_count() or 1, len(asked))
    with executor_of(parsed, os.environ, cores) as executor, progress_bar() as tell:
        tell("traces", 0, len(asked))
        for one, future in spread(executor, analysed, asked):
            error = future.exception()
            if isinstance(error, ConfigError):
                # Of a node, not of a trace: all others would fail like it.
                raise error
            rows.append(future.result() if error is None else failed(one, error))
            tell("traces", len(rows), len(asked))
    return rows


def paths_of(given: Sequence[str]) -> list[str]:
    """The traces of a command line: absolute, each once, in order.

    Raises
    ------
    ConfigError
        A pattern fits nothing.
    """
    found: set[str] = set()
    for text in given:
        names = [text]
        if _MAGIC & set(text) and not Path(text).exists():
            # Of `pathlib`, a pattern cannot be absolute.
            names = glob.glob(text, recursive=True)  # noqa: PTH207
            if not names:
                raise ConfigError(f"expected traces, found nothing that fits {text!r}")
        # Elsewhere there is another working folder.
        found.update(str(Path(name).absolute()) for name in names)
    return sorted(found)


def _printed(parsed: argparse.Namespace, document: dict[str, Any]) -> str:
    from smon.render.study import study_csv, study_text

    if parsed.json:
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return study_csv(document) if parsed.csv else study_text(document)
