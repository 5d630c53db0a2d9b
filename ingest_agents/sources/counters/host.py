"""The host: CPU, pressure, memory, faults; and how it is set up.

Flow: ``/proc``, ``/sys`` → **here** → `ingest_agents.sources.counters.source`, and
``smon-agent check`` for what is said once.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ingest_agents.sources.counters.reading import Growth, Values, number_of, text_of

#: Columns of the line ``cpu`` of ``/proc/stat`` that are no work, and all that count: guests are in
#: user time already.
_IDLE, _IOWAIT, _STEAL, _COLUMNS = 3, 4, 7, 8

_KIB: Final = 1024
_US: Final = 1e6


class Host:
    """One host.

    Parameters
    ----------
    root
        Above ``proc`` and ``sys``.
    clock
        Seconds that never go back.
    cpus
        How many it has.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        clock: Callable[[], float] = time.monotonic,
        cpus: int | None = None,
    ) -> None:
        self._proc, self._sys = root / "proc", root / "sys"
        self._clock, self._cpus = clock, cpus or os.cpu_count() or 1
        self._growth = Growth()
        self._at: float | None = None

    def read(self) -> Values:
        """Look once; differences only from the second look on."""
        now = self._clock()
        passed_s = 0.0 if self._at is None else now - self._at
        self._at = now
        values: Values = {}
        self._cpu(values)
        self._pressure(values, passed_s)
        self._memory(values)
        self._faults(values)
        load = _first_float(text_of(self._proc / "loadavg"))
        if load is not None:
            values["host_load_ratio"] = load / self._cpus
        self._settings(values)
        self._growth.turn()
        return values

    def _cpu(self, values: Values) -> None:
        line = (text_of(self._proc / "stat") or "").partition("\n")[0].split()
        if not line or line[0] != "cpu" or len(line) <= _COLUMNS:
            return
        grown = [
            self._growth.of(("cpu", column), int(text))
            for column, text in enumerate(line[1 : _COLUMNS + 1])
            if text.isdecimal()
        ]
        ticks = [each for each in grown if each is not None]
        if len(ticks) != _COLUMNS or not sum(ticks):
            return
        share = 1.0 / sum(ticks)
        values["host_cpu_ratio"] = 1.0 - (ticks[_IDLE] + ticks[_IOWAIT]) * share
        values["host_steal_ratio"] = ticks[_STEAL] * share

    def _pressure(self, values: Values, passed_s: float) -> None:
        for what in ("cpu", "memory", "io"):
            stalled = _stalled_us(text_of(self._proc / "pressure" / what))
            grown = None if stalled is None else self._growth.of(("pressure", what), stalled)
            if grown is not None and passed_s > 0:
                values[f"host_pressure_{what}_ratio"] = min(grown / _US / passed_s, 1.0)

    def _memory(self, values: Values) -> None:
        known = _meminfo(text_of(self._proc / "meminfo"))
        total, available = known.get("MemTotal", 0), known.get("MemAvailable")
        if total and available is not None:
            values["host_memory_ratio"] = 1.0 - available / total
        if "SwapTotal" in known and "SwapFree" in known:
            values["host_swap_bytes"] = float((known["SwapTotal"] - known["SwapFree"]) * _KIB)

    def _faults(self, values: Values) -> None:
        for line in (text_of(self._proc / "vmstat") or "").splitlines():
            name, _, number = line.partition(" ")
            if name == "pgmajfault" and number.isdecimal():
                grown = self._growth.of(name, int(number))
                if grown is not None:
                    values["host_major_faults"] = float(grown)

    def _settings(self, values: Values) -> None:
        numa = number_of(self._proc / "sys/kernel/numa_balancing")
        for name, found, wanted in (
            ("host_governor_performance", self._governor(), "performance"),
            ("host_clocksource_tsc", self._clocksource(), "tsc"),
            ("host_hugepages_always", self._hugepages(), "always"),
        ):
            if found is not None:
                values[name] = float(found == wanted)
        if numa is not None:
            values["host_numa_balancing"] = float(numa > 0)

    def _governor(self) -> str | None:
        return text_of(self._sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor")

    def _clocksource(self) -> str | None:
        return text_of(self._sys / "devices/system/clocksource/clocksource0/current_clocksource")

    def _hugepages(self) -> str | None:
        """The word in brackets."""
        text = text_of(self._sys / "kernel/mm/transparent_hugepage/enabled") or ""
        word = text.partition("[")[2].partition("]")[0]
        return word or None

    def facts(self) -> dict[str, str]:
        """How it is set up, in words; what it does not say is left out."""
        numa = number_of(self._proc / "sys/kernel/numa_balancing")
        found = {
            "kernel": text_of(self._proc / "sys/kernel/osrelease") or platform.release(),
            "CPUs": str(self._cpus),
            "CPU governor": self._governor(),
            "clock source": self._clocksource(),
            "transparent huge pages": self._hugepages(),
            "NUMA balancing": None if numa is None else "on" if numa else "off",
        }
        return {name: value for name, value in found.items() if value}


def _first_float(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def _stalled_us(text: str | None) -> int | None:
    """Time in which some task stalled, out of a file of ``/proc/pressure``."""
    for line in (text or "").splitlines():
        kind, *pairs = line.split()
        number = dict(pair.partition("=")[::2] for pair in pairs).get("total", "")
        if kind == "some" and number.isdecimal():
            return int(number)
    return None


def _meminfo(text: str | None) -> dict[str, int]:
    """KiB by name."""
    known = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[0] if rest.split() else ""
        if number.isdecimal():
            known[name] = int(number)
    return known
