"""Where the files of a deployment lie, and how tests read them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from ingest_agents import cli as agent_cli
from ingest_agents.config import names
from smon import cli
from smon.config import PREFIX, Settings, variable_of

ROOT: Final = Path(__file__).resolve().parents[2]
AGENT: Final = ROOT / "ingest_agents" / "deploy"
SERVER: Final = ROOT / "docs" / "deploy"
COMPOSE: Final = ROOT / "docker-compose.yml"

#: What servers and agents read from the environment.
SERVER_VARIABLES: Final = frozenset(variable_of(each.name) for each in fields(Settings))
AGENT_VARIABLES: Final = frozenset(
    {PREFIX + name.upper() for name in names()} | {"SMON_AGENT_CONFIG"}
)

#: Where the parts of a shell command end.
_ENDS: Final = re.compile(r"&&|\|\||[|;\n]")


def documents(path: Path) -> list[dict[str, Any]]:
    """All YAML documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def tool(name: str, package: str) -> str:
    """A program that checks files; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NO {name.upper()}: expected the program {name} (Debian: {package})")
    return found


def smon_commands(words: list[str]) -> Iterator[list[str]]:
    """Every call of ``smon`` and ``smon-agent`` in a command, also inside of ``sh -c``."""
    if words and words[0] == "sh":
        for part in _ENDS.split(words[-1]):
            yield from smon_commands(shlex.split(part.partition(" > ")[0]))
    elif words and Path(words[0]).name in {"smon", "smon-agent"}:
        yield [Path(words[0]).name, *words[1:]]


def parses(command: list[str]) -> bool:
    """Whether the program takes this command line."""
    parser = cli._parser() if command[0] == "smon" else agent_cli.parser()
    try:
        parser.parse_args(command[1:])
    except SystemExit:
        return False
    return True


def variables_for(command: list[str]) -> frozenset[str]:
    """What the program of a command line reads from the environment."""
    return SERVER_VARIABLES if command[0] == "smon" else AGENT_VARIABLES
