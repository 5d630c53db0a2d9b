"""Which rank a process is, and whether its cgroup holds it back.

Flow: ``/proc/<pid>`` → **here** → `ingest_agents.sources.counters.owners`. ``LOCAL_RANK`` says
nothing, and neither does the number of a GPU: whoever has memory on a GPU uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ingest_agents.config import AgentSettings
from ingest_agents.identity import environ_of, identify
from ingest_agents.sources.counters.reading import text_of
from smon.errors import ConfigError

#: Cgroups above that of a process that are looked at.
_MAX_DEPTH: Final = 8

_US: Final = 1e6
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a process says it is; None where it does not say."""

    job: str | None
    attempt: int
    rank: int | None


def trainer_of(root: Path, pid: int) -> Trainer | None:
    """Who a process is, by its environment; None if that cannot be read, or makes no sense."""
    environ = environ_of(root / "proc" / str(pid) / "environ")
    if environ is None:
        return None
    try:
        settings = AgentSettings(
            job_id=environ.get("SMON_JOB_ID", ""), attempt=int(environ.get("SMON_ATTEMPT", "-1"))
        )
        who = identify(environ, settings)
    except (ConfigError, ValueError):
        return None
    return Trainer(who.job, who.attempt, who.rank)


def throttled_s(root: Path, pid: int) -> float | None:
    """Seconds for which a CPU limit has held a process back, ever; None without a limit."""
    text = text_of(root / "proc" / str(pid) / "cgroup")
    for line in (text or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            return _highest(root / "sys/fs/cgroup", path, "throttled_usec", _US)
        if "cpu" in controllers.split(","):
            return _highest(root / "sys/fs/cgroup" / controllers, path, "throttled_time", _NS)
    return None


def _highest(mount: Path, path: str, key: str, unit: float) -> float | None:
    """Of a cgroup and those above it, which may have the limit."""
    inside = PurePosixPath(path.lstrip("/"))
    if ".." in inside.parts:
        # Outside of the namespace that this process sees.
        return None
    found = []
    for part in [inside, *inside.parents][:_MAX_DEPTH]:
        held = _value(text_of(mount / part / "cpu.stat"), key)
        if held is not None:
            found.append(held / unit)
    return max(found, default=None)


def _value(text: str | None, key: str) -> int | None:
    for line in (text or "").splitlines():
        name, _, number = line.partition(" ")
        if name == key and number.isdecimal():
            return int(number)
    return None
