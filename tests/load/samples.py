"""What a running server takes, sampled over time: memory, descriptors, threads, files, rows.

`slope_per_min` tells growth from noise; `Series` keeps what was sampled, and looks at it from the
moment on at which a steady state is to be expected.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from smon.store.objects import PARTIAL
from tests.faults.outside import query

#: Tables whose rows go with the event files and reports that they belong to. Jobs, their attempts
#: and streams are kept (`smon.store.retention`), and so grow with the number of jobs.
BOUNDED: Final = (
    "event_files", "windows", "results", "steps", "clock_samples", "sent_files", "tasks", "nodes",
)  # fmt: skip
KEPT: Final = ("jobs", "attempts", "streams", "coverage", "findings", "finding_events")

_MIB: Final = 1 << 20

#: Pairs of samples by which a slope is judged: all of them, or so many at equal distances.
_MOST: Final = 1500


@dataclass(frozen=True, slots=True)
class Process:
    """One process, or several that do the same."""

    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes
    ----------
    processes
        By role: ``server``, ``worker``, and ``child`` for all others together.
    files
        Files and folders below the data folder, by kind.
    rows
        By table.
    """

    at_s: float
    processes: Mapping[str, Process]
    files: Mapping[str, int]
    rows: Mapping[str, int]


@dataclass(slots=True)
class Series:
    """Samples of one run, in order; `pids` of each role that were ever seen."""

    samples: list[Sample] = field(default_factory=list)
    pids: dict[str, set[int]] = field(default_factory=dict)

    def take(self, pid: int, data: Path, url: str) -> Sample:
        """Look at a server, its children, its data folder and its database now."""
        found = family(pid)
        for role, members in found.items():
            self.pids.setdefault(role, set()).update(each.pid for each in members)
        processes = {role: _together(members) for role, members in found.items()}
        sample = Sample(time.monotonic(), processes, files_by_kind(data), rows(url))
        self.samples.append(sample)
        return sample

    def roles(self) -> list[str]:
        """Roles of which there is a process in every sample."""
        names = [set(sample.processes) for sample in self.samples]
        return sorted(set.intersection(*names)) if names else []

    def restarts(self, roles: Sequence[str]) -> int:
        """Processes of these roles beyond the first of each."""
        return sum(max(len(self.pids.get(role, ())) - 1, 0) for role in roles)

    def after(self, share: float) -> list[Sample]:
        """The samples after so large a share of the time."""
        if not self.samples:
            return []
        first, last = self.samples[0].at_s, self.samples[-1].at_s
        return [each for each in self.samples if each.at_s >= first + share * (last - first)]


def slope_per_min(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Growth per minute by Theil and Sen: the median of the slopes between all pairs of samples.

    A quarter of the samples may be anything without moving it much; a sawtooth has none.
    """
    times, heights = np.asarray(at_s, float), np.asarray(values, float)
    if len(times) > _MOST:
        chosen = np.linspace(0, len(times) - 1, _MOST).astype(int)
        times, heights = times[chosen], heights[chosen]
    first, second = np.triu_indices(len(times), 1)
    apart = times[second] - times[first]
    rises = (heights[second] - heights[first])[apart > 0] / apart[apart > 0]
    return 60.0 * float(np.median(rises)) if len(rises) else 0.0


def family(pid: int) -> dict[str, list[psutil.Process]]:
    """A server, and all processes below it, by role."""
    server = psutil.Process(pid)
    found = {"server": [server]}
    for child in server.children(recursive=True):
        try:
            role = "worker" if "worker" in child.cmdline() else "child"
        except psutil.Error:
            continue
        found.setdefault(role, []).append(child)
    return found


def _together(members: Sequence[psutil.Process]) -> Process:
    rss, descriptors, threads = 0, 0, 0
    for member in members:
        try:
            with member.oneshot():
                rss += member.memory_info().rss
                descriptors += member.num_fds()
                threads += member.num_threads()
        except psutil.Error:
            # It ended between two looks.
            continue
    return Process(rss / _MIB, descriptors, threads)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, which does not depend on who else uses the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, float]:
    """Resident memory of a process now and at most, MiB."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {
        name: round(int(found[key].split()[0]) / 1024, 1)
        for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))
    }


def family_cpu_s(pid: int) -> float:
    """CPU time of a server and of all processes below it that live."""
    return sum(cpu_s(each) for each in _pids(pid))


def family_peak_mib(pid: int) -> float:
    """The most memory of each of them since its start, or since `restart_peaks`, together."""
    return sum(memory(each)["peak"] for each in _pids(pid))


def restart_peaks(pid: int) -> None:
    """From now on, the most memory of each of them is that from now on."""
    for each in _pids(pid):
        Path(f"/proc/{each}/clear_refs").write_text("5")


def _pids(pid: int) -> list[int]:
    return [each.pid for members in family(pid).values() for each in members]


def files_by_kind(data: Path) -> dict[str, int]:
    """Files below a data folder: of the log, of events, unfinished ones, the rest; and folders."""
    counts: Counter[str] = Counter()
    for folder, below, names in os.walk(data):
        counts["folders"] += len(below)
        for name in names:
            counts[_kind(Path(folder).relative_to(data).parts, name)] += 1
    return {kind: counts[kind] for kind in ("log", "events", "unfinished", "other", "folders")}


def _kind(parts: tuple[str, ...], name: str) -> str:
    if name.endswith(PARTIAL):
        return "unfinished"
    if name.endswith(".wal"):
        return "log"
    return "events" if "events" in parts else "other"


def rows(url: str, tables: Sequence[str] = (*BOUNDED, *KEPT)) -> dict[str, int]:
    """Rows of each table."""
    parts = (f"SELECT '{table}', count(*) FROM {table}" for table in tables)  # noqa: S608  # names of ours
    return {str(name): int(count) for name, count in query(url, " UNION ALL ".join(parts))}
