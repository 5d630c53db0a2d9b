"""GPUs through NVML: clocks, heat, power, throttling, errors, links, and whose they are.

Flow: ``pynvml``, given as an argument → **here** → `ingest_agents.sources.counters.source`. What a
GPU does not support is not asked again; what fails is counted; a GPU that is lost is said to be.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from ingest_agents.sources.counters.reading import Growth, Values
from smon.errors import SMonError

_T = TypeVar("_T")

#: Bits of the reasons for which clocks are low: counter, and what each bit means.
REASONS: Final[Mapping[int, tuple[str, str]]] = {
    0x002: ("gpu_throttle_setting", "application clocks"),
    0x004: ("gpu_throttle_power", "software power cap"),
    0x008: ("gpu_throttle_hw", "hardware slowdown"),
    0x020: ("gpu_throttle_thermal", "software thermal slowdown"),
    0x040: ("gpu_throttle_thermal", "hardware thermal slowdown"),
    0x080: ("gpu_throttle_power", "hardware power brake"),
    0x200: ("gpu_throttle_setting", "board limit"),
}

#: Errors that will be the same next time: numbers of `nvmlReturn_t`.
_NEVER: Final = frozenset({2, 3, 4, 12, 13, 25, 26})
_NOT_SUPPORTED: Final = 3
#: No error: not supported, no such call, no such link.
_SILENT: Final = frozenset({2, _NOT_SUPPORTED, 13})
_LOST: Final = frozenset({15, 16})
#: The library has to be started anew: uninitialised, driver gone, driver of another version.
_AGAIN: Final = frozenset({1, 9, 18})

_SM: Final = 1
_CORE: Final = 0
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_MIG_ON: Final = 1

#: Fields, and the member of the union that holds a value by its type.
_FIELDS: Final = {38: "nvlink_crc", 52: "nvlink_replays"}
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")

_MAX_LINKS: Final = 36


class GpusUnavailableError(SMonError):
    """There is no GPU that NVML can ask, for now."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on a GPU.

    Attributes
    ----------
    uuid
        Of the GPU, or of the part of it (MIG) that it runs on.
    used_bytes
        Of its memory; 0 if NVML does not say.
    """

    pid: int
    uuid: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at one GPU.

    Attributes
    ----------
    values
        Only ``gpu_lost`` if it is lost.
    reasons
        Why its clocks are low, as a bit mask; 0 if they are not, or nobody knows.
    """

    uuid: str
    values: Values
    holders: tuple[Holder, ...] = ()
    reasons: int = 0


def throttle_words(reasons: int) -> tuple[str, ...]:
    """Why clocks are low, in words; bits that mean nothing bad, such as idle, have none."""
    return tuple(words for bit, (_, words) in REASONS.items() if reasons & bit)


