"""What tests of counters share: an NVML that is told what to answer, and trees of ``/proc``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

#: Numbers of `nvmlReturn_t`.
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_LOADED, LOST, VERSION = 1, 3, 4, 9, 15, 18
INVALID, NOT_FOUND = 2, 6

#: NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL.
CRC_FIELD = 38


class NVMLError(Exception):
    """As in ``pynvml``: has a number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Gpu:
    """What a GPU answers; a number in `fails` instead, by call."""

    uuid: str
    clock: int = 1980
    max_clock: int = 1980
    limit_mw: int = 700_000
    busy: int = 97
    temperature: int = 60
    power_mw: int = 500_000
    reasons: int = 0
    width: int = 16
    generation: int = 5
    ecc: list[int] = field(default_factory=lambda: [0, 0])
    replays: int = 0
    crc: int = 0
    links: list[int] = field(default_factory=lambda: [1] * 18)
    #: pid → bytes.
    processes: dict[int, int] = field(default_factory=dict)
    #: uuid → pid → bytes; None: not in MIG mode.
    parts: dict[str, dict[int, int]] | None = None
    fails: dict[str, int] = field(default_factory=dict)
    #: Calls wait for this.
    hang: threading.Event | None = None


@dataclass
class Part:
    """A part of a GPU (MIG)."""

    uuid: str
    processes: dict[int, int]


def _field(number: int, crc: int) -> SimpleNamespace:
    """As `c_nvmlFieldValue_t`; this GPU has but one of the fields."""
    return SimpleNamespace(
        fieldId=number,
        nvmlReturn=0 if number == CRC_FIELD else NOT_SUPPORTED,
        valueType=3,
        value=SimpleNamespace(ullVal=crc),
    )


def _link(gpu: Gpu, link: int) -> int:
    if link >= len(gpu.links):
        raise NVMLError(INVALID)
    return gpu.links[link]


def _mig(gpu: Gpu) -> list[int]:
    if gpu.parts is None:
        raise NVMLError(NOT_SUPPORTED)
    return [1, 1]


def _part(gpu: Gpu, index: int) -> Part:
    parts = list((gpu.parts or {}).items())
    if index >= len(parts):
        raise NVMLError(NOT_FOUND)
    return Part(*parts[index])


def _processes(gpu: Gpu | Part) -> list[SimpleNamespace]:
    known = gpu.processes.items()
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in known]


#: Calls about a GPU: a short name, for `Gpu.fails`, and the answer.
CALLS: dict[str, tuple[str, Callable[..., object]]] = {
    "nvmlDeviceGetUUID": ("uuid", lambda gpu: gpu.uuid),
    "nvmlDeviceGetClockInfo": ("clock", lambda gpu, kind: {1: gpu.clock}[kind]),
    "nvmlDeviceGetMaxClockInfo": ("max_clock", lambda gpu, kind: {1: gpu.max_clock}[kind]),
    "nvmlDeviceGetTemperature": ("temperature", lambda gpu, sensor: {0: gpu.temperature}[sensor]),
    "nvmlDeviceGetPowerUsage": ("power", lambda gpu: gpu.power_mw),
    "nvmlDeviceGetEnforcedPowerLimit": ("limit", lambda gpu: gpu.limit_mw),
    "nvmlDeviceGetUtilizationRates": ("busy", lambda gpu: SimpleNamespace(gpu=gpu.busy)),
    "nvmlDeviceGetCurrPcieLinkGeneration": ("generation", lambda gpu: gpu.generation),
    "nvmlDeviceGetCurrPcieLinkWidth": ("width", lambda gpu: gpu.width),
    "nvmlDeviceGetCurrentClocksEventReasons": ("reasons", lambda gpu: gpu.reasons),
    "nvmlDeviceGetTotalEccErrors": ("ecc", lambda gpu, kind, since: {0: gpu.ecc[kind]}[since]),
    "nvmlDeviceGetPcieReplayCounter": ("replays", lambda gpu: gpu.replays),
    "nvmlDeviceGetFieldValues": ("fields", lambda gpu, ids: [_field(n, gpu.crc) for n in ids]),
    "nvmlDeviceGetNvLinkState": ("link", _link),
    "nvmlDeviceGetMigMode": ("mig", _mig),
    "nvmlDeviceGetMaxMigDeviceCount": ("parts", lambda _gpu: 7),
    "nvmlDeviceGetMigDeviceHandleByIndex": ("part", _part),
    "nvmlDeviceGetComputeRunningProcesses": ("processes", _processes),
}

