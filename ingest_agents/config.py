"""Settings of agent and recorder: one frozen value; nothing is read at import.

Order: flag > environment (``SMON_`` and the name in capitals) > file (YAML or JSON) > default.
``docs/reference/agent.md`` lists them. Flow: flags, environment, file → **here** → everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from smon.errors import ConfigError

PREFIX: Final = "SMON_"

#: Names the file in the environment.
FILE_VARIABLE: Final = "SMON_AGENT_CONFIG"

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_MAX_FILE_BYTES: Final = 1 << 20
_MASK: Final = "***"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def _setting(default: Any, meaning: str, low: float = 0, high: float = math.inf) -> Any:  # noqa: ANN401  # fields of many types
    return field(default=default, metadata={"meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent or recorder runs with; sizes in bytes, times in seconds."""

    enable: bool = _setting(True, "0: agent and recorders do nothing")  # noqa: FBT003  # a default
    # server
    server: str = _setting("http://127.0.0.1:8080", "address of the server")
    token: str = _setting("", "token for it; better in a file")
    token_file: str = _setting("", "file that holds the token, and nothing else")
    ca_file: str = _setting("", "certificates that https servers are checked with; empty: system's")
    timeout_s: float = _setting(30.0, "wait for an answer of the server", 0.1)
    senders: int = _setting(2, "connections that send at the same time", 1, 64)
    retry_min_s: float = _setting(0.5, "first pause after a failure", 0.001)
    retry_max_s: float = _setting(60.0, "longest pause after failures", 0.001)
    auth_retry_s: float = _setting(60.0, "pause after a refused token", 0.001)
    # spool
    spool_dir: str = _setting("/var/spool/smon", "folder that recorders and agent share")
    cap_bytes: int = _setting(_GIB, "size of the spool; beyond, the oldest steps go", 1 << 16)
    segment_bytes: int = _setting(8 * _MIB, "size at which a new segment begins", 4096)
    segment_s: float = _setting(60.0, "age at which a new segment begins", 0.1)
    dead_bytes: int = _setting(64 * _MIB, "refused batches that are kept to be looked at", 0)
    # agent
    poll_s: float = _setting(0.25, "pause between two looks at spool and sources", 0.01)
    stop_s: float = _setting(5.0, "time to send what is left when stopping", 0.0)
    directory: str = _setting("", "growing folder of op files to ship; see sources")
    # profiles
    kineto_dir: str = _setting("", "folder of profiles of torch.profiler to ship")
    inspector_dir: str = _setting("", "folder of logs of NCCL Inspector to follow and ship")
    flight_recorder_dir: str = _setting("", "folder of dumps of Flight Recorder to ship")
    file_still_s: float = _setting(5.0, "a profile or dump unchanged for so long is whole", 0.0)
    file_age_s: float = _setting(3600.0, "files older than that when the agent starts stay", 0.0)
    file_bytes: int = _setting(_GIB, "largest profile that is read; larger ones stay", 1)
    file_hour_bytes: int = _setting(256 * _MIB, "bytes of them shipped in an hour; 0: any", 0)
    inspector_portion_s: float = _setting(60.0, "time of one portion of such a log", 1.0, 3600)
    reader_bytes: int = _setting(2 * _GIB, "memory of the process that reads profiles", 1 << 28)
    reader_s: float = _setting(120.0, "time that it may take for a profile", 1.0)
    # counters
    counters_s: float = _setting(10.0, "pause between two readings of counters; 0: none", 0, 3600)
    # who
    job_id: str = _setting("", "name of the job; empty: from the launcher's environment")
    attempt: int = _setting(-1, "restarts of the job so far; -1: from the environment", -1)
    layout: str = _setting("", "layout of the job, e.g. tp4-dp4-pp4; for recorder and directory")
    ranks: str = _setting("", "ranks in the directory, e.g. 0-7; empty: all of the layout")
    hostname: str = _setting("", "name of this host; empty: the system's")
    window_steps: int = _setting(0, "steps of a window; 0: the server's number", 0, 100_000)
    # recorder
    queue_events: int = _setting(65_536, "events a recorder holds; beyond, they are counted", 16)
    flush_s: float = _setting(0.0, "pause between two writes of a recorder; 0: server's", 0.0, 600)
    recorder_clock: str = _setting("auto", "clock of a recorder: cuda, host, or auto: cuda if used")


