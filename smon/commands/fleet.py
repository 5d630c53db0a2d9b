"""``smon fleet``: which jobs and hosts waste most, as a server knows it, or many trace files."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from smon.commands import fleet_analyze
from smon.commands.remote import Sleep, add_server, server_of
from smon.errors import StoreError
from smon.render.fleet import fleet_csv, fleet_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DAYS: Final = 7.0
_MAX_DAYS: Final = 3650.0


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "fleet",
        help="say which jobs and hosts waste most",
        description="What many jobs lose, why, and where: all jobs of a server, or trace files.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    report = actions.add_parser("report", help="print the fleet report")
    add_server(report)
    report.add_argument(
        "--days",
        type=_days,
        default=_DAYS,
        metavar="N",
        help=f"how far back ({_DAYS:g}); a fraction is allowed",
    )
    shape = report.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print CSV")
    shape.add_argument("--json", action="store_true", help="print the server's JSON")
    report.set_defaults(run=run)
    fleet_analyze.add(actions)


def run(parsed: argparse.Namespace, sleep: Sleep = time.sleep) -> int:
    """Ask the server, and print its report.

    Returns
    -------
    int
        0, whatever the report says.

    Raises
    ------
    ConfigError
        The server's address or the token cannot be used.
    StoreError
        The server cannot be reached, fails, or is of another version.
    """
    server = server_of(parsed, sleep)
    document = server.ask("GET", f"/fleet/summary?days={parsed.days:g}")
    try:
        text = _printed(parsed, document)
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{server.address} answers in another form: is it of this version?"
        ) from error
    sys.stdout.write(text)
    return 0


def _printed(parsed: argparse.Namespace, document: dict[str, Any]) -> str:
    if parsed.json:
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return fleet_csv(document) if parsed.csv else fleet_text(document)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0.0 < days <= _MAX_DAYS:
        raise argparse.ArgumentTypeError(f"expected days up to {_MAX_DAYS:g}, found {text!r}")
    return days
