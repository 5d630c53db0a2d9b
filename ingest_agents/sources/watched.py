"""The sources that the settings ask for, with all that they share.

Flow: settings → **here** → `ingest_agents.sources.profiles`, `ingest_agents.sources.logs` → agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ingest_agents.agent import Source
from ingest_agents.config import AgentSettings
from ingest_agents.identity import identify
from ingest_agents.sender import Say
from ingest_agents.sources.listing import FileKind
from ingest_agents.sources.logs import LogSource
from ingest_agents.sources.outbox import Budget, Outbox, Shared
from ingest_agents.sources.processes import Processes
from ingest_agents.sources.profiles import ProfileSource
from ingest_agents.sources.reducing import Reducer

PROC = Path("/proc")


def folders(settings: AgentSettings) -> dict[FileKind, Path]:
    """The folders that are watched for files of profilers."""
    named = {
        FileKind.KINETO: settings.kineto_dir,
        FileKind.INSPECTOR: settings.inspector_dir,
        FileKind.FLIGHT_RECORDER: settings.flight_recorder_dir,
    }
    return {kind: Path(folder) for kind, folder in named.items() if folder}


def watched(
    settings: AgentSettings, environ: Mapping[str, str], say: Say, *, proc: Path = PROC
) -> list[Source]:
    """A source for each folder.

    Parameters
    ----------
    environ
        Of the agent.
    say
        For people.
    proc
        Root of what the system tells of processes.

    Raises
    ------
    ConfigError
        A number in the environment is none.
    """
    wanted = folders(settings)
    if not wanted:
        return []
    shared = Shared(
        settings=settings,
        host=identify(environ, settings).host,
        processes=Processes(proc, settings, environ),
        reducer=Reducer(Path(settings.spool_dir), settings.reader_bytes, settings.reader_s),
        budget=Budget(settings.file_hour_bytes),
        say=say,
    )
    sources: list[Source] = []
    for kind, folder in wanted.items():
        outbox = Outbox(kind, shared)
        if kind is FileKind.INSPECTOR:
            sources.append(LogSource(folder, outbox, shared))
        else:
            sources.append(ProfileSource(kind, folder, outbox, shared))
    return sources
