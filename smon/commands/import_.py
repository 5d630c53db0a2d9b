"""``smon import``: send recorded trace files to a server, and follow what becomes of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smon.commands.remote import Server, Sleep, add_server, server_of, text_of
from smon.errors import ConfigError, StoreError, TraceError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EXIT_OK: Final = 0
_EXIT_INSUFFICIENT: Final = 3

_POLL_S: Final = 0.5


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "import",
        help="send recorded trace files to a server",
        description="Send recorded trace files to a server, which analyses them.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="trace file, or directory of the files of all ranks",
    )
    add_server(parser)
    parser.add_argument("--meta", type=Path, metavar="FILE", help="meta file, YAML or JSON")
    parser.add_argument(
        "--layout", metavar="tp4-dp4-pp4", help="parallel sizes, if there is no meta file"
    )
    parser.add_argument("--job", metavar="NAME", help="name of the job; by default the trace's")
    parser.add_argument("--attempt", type=int, metavar="N", help="restart count of the job")
    parser.add_argument(
        "--format", metavar="NAME", help="read the files as this format instead of recognising it"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for the analysis and print its verdict"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace, sleep: Sleep = time.sleep) -> int:
    """Send, start, follow.

    Returns
    -------
    int
        0, or with ``--wait`` 3 if the data is insufficient.

    Raises
    ------
    ConfigError
        An option or a file cannot be used, or the token does not allow it.
    TraceError
        The server cannot read the files.
    StoreError
        The server cannot be reached, or fails.
    """
    files = list(_files(parsed.files))
    server = server_of(parsed, sleep)
    options = _options(parsed)
    made = server.ask("POST", "/imports", options)
    for number, path in enumerate(files):
        _say(f"sending {path.name} ({number + 1} of {len(files)})")
        server.send(f"/imports/{made['id']}/files/{number}", path)
    server.ask("POST", f"/imports/{made['id']}/start")
    done = _followed(server, made["id"], sleep)
    print(f"{server.address}/jobs/{done['job_id']}", flush=True)
    return _verdict(server, done, sleep) if parsed.wait else _EXIT_OK


def _followed(server: Server, import_id: str, sleep: Sleep) -> dict[str, Any]:
    """Wait until a worker has read the files."""
    said = ""
    while True:
        row = server.ask("GET", f"/imports/{import_id}")
        if row["state"] == "done":
            return row
        if row["state"] == "failed":
            raise TraceError(f"the server cannot read the files: {row['error']}")
        words = f"{row['phase'] or 'waiting for a worker'}, {row['progress']:.0%}"
        if words != said:
            _say(words)
            said = words
        sleep(_POLL_S)


def _verdict(server: Server, done: Mapping[str, Any], sleep: Sleep) -> int:
    """Wait for the analysis, and print what it found."""
    job_id, wanted = done["job_id"], done["window_id"]
    _say("waiting for the analysis")
    while True:
        page = server.ask("GET", f"/jobs/{job_id}/windows?limit=500")
        window = next((each for each in page["items"] if each["id"] == wanted), None)
        if window is None:
            raise StoreError("the window of the import is gone: import it again")
        if window["state"] == "failed":
            raise TraceError(f"the analysis failed: {window['reason']}")
        if window["state"] == "done" and window["verdict"] is not None:
            break
        sleep(_POLL_S)
    for line in server.ask("GET", f"/jobs/{job_id}/plan")["lines"]:
        print(line)
    insufficient = window["verdict"] == "insufficient_data"
    return _EXIT_INSUFFICIENT if insufficient else _EXIT_OK


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# --- what is sent -----------------------------------------------------------------------------


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.is_file())
            if not found:
                raise ConfigError(f"the folder {path} holds no file")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"there is no file {path}")


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    given = {
        "job": parsed.job,
        "attempt": parsed.attempt,
        "layout": parsed.layout,
        "format": parsed.format,
        "meta": None if parsed.meta is None else text_of(parsed.meta),
    }
    return {name: value for name, value in given.items() if value is not None}