_META: Final = {each.name: each for each in fields(AgentSettings)}

#: Never printed.
SECRET: Final = frozenset({"token"})


@dataclass(frozen=True, slots=True)
class Configured:
    """Settings, and where each came from: ``flag``, ``environment``, ``file`` or ``default``."""

    settings: AgentSettings
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """One line per setting; secrets masked."""
        lines = []
        for name in _META:
            value = getattr(self.settings, name)
            shown = _MASK if name in SECRET and value else repr(value)
            lines.append(f"{name} = {shown} ({self.origins[name]})")
        return lines


def configure(
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, object] | None = None,
    file: Path | None = None,
) -> Configured:
    """Put settings together.

    Parameters
    ----------
    environ
        The environment.
    flags
        By name; None: not given.
    file
        YAML or JSON; by default what ``SMON_AGENT_CONFIG`` names, if anything.

    Raises
    ------
    ConfigError
        A value cannot be read or is out of range, or the file is wrong.
    """
    named = environ.get(FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    from_file = {} if path is None else _read(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in _META:
        variable = variable_of(name)
        given = (flags or {}).get(name)
        if given is not None:
            values[name], origins[name] = _checked(name, given, f"--{flag_of(name)}"), "flag"
        elif variable in environ:
            values[name] = _checked(name, environ[variable].strip(), variable)
            origins[name] = "environment"
        elif name in from_file:
            values[name] = _checked(name, from_file[name], f"{name} in {path}")
            origins[name] = "file"
        else:
            origins[name] = "default"
    return Configured(AgentSettings(**values), origins)


def names() -> tuple[str, ...]:
    """Names of all settings."""
    return tuple(_META)


def meaning_of(name: str) -> str:
    """What a setting is, in a few words."""
    return str(_META[name].metadata["meaning"])


def default_of(name: str) -> Any:  # noqa: ANN401  # of many types
    """What a setting is if nobody says otherwise."""
    return _META[name].default


def variable_of(name: str) -> str:
    """Name of a setting in the environment."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Name of a setting's flag, without the dashes before it."""
    return name.replace("_", "-")


def token_of(settings: AgentSettings) -> str | None:
    """The token to send; read anew each time, so that a rotated file works. None: there is none.

    Raises
    ------
    ConfigError
        The file cannot be read or is empty, or what is there can be no token.
    """
    token = settings.token
    if settings.token_file:
        try:
            token = Path(settings.token_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{settings.token_file}: cannot read the token: {reason}") from error
        if not token:
            raise ConfigError(f"{settings.token_file}: expected a token, found nothing")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError("token: expected smon_KID_SECRET, found other characters")
    return token or None


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    document = _parsed(raw, path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected settings such as server and spool_dir, found none")
    unknown = sorted(set(map(str, document)) - set(_META))
    if unknown:
        raise ConfigError(
            f"{path}: there is no setting {unknown[0]!r}: see docs/reference/agent.md"
        )
    return document


def _parsed(raw: bytes, path: Path) -> object:
    if path.suffix == ".json":
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"{path}: PyYAML is not installed: write the file as .json") from error
    try:
        return yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _checked(name: str, value: object, where: str) -> object:
    kind = type(_META[name].default)
    typed = _typed(kind, value)
    shown = _MASK if name in SECRET else repr(value)
    if typed is None:
        raise ConfigError(f"{where}: expected {_WORDS[kind]}, found {shown}")
    data = _META[name].metadata
    # Comparing is False for NaN.
    if isinstance(typed, int | float) and not data["low"] <= typed <= data["high"]:
        raise ConfigError(
            f"{where}: expected a number from {data['low']} to {data['high']}, found {shown}"
        )
    return typed


_WORDS: Final[dict[type, str]] = {
    bool: "0 or 1",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _typed(kind: type, value: object) -> object:
    """The value as this type; None if it is not one."""
    if kind is bool:
        text = str(value).strip().lower()
        return True if text in _TRUE else False if text in _FALSE else None
    if isinstance(value, bool | dict | list) or value is None:
        return None
    if kind is str:
        return str(value)
    if kind is int and isinstance(value, float):
        return None
    try:
        return kind(value)
    except (ValueError, OverflowError):
        return None
