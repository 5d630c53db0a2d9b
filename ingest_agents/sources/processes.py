"""Whose file is it? Job, attempt and rank of the processes on this host, from their environment.

A file of a profiler often holds no rank, but its name holds the number of the process that wrote
it. What a process said about itself is remembered for a while after its end: files appear late.

Flow: ``/proc`` → **here** → sources of files. Reads ``environ`` of processes of the agent's own
user; of all if the agent is root.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ingest_agents.config import AgentSettings
from ingest_agents.identity import Identity, environ_of, identify
from smon.errors import ConfigError

#: A look at all processes so often. A young process is looked at twice: between fork and exec it
#: still has the environment of its parent.
_LOOK_S: Final = 5.0

#: So long a process is remembered after its end.
_REMEMBERED_S: Final = 3600.0

#: ``<host>-pid<pid>.log`` of Inspector, ``<host>_<pid>.<time>.pt.trace.json`` of torch.profiler.
_PID_IN_NAME: Final = re.compile(
    r"pid[-_]?(\d{1,9})(?!\d)|_(\d{1,9})\.\d+(?:\.pt)?\.trace\.json", re.IGNORECASE
)
_RANK_IN_NAME: Final = re.compile(r"rank[\[\-_/.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(?<!\d)(\d{1,7})(?:\.(?:json|pkl|pickle|pt|gz|bin))*$")

#: What a process must have in its environment to be of a job.
_MARKS: Final = frozenset({"SMON_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"})


@dataclass(frozen=True, slots=True)
class Owner:
    """Who wrote a file.

    Attributes
    ----------
    identity
        Job, attempt, rank and size of the job, as far as they are known.
    how
        Where that comes from, for people.
    """

    identity: Identity
    how: str

    @property
    def job(self) -> tuple[str, int] | None:
        """(job, attempt); None if nobody knows the job."""
        who = self.identity
        return None if who.job is None else (who.job, who.attempt)


@dataclass(slots=True)
class _Process:
    """A process of a job; `pids` are its numbers, here and in the containers it is in."""

    pids: tuple[int, ...]
    identity: Identity
    seen: float


@dataclass(slots=True)
class _Look:
    """What the last look at ``/proc`` left."""

    at: float = -_LOOK_S
    pids: frozenset[int] = frozenset()
    young: frozenset[int] = frozenset()
    known: dict[int, _Process] = field(default_factory=dict)


class Processes:
    """The processes of training jobs on this host.

    Parameters
    ----------
    root
        ``/proc``.
    settings, environ
        Of the agent: what it knows of the job if no process says more.
    clock
        Seconds that never go back.
    """

    def __init__(
        self,
        root: Path,
        settings: AgentSettings,
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._settings, self._clock = root, settings, clock
        self._own = Owner(identify(environ, settings), "the agent's settings")
        self._look = _Look()
        self._gone: list[_Process] = []

    # --- looking --------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at processes that are new, if it is time for that."""
        now = self._clock()
        if now - self._look.at < _LOOK_S:
            return
        pids = frozenset(self._pids()) - {os.getpid()}
        last, fresh = self._look, pids - self._look.pids
        known = {pid: process for pid, process in last.known.items() if pid in pids}
        self._gone += [process for pid, process in last.known.items() if pid not in pids]
        self._gone = [each for each in self._gone if now - each.seen < _REMEMBERED_S]
        for pid in fresh | (last.young & pids):
            process = self._process(pid, now)
            if process is not None:
                known[pid] = process
        for process in known.values():
            process.seen = now
        self._look = _Look(now, pids, fresh, known)

    def _pids(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(path.name) for path in self._root.iterdir() if path.name.isdigit()]
        return []

    def _process(self, pid: int, now: float) -> _Process | None:
        """What a process says about itself; None if it is of no job, or of another user."""
        folder = self._root / str(pid)
        environ = environ_of(folder / "environ")
        if environ is None or _MARKS.isdisjoint(environ):
            return None
        try:
            identity = identify(environ, self._settings_of(environ))
        except ConfigError:
            return None
        return _Process(_inner_pids(folder, pid), identity, now)

    def _settings_of(self, environ: Mapping[str, str]) -> AgentSettings:
        """The agent's settings, with what the process's own environment says of the job."""
        attempt = environ.get("SMON_ATTEMPT", "")
        return replace(
            self._settings,
            job_id=environ.get("SMON_JOB_ID", "").strip() or self._settings.job_id,
            layout=environ.get("SMON_LAYOUT", "").strip() or self._settings.layout,
            attempt=int(attempt) if attempt.isdecimal() else self._settings.attempt,
        )

    # --- asking ---------------------------------------------------------------------------------

    def owner(self, name: str, *, dump: bool = False) -> Owner:
        """Who wrote a file of this name, as far as the name and processes tell.

        Parameters
        ----------
        name
            With the folders below the one that is watched.
        dump
            Whether the last number of a name is a rank.
        """
        match = _PID_IN_NAME.search(name)
        if match is not None:
            process = self._of_pid(int(match[1] or match[2]))
            if process is not None:
                return Owner(process, "the environment of its process")
        rank = rank_in(name, dump=dump)
        return self.of_rank(rank) if rank is not None else self._of_nobody()

    def of_rank(self, rank: int) -> Owner:
        """Who has this rank here; the job of the agent if nobody, or several jobs have it."""
        found = self._newest(each for each in self._identities() if each.rank == rank)
        if found is not None:
            return Owner(found, "the environment of the process of its rank")
        whose = self._of_nobody()
        return Owner(replace(whose.identity, rank=rank), whose.how)

    def ranks_of(self, job: tuple[str, int]) -> tuple[int, ...]:
        """Ranks of a job that run, or ran, on this host."""
        ranks = {each.rank for each in self._identities() if (each.job, each.attempt) == job} - {
            None
        }
        return tuple(sorted(rank for rank in ranks if rank is not None))

    def runs(self, job: tuple[str, int]) -> bool:
        """Whether a process of a job runs on this host."""
        running = (each.identity for each in self._look.known.values())
        return any((each.job, each.attempt) == job for each in running)

    def _of_pid(self, pid: int) -> Identity | None:
        """The process of this number, here or in a container; None if there are several."""
        for processes in (list(self._look.known.values()), self._gone):
            exact = [each.identity for each in processes if each.pids[0] == pid]
            inner = [each.identity for each in processes if pid in each.pids[1:]]
            for found in (exact, inner):
                if found:
                    return found[-1] if len({_key(each) for each in found}) == 1 else None
        return None

    def _of_nobody(self) -> Owner:
        """The one job on this host, else what the agent's own settings say."""
        found = self._newest(self._identities())
        if found is None or self._settings.job_id:
            return Owner(replace(self._own.identity, rank=None), self._own.how)
        return Owner(replace(found, rank=None), "the only job on this host")

    def _identities(self) -> list[Identity]:
        """Of processes that run, else of those that ran."""
        known = [each.identity for each in self._look.known.values()]
        return known or [each.identity for each in self._gone]

    def _newest(self, found: Iterable[Identity]) -> Identity | None:
        """The one with the highest attempt if all are of one job, else None."""
        every = [each for each in found if each.job is not None]
        if len({each.job for each in every}) != 1:
            return None
        return max(every, key=lambda each: each.attempt)


def rank_in(name: str, *, dump: bool = False) -> int | None:
    """The rank in a file's name; of a dump, also a number at its end."""
    match = _RANK_IN_NAME.search(name) or (_LAST_NUMBER.search(name) if dump else None)
    return int(match[1]) if match else None


def _key(identity: Identity) -> tuple[object, ...]:
    return identity.job, identity.attempt, identity.rank, identity.world_size


def _inner_pids(folder: Path, pid: int) -> tuple[int, ...]:
    """Numbers of a process: here, and in the containers it is in."""
    with contextlib.suppress(OSError, ValueError):
        with (folder / "status").open("rb") as file:
            text = file.read(1 << 14)
        for line in text.splitlines():
            if line.startswith(b"NSpid:"):
                return (pid, *(int(each) for each in line.split()[2:]))
    return (pid,)
