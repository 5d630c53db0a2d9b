"""GPUs of AMD, by files of their driver: clock, heat, power, use, PCIe, ECC, and whose they are.

Flow: ``/sys/class/kfd``, ``/sys/class/drm`` → **here** → `ingest_agents.sources.counters.source`.
No library is needed. Files and units are those of the kernel's documentation of amdgpu and hwmon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingest_agents.sources.counters.gpu import GpuReading, Holder
from ingest_agents.sources.counters.reading import Growth, Values, names_in, number_of, text_of

#: Sensors of ``hwmon``: counter, files of which the first that is there counts, scale.
_SENSORS: Final = (
    ("gpu_clock_mhz", ("freq1_input",), 1e-6),
    ("gpu_temperature_c", ("temp2_input", "temp1_input"), 1e-3),
    ("gpu_power_w", ("power1_average", "power1_input"), 1e-6),
    ("gpu_power_limit_w", ("power1_cap",), 1e-6),
)

#: PCIe generation by the speed of a lane, GT/s.
_GENERATIONS: Final = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU as the compute driver lists it."""

    gpu_id: int
    uuid: str
    device: Path


class AmdGpus:
    """All GPUs of AMD of the host.

    Parameters
    ----------
    root
        Above ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._kfd = root / "sys/class/kfd/kfd"
        self._drm = root / "sys/class/drm"
        self._growth = Growth()

    def read(self) -> list[GpuReading]:
        """Look at every GPU once; empty without any."""
        nodes = list(self._nodes())
        holders = self._holders(nodes) if nodes else {}
        found = [
            GpuReading(node.uuid, self._values(node), tuple(holders.get(node.gpu_id, ())))
            for node in nodes
        ]
        self._growth.turn()
        return found

    def _nodes(self) -> Iterator[_Node]:
        topology = self._kfd / "topology/nodes"
        for name in names_in(topology):
            gpu_id = number_of(topology / name / "gpu_id")
            properties = _pairs(text_of(topology / name / "properties"))
            minor, unique = properties.get("drm_render_minor"), properties.get("unique_id")
            # Nodes without a GPU are CPUs.
            if gpu_id and minor and unique:
                device = self._drm / f"renderD{minor}" / "device"
                yield _Node(gpu_id, f"GPU-{int(unique):016x}", device)

    def _values(self, node: _Node) -> Values:
        values: Values = {}
        sensors = node.device / "hwmon"
        for folder in names_in(sensors)[:1]:
            for counter, files, scale in _SENSORS:
                readings = (number_of(sensors / folder / file) for file in files)
                value = next((each for each in readings if each is not None), None)
                if value is not None:
                    values[counter] = value * scale
        busy = number_of(node.device / "gpu_busy_percent")
        if busy is not None:
            values["gpu_busy_ratio"] = busy / 100
        self._link(node, values)
        self._errors(node, values)
        return values

    def _link(self, node: _Node, values: Values) -> None:
        width = number_of(node.device / "current_link_width")
        speed = (text_of(node.device / "current_link_speed") or "").partition(" ")[0]
        if width is not None:
            values["pcie_width"] = float(width)
        if speed in _GENERATIONS:
            values["pcie_gen"] = float(_GENERATIONS[speed])

    def _errors(self, node: _Node, values: Values) -> None:
        counts = _pairs(text_of(node.device / "ras/umc_err_count"))
        for name, key in (("gpu_ecc_corrected", "ce"), ("gpu_ecc_uncorrected", "ue")):
            if key in counts:
                grown = self._growth.of((node.uuid, name), int(counts[key]))
                if grown is not None:
                    values[name] = float(grown)

    def _holders(self, nodes: list[_Node]) -> dict[int, list[Holder]]:
        """Processes with memory on each GPU, by the driver's number of it."""
        found: dict[int, list[Holder]] = {}
        processes = self._kfd / "proc"
        for pid in names_in(processes):
            for node in nodes:
                used = number_of(processes / pid / f"vram_{node.gpu_id}")
                if pid.isdecimal() and used:
                    found.setdefault(node.gpu_id, []).append(Holder(int(pid), node.uuid, used))
        return found


def _pairs(text: str | None) -> dict[str, str]:
    """Numbers by name, out of lines such as ``unique_id 42`` or ``ce: 3``."""
    pairs = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}
