"""What the watched folders hold, what would be shipped, and what not and why.

Flow: settings → **here** → ``smon-agent check``. Reads names, and the ends of files; changes
nothing, and reads no profile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingest_agents.config import AgentSettings
from ingest_agents.files import MAX_BYTES
from ingest_agents.sources.listing import (
    FileKind,
    Listed,
    Passed,
    listed,
    named_otherwise,
    state_of,
)
from ingest_agents.sources.processes import Owner, Processes
from ingest_agents.sources.reducing import missing_libraries
from ingest_agents.sources.watched import PROC, folders

#: Files that are named, of those of one kind.
_NAMED: Final = 4


@dataclass(slots=True)
class Survey:
    """What one folder holds.

    Attributes
    ----------
    ships
        (name, who wrote it) of files that would be shipped.
    passed
        Names of the others, by reason.
    wrong
        What keeps all of them from being shipped.
    """

    kind: FileKind
    folder: Path
    ships: list[tuple[str, Owner]] = field(default_factory=list)
    passed: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"source {self.kind} {self.folder}"
        count = sum(map(len, self.passed.values()))
        yield f"  {len(self.ships)} files would be shipped, {count} not"
        for name, owner in self.ships[:_NAMED]:
            yield f"  {name}: {_who(owner)}"
        if len(self.ships) > _NAMED:
            yield f"  … and {len(self.ships) - _NAMED} more"
        for reason, names in sorted(self.passed.items()):
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            yield f"  {reason}: {', '.join(names[:_NAMED])}{more}"


def surveys(
    settings: AgentSettings, environ: Mapping[str, str], *, proc: Path = PROC
) -> list[Survey]:
    """What every watched folder holds.

    Raises
    ------
    ConfigError
        A number in the environment is none.
    """
    processes = Processes(proc, settings, environ)
    processes.look()
    return [
        _survey(Survey(kind, folder), settings, processes)
        for kind, folder in folders(settings).items()
    ]


def _survey(found: Survey, settings: AgentSettings, processes: Processes) -> Survey:
    if not found.folder.is_dir():
        found.wrong.append(f"{found.folder}: no such folder")
        return found
    lacking = missing_libraries()
    if lacking and found.kind is not FileKind.FLIGHT_RECORDER:
        found.wrong.append(f'{", ".join(lacking)} is not installed: pip install "smon[agent]"')
    for each in listed(found.folder):
        if not isinstance(each, Listed):
            found.passed.setdefault(each[1], []).append(each[0])
        elif (reason := _reason(each, found.kind, settings)) is not None:
            found.passed.setdefault(reason, []).append(each.name)
        else:
            dump = found.kind is FileKind.FLIGHT_RECORDER
            found.ships.append((each.name, processes.owner(each.name, dump=dump)))
    if any(owner.job is None for _, owner in found.ships):
        found.wrong.append("nobody says which job files belong to: give --job-id")
    return found


def _reason(file: Listed, kind: FileKind, settings: AgentSettings) -> Passed | None:
    """Why a file would not be shipped if the agent started now; None if it would."""
    most = settings.file_bytes
    if named_otherwise(file.name, kind):
        return Passed.OTHER_NAME
    if file.mtime_ns < time.time_ns() - int(settings.file_age_s * 10**9):
        return Passed.TOO_OLD
    if kind is FileKind.INSPECTOR:
        return None if file.size else Passed.EMPTY
    if file.size > (min(most, MAX_BYTES) if kind is FileKind.FLIGHT_RECORDER else most):
        return Passed.TOO_LARGE
    return state_of(file, kind)


def _who(owner: Owner) -> str:
    who = owner.identity
    rank = "rank from its content" if who.rank is None else f"rank {who.rank}"
    return f"{rank}, job {who.job or 'unknown'}, attempt {who.attempt}, from {owner.how}"