def find_nvml() -> Any | None:  # noqa: ANN401  # a module
    """The module ``pynvml``; None if ``nvidia-ml-py`` is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


@dataclass(slots=True)
class _Gpu:
    """What is remembered of one GPU."""

    uuid: str
    unsupported: set[str] = field(default_factory=set)
    links: int = _MAX_LINKS


class NvidiaGpus:
    """All GPUs of the host.

    Parameters
    ----------
    nvml
        The module ``pynvml``, or something like it.

    Attributes
    ----------
    errors
        Calls that failed, by counter.
    """

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401  # a module
        self.errors: Counter[str] = Counter()
        self._nvml, self._started = nvml, False
        self._known: dict[int, _Gpu] = {}
        self._growth = Growth()

    def read(self) -> list[GpuReading]:
        """Look at every GPU once.

        Raises
        ------
        GpusUnavailableError
            NVML cannot be started; perhaps later.
        """
        if not self._started:
            self._start()
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self._stop()
            raise GpusUnavailableError(f"NVML does not count GPUs: {error}") from error
        found = [reading for index in range(count) if (reading := self._look(index)) is not None]
        self._growth.turn()
        return found

    def driver(self) -> str | None:
        """Version of the driver; None if it does not say."""
        try:
            if not self._started:
                self._start()
            return _text(self._nvml.nvmlSystemGetDriverVersion())
        except (GpusUnavailableError, self._nvml.NVMLError):
            return None

    def _start(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise GpusUnavailableError(f"NVML cannot be started: {error}") from error
        self._started = True
        self._known.clear()

    def _stop(self) -> None:
        self._started = False
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            self.errors["shutdown"] += 1

    def _look(self, index: int) -> GpuReading | None:
        """One GPU; None if it does not even say which one it is."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = self._named(index, handle)
        except self._nvml.NVMLError as error:
            return self._gone(index, error)
        ask = _Asking(self._nvml, gpu, self.errors)
        reasons = self._reasons(ask, handle)
        values = self._values(ask, handle, gpu)
        values.update(_flags(reasons))
        if ask.again:
            self._started = False
        if ask.lost:
            return GpuReading(gpu.uuid, {"gpu_lost": 1.0})
        return GpuReading(gpu.uuid, values, self._holders(ask, handle, gpu), reasons or 0)

    def _named(self, index: int, handle: object) -> _Gpu:
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        known = self._known.get(index)
        if known is None or known.uuid != uuid:
            known = self._known[index] = _Gpu(uuid)
        return known

    def _gone(self, index: int, error: Exception) -> GpuReading | None:
        code, known = getattr(error, "value", 0), self._known.get(index)
        self.errors["handle"] += 1
        if code in _AGAIN:
            self._started = False
        if code in _LOST and known is not None:
            return GpuReading(known.uuid, {"gpu_lost": 1.0})
        return None

    # --- values ---------------------------------------------------------------------------------

    def _values(self, ask: _Asking, handle: object, gpu: _Gpu) -> Values:
        nvml = self._nvml
        calls: dict[str, tuple[Callable[[], Any], float]] = {
            "gpu_clock_mhz": (lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM), 1.0),
            "gpu_clock_max_mhz": (lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, _SM), 1.0),
            "gpu_temperature_c": (lambda: nvml.nvmlDeviceGetTemperature(handle, _CORE), 1.0),
            "gpu_power_w": (lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3),
            "gpu_power_limit_w": (lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle), 1e-3),
            "gpu_busy_ratio": (lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 1e-2),
            "pcie_gen": (lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), 1.0),
            "pcie_width": (lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), 1.0),
        }
        answers = {name: (ask(name, call), scale) for name, (call, scale) in calls.items()}
        values = {
            name: value * scale for name, (value, scale) in answers.items() if value is not None
        }
        self._counts(ask, handle, gpu, values)
        self._links(ask, handle, gpu, values)
        return values

    def _reasons(self, ask: _Asking, handle: object) -> int | None:
        # The newer of two names for the same call.
        call = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        call = call or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        reasons = ask("gpu_throttle", lambda: call(handle))
        return None if reasons is None else int(reasons)

    def _counts(self, ask: _Asking, handle: object, gpu: _Gpu, values: Values) -> None:
        nvml = self._nvml
        calls: dict[str, Callable[[], Any]] = {
            "gpu_ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, _CORRECTED, _VOLATILE
            ),
            "gpu_ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, _UNCORRECTED, _VOLATILE
            ),
            "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        }
        seen = {name: ask(name, call) for name, call in calls.items()}
        fields = ask("nvlink", lambda: nvml.nvmlDeviceGetFieldValues(handle, list(_FIELDS)))
        for value in fields or ():
            seen[_FIELDS[int(value.fieldId)]] = _field(value)
        for name, now in seen.items():
            grown = None if now is None else self._growth.of((gpu.uuid, name), int(now))
            if grown is not None:
                values[name] = float(grown)

    def _links(self, ask: _Asking, handle: object, gpu: _Gpu, values: Values) -> None:
        state = partial(self._nvml.nvmlDeviceGetNvLinkState, handle)
        states: list[int] = []
        for link in range(gpu.links):
            name = f"nvlink_down {link}"
            active = ask(name, partial(state, link))
            if active is None:
                # Links are numbered without gaps: the first that it does not have is the end.
                gpu.links = link if name in gpu.unsupported else gpu.links
                break
            states.append(int(active))
        if states:
            values["nvlink_down"] = float(states.count(0))

    # --- whose it is ----------------------------------------------------------------------------

    def _holders(self, ask: _Asking, handle: object, gpu: _Gpu) -> tuple[Holder, ...]:
        mode = ask("mig", lambda: self._nvml.nvmlDeviceGetMigMode(handle))
        if not mode or mode[0] != _MIG_ON:
            return self._on(ask, handle, gpu.uuid)
        count = ask("mig_count", lambda: self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        found: list[Holder] = []
        for index in range(int(count)):
            try:
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(part))
            except self._nvml.NVMLError:
                # Of the parts that there could be, this one is not.
                continue
            found += self._on(ask, part, uuid)
        return tuple(found)

    def _on(self, ask: _Asking, handle: object, uuid: str) -> tuple[Holder, ...]:
        running = ask("processes", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return tuple(
            Holder(int(each.pid), uuid, int(each.usedGpuMemory or 0)) for each in running or ()
        )


class _Asking:
    """Calls about one GPU, in one look."""

    __slots__ = ("_errors", "_gpu", "_nvml", "again", "lost")

    def __init__(self, nvml: Any, gpu: _Gpu, errors: Counter[str]) -> None:  # noqa: ANN401  # a module
        self._nvml, self._gpu, self._errors = nvml, gpu, errors
        self.lost = self.again = False

    def __call__(self, name: str, call: Callable[[], _T]) -> _T | None:
        """The answer; None if there is none, which is counted unless it is simply not supported."""
        if self.lost or name in self._gpu.unsupported:
            return None
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError) as error:
            # AttributeError: a call that this version of the module does not have.
            code = getattr(error, "value", _NOT_SUPPORTED)
            self.lost = code in _LOST
            self.again |= code in _AGAIN
            if code in _NEVER:
                self._gpu.unsupported.add(name)
            if code not in _SILENT:
                self._errors[name.split(maxsplit=1)[0]] += 1
            return None


def _flags(reasons: int | None) -> Values:
    """Counters of a bit mask: 1 where any bit of them is set; none if it is not known."""
    if reasons is None:
        return {}
    flags = dict.fromkeys((name for name, _ in REASONS.values()), 0.0)
    flags.update({name: 1.0 for bit, (name, _) in REASONS.items() if reasons & bit})
    return flags


def _field(value: Any) -> int | None:  # noqa: ANN401  # a structure of ctypes
    """The number in a field; None if this GPU does not have it."""
    if int(value.nvmlReturn) != 0 or not 0 <= int(value.valueType) < len(_MEMBERS):
        return None
    return int(getattr(value.value, _MEMBERS[int(value.valueType)]))


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