#: What older versions of the module call it.
OLD_NAMES = {"nvmlDeviceGetCurrentClocksThrottleReasons": "nvmlDeviceGetCurrentClocksEventReasons"}


class Nvml:
    """Like the module ``pynvml``.

    Parameters
    ----------
    gpus
        Of the host.
    old
        A version of years ago: other names, and no counter of replays.

    Attributes
    ----------
    calls
        How often each was called, by its short name.
    fails
        Number that a call about no GPU fails with: ``init``, ``shutdown``, ``count``, ``driver``.
    """

    NVMLError = NVMLError

    def __init__(self, gpus: list[Gpu], *, old: bool = False) -> None:
        self.gpus, self.fails = gpus, dict[str, int]()
        self.calls: Counter[str] = Counter()
        self._old = old
        self._whole: dict[str, tuple[str, Callable[..., object]]] = {
            "nvmlInit": ("init", lambda: None),
            "nvmlShutdown": ("shutdown", lambda: None),
            "nvmlDeviceGetCount": ("count", lambda: len(self.gpus)),
            "nvmlSystemGetDriverVersion": ("driver", lambda: "595.58.03"),
        }

    def __getattr__(self, name: str) -> Callable[..., object]:
        """The call of this name."""
        if self._old and name in {*OLD_NAMES.values(), "nvmlDeviceGetPcieReplayCounter"}:
            raise AttributeError(name)
        if name in self._whole:
            return partial(self._about_all, *self._whole[name])
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: self._about("handle", lambda gpu: gpu, self.gpus[index])
        if name not in CALLS and name not in OLD_NAMES:
            raise AttributeError(name)
        return partial(self._about, *CALLS[OLD_NAMES.get(name, name)])

    def _about_all(self, call: str, answer: Callable[..., object]) -> object:
        self.calls[call] += 1
        if call in self.fails:
            raise NVMLError(self.fails[call])
        return answer()

    def _about(
        self, call: str, answer: Callable[..., object], gpu: Gpu | Part, *more: object
    ) -> object:
        self.calls[call] += 1
        if isinstance(gpu, Gpu):
            if gpu.hang is not None:
                gpu.hang.wait()
            code = gpu.fails.get(call, gpu.fails.get("all"))
            if code is not None:
                raise NVMLError(code)
        return answer(gpu, *more)


# --- files ----------------------------------------------------------------------------------------


def put(root: Path, files: Mapping[str, object]) -> Path:
    """Write small files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def process(root: Path, pid: int, **environ: object) -> None:
    """A process with this environment."""
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [f"{name}={value}" for name, value in {"PATH": "/bin", **environ}.items()]
    (folder / "environ").write_bytes("\0".join(pairs).encode() + b"\0")


def at_once(run: Callable[[], None]) -> None:
    """Instead of a thread."""
    run()


def port(root: Path, name: str = "mlx5_0", number: int = 1, **files: object) -> None:
    """An InfiniBand port that is up; `files` of ``counters``, with ``hw_`` of ``hw_counters``."""
    folder = root / "sys/class/infiniband" / name / "ports" / str(number)
    put(folder, {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"})
    for file, value in files.items():
        place = "hw_counters" if file.startswith("hw_") else "counters"
        put(folder, {f"{place}/{file.removeprefix('hw_')}": value})


def interface(root: Path, name: str = "eth0", *, hardware: bool = True, **files: object) -> None:
    """An Ethernet interface that is up."""
    folder = root / "sys/class/net" / name
    put(folder, {"operstate": "up", "speed": 100_000, "type": 1, "carrier_down_count": 0})
    if hardware:
        (folder / "device").mkdir(exist_ok=True)
    known = {"rx_bytes": 0, "tx_bytes": 0, "rx_errors": 0, "tx_errors": 0, "rx_missed_errors": 0}
    for file, value in {**known, **files}.items():
        place = f"statistics/{file}" if file in known else file
        put(folder, {place: value})
