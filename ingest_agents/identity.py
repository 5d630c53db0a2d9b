"""Which job, attempt, rank and host this process belongs to, from what launchers set.

Flow: environment → **here** → recorder, sources, ``smon-agent check``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingest_agents.config import AgentSettings
from ingest_agents.payload import clean
from smon.errors import ConfigError, TopologyError
from smon.topology import Layout, parse_layout

_RANK: Final = ("SMON_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_WORLD: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_JOB: Final = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
)
_ATTEMPT: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

#: What torchrun sets if nobody named the run.
_NO_NAME: Final = frozenset({"", "none", "default"})

_MAX_NUMBER: Final = 2**31 - 1

#: Of the environment of a process.
_MAX_ENVIRON: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are.

    Attributes
    ----------
    job
        None if nothing says.
    rank, world_size
        None outside of a launcher.
    layout
        As given; else every rank is a DP rank, if the world size is known.
    origins
        Where each part comes from, by name: a variable, ``setting``, ``system`` or ``default``.
    """

    job: str | None
    attempt: int
    host: str
    rank: int | None
    world_size: int | None
    layout: Layout | None
    origins: Mapping[str, str]


def environ_of(path: Path) -> dict[str, str] | None:
    """The environment of a process, from its file ``environ``; None if that cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_ENVIRON)
    except OSError:
        return None
    pairs = (part.partition("=") for part in raw.decode("utf-8", "replace").split("\0"))
    return {name: value for name, sep, value in pairs if sep}


def identify(environ: Mapping[str, str], settings: AgentSettings) -> Identity:
    """Find out who we are.

    Raises
    ------
    ConfigError
        A number is none, or the layout is malformed.
    """
    origins: dict[str, str] = {}
    rank = _number(environ, _RANK, "rank", origins)
    world_size = _number(environ, _WORLD, "world_size", origins)
    attempt = settings.attempt
    if attempt >= 0:
        origins["attempt"] = "setting"
    else:
        attempt = _number(environ, _ATTEMPT, "attempt", origins) or 0
    return Identity(
        job=_job(environ, settings, origins),
        attempt=attempt,
        host=_host(settings, origins),
        rank=rank,
        world_size=world_size,
        layout=_layout(settings, world_size, origins),
        origins=origins,
    )


def _number(
    environ: Mapping[str, str], variables: tuple[str, ...], name: str, origins: dict[str, str]
) -> int | None:
    for variable in variables:
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit()) or int(text) > _MAX_NUMBER:
            raise ConfigError(f"{variable}: expected a number from 0, found {text[:40]!r}")
        origins[name] = variable
        return int(text)
    origins[name] = "default"
    return None


def _job(
    environ: Mapping[str, str], settings: AgentSettings, origins: dict[str, str]
) -> str | None:
    if settings.job_id.strip():
        origins["job"] = "setting"
        return clean(settings.job_id)
    for variable in _JOB:
        text = environ.get(variable, "").strip()
        if text.lower() not in _NO_NAME:
            origins["job"] = variable
            return clean(text)
    origins["job"] = "default"
    return None


def _host(settings: AgentSettings, origins: dict[str, str]) -> str:
    origins["host"] = "setting" if settings.hostname else "system"
    return clean(settings.hostname or socket.gethostname()) or "unknown"


def _layout(
    settings: AgentSettings, world_size: int | None, origins: dict[str, str]
) -> Layout | None:
    if settings.layout:
        origins["layout"] = "setting"
        try:
            return parse_layout(settings.layout)
        except TopologyError as error:
            raise ConfigError(f"layout: {error}") from error
    origins["layout"] = "default"
    return Layout(dp=world_size, pp=1) if world_size else None


def coordinates(layout: Layout, rank: int) -> tuple[int, int]:
    """(DP rank, stage) of a global rank.

    Raises
    ------
    ConfigError
        The layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ConfigError(
            f"expected a rank of layout {layout}, 0 to {layout.world_size - 1}, found {rank}: "
            "correct the layout"
        )
    worker = rank // (layout.tp * layout.cp)
    return worker % layout.dp, worker // layout.dp
