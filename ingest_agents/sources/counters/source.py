"""Counters of this host, as side evidence of the steps of the jobs that run on it.

Flow: `gpu`, `network`, `host` → **here**: whose GPU, which step → a stream of its own in the spool,
which the agent ships like any other. Only while a recorder, or a growing folder, writes here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from ingest_agents.payload import context_batch
from ingest_agents.sources.counters.amd import AmdGpus
from ingest_agents.sources.counters.gpu import GpuReading, NvidiaGpus, find_nvml
from ingest_agents.sources.counters.host import Host
from ingest_agents.sources.counters.ledger import Ledger, Reading
from ingest_agents.sources.counters.network import Network
from ingest_agents.sources.counters.owners import JobHere, Owned, jobs_in, owned_by
from ingest_agents.sources.counters.patient import Patient, Seams, Taken
from ingest_agents.sources.counters.reading import Values
from ingest_agents.sources.counters.steps import Steps, Tail
from ingest_agents.sources.counters.trainers import throttled_s, trainer_of
from ingest_agents.spool.folder import (
    LOCK_NAME,
    StreamSpec,
    is_held,
    key_of,
    read_spec,
    streams_in,
)
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import StoreError
from smon.wire import COUNTERS_SOURCE

#: Sources whose streams have the ops of steps, at the time at which they happen.
_WITH_STEPS: Final = frozenset({"recorder", "directory"})

#: Streams of the spool are looked through so often.
_LOOK_S: Final = 2.0

#: A reading that takes longer is talked about.
_HANGS_S: Final = 10.0

#: Of larger jobs each host reads less often, so that a job sends no more.
_RANKS_AT_ONCE: Final = 1024

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Readers:
    """What is read; each can be another one in tests.

    Attributes
    ----------
    gpus
        None if there are none that can be read.
    root
        Above ``proc`` and ``sys``.
    seams
        Time, and how readings are run.
    """

    gpus: Callable[[], list[GpuReading]] | None
    network: Callable[[], Values]
    host: Callable[[], Values]
    root: Path = Path("/")
    seams: Seams = field(default_factory=Seams)


def readers_of(root: Path = Path("/"), *, find: Callable[[], Any] = find_nvml) -> Readers:
    """What there is to read on this host.

    Parameters
    ----------
    root
        Above ``proc`` and ``sys``.
    find
        Gives the module ``pynvml``, or None.
    """
    nvml, amd = find(), AmdGpus(root)
    gpus = NvidiaGpus(nvml).read if nvml is not None else amd.read if amd.read() else None
    return Readers(gpus, Network(root).read, Host(root).read, root)


@dataclass(slots=True)
class _Job:
    """A job attempt that runs here, from its first stream to the end of its last one."""

    here: JobHere
    folder: Path
    tail: Tail
    steps: Steps = field(default_factory=Steps)
    ledger: Ledger = field(default_factory=Ledger)
    writer: SpoolWriter | None = None
    owned: dict[int, Owned] = field(default_factory=dict)
    said_gpus: dict[str, str] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    throttled: dict[int, tuple[int, float, int]] = field(default_factory=dict)


class CounterSource:
    """Reads counters every so often while a job runs.

    Parameters
    ----------
    root
        The spool.
    interval_s
        Between two readings.
    readers
        What is read.
    limits
        Of its segments.
    say
        For people.
    """

    def __init__(
        self,
        root: Path,
        interval_s: float,
        readers: Readers,
        limits: SpoolLimits,
        say: Say,
    ) -> None:
        self._root, self._interval_s, self._limits, self._say = root, interval_s, limits, say
        self._readers, seams = readers, readers.seams
        self._clock = seams.clock
        self._host = Patient(readers.host, seams)
        self._network = Patient(readers.network, seams)
        self._gpus = None if readers.gpus is None else Patient(readers.gpus, seams)
        self._specs: dict[str, StreamSpec] = {}
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._look_due = self._read_due = seams.clock()
        self._process = f"{os.getpid()}-{seams.wall_ns()}"

    # --- as the agent calls it ------------------------------------------------------------------

    def poll(self) -> None:
        """Look what runs, read if it is time, and write what is known by now."""
        now = self._clock()
        if now >= self._look_due:
            self._look_due = now + _LOOK_S
            self._look()
        if not self._jobs:
            return
        if now >= self._read_due:
            self._read_due = now + self._pause_s()
            self._begin()
        self._collect()
        for job in self._jobs.values():
            self._follow(job)

    def close(self) -> None:
        """The agent stops: what is known goes into the spool, and the streams end."""
        for key in list(self._jobs):
            self._end(key, "agent-stopped")

    # --- jobs -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Which jobs have a stream here that somebody writes."""
        held: dict[str, StreamSpec] = {}
        folders = {folder.name: folder for folder in streams_in(self._root)}
        for name in set(self._specs) - set(folders):
            del self._specs[name]
        for name, folder in folders.items():
            spec = self._spec(name, folder)
            if spec is not None and _has_steps(spec) and is_held(folder / LOCK_NAME):
                held[name] = spec
        found = jobs_in(held.values())
        for key in set(self._jobs) - set(found):
            self._end(key, "job-ended")
        for key, here in found.items():
            first = min(
                (spec.ranks[:1], name)
                for name, spec in held.items()
                if (spec.job, spec.attempt) == key
            )[1]
            self._take_up(key, here, folders[first])

    def _spec(self, name: str, folder: Path) -> StreamSpec | None:
        if name not in self._specs:
            try:
                self._specs[name] = read_spec(folder)
            except StoreError:
                # Its description may just be being written.
                return None
        return self._specs[name]

    def _take_up(self, key: tuple[str, int], here: JobHere, folder: Path) -> None:
        job = self._jobs.get(key)
        if job is None:
            if not self._jobs:
                self._read_due = self._clock()
            self._jobs[key] = _Job(here, folder, Tail(folder))
            return
        job.here = here
        if job.folder != folder and not is_held(job.folder / LOCK_NAME):
            job.folder, job.tail = folder, Tail(folder)

    def _end(self, key: tuple[str, int], reason: str) -> None:
        job = self._jobs.pop(key)
        self._follow(job, closing=True)
        job.ledger.give_up()
        if job.writer is not None:
            job.writer.end(reason)
            job.writer.close()
        elif job.ledger.unplaced:
            self._say(
                "counters steps",
                f"job {key[0]}: {job.ledger.unplaced} readings of counters were of no step",
            )

    # --- reading --------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        """Between two readings; longer for large jobs."""
        ranks = max(job.here.spec.layout.world_size for job in self._jobs.values())
        return self._interval_s * max(1.0, ranks / _RANKS_AT_ONCE)

    def _begin(self) -> None:
        for name, reader in self._patients():
            failure = reader.failure
            if failure:
                self._say(f"counters {name}", f"counters of the {name}: not read: {failure}")
            if not reader.begin() and reader.waits_s() > _HANGS_S:
                self._say(
                    f"counters {name}",
                    f"counters of the {name}: the driver does not answer; going on without them",
                )

    def _patients(self) -> Sequence[tuple[str, Patient[list[GpuReading]] | Patient[Values]]]:
        known = [("host", self._host), ("network", self._network)]
        return known if self._gpus is None else [*known, ("GPUs", self._gpus)]

    def _collect(self) -> None:
        for name, patient in (("host", self._host), ("network", self._network)):
            taken = patient.take()
            if taken is not None:
                self._say(f"counters {name}", "")
                for job in self._jobs.values():
                    self._enter(job, name, taken.ns, dict.fromkeys(job.here.ranks, taken.value))
        found = None if self._gpus is None else self._gpus.take()
        if found is not None:
            self._say("counters GPUs", "")
            for job in self._jobs.values():
                self._enter_gpus(job, found)
            self._say("counters owners", self._owners_of(found.value))

    def _owners_of(self, readings: Sequence[GpuReading]) -> str:
        """What to say if GPUs are in use, and nobody can tell by whom."""
        used = any(reading.holders for reading in readings)
        if not used or any(job.owned for job in self._jobs.values()):
            return ""
        return (
            "GPUs are in use, but not by a rank that can be told: the agent needs the user of the "
            "trainers, or the capability SYS_PTRACE, to read the environment of their processes"
        )

    def _enter(self, job: _Job, name: str, ns: int, by_rank: dict[int, Values]) -> None:
        """Note a reading; the first one of a job only says from where differences count."""
        job.ledger.add(Reading(name, ns, by_rank if name in job.begun else {}))
        job.begun.add(name)

    def _enter_gpus(self, job: _Job, taken: Taken[list[GpuReading]]) -> None:
        root = self._readers.root
        job.owned |= owned_by(job.here, taken.value, partial(trainer_of, root))
        by_uuid = {reading.uuid: reading for reading in taken.value}
        by_rank: dict[int, Values] = {}
        for rank, owned in job.owned.items():
            # A GPU that is lost has no processes: it is still that of its rank.
            reading = by_uuid.get(owned.reading.uuid)
            if reading is not None and rank in job.here.ranks:
                by_rank[rank] = {**reading.values, **self._throttled(job, rank, owned.pid, taken)}
        self._enter(job, "GPUs", taken.ns, by_rank)

    def _throttled(self, job: _Job, rank: int, pid: int, taken: Taken[list[GpuReading]]) -> Values:
        """Share of the time for which a CPU limit held a rank's process back."""
        held_s = throttled_s(self._readers.root, pid)
        if held_s is None:
            return {}
        before = job.throttled.get(rank)
        job.throttled[rank] = pid, held_s, taken.ns
        if before is None or before[0] != pid or taken.ns <= before[2]:
            return {}
        ratio = (held_s - before[1]) / ((taken.ns - before[2]) / 1e9)
        return {"host_throttled_ratio": min(max(ratio, 0.0), 1.0)}

    # --- writing --------------------------------------------------------------------------------

    def _follow(self, job: _Job, *, closing: bool = False) -> None:
        news = False
        for batch in job.tail.new():
            job.steps.add(batch)
            news = True
        if not (news or closing):
            return
        for found in job.ledger.settle(job.steps, closing=closing):
            self._say_gpus(job)
            # One step, one batch: a server files side evidence by its first step.
            self._write(job, {"counters": found.columns}, len(found))

    def _say_gpus(self, job: _Job) -> None:
        """Which GPU is whose, when that is new."""
        gpus = {str(rank): owned.uuid for rank, owned in sorted(job.owned.items())}
        if gpus != job.said_gpus:
            job.said_gpus = gpus
            self._write(job, {"gpus": gpus}, 0)

    def _write(self, job: _Job, document: dict[str, object], rows: int) -> None:
        try:
            if job.writer is None:
                job.writer = SpoolWriter(self._root, self._stream(job.here.spec), self._limits)
            job.writer.append(context_batch(document, rows=rows))
        except StoreError as error:
            self._say("counters spool", f"counters cannot be written: {error}")

    def _stream(self, spec: StreamSpec) -> StreamSpec:
        """The stream of one job and one life of the agent; it has the ops of no rank."""
        return StreamSpec(
            key=key_of(COUNTERS_SOURCE, spec.job, spec.attempt, spec.host, self._process),
            job=spec.job,
            attempt=spec.attempt,
            layout=spec.layout,
            mode=spec.mode,
            time=spec.time,
            host=spec.host,
            source=COUNTERS_SOURCE,
            ranks=(),
            window_steps=spec.window_steps,
        )


def _has_steps(spec: StreamSpec) -> bool:
    return spec.source in _WITH_STEPS and spec.mode == "live" and spec.time == "unix"
