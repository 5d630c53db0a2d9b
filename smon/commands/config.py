"""``smon config show``: every setting, its value, and where that comes from."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.config import (
    MASK,
    PREFIX,
    SECRET_URLS,
    Settings,
    default_of,
    masked_url,
    meaning_of,
    variable_of,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

#: What stands in an address before the host: name and password; rather too much than too little.
_SECRET = re.compile(r"(?<=://)[^?#]*@")

#: Options of an address that are secrets themselves.
_SECRET_OPTION = re.compile(r"(?i)((?:password|secret|token|key)[^=&]*=)[^&]*")


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "config",
        help="show the settings",
        description="Show the settings of the server.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = inner.add_parser(
        "show",
        help="every setting, its value, and where it comes from",
        description="Show every setting, its value, and where it comes from; secrets are masked.",
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the server's data (smon-data)"
    )
    show.set_defaults(run=_show)


def _show(parsed: argparse.Namespace) -> int:
    from smon.commands.serve import settings_of

    settings = settings_of(parsed)
    given = {"data_dir"} if parsed.data_dir is not None else set()
    rows = [_row(settings, each.name, os.environ, given) for each in fields(Settings)]
    unknown = unknown_variables(os.environ)
    if parsed.json:
        print(json.dumps({"settings": rows, "unknown": unknown}, indent=2))
        return 0
    width = max(len(row["variable"]) for row in rows)
    for row in rows:
        value = row["value"] if row["value"] != "" else '""'
        print(f"{row['variable']:{width}}  {value}  ({row['origin']})  {row['meaning']}")
    for name in unknown:
        print(f"{name}: no setting of the server has this name")
    return 0


def _row(
    settings: Settings, name: str, environ: Mapping[str, str], given: set[str]
) -> dict[str, Any]:
    variable = variable_of(name)
    origin = "option" if name in given else "environment" if variable in environ else "default"
    return {
        "name": name,
        "variable": variable,
        "value": _shown(name, getattr(settings, name)),
        "default": _plain(default_of(name)),
        "origin": origin,
        "meaning": meaning_of(name),
    }


def _shown(name: str, value: object) -> str | int | float:
    return masked_url(str(value)) if value and name in SECRET_URLS else _plain(value)


def _plain(value: object) -> str | int | float:
    return value if isinstance(value, int | float) else masked(str(value))


def masked(text: str) -> str:
    """An address without the secrets in it."""
    return _SECRET_OPTION.sub(rf"\1{MASK}", _SECRET.sub(_mask, text))


def _mask(match: re.Match[str]) -> str:
    name, colon, _ = match[0].removesuffix("@").partition(":")
    return f"{name}:{MASK}@" if colon else f"{name}@"


#: Variables of agents and of the build, which are no settings of the server.
_OTHERS = re.compile(r"SMON_(AGENT_|ENABLE$|RECORDER_|SERVER$|TOKEN|NO_SKIP$|AXE$|ARTIFACTS$)")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none: typing errors, mostly."""
    known = {variable_of(each.name) for each in fields(Settings)}
    names = {name for name in environ if name.startswith(PREFIX)} - known
    return sorted(name for name in names if not _OTHERS.match(name))
